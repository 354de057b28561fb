"""What a model's directory is for: to generate text, to embed texts, or to classify them.

A decoder whose modules.json lists a Pooling embeds, and one that lists a LogitScore ranks: nothing else in the
directory distinguishes it from one that writes.
"""

from pathlib import Path

from fp8serve.engine.request import Task
from fp8serve.errors import ModelError
from fp8serve.model.config.decoder import classifies
from fp8serve.model.config.encoder import is_encoder
from fp8serve.model.config.sentence import LOGIT_SCORE, has_pooling, lacks_head, modules_of
from fp8serve.model.storage.files import read_optional_json


def task_of(model_dir: Path | str, requested: Task | None = None) -> Task:
    """The task of the directory; asked None: the one for which it was published. ModelError: it cannot do what is
    asked."""
    possible = _possible(Path(model_dir))
    if requested is None:
        return possible[0]
    if requested not in possible:
        more = " (an embedding model says in modules.json how it pools)" if requested == "embed" else ""
        raise ModelError(f"{model_dir} holds a model that can {' or '.join(possible)} and not {requested}{more}.")
    return requested


def _possible(model_dir: Path) -> tuple[Task, ...]:
    """All tasks; the first is the one for which the directory was published."""
    raw = read_optional_json(model_dir / "config.json")
    if classifies(raw):
        return ("classify",)
    if is_encoder(raw):
        return ("embed",)
    if not has_pooling(model_dir):
        judges: tuple[Task, ...] = ("generate", "classify") if raw.get("model_type") == "qwen3" else ("generate",)
        return judges[::-1] if LOGIT_SCORE in modules_of(model_dir) else judges
    name = str((raw.get("architectures") or [""])[0])
    return ("embed",) if name.endswith("Model") or lacks_head(model_dir, raw) else ("embed", "generate")


def check_generates(model_dir: Path | str, requested: Task | None) -> None:
    """ModelError: the directory is for something else."""
    if (task := task_of(model_dir, requested)) != "generate":
        what = "task says so" if requested else "its modules.json says so, which the task 'generate' overrides"
        raise ModelError(f"{model_dir} is served to {task} and not to write text: {what}.")
