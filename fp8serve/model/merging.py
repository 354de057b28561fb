"""Merges an adapter into its base, writes an ordinary directory, and measures how much rounding lost of the adapter.

    W' = W + s B A                                 LoRA
    W' = m (W + s B A) / ||W + s B A||, by row     DoRA

An FP8 weight keeps its scales, so that elements which the adapter does not change keep their bits. Where W' leaves the
range of the scale of a tensor, a row or a block, only that scale is doubled as often as needed. Its unchanged elements
are then halved in E4M3, which affects only the smallest of them. Two neighbouring values of E4M3 are 6 to 12 % apart,
and an adapter's changes are often less than half of that: such elements stay unchanged. `Loss` counts them, layer by
layer, and measures how far the remaining change is from the trained one. Input scales stay. With a BF16 base only the
rounding to BF16 is lost.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve import __version__
from fp8serve.errors import ModelError
from fp8serve.fp8.ops.arithmetic import BLOCK, dequantize, expand, saturate
from fp8serve.model.adapters import Adapter, LowRank, read_adapter
from fp8serve.model.config.wrappers import read_text_config
from fp8serve.model.export import write_calibrated, write_hf_directory
from fp8serve.model.formats.scales import ScalingCheckpoint
from fp8serve.model.rewriting import (
    fit_scale,
    format_of,
    recipe_of,
    retained_state,
    state_of,
    stored_linears,
    stored_matrices,
)
from fp8serve.model.storage.files import check_absent, check_writable
from fp8serve.model.stored import Checkpoint, open_checkpoint

E4M3 = torch.float8_e4m3fn
ROUNDED_DOWN = 464.0  # half a step above E4M3's largest, 448: larger values are cut off and not rounded
MOST_LOST = 0.5  # with a larger loss most of the training is not in the result


@dataclass
class Loss:
    """changed: elements that the adapter changes; lost: those of them that rounding restores. trained, missed: sums of
    squares of the trained change, and of the merged change's difference from it. rescaled: scales that grew."""

    changed: int = 0
    lost: int = 0
    trained: float = 0.0
    missed: float = 0.0
    rescaled: int = 0

    @property
    def lost_share(self) -> float:
        return self.lost / max(self.changed, 1)

    @property
    def error(self) -> float:
        """Relative error of the merged change; 1: as large as without any change."""
        return (self.missed / self.trained) ** 0.5 if self.trained else 0.0

    def __add__(self, other: "Loss") -> "Loss":
        sums = (mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))
        return Loss(*sums)

    @classmethod
    def of(cls, before: Tensor, expected: Tensor, after: Tensor, rescaled: int = 0) -> "Loss":
        """The loss of one weight, from FP32 before the merge, as trained, and as rounded."""
        change = expected - before
        changed, lost = int(change.count_nonzero()), int(((change != 0) & (after == before)).sum())
        trained, missed = float(change.double().square().sum()), float((after - expected).double().square().sum())
        return cls(changed, lost, trained, missed, rescaled)


@dataclass
class Losses:
    """The loss of every linear that has an adapter, by name."""

    layers: dict[str, Loss] = field(default_factory=dict)

    @property
    def total(self) -> Loss:
        return sum(self.layers.values(), Loss())


def merged(weight: Tensor, adapter: LowRank) -> Tensor:
    """weight FP32 [N, K] with the adapter in it."""
    moved = weight + adapter.scaling * (adapter.b.float() @ adapter.a.float())
    if adapter.magnitude is None:
        return moved
    scaled: Tensor = moved * (
        adapter.magnitude / moved.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    ).unsqueeze(1)
    return scaled


def merge(base: Path | str, adapter: Path | str, out: Path | str, most_lost: float = MOST_LOST) -> Losses:
    """Write the model in `base` with the adapter in the directory `adapter` to `out`.

    ModelError: `out` is taken; one of the two cannot be read; rounding would put back more than this share of the
    changed elements, and nothing is written. ScalesError: scales that cannot be served.
    """
    check_absent(Path(out))
    checkpoint = open_checkpoint(base)
    check_writable(Path(out), sum(math.prod(shape) for shape in checkpoint.shapes.values()))
    low_ranks, losses = read_adapter(adapter, checkpoint.config), Losses()
    stored = stored_linears(checkpoint)
    weights = _Merged(checkpoint, {name: low for name, low in low_ranks.items() if name not in stored})
    for name in weights.adapter:
        key = f"{name}.weight"
        losses.layers[name] = Loss.of(checkpoint[key].float(), weights.merged(key), weights[key].float())
    if not stored:
        _check(losses.total, most_lost)
        config = {k: v for k, v in read_text_config(checkpoint.path).items() if k != "quantization_config"}
        write_hf_directory(out, config, weights, carry_from=checkpoint.path)
        return losses
    format = format_of(checkpoint.path)
    recipe = recipe_of(checkpoint, stored, format)
    state = retained_state(checkpoint, recipe) or state_of(checkpoint, stored, recipe)
    spec = recipe.specs.linear["weight"]
    quantized = {name: (linear.weight_q, fit_scale(linear, spec)) for name, linear in stored.items()}
    for name in low_ranks.keys() & stored.keys():
        before = quantized[name]
        quantized[name], losses.layers[name] = _rounded(*before, low_ranks[name])
        if losses.layers[name].rescaled:
            state = _with_scale(state, f"{name}.weight", quantized[name][1])
    _check(losses.total, most_lost)
    write_calibrated(
        out,
        base,
        state,
        weights=weights,
        quantized=quantized,
        matrices=stored_matrices(checkpoint),
        high_precision=checkpoint.high_precision_linears,
        format=format,
    )
    return losses


def _check(loss: Loss, most: float) -> None:
    if loss.lost_share > most:
        raise ModelError(
            f"Rounding takes too much of the adapter: {loss.lost_share:.0%} of the elements that it changes round "
            f"back, and the merged change has a relative error of {loss.error:.2f}; serve it beside the model "
            "(--adapter), merge it into the model in BF16, or allow the loss with --max-lost."
        )


def _rounded(q: Tensor, scale_inv: Tensor, adapter: LowRank) -> tuple[tuple[Tensor, Tensor], Loss]:
    """The weight with the adapter in it, in FP8, and its dequantizing scales."""
    before = dequantize(q, scale_inv)
    expected = merged(before, adapter)
    # each scale is doubled until its part of `expected` is in the range of E4M3
    largest = _largest(expected, scale_inv)
    grown = scale_inv * torch.exp2((largest / scale_inv / ROUNDED_DOWN).log2().ceil().clamp_min(0))
    new = saturate(expected / expand(grown, *q.shape), E4M3), grown
    return new, Loss.of(before, expected, dequantize(*new), int((grown != scale_inv).sum()))


def _largest(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """The largest magnitude of each scale's part: a tensor, a row, or a block."""
    rows, cols = weight.shape
    size = weight.abs()
    if scale_inv.numel() == 1:
        return size.max().reshape(scale_inv.shape)
    if tuple(scale_inv.shape) == (rows, 1):
        return size.amax(1, keepdim=True)
    padded = F.pad(size, (0, -cols % BLOCK, 0, -rows % BLOCK))
    tiles = padded.view(-(-rows // BLOCK), BLOCK, -(-cols // BLOCK), BLOCK)
    return tiles.amax((1, 3))


def _with_scale(state: ScalingCheckpoint, key: str, scale_inv: Tensor) -> ScalingCheckpoint:
    """The state with a weight's new scale, if it holds scales of weights."""
    if key not in state.tensors:
        return state
    new = replace(state.tensors[key], scale=scale_inv.reciprocal())
    return replace(state, tensors=state.tensors | {key: new}, created_by=f"fp8serve {__version__} merge")


class _Merged(Mapping[str, Tensor]):
    """The parameters of a checkpoint, with an adapter in those of its linears that are in high precision."""

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter) -> None:
        self._checkpoint, self.adapter = checkpoint, adapter

    def merged(self, name: str) -> Tensor:
        """The weight of a linear that has an adapter, FP32."""
        return merged(self._checkpoint[name].float(), self.adapter[name.removesuffix(".weight")])

    def __getitem__(self, name: str) -> Tensor:
        own = self._checkpoint[name]
        return self.merged(name).to(own.dtype) if name.removesuffix(".weight") in self.adapter else own

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __len__(self) -> int:
        return len(self._checkpoint)
