"""Reduces the vectors of a text's tokens to one, as the files of sentence-transformers say.

`modules.json` lists the modules after the transformer (a `Pooling`, and a `Normalize` or none), `1_Pooling/config.json`
says which vectors count, `sentence_bert_config.json` how many tokens are read, `config_sentence_transformers.json`
which prompts are put before a text. A directory that does not say how it pools is refused: a wrong guess gives vectors
that look right.
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
from fp8serve.model.config.sentence import FILE_NAME, modules_of, one_folder
from fp8serve.model.storage.files import present, read_json, read_optional_json

Mode = Literal["mean", "cls", "lasttoken"]
MODES: dict[str, Mode] = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "lasttoken"
}  # fmt: skip


@dataclass(frozen=True)
class Pooling:
    """mode: the mean of the tokens' vectors, or the first's or the last's. max_length: tokens that are read of a text;
    None: as many as the model can. prompts: texts to put before a text, by name."""

    mode: Mode
    normalized: bool
    max_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # its name

    def __call__(self, hidden: Tensor, lengths: Sequence[int], dimensions: int | None = None) -> Tensor:
        """hidden [tokens, H] of some texts -> FP32 [texts, H], or the first `dimensions`, normalised again."""
        return self.finished(self.pooled(hidden, lengths), dimensions)

    def pooled(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """hidden [tokens, H] of some texts -> FP32 [texts, H], not normalised."""
        return torch.stack([self._one(part) for part in torch.split(hidden, list(lengths))])

    def finished(self, vectors: Tensor, dimensions: int | None = None) -> Tensor:
        """[texts, H], or the first `dimensions`, normalised where the model's are."""
        vectors = vectors[:, :dimensions]
        return normalize(vectors, dim=1) if self.normalized else vectors

    def _one(self, part: Tensor) -> Tensor:
        """[tokens, H] -> FP32 [H]."""
        if self.mode == "mean":
            return part.float().mean(0)
        return part[0 if self.mode == "cls" else -1].float()

    def prompt(self, name: str | None) -> str:
        """The prompt to put before a text; without a name, the default one. RequestError: there is no such prompt."""
        name = self.default_prompt if name is None else name
        if name is not None and name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise RequestError(f"This model has no prompt of the name {shown(name)}; it has {known}.")
        return "" if name is None else self.prompts[name]


def read_pooling(model_dir: Path | str) -> Pooling:
    """ModelError: the directory does not say how it pools, or in a way that is not supported."""
    model_dir = Path(model_dir)
    if not present(model_dir / FILE_NAME):
        raise ModelError(
            f"{model_dir} does not say how the vectors of a text's tokens become one: it holds no modules.json, as "
            "sentence-transformers writes it."
        )
    modules = _modules(model_dir)
    path = model_dir / pooling_file(modules, model_dir)
    raw = read_json(path, root=model_dir)
    settings = read_optional_json(model_dir / "config_sentence_transformers.json")
    return Pooling(_mode(raw, path), "Normalize" in modules, _max_length(model_dir), *_prompts(settings, model_dir))


def pooling_file(modules: Mapping[str, str], model_dir: Path) -> str:
    """The path of the pooling's configuration in the directory."""
    return f"{one_folder(modules['Pooling'], 'Pooling', model_dir)}/config.json"


def _modules(model_dir: Path) -> dict[str, str]:
    """See `modules_of`. ModelError: others than are computed here."""
    modules = modules_of(model_dir)
    if list(modules)[:2] != ["Transformer", "Pooling"] or list(modules)[2:] not in ([], ["Normalize"]):
        raise ModelError(
            f"{model_dir / FILE_NAME} lists {', '.join(modules)}; supported are Transformer and Pooling, and "
            "Normalize behind them."
        )
    return modules


def _mode(raw: Mapping[str, Any], path: Path) -> Mode:
    named = raw.get("pooling_mode")
    modes = [named] if named is not None else [
        MODES.get(key, key) for key, on in raw.items() if key.startswith("pooling_mode_") and on
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
        raise ModelError(f"{path} asks for lower case before the tokenizer, which is not done here.")
    length = raw.get("max_seq_length")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 2):
        raise ModelError(f"{path}: max_seq_length is {shown(length)} where a number of tokens was expected.")
    return length


def _prompts(settings: Mapping[str, Any], model_dir: Path) -> tuple[dict[str, str], str | None]:
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    good = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    if not good or not (default is None or (isinstance(default, str) and default in prompts)):
        raise ModelError(
            f"{model_dir / 'config_sentence_transformers.json'} has prompts that are not texts by name, or a default "
            "that is none of them."
        )
    return prompts, default


def scored(logits: Tensor, activation: ScoreActivation) -> Tensor:
    """[texts, labels]."""
    if activation == "none":
        return logits
    return logits.softmax(1) if activation == "softmax" else logits.sigmoid()
