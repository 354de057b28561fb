"""Merges an adapter into its base model and measures how much of the adapter is lost by rounding.

    W' = W + s B A                                 LoRA
    W' = m (W + s B A) / ||W + s B A||, by row     DoRA

FP8 weights keep their scales where possible, so that elements which the adapter does not change keep their bits. If a
tensor, row or block of W' exceeds the range of its scale, this scale is doubled as often as needed. Each doubling
halves the unchanged E4M3 elements, which is exact except for the smallest. Neighbouring E4M3 values are 6 to 12 %
apart, and an adapter often changes an element by less than half of that: rounding then restores the old value.
`RoundingLoss` counts such elements in each layer and measures the error of the merged change. Input scales do not
change. With a BF16 base, only rounding to BF16 causes a loss.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve import __version__
from fp8serve.errors import ModelError
from fp8serve.fp8.casting import QuantizedWeight, cast_weight
from fp8serve.fp8.ops.arithmetic import BLOCK, expand, saturating_cast
from fp8serve.fp8.spec import QuantSpec
from fp8serve.model.adapters import LinearAdapter, read_adapter
from fp8serve.model.config.wrappers import read_text_config
from fp8serve.model.export import write_calibrated, write_hf_directory
from fp8serve.model.format_conversion import (
    collect_scales,
    detect_format,
    expanded_weight,
    infer_recipe,
    read_matching_state,
)
from fp8serve.model.formats.scales import ScalingCheckpoint
from fp8serve.model.storage.files import check_absent, check_writable
from fp8serve.model.storage.shards import LazyTensors
from fp8serve.model.stored_checkpoint import open_checkpoint

E4M3 = torch.float8_e4m3fn
SATURATION_LIMIT = 464.0  # half a step above 448, E4M3's largest value: larger values saturate instead of being rounded
MAX_LOST_FRACTION = 0.5  # of the changed elements; with a larger loss most of the training is not in the result


@dataclass
class RoundingLoss:
    """Statistics of the rounding in one merged weight, or sums of them over several weights."""

    changed: int = 0  # elements that the adapter changes
    lost: int = 0  # changed elements that rounding returns to their old value
    trained: float = 0.0  # sum of squares of the trained change
    missed: float = 0.0  # sum of squares of (merged change - trained change)
    rescaled: int = 0  # scales that were doubled

    @property
    def lost_share(self) -> float:
        return self.lost / max(self.changed, 1)

    @property
    def error(self) -> float:
        """The relative error of the merged change; 1 is the error of a weight that did not change."""
        return (self.missed / self.trained) ** 0.5 if self.trained else 0.0

    def __add__(self, other: "RoundingLoss") -> "RoundingLoss":
        return RoundingLoss(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @classmethod
    def measure(cls, base: Tensor, expected: Tensor, merged: Tensor, rescaled: int = 0) -> "RoundingLoss":
        """Returns the loss of one weight from its FP32 values before the merge, before rounding and after rounding."""
        change = expected - base
        changed, lost = int(change.count_nonzero()), int(((change != 0) & (merged == base)).sum())
        trained = float(change.double().square().sum())
        missed = float((merged - expected).double().square().sum())
        return cls(changed, lost, trained, missed, rescaled)


def total_loss(losses: Mapping[str, RoundingLoss]) -> RoundingLoss:
    return sum(losses.values(), RoundingLoss())


def apply_adapter(weight: Tensor, adapter: LinearAdapter) -> Tensor:
    """Returns the FP32 weight [N, K] merged with the adapter."""
    result = weight + adapter.scaling * (adapter.b.float() @ adapter.a.float())
    if adapter.magnitude is None:
        return result
    norm = result.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    scaled: Tensor = result * (adapter.magnitude / norm).unsqueeze(1)
    return scaled


def merge(
    base: Path | str, adapter: Path | str, out: Path | str, max_lost_fraction: float = MAX_LOST_FRACTION
) -> dict[str, RoundingLoss]:
    """Writes the model in `base`, merged with the adapter in the directory `adapter`, to `out`. Returns the loss of
    every linear layer that has an adapter, by name.

    Raises ModelError if `out` exists, a directory cannot be read, or rounding would lose more than `max_lost_fraction`
    of the changed elements; then nothing is written. Raises ScalesError if a scale is unusable.
    """
    check_absent(Path(out))
    checkpoint = open_checkpoint(base)
    check_writable(Path(out), sum(math.prod(shape) for shape in checkpoint.shapes.values()))
    adapters, losses = read_adapter(adapter, checkpoint.config), dict[str, RoundingLoss]()
    linears = checkpoint.read_quantized(checkpoint.quantized_linears)
    unquantized = {name: adapters[name] for name in adapters if name not in linears}

    def merged(key: str) -> Tensor:
        """Returns the parameter, in FP32 and merged with its adapter if it has one."""
        linear = unquantized.get(key.removesuffix(".weight"))
        return checkpoint[key] if linear is None else apply_adapter(checkpoint[key].float(), linear)

    weights = LazyTensors(checkpoint, lambda key: merged(key).to(checkpoint[key].dtype))
    for name in unquantized:
        key = f"{name}.weight"
        losses[name] = RoundingLoss.measure(checkpoint[key].float(), merged(key), weights[key].float())
    if not linears:
        _check_loss(total_loss(losses), max_lost_fraction)
        config = {k: v for k, v in read_text_config(checkpoint.path).items() if k != "quantization_config"}
        write_hf_directory(out, config, weights, copy_files_from=checkpoint.path)
        return losses
    format = detect_format(checkpoint.path)
    recipe = infer_recipe(checkpoint, linears, format)
    state = read_matching_state(checkpoint, recipe) or collect_scales(checkpoint, linears, recipe)
    spec = recipe.specs.linear["weight"]
    quantized = {name: expanded_weight(linear, spec) for name, linear in linears.items()}
    for name in adapters.keys() & linears.keys():
        quantized[name], losses[name] = _merge_quantized(quantized[name], spec, adapters[name])
        if losses[name].rescaled:
            state = _replace_weight_scale(state, f"{name}.weight", quantized[name].scale_inv)
    _check_loss(total_loss(losses), max_lost_fraction)
    write_calibrated(
        out,
        base,
        state,
        weights=weights,
        quantized=quantized,
        matrices=checkpoint.read_quantized(checkpoint.quantized_matrices),
        high_precision=checkpoint.high_precision_linears,
        format=format,
    )
    return losses


def _check_loss(loss: RoundingLoss, max_lost_fraction: float) -> None:
    if loss.lost_share > max_lost_fraction:
        raise ModelError(
            f"Merging would lose too much of the adapter: rounding undoes {loss.lost_share:.0%} of its changes, and "
            f"the merged change has a relative error of {loss.error:.2f}; serve the adapter with --adapter, merge it "
            "into the model in BF16, or allow the loss with --max-lost."
        )


def _merge_quantized(
    weight: QuantizedWeight, spec: QuantSpec, adapter: LinearAdapter
) -> tuple[QuantizedWeight, RoundingLoss]:
    """Merges a weight with its adapter and returns the quantized weight and the loss."""
    q, scale_inv, _ = weight
    base = weight.dequantize()
    expected = apply_adapter(base, adapter)
    if spec.is_mx or spec.is_4bit:
        new = cast_weight(expected, spec)
        changed = int((new.scale_inv.view(torch.uint8) != scale_inv.view(torch.uint8)).sum())
        return new, RoundingLoss.measure(base, expected, new.dequantize(), changed)
    # each scale is doubled until its tensor, row or block of `expected` is in the range of E4M3
    amax = _amax(expected, scale_inv)
    new_scale_inv = scale_inv * torch.exp2((amax / scale_inv / SATURATION_LIMIT).log2().ceil().clamp_min(0))
    result = QuantizedWeight(saturating_cast(expected / expand(new_scale_inv, *q.shape), E4M3), new_scale_inv)
    return result, RoundingLoss.measure(base, expected, result.dequantize(), int((new_scale_inv != scale_inv).sum()))


def _amax(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """Returns the amax of the tensor, of each row or of each block, in the shape of its scales."""
    rows, cols = weight.shape
    magnitude = weight.abs()
    if scale_inv.numel() == 1:
        return magnitude.max().reshape(scale_inv.shape)
    if tuple(scale_inv.shape) == (rows, 1):
        return magnitude.amax(1, keepdim=True)
    padded = F.pad(magnitude, (0, -cols % BLOCK, 0, -rows % BLOCK))
    tiles = padded.view(-(-rows // BLOCK), BLOCK, -(-cols // BLOCK), BLOCK)
    return tiles.amax((1, 3))


def _replace_weight_scale(state: ScalingCheckpoint, key: str, scale_inv: Tensor) -> ScalingCheckpoint:
    """Returns the state with a weight's new scale; a state without this scale does not change."""
    if key not in state.tensors:
        return state
    new = replace(state.tensors[key], scale=scale_inv.reciprocal())
    return replace(state, tensors=state.tensors | {key: new}, created_by=f"fp8serve {__version__} merge")
