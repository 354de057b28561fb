"""Pools the hidden states of a text's tokens into one embedding, as the files of sentence-transformers specify.

`modules.json` lists the modules after the transformer: `Pooling`, and optionally `Normalize`. `1_Pooling/config.json`
has the pooling mode, `sentence_bert_config.json` the maximum number of tokens, `config_sentence_transformers.json` the
prompts. A directory without these files is refused, because a wrong pooling mode gives embeddings that look right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fp8serve.errors import ModelError, RequestError, shown
from fp8serve.model.config.encoder import ScoreActivation
from fp8serve.model.config.modules_json import FILE_NAME, check_module_folder, read_modules
from fp8serve.model.storage.files import present, read_json, read_optional_json

Mode = Literal["mean", "cls", "lasttoken"]
MODES: dict[str, Mode] = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "lasttoken"
}  # fmt: skip


@dataclass(frozen=True)
class Pooling:
    """The pooling of an embedding model, and the prompts that may precede a text."""

    mode: Mode  # the embedding is the mean hidden state, or that of the first ("cls") or last token
    normalized: bool
    max_length: int | None = None  # in tokens; longer texts are truncated. None: the model's own limit
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name
    default_prompt: str | None = None  # a name in `prompts`

    def __call__(self, hidden: Tensor, lengths: Sequence[int], dimensions: int | None = None) -> Tensor:
        """Returns the embeddings, FP32 [texts, H], of hidden [tokens, H]; `lengths` are the texts' numbers of tokens.

        If `dimensions` is given, embeddings are truncated to that length before they are normalized.
        """
        return self.truncate_and_normalize(self.pool(hidden, lengths), dimensions)

    def pool(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns the pooled hidden states, FP32 [texts, H], without truncation and normalization."""
        texts = torch.split(hidden, list(lengths))
        if self.mode == "mean":
            return torch.stack([text.float().mean(0) for text in texts])
        return torch.stack([text[0 if self.mode == "cls" else -1].float() for text in texts])

    def truncate_and_normalize(self, vectors: Tensor, dimensions: int | None = None) -> Tensor:
        """Returns the first `dimensions` of vectors [texts, H], normalized if the model normalizes embeddings."""
        vectors = vectors[:, :dimensions]
        return normalize(vectors, dim=1) if self.normalized else vectors

    def prompt(self, name: str | None) -> str:
        """Returns the prompt with this name, or the default prompt. Raises RequestError if the name is unknown."""
        name = self.default_prompt if name is None else name
        if name is not None and name not in self.prompts:
            names = ", ".join(self.prompts) or "none"
            raise RequestError(f"This model has no prompt of the name {shown(name)}; it has {names}.")
        return "" if name is None else self.prompts[name]


def read_pooling(model_dir: Path | str) -> Pooling:
    """Returns the pooling of the model in `model_dir`. Raises ModelError if its files are missing or unsupported."""
    model_dir = Path(model_dir)
    if not present(model_dir / FILE_NAME):
        raise ModelError(
            f"{model_dir} does not say how the vectors of a text's tokens become one: it holds no modules.json, as "
            "sentence-transformers writes it."
        )
    modules = read_modules(model_dir)
    if list(modules)[:2] != ["Transformer", "Pooling"] or list(modules)[2:] not in ([], ["Normalize"]):
        raise ModelError(
            f"{model_dir / FILE_NAME} lists {', '.join(modules)}; supported are Transformer and Pooling, and "
            "optionally Normalize."
        )
    path = model_dir / check_module_folder(modules["Pooling"], "Pooling", model_dir) / "config.json"
    raw = read_json(path, root=model_dir)
    settings = read_optional_json(model_dir / "config_sentence_transformers.json")
    return Pooling(_mode(raw, path), "Normalize" in modules, _max_length(model_dir), *_prompts(settings, model_dir))


def _mode(raw: Mapping[str, Any], path: Path) -> Mode:
    mode = raw.get("pooling_mode")
    modes = [mode] if mode is not None else [
        MODES.get(key, key) for key, is_enabled in raw.items() if key.startswith("pooling_mode_") and is_enabled
    ]  # fmt: skip
    if len(modes) != 1 or modes[0] not in MODES.values():
        raise ModelError(f"{path} pools by {shown(modes)}; supported is one of {', '.join(MODES.values())}.")
    if raw.get("include_prompt", True) is not True:
        raise ModelError(f"{path} leaves the prompt out of the pooling, which is not supported.")
    return cast(Mode, modes[0])


def _max_length(model_dir: Path) -> int | None:
    path = model_dir / "sentence_bert_config.json"
    raw = read_optional_json(path)
    if raw.get("do_lower_case"):
        raise ModelError(f"{path} has do_lower_case, which is not supported.")
    length = raw.get("max_seq_length")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 2):
        raise ModelError(f"{path}: max_seq_length is {shown(length)} where a number of tokens was expected.")
    return length


def _prompts(settings: Mapping[str, Any], model_dir: Path) -> tuple[dict[str, str], str | None]:
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    is_valid = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    if not is_valid or not (default is None or (isinstance(default, str) and default in prompts)):
        raise ModelError(
            f"{model_dir / 'config_sentence_transformers.json'} has prompts that are not an object of texts, or a "
            "default_prompt_name that is not the name of a prompt."
        )
    return prompts, default


def to_scores(logits: Tensor, activation: ScoreActivation) -> Tensor:
    """Applies the activation of a classification head to logits [texts, labels]."""
    if activation == "none":
        return logits
    return logits.softmax(1) if activation == "softmax" else logits.sigmoid()
