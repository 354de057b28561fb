"""Determines the task of a model directory: to generate text, to embed texts, or to classify them.

A decoder that embeds or reranks can have the same config.json as one that generates text. It is recognized by its
modules.json, which lists a Pooling module (to embed) or a LogitScore module (to rerank).
"""

from pathlib import Path

from fp8serve.engine.request import Task
from fp8serve.errors import ModelError
from fp8serve.model.config.decoder import is_classifier
from fp8serve.model.config.encoder import is_encoder
from fp8serve.model.config.modules_json import LOGIT_SCORE, has_pooling, lacks_head, read_modules
from fp8serve.model.storage.files import read_optional_json


def task_of(model_dir: Path | str, requested: Task | None = None) -> Task:
    """Returns the requested task, or by default the task for which the model was published. Raises ModelError if the
    model does not support the requested task."""
    supported = _supported_tasks(Path(model_dir))
    if requested is None:
        return supported[0]
    if requested not in supported:
        more = " (an embedding model needs a modules.json with its pooling)" if requested == "embed" else ""
        raise ModelError(f"{model_dir} holds a model that can {' or '.join(supported)} and not {requested}{more}.")
    return requested


def _supported_tasks(model_dir: Path) -> tuple[Task, ...]:
    """Returns all tasks that the model supports. The first is the task for which it was published."""
    raw = read_optional_json(model_dir / "config.json")
    if is_classifier(raw):
        return ("classify",)
    if is_encoder(raw):
        return ("embed",)
    if not has_pooling(model_dir):
        tasks: tuple[Task, ...] = ("generate", "classify") if raw.get("model_type") == "qwen3" else ("generate",)
        return tasks[::-1] if LOGIT_SCORE in read_modules(model_dir) else tasks
    architecture = str((raw.get("architectures") or [""])[0])
    return ("embed",) if architecture.endswith("Model") or lacks_head(model_dir, raw) else ("embed", "generate")


def check_generates(model_dir: Path | str, requested: Task | None) -> None:
    """Raises ModelError if the task of the directory is not to generate text."""
    if (task := task_of(model_dir, requested)) != "generate":
        reason = f"the option task is {task!r}"
        if not requested:
            reason = "it was published for that; if it can write text, too, the option task='generate' serves it so"
        raise ModelError(f"{model_dir} is served to {task} and not to write text: {reason}.")
