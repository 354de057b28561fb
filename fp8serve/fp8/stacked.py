"""StackedExperts: FrozenLinear layers of many experts as one weight [E, N, K], for grouped GEMMs (ops/grouped.py).

First the layers of each expert, such as gate and up, are joined (joined.py). Then the weights of all experts are
stacked, and the layers' tensors become views of the stack, so a write to a layer's weight takes effect at once.
change_tracking.py records replaced layers, replaced tensors and new hooks, and the caller checks for them before the
next call.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from fp8serve.fp8.casting import rowwise_scale_options
from fp8serve.fp8.change_tracking import track_children
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.joined import JoinedLinear, can_join, have_whole_blocks
from fp8serve.fp8.ops.arithmetic import E8M0, SATURATION_LIMIT
from fp8serve.fp8.ops.four_bit import pack_4bit_into
from fp8serve.fp8.ops.grouped import expert_of_rows
from fp8serve.fp8.ops.packing import is_packable, pack_into

E4M3 = torch.float8_e4m3fn
_grouped_mlp = torch.ops.fp8serve.grouped_mlp.default
_grouped_mm = torch.ops.fp8serve.grouped_mm.default
_grouped_mm_4bit = torch.ops.fp8serve.grouped_mm_4bit.default
_grouped_quantize = torch.ops.fp8serve.grouped_quantize.default


def can_stack(experts: Sequence[nn.Module], names: Sequence[str]) -> bool:
    """Returns whether the layers `names` can be joined in every expert and have the same settings in all experts."""
    layers = [[expert._modules[name] for name in names] for expert in experts]
    return (
        all(can_join(group) and have_whole_blocks(group) for group in layers)
        and _has_grouped_product(cast(FrozenLinear, layers[0][0]))
        and len({_stacking_key(cast(list[FrozenLinear], group)) for group in layers}) == 1
    )


def _has_grouped_product(layer: FrozenLinear) -> bool:
    """Returns whether there is a grouped product for the operands: not for inputs of 4 bits, and on a GPU neither for
    inputs in BF16 nor for MX blocks."""
    is_mx = layer.weight_scale_inv.dtype is E8M0
    on_device = not layer.weight_q.is_cuda or (layer.input_spec.is_fp8 and not is_mx)
    return on_device and not layer.input_spec.is_4bit


def _stacking_key(layers: Sequence[FrozenLinear]) -> tuple[object, ...]:
    """Returns the settings that must be equal in all experts."""
    first = layers[0]
    settings = first.input_spec, first.out_dtype, first.input_scale is None, first.bias is None
    return (*settings, *((layer.weight_q.shape, layer.weight_scale_inv.shape) for layer in layers))


class StackedExperts:
    """The layers `names` of all experts, joined and stacked to one weight [E, N, K].

    `can_stack` must be true for the layers, and no layer may be packed yet. The layers' tensors become views.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, experts: Sequence[nn.Module], names: Sequence[str]) -> None:
        self._changed: set[int] = set()  # the experts in which a layer or tensor may have been replaced
        for i, expert in enumerate(experts):
            track_children(expert, names, (self._changed, i))
        self._modules = [expert._modules for expert in experts]
        layers = [{name: cast(FrozenLinear, expert._modules[name]) for name in names} for expert in experts]
        self._experts = stacked = [JoinedLinear(group, (self._changed, i)) for i, group in enumerate(layers)]
        self._first = first = stacked[0].first
        self._matrix = torch.cat([expert.weight.view(torch.uint8) for expert in stacked]).view(first.weight_q.dtype)
        self._scale = torch.stack([x.scale if x.scale.dim() else x.scale.expand(len(x.weight), 1) for x in stacked])
        biases = [expert.bias for expert in stacked if expert.bias is not None]
        self._bias = torch.stack(biases) if biases else None
        global_scales = [expert.global_scale for expert in stacked if expert.global_scale is not None]
        self._global_scale = torch.stack(global_scales) if global_scales else None
        scales = [expert.first.input_scale for expert in stacked if expert.first.input_scale is not None]
        self._input_scale = torch.stack(scales) if scales else None
        self._input_scale_inv = None if self._input_scale is None else self._input_scale.reciprocal()
        self._amax = torch.zeros(len(stacked), device=self._matrix.device)
        self._saturated = torch.zeros(len(stacked), dtype=torch.int64, device=self._matrix.device)
        self._rowwise_options = rowwise_scale_options(first.input_spec)
        self._share_tensors()

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Returns the outputs [T, N] for x [T, K], sorted by expert; the rows of each expert end at `offsets` int32
        [E]."""
        q, scale_inv = self._quantize(x, offsets)
        dtype = self._first.out_dtype or x.dtype
        if self._first.is_4bit:
            weights = self._weights, self._scale, self._global_scale
            return cast(Tensor, _grouped_mm_4bit(q, *weights, offsets, self._bias).to(dtype))
        return cast(Tensor, _grouped_mm(q, self._weights, scale_inv, self._scale, offsets, self._bias, dtype))

    @property
    def is_unchanged(self) -> bool:
        """Whether no change was recorded, in which case `is_current` is true for all experts."""
        return not self._changed

    def is_current(self, experts: Collection[int]) -> bool:
        """Returns whether these experts still have the modules and the tensors that were stacked."""
        for expert in self._changed.intersection(experts):
            if not self._experts[expert].is_current(self._modules[expert]):
                return False
            self._changed.discard(expert)
        return True

    def can_run_mlp_with(self, down: "StackedExperts", x: Tensor) -> bool:
        """Returns whether `mlp` supports the stacks and inputs like x."""
        options, dtypes = self._rowwise_options, (None, x.dtype)
        is_supported = options is not None and options == down._rowwise_options
        return is_supported and self._first.out_dtype in dtypes and down._first.out_dtype in dtypes and not x.is_cuda

    def mlp(self, down: "StackedExperts", x: Tensor, chosen: Tensor, weights: Tensor, tokens: Tensor) -> Tensor:
        """Returns the output [T, N] of a gated MLP whose gate and up layers are in this stack, computed by one op.

        Args:
            down: The stack of the down layers.
            x: The input [T, K].
            chosen: int64 [T, k], the experts of each token.
            weights: [T, k], the weights of the experts' outputs.
            tokens: int64 [E], to which the number of rows of each expert is added.
        """
        gate_up, down_tensors = (self._weights, self._scale, self._bias), (down._weights, down._scale, down._bias)
        options = cast(tuple[int, bool], self._rowwise_options)
        return _grouped_mlp(x, chosen, weights, tokens, *gate_up, *down_tensors, *options)  # type: ignore[no-any-return]

    @property
    def weight(self) -> Tensor | None:
        """All weights as one matrix [E * N, K], or None if a layer was replaced, which packing would undo."""
        return self._matrix if self.is_current(range(len(self._experts))) else None

    @property
    def is_packable(self) -> bool:
        return is_packable(self._matrix) and all(expert.is_packable for expert in self._experts)

    @torch.inference_mode(False)
    @torch.no_grad()
    def pack(self, out: Tensor) -> None:
        """Packs all weights into `out`; see `FrozenLinear.pack`."""
        if self._first.is_4bit:
            self._matrix, scale = pack_4bit_into(self._matrix, self._scale.flatten(0, 1), out)
            self._scale = scale.view(len(self._experts), -1, *scale.shape[1:])
        else:
            self._matrix = pack_into(self._matrix, out)
        self._share_tensors()

    @property
    def has_input_scale(self) -> bool:
        """Whether the layers have stored input scales, in which case their counters are updated."""
        return self._input_scale is not None

    @property
    def num_experts(self) -> int:
        return len(self._experts)

    def layers(self) -> Iterator[FrozenLinear]:
        """Yields the layers of all experts."""
        for expert in self._experts:
            yield from expert.layers

    @torch.no_grad()
    def move_counters(self, amax: Tensor, saturated: Tensor) -> None:
        """Replaces the counters of all experts, FP32 [E] and int64 [E], by tensors in other memory."""
        self._amax, self._saturated = amax, saturated
        self._share_tensors()

    def _quantize(self, x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        if self._input_scale is None or self._input_scale_inv is None:
            return self._first.cast(x)
        q, amax = _grouped_quantize(x, self._input_scale, offsets, E4M3)
        self._update_counters(x, amax, offsets)
        return q, self._input_scale_inv

    def _update_counters(self, x: Tensor, amax: Tensor, offsets: Tensor) -> None:
        """Updates the amax and the number of saturated elements of each expert, as `quantize_watched` does."""
        scale = cast(Tensor, self._input_scale)
        torch.fmax(self._amax, amax, out=self._amax)
        limit = SATURATION_LIMIT[E4M3]
        if not x.is_cuda and not bool((amax * scale > limit).any()):
            return
        expert = expert_of_rows(offsets, len(x))
        num_saturated = ((x.float() * scale[expert].unsqueeze(1)).abs() > limit).sum(1)
        self._saturated.index_add_(0, expert, num_saturated)

    def _share_tensors(self) -> None:
        """Replaces the layers' tensors by views of the stack."""
        matrix = self._matrix
        self._weights = matrix.view(len(self._experts), -1, *matrix.shape[1:])
        for i, expert in enumerate(self._experts):
            global_scale, bias = (None if t is None else t[i] for t in (self._global_scale, self._bias))
            expert.move_weight(self._weights[i], self._scale[i], global_scale, bias)
            expert.move_input_tensors(self._amax[i], self._saturated[i], *self._input_scales(i))
        self._changed.clear()

    def _input_scales(self, expert: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if self._input_scale is None or self._input_scale_inv is None:
            return None, None
        return self._input_scale[expert], self._input_scale_inv[expert]
