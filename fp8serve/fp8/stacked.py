"""Stacked: frozen layers of many experts as one [E, N, K], for products of all experts at once (ops/grouped.py).

Each expert's layers, for instance its gate and up, are joined first (joined.py); then the experts' weights are stacked
and the layers' tensors become views of the stack. So a write to a weight takes effect at once. What was replaced or
hooked is noticed before the next call (replacing.py).
"""

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from fp8serve.fp8.casting import content_cast, content_strips
from fp8serve.fp8.frozen import FrozenLinear, packed
from fp8serve.fp8.joined import Joined, are_whole_blocks, can_join
from fp8serve.fp8.ops.arithmetic import CUT_OFF
from fp8serve.fp8.ops.grouped import expert_of_rows
from fp8serve.fp8.ops.packing import is_packable
from fp8serve.fp8.replacing import note_replacements

E4M3 = torch.float8_e4m3fn
_grouped_mlp = torch.ops.fp8serve.grouped_mlp.default
_grouped_mm = torch.ops.fp8serve.grouped_mm.default
_grouped_quantize = torch.ops.fp8serve.grouped_quantize.default


def can_stack(owners: Sequence[nn.Module], names: Sequence[str]) -> bool:
    """Whether these layers of every owner can be joined, and have the same shapes and kind in all owners."""
    layers = [[owner._modules[name] for name in names] for owner in owners]
    return (
        all(can_join(group) and are_whole_blocks(group) for group in layers)
        and _multiplies(cast(FrozenLinear, layers[0][0]))
        and len({_kind(cast(list[FrozenLinear], group)) for group in layers}) == 1
    )


def _multiplies(layer: FrozenLinear) -> bool:
    """Whether grouped_mm takes these operands: on a GPU it takes no input in BF16."""
    return layer.input_spec.is_fp8 or not layer.weight_q.is_cuda


def _kind(layers: Sequence[FrozenLinear]) -> tuple[object, ...]:
    """Equal for layers whose products can be stacked."""
    first = layers[0]
    alike = first.input_spec, first.out_dtype, first.input_scale is None, first.bias is None
    return (*alike, *((layer.weight_q.shape, layer.weight_scale_inv.shape) for layer in layers))


class Stacked:
    """The layers `names` of every owner, [N, K] together, as one. Changes the layers: see above.

    `can_stack` must be true for them, and none may be packed yet.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, owners: Sequence[nn.Module], names: Sequence[str]) -> None:
        self._changed: set[int] = set()  # experts in which something may have been replaced
        for expert, owner in enumerate(owners):
            note_replacements(owner, names, (self._changed, expert))
        self._modules = [owner._modules for owner in owners]
        layers = [{name: cast(FrozenLinear, owner._modules[name]) for name in names} for owner in owners]
        self._parts = parts = [Joined(group, (self._changed, expert)) for expert, group in enumerate(layers)]
        self._first = first = parts[0].first
        self._whole = torch.cat([part.weight.view(torch.uint8) for part in parts]).view(first.weight_q.dtype)
        self._scale = torch.stack([part.scale for part in parts])
        biases = [part.bias for part in parts if part.bias is not None]
        self._bias = torch.stack(biases) if biases else None
        scales = [part.first.input_scale for part in parts if part.first.input_scale is not None]
        self._input_scale = torch.stack(scales) if scales else None
        self._input_scale_inv = None if self._input_scale is None else self._input_scale.reciprocal()
        self._amax = torch.zeros(len(parts), device=self._whole.device)
        self._saturated = torch.zeros(len(parts), dtype=torch.int64, device=self._whole.device)
        self._cast = content_cast(first.input_spec)
        self._strips = content_strips(first.input_spec)
        self._share()

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [T, K], rows sorted by expert, which end at `offsets` int32 [E] -> [T, N]."""
        q, scale_inv = self._quantized(x, offsets)
        dtype = self._first.out_dtype or x.dtype
        return cast(Tensor, _grouped_mm(q, self._weights, scale_inv, self._scale, offsets, self._bias, dtype))

    @property
    def is_unchanged(self) -> bool:
        """Whether `is_current` is true for all experts, without a look at any."""
        return not self._changed

    def is_current(self, experts: Collection[int]) -> bool:
        """Whether these experts still have the modules and the tensors that were stacked."""
        for expert in self._changed.intersection(experts):
            if not self._parts[expert].is_current(self._modules[expert]):
                return False
            self._changed.discard(expert)
        return True

    def makes_mlp_with(self, down: "Stacked", x: Tensor) -> bool:
        """Whether `mlp` of inputs like x does what calling the two stacks does."""
        strips, dtypes = self._strips, (None, x.dtype)
        is_alike = strips is not None and strips == down._strips
        return is_alike and self._first.out_dtype in dtypes and down._first.out_dtype in dtypes and not x.is_cuda

    def mlp(self, down: "Stacked", x: Tensor, chosen: Tensor, weights: Tensor, tokens: Tensor) -> Tensor:
        """x [T, K], chosen int64 [T, k], weights [T, k] -> [T, N]: the products of gate and up (this stack), silu, the
        product of `down`, and the weighted sum in one call. Adds the rows of each expert to tokens, int64 [E]."""
        own, other = (self._weights, self._scale, self._bias), (down._weights, down._scale, down._bias)
        return _grouped_mlp(x, chosen, weights, tokens, *own, *other, *cast(tuple[int, bool], self._strips))  # type: ignore[no-any-return]

    @property
    def weight(self) -> Tensor | None:
        """All weights as one matrix [E * N, K]. None once a layer was replaced, because packing would restore the old
        one."""
        return self._whole if self.is_current(range(len(self._parts))) else None

    @property
    def is_packable(self) -> bool:
        return is_packable(self._whole) and all(part.is_packable for part in self._parts)

    @torch.inference_mode(False)
    @torch.no_grad()
    def pack(self, out: Tensor) -> None:
        """See FrozenLinear.pack."""
        self._whole = packed(self._whole, out)
        self._share()

    def _quantized(self, x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        if self._input_scale is None or self._input_scale_inv is None:
            op, arguments = self._cast
            return op(x, *arguments)
        q, amax = _grouped_quantize(x, self._input_scale, offsets, E4M3)
        self._watch(x, amax, offsets)
        return q, self._input_scale_inv

    def _watch(self, x: Tensor, amax: Tensor, offsets: Tensor) -> None:
        """Count as `quantize_watched` does, for each expert."""
        scale = cast(Tensor, self._input_scale)
        torch.fmax(self._amax, amax, out=self._amax)
        limit = CUT_OFF[E4M3]
        if not x.is_cuda and not bool((amax * scale > limit).any()):
            return
        expert = expert_of_rows(offsets, len(x))
        cut = ((x.float() * scale[expert].unsqueeze(1)).abs() > limit).sum(1)
        self._saturated.index_add_(0, expert, cut)

    def _share(self) -> None:
        """The parts' tensors become views of the stack."""
        weight = self._whole
        self._weights = weight.view(len(self._parts), -1, *weight.shape[1:])
        for expert, part in enumerate(self._parts):
            bias = None if self._bias is None else self._bias[expert]
            part.lie_at(self._weights[expert], self._scale[expert], bias)
            part.read_inputs_at(self._amax[expert], self._saturated[expert], *self._input_scales(expert))
        self._changed.clear()

    def _input_scales(self, expert: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if self._input_scale is None or self._input_scale_inv is None:
            return None, None
        return self._input_scale[expert], self._input_scale_inv[expert]
