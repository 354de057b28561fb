"""Loads the draft model of another model (draft_model.py): checks its vocabulary, and computes the cost of a pass.

Its directory decides how it is served: with its stored scales if it has some, otherwise in BF16. The options decide the
type of its head.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor

from fp8serve.engine.drafting import ROW
from fp8serve.engine.memory import weight_bytes
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.task import check_generates
from fp8serve.errors import ModelError, shown
from fp8serve.model.building import Model
from fp8serve.model.checkpoint import load_servable, open_checkpoint
from fp8serve.model.config.decoder import ModelConfig, read_config
from fp8serve.model.network.experts import mixtures
from fp8serve.model.text.tokenizer import Tokenizer

log = logging.getLogger("fp8serve.engine")


def draft_config(directory: Path, model_dir: Path, config: ModelConfig) -> ModelConfig:
    """The draft model's configuration; `config` is that of `model_dir`. ModelError: it writes no text, or has another
    vocabulary."""
    try:
        found = read_config(directory)
        check_generates(directory, None)
    except ModelError as problem:
        raise ModelError(f"The draft model cannot be used: {problem}") from None
    _check_vocabulary(directory, found, model_dir, config)
    return found


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model without its cache; cost: see `_cost`."""

    name: str
    model: Model
    cost: float


def load_draft(directory: Path, model: Model, options: EngineOptions) -> LoadedDraft:
    """The draft model of `model`, which has just been loaded."""
    has_scales = open_checkpoint(directory).has_scales
    draft = load_servable(directory, "stored" if has_scales else "bf16", None, options.device, head=options.head_dtype)
    found = LoadedDraft(directory.resolve().name, draft, _cost(draft, model))
    if found.cost + ROW >= 1:
        log.warning(
            "A pass of the draft model %s costs %.2f of a step of the model, so that no guess can pay for itself and "
            "nothing is drafted; take a smaller one.",
            found.name,
            found.cost,
        )
    return found


def _cost(draft: Model, model: Model) -> float:
    """The cost of a pass of the draft model, in steps of the model, both for one sequence.

    Such a step reads all weights and runs all layers, so its cost is a sum of terms for bytes and for layers. The ratio
    of the two costs lies between the ratio of the bytes and that of the layers; this is the larger of these.
    """
    return max(_read_bytes(draft) / _read_bytes(model), draft.config.num_layers / model.config.num_layers)


def _check_vocabulary(directory: Path, found: ModelConfig, model_dir: Path, config: ModelConfig) -> None:
    draft, model = _vocabulary(directory), _vocabulary(model_dir)
    if draft is None or model is None:
        if found.vocab_size != config.vocab_size:
            raise ModelError(
                f"The draft model {directory} has {found.vocab_size} tokens and {model_dir} has {config.vocab_size}; "
                "a draft model must have the same vocabulary."
            )
        return
    if draft != model:
        token, number = min(model.items() ^ draft.items(), key=lambda pair: pair[1])
        raise ModelError(
            f"The draft model {directory} has another vocabulary than {model_dir}: token {number}, {shown(token)}, is "
            "in one of them only; take a draft model of the same family."
        )


def _vocabulary(directory: Path) -> dict[str, int] | None:
    return Tokenizer.from_dir(directory).vocabulary if (directory / "tokenizer.json").is_file() else None


def _read_bytes(model: Model) -> float:
    """Bytes of the weights that a step of one token reads."""
    read = weight_bytes(model)
    if model.embedding.weight.data_ptr() != cast(Tensor, model.head.weight).data_ptr():
        read -= model.embedding.weight.nbytes
    experts = model.config.experts
    if experts is None:
        return read
    return read - (1 - experts.per_token / experts.count) * weight_bytes(*mixtures(model).values())
