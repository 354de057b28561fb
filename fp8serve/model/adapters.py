"""A directory with an adapter, as peft writes one, becomes tensors by the names of linear layers, and back.

    adapter_config.json         how it is multiplied (formats/peft.py)
    adapter_model.safetensors   `base_model.model.{linear}.lora_A.weight` [r, K], `lora_B.weight` [N, r],
                                `lora_magnitude_vector` [N] (DoRA)

The projections of decoder layers that FP8 may run can have one, except the experts of a mixture, which run stacked.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.model.building import build_on_meta, transposed_linears
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.formats.peft import CONFIG, WEIGHTS, PeftConfig, key_of, place_of, read_config, written_config
from fp8serve.model.storage.files import save_tensors, write_json
from fp8serve.model.storage.shards import Shards, read_header, type_name

_STORED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LowRank:
    """One linear's adapter: a [r, K] and b [N, r] in BF16, as they are multiplied, magnitude FP32 [N] or None."""

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + (0 if self.magnitude is None else self.magnitude.nbytes)


Adapter = Mapping[str, LowRank]  # by the name of the linear


def adaptable(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out, in) features of every linear that can have an adapter, by name, in the model's order."""
    model = build_on_meta(config)
    transposed = transposed_linears(model)
    names = (name for name in model.linear_names() if ".experts." not in name and name not in transposed)
    shapes = {name: cast(Tensor, model.get_submodule(name).weight).shape for name in names}
    return {name: (shape[0], shape[1]) for name, shape in shapes.items()}


def chosen(linears: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The `linears` that a pattern matches, by the full name or its last component; no pattern: all.

    ModelError: a pattern that matches none.
    """
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in linears):
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears))
            raise ModelError(f"No linear layer is called {pattern!r}; those that can have an adapter are {known}.")
    return [name for name in linears if not patterns or any(_matches(name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) or fnmatch(name.rpartition(".")[2], pattern)


def read_adapter(directory: Path | str, config: ModelConfig) -> dict[str, LowRank]:
    """The adapter in `directory` for a model of this configuration.

    ModelError: files that are missing or damaged, a method that is not supported, tensors that do not fit the model.
    """
    directory = Path(directory)
    peft, linears = read_config(directory), adaptable(config)
    adapter = _parts(directory, linears)
    if not adapter:
        raise ModelError(f"{directory / WEIGHTS} holds no adapter.")
    return {linear: _low_rank(directory, linear, adapter[linear], linears[linear], peft) for linear in adapter}


def _parts(directory: Path, linears: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, Tensor]]:
    """The tensors of the file by linear and part."""
    path = directory / WEIGHTS
    entries, _ = read_header(path)
    for key, entry in entries.items():
        place = place_of(key)
        if place is None or place[0] not in linears:
            raise ModelError(f"{path} holds {key}, and this model has no such layer that can have an adapter.")
        if entry.dtype not in _STORED:
            raise ModelError(f"{path}: {key} is stored as {type_name(entry.dtype)}; an adapter is F32, BF16 or F16.")
    tensors, parts = Shards(entries), dict[str, dict[str, Tensor]]()
    for key in tensors:
        linear, part = place_of(key) or ("", "lora_A")
        if part in parts.setdefault(linear, {}):
            raise ModelError(f"{path} holds the {part} of {linear} under two names.")
        parts[linear][part] = tensors[key]
    return {linear: parts[linear] for linear in linears if linear in parts}


def _low_rank(
    directory: Path, linear: str, parts: Mapping[str, Tensor], shape: tuple[int, int], peft: PeftConfig
) -> LowRank:
    rows, cols = shape
    rank = peft.rank_of(linear)
    expected_shapes: dict[str, tuple[int, ...]] = {"lora_A": (rank, cols), "lora_B": (rows, rank)}
    expected_shapes |= {"lora_magnitude_vector": (rows,)} if peft.dora else {}
    for part in sorted(expected_shapes.keys() | parts.keys()):
        tensor, expected = parts.get(part), expected_shapes.get(part)
        if tensor is None or expected is None or tuple(tensor.shape) != expected:
            actual_shape = "none" if tensor is None else str(list(tensor.shape))
            expected_shape = "none" if expected is None else str(list(expected))
            raise ModelError(
                f"{directory}: {part} of {linear} must be {expected_shape} in this model, found {actual_shape}."
            )
        if not bool(tensor.isfinite().all()):
            raise ModelError(f"{directory}: {part} of {linear} holds NaN or an infinity.")
    magnitude = parts["lora_magnitude_vector"].float() if peft.dora else None
    a, b = (parts[part].to(torch.bfloat16) for part in ("lora_A", "lora_B"))
    return LowRank(a, b, peft.scaling(linear), magnitude)


def write_adapter(
    folder: Path,
    base: str,
    peft: PeftConfig,
    weights: Mapping[str, Tensor],
    linears: Sequence[str],
    *,
    dropout: float = 0.0,
) -> None:
    """Write the two files into `folder`. weights: `{linear}.lora_A` and so on, FP32; A and B are rounded to BF16, as
    training rounds them for its products. linears: all linears of the model that can have an adapter, in its order."""
    places = [(name.rpartition(".")[0], name.rpartition(".")[2]) for name in weights]
    adapted = [name for name in linears if name in {linear for linear, _ in places}]
    write_json(folder / CONFIG, written_config(base, peft, adapted, linears, dropout))
    save_tensors(folder / WEIGHTS, dict(_written(weights)), {"format": "pt"})


def _written(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights.items():
        linear, _, part = name.rpartition(".")
        stored = tensor if part == "lora_magnitude_vector" else tensor.to(torch.bfloat16)
        yield key_of(linear, part), stored.detach().contiguous()  # type: ignore[arg-type]
