"""Reads and writes LoRA and DoRA adapters in peft's format.

    adapter_config.json         rank, alpha, target modules (formats/peft.py)
    adapter_model.safetensors   `base_model.model.{linear}.lora_A.weight` [r, K], `lora_B.weight` [N, r],
                                `lora_magnitude_vector` [N] (DoRA)

config/model_config.py lists the layers that can have an adapter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.fp8.ops.arithmetic import is_finite
from fp8serve.model.building import build_on_meta
from fp8serve.model.config.model_config import ModelConfig, adaptable_linear_names
from fp8serve.model.formats.peft import CONFIG, WEIGHTS, PeftConfig, make_config, parse_name, read_config, tensor_name
from fp8serve.model.storage.files import write_json
from fp8serve.model.storage.shards import Shards, read_header, save_tensors, type_name

_STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LinearAdapter:
    """The adapter of one linear layer: `a` [r, K] and `b` [N, r] in BF16, and for DoRA `magnitude` [N] in FP32."""

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + (0 if self.magnitude is None else self.magnitude.nbytes)


Adapter = Mapping[str, LinearAdapter]  # by the name of the linear


def adaptable_linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns (out_features, in_features) of every linear layer that can have an adapter, in the model's order."""
    model = build_on_meta(config)
    names = adaptable_linear_names(config)
    shapes = {name: cast(Tensor, model.get_submodule(name).weight).shape for name in names}
    return {name: (shape[0], shape[1]) for name, shape in shapes.items()}


def read_adapter(directory: Path | str, config: ModelConfig) -> dict[str, LinearAdapter]:
    """Reads the adapter in `directory` for a model of this configuration, by the name of the linear layer.

    Raises ModelError if a file is missing or damaged, the method is not supported, or a tensor does not fit the model.
    """
    directory = Path(directory)
    peft, linears = read_config(directory), adaptable_linears(config)
    tensors = _read_tensors(directory, linears)
    if not tensors:
        raise ModelError(f"{directory / WEIGHTS} holds no adapter.")
    return {name: _linear_adapter(directory, name, tensors[name], linears[name], peft) for name in tensors}


def _read_tensors(directory: Path, linears: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, Tensor]]:
    """Returns the tensors of the file by linear layer and by part, such as `lora_A`."""
    path = directory / WEIGHTS
    entries, _ = read_header(path)
    for key, entry in entries.items():
        place = parse_name(key)
        if place is None or place[0] not in linears:
            raise ModelError(f"{path} holds {key}, and this model has no such layer that can have an adapter.")
        if entry.dtype not in _STORED_DTYPES:
            raise ModelError(f"{path}: {key} is stored as {type_name(entry.dtype)}; an adapter is F32, BF16 or F16.")
    tensors, parts = Shards(entries), dict[str, dict[str, Tensor]]()
    for key in tensors:
        linear, part = parse_name(key) or ("", "lora_A")
        if part in parts.setdefault(linear, {}):
            raise ModelError(f"{path} holds the {part} of {linear} under two names.")
        parts[linear][part] = tensors[key]
    return {linear: parts[linear] for linear in linears if linear in parts}


def _linear_adapter(
    directory: Path, linear: str, parts: Mapping[str, Tensor], shape: tuple[int, int], peft: PeftConfig
) -> LinearAdapter:
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
        if not is_finite(tensor):
            raise ModelError(f"{directory}: {part} of {linear} holds NaN or an infinity.")
    magnitude = parts["lora_magnitude_vector"].float() if peft.dora else None
    a, b = (parts[part].to(torch.bfloat16) for part in ("lora_A", "lora_B"))
    return LinearAdapter(a, b, peft.scaling(linear), magnitude)


def write_adapter(
    folder: Path,
    base: str,
    peft: PeftConfig,
    weights: Mapping[str, Tensor],
    linears: Sequence[str],
    *,
    dropout: float = 0.0,
) -> None:
    """Writes the adapter's two files into `folder`.

    Args:
        base: name or path of the base model, for adapter_config.json
        weights: FP32 tensors by `{linear}.lora_A` and so on; A and B are rounded to BF16, as in training
        linears: all linear layers of the model that can have an adapter, in the model's order
    """
    owners = {name.rpartition(".")[0] for name in weights}
    adapted = [name for name in linears if name in owners]
    write_json(folder / CONFIG, make_config(base, peft, adapted, linears, dropout))
    tensors = {}
    for name, tensor in weights.items():
        linear, _, part = name.rpartition(".")
        value = tensor if part == "lora_magnitude_vector" else tensor.to(torch.bfloat16)
        tensors[tensor_name(linear, part)] = value  # type: ignore[arg-type]
    save_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
