"""JoinedLinear: several FrozenLinear layers with the same input, computed by one cast and one product.

The layers stay modules with their names, tensors and counters. Their weights, weight scales and biases become views of
the joined tensors. So no tensor is in memory twice, and a value that is written to a layer's tensor takes effect in the
joined product. Weights that are already adjacent in memory (such as gate and up in a mapped file) are joined in place;
others are copied once. All layers share the input scale and the counters of the first layer, which casts the input.
If every layer has one weight scale and all are equal (calibrate --share-scales), they share it, too. A GPU can then
multiply by cuBLASLt with one scale for each operand. Otherwise a weight scale per tensor becomes one per row, which
gives the same bits.

If code replaces a layer or its tensor (by an assignment, `.data` or `.to`) instead of writing to the tensor, the new
tensor is no view. A listener (change_tracking.py) records that a tensor may have been replaced. Then `is_current`
compares the tensors and their addresses to find out.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from fp8serve.fp8.change_tracking import Listener, track_view
from fp8serve.fp8.frozen import FrozenLinear, Operands, multiply
from fp8serve.fp8.ops.arithmetic import BLOCK
from fp8serve.fp8.ops.four_bit import pack_4bit_into
from fp8serve.fp8.ops.packing import GROUP, is_packable, pack_into

_joined_mm = torch.ops.fp8serve.joined_mm.default


class _Snapshot(NamedTuple):
    """The tensors of the joined layers: where each is stored, and at which address its memory begins."""

    entries: list[tuple[dict[str, Tensor | None], str, Tensor | None]]  # a layer's buffers, a name, the tensor
    addresses: list[tuple[Tensor, int]]

    @classmethod
    def of(cls, layers: Iterable[FrozenLinear]) -> "_Snapshot":
        names = ("weight_q", "weight_scale_inv", "weight_global_scale", "bias", "input_scale", "input_scale_inv")
        entries = [(layer._buffers, name, layer._buffers[name]) for layer in layers for name in names]
        moved = [tensor for _, name, tensor in entries if tensor is not None and not name.startswith("input_")]
        return cls(entries, [(tensor, tensor.data_ptr()) for tensor in moved])


class JoinedLinear:
    """The layers [N_i, K] of one module, by name, joined to one layer [sum of N_i, K].

    `can_join` must be true for the layers; their tensors become views of the joined ones. The listener is notified when
    a layer's weight, scale or bias may have moved to other memory; `track_children` notifies it of other changes.

    Attributes:
        layers: The joined layers, in order.
        first: The layer whose input scale and counters all layers share.
        weight: FP8 [sum of N_i, K], or packed, or 4-bit codes [sum of N_i, K/2].
        widths: The number of outputs of each layer.
        scale: The scale_inv of the weight: FP32 [] if the layers share one, else [sum of N_i, 1], or one per block.
        global_scale: FP32 [sum of N_i] in NVFP4, else None.
        bias: [sum of N_i] or None.
    """

    @torch.inference_mode(False)  # an inference tensor cannot be written to outside of inference mode
    @torch.no_grad()
    def __init__(self, layers: Mapping[str, FrozenLinear], listener: Listener) -> None:
        self._by_name, self._listener = dict(layers), listener
        self.layers = list(layers.values())
        self.first = self.layers[0]
        self.widths = [layer.out_features for layer in self.layers]
        _pack_all_if_any(self.layers)
        self.weight = _concat_weights([layer.weight_q for layer in self.layers])
        scales = [_joinable_scale(layer) for layer in self.layers]
        self._scale_rows = [len(scale) for scale in scales]
        self.scale = torch.cat(scales) if (shared := _shared_scale(self.layers)) is None else shared
        pairs = [(layer.weight_global_scale, layer.out_features) for layer in self.layers]
        global_scales = [scale.expand(rows) for scale, rows in pairs if scale is not None]
        self.global_scale = torch.cat(global_scales) if global_scales else None
        self._ends = None if have_whole_blocks(self.layers) else torch.tensor(self.widths).cumsum(0).to(torch.int32)
        biases = [layer.bias for layer in self.layers if layer.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self._share_tensors()

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """Returns the output [M, N_i] of every layer for x [M, K]."""
        return self._multiply(*self.first.cast(x), x.dtype)

    def forward_norm(self, x: Tensor, norm_weight: Tensor, eps: float) -> Sequence[Tensor]:
        """Returns the output [M, N_i] of every layer for rms_norm(x [M, K], norm_weight [K], eps)."""
        if self.can_fuse_product(x):
            return self.operands_of_norm(x, norm_weight, eps).multiply().split_with_sizes(self.widths, 1)
        return self._multiply(*self.first.cast_norm(x, norm_weight, eps), x.dtype)

    def cast_gated(
        self, x: Tensor, norm_weight: Tensor, eps: float, linear: FrozenLinear
    ) -> tuple[Tensor, Tensor] | None:
        """Returns silu(gate) * up, cast as the input of `linear`, where gate and up are this layer's outputs for
        rms_norm(x [M, K]). Returns None if the joined layers are no such pair or `linear.cast_gated_product` cannot
        compute it."""
        is_gated = len(self.widths) == 2 and self.widths[0] == self.widths[1]
        if not is_gated or not self.can_fuse_product(x) or not linear.can_cast_product(x):
            return None
        return linear.cast_gated_product(self.operands_of_norm(x, norm_weight, eps))

    def can_fuse_product(self, x: Tensor) -> bool:
        """Returns whether an op of a GPU may multiply inputs like x and do more with the product."""
        return self._ends is None and self.first.can_fuse_product(x)

    def operands(self, x: Tensor) -> Operands:
        """Returns the operands for the input x [M, K]."""
        return self._operands(*self.first.cast(x), ())

    def operands_of_norm(self, x: Tensor, norm_weight: Tensor, eps: float) -> Operands:
        """Returns the operands for the input rms_norm(x [M, K], norm_weight [K], eps), not cast yet if possible."""
        norm = self.first.norm_arguments(norm_weight, eps)
        if not norm:
            return self._operands(*self.first.cast_norm(x, norm_weight, eps), ())
        return self._operands(x, self.first.input_scale_inv, norm)  # type: ignore[arg-type]  # not None

    def _operands(self, a: Tensor, scale_inv: Tensor, norm: tuple[Any, ...]) -> Operands:
        return Operands((a, self.weight, scale_inv, self.scale, self.bias), norm)

    def _multiply(self, q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        dtype = self.first.out_dtype or dtype
        if self._ends is None:
            input_scale = scale_inv if self.first.needs_input_scale else None
            y = multiply(q, input_scale, self.weight, self.scale, self.bias, dtype, self.global_scale)
        else:
            y = _joined_mm(q, self.weight, scale_inv, self.scale, self._ends, self.bias, dtype)
        return y.split_with_sizes(self.widths, 1)

    def is_current(self, modules: Mapping[str, nn.Module | None]) -> bool:
        """Returns whether each name in `modules` still has the joined layer, with the joined tensors and no hooks."""
        return (
            all(modules[name] is layer and not _has_hooks(layer) for name, layer in self._by_name.items())
            and all(buffers[name] is tensor for buffers, name, tensor in self._snapshot.entries)
            and all(tensor.data_ptr() == address for tensor, address in self._snapshot.addresses)
        )

    @property
    def is_packable(self) -> bool:
        """Whether the weight can be packed. Each layer must begin at a group of rows, so that its weight is a view."""
        return is_packable(self.weight) and not any(width % GROUP for width in self.widths)

    @torch.inference_mode(False)
    @torch.no_grad()
    def pack(self, out: Tensor) -> None:
        """Packs the weight into `out`; see `FrozenLinear.pack`."""
        if self.first.is_4bit:
            self.weight, self.scale = pack_4bit_into(self.weight, self.scale, out)
        else:
            self.weight = pack_into(self.weight, out)
        self._share_tensors()

    @torch.no_grad()
    def move_weight(self, weight: Tensor, scale: Tensor, global_scale: Tensor | None, bias: Tensor | None) -> None:
        """Replaces the weight, its scales and the bias by equal tensors in other memory; the weight may be packed."""
        self.weight, self.scale, self.global_scale, self.bias = weight, scale, global_scale, bias
        self._share_tensors()

    def move_input_tensors(
        self, amax: Tensor, saturated: Tensor, input_scale: Tensor | None, input_scale_inv: Tensor | None
    ) -> None:
        """Replaces the counters and the input scale by equal tensors in other memory. None is current scaling."""
        first = self.first
        first.amax, first.saturated = amax, saturated
        first.input_scale, first.input_scale_inv = input_scale, input_scale_inv
        self._share_tensors()

    def _share_tensors(self) -> None:
        """Replaces the layers' tensors by views of the joined tensors."""
        unit = GROUP if self.weight.dim() == 3 else 1
        weights = self.weight.split_with_sizes([width // unit for width in self.widths])
        is_shared = self.scale.dim() == 0
        scale_unit = unit if self.first.is_4bit else 1  # scales are packed only with codes of 4 bits
        scale_rows = [rows // scale_unit for rows in self._scale_rows]
        scales = [self.scale] * len(weights) if is_shared else self.scale.split_with_sizes(scale_rows)
        vectors = self.global_scale, self.bias
        rows = [[None] * len(scales) if v is None else v.split_with_sizes(self.widths) for v in vectors]
        for layer, weight, scale, *row in zip(self._by_name.values(), weights, scales, *rows, strict=True):
            layer.weight_q, layer.weight_scale_inv = (track_view(t, self._listener) for t in (weight, scale))
            layer.shares_weight_scale = is_shared
            layer.weight_global_scale, layer.bias = (None if t is None else track_view(t, self._listener) for t in row)
            for name in ("input_scale", "input_scale_inv", "amax", "saturated"):
                setattr(layer, name, getattr(self.first, name))
        self._snapshot = _Snapshot.of(self.layers)


def can_join(layers: Sequence[nn.Module | None]) -> TypeGuard[Sequence[FrozenLinear]]:
    """Returns whether all layers are FrozenLinear, cast their input in the same way, and have joinable weight scales.

    Block scales are joinable if every layer but the last has whole blocks of rows, or on a CPU if all layers have
    groups of 16 rows. Layers with hooks cannot be joined, because their hooks must be called.
    """
    frozen = [layer for layer in layers if isinstance(layer, FrozenLinear) and not _has_hooks(layer)]
    if len(frozen) < len(layers) or any(layer.pre_quant_scale is not None for layer in frozen):
        return False
    settings = {
        (x.input_spec, x.out_dtype, x.in_features, x.bias is None, has_block_scales(x), x.is_4bit, _scale_dtype(x))
        for x in frozen
    }
    if len(settings) > 1 or not all(_equal(layer.input_scale, frozen[0].input_scale) for layer in frozen):
        return False
    is_any_packed = any(layer.is_packed for layer in frozen)
    if is_any_packed and not all(layer.is_packed or is_packable(layer.weight_q) for layer in frozen):
        return False
    have_whole_groups = not any(layer.weight_q.is_cuda or layer.out_features % GROUP for layer in frozen)
    return have_whole_groups or have_whole_blocks(frozen)


def have_whole_blocks(layers: Sequence[FrozenLinear]) -> bool:
    """Returns whether concatenated block scales of the layers are the block scales of the joined weight.

    It is also True for layers without block scales.
    """
    return not (has_block_scales(layers[0]) and any(layer.out_features % BLOCK for layer in layers[:-1]))


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return torch.equal(a, b) if a is not None and b is not None else a is b


def has_block_scales(layer: FrozenLinear) -> bool:
    """Returns whether the weight has a scale for each block of 128 x 128 elements."""
    scale = layer.weight_scale_inv
    return scale.dim() == 2 and scale.dtype is torch.float32 and tuple(scale.shape) != (layer.out_features, 1)


def _scale_dtype(layer: FrozenLinear) -> torch.dtype:
    return layer.weight_scale_inv.dtype


def _joinable_scale(layer: FrozenLinear) -> Tensor:
    """Returns the weight's scale_inv, expanded to one per row if it is one per tensor."""
    scale = layer.weight_scale_inv
    return scale if scale.dim() else scale.expand(layer.out_features, 1)


def _shared_scale(layers: Sequence[FrozenLinear]) -> Tensor | None:
    """Returns a copy of the weight scale that all layers have in common, FP32 [], or None if their scales differ."""
    scales = [layer.weight_scale_inv for layer in layers]
    if any(scale.dim() for scale in scales) or not all(torch.equal(scale, scales[0]) for scale in scales):
        return None
    return scales[0].detach().clone()


def _pack_all_if_any(layers: Sequence[FrozenLinear]) -> None:
    """Packs all layers if any is packed already, which happens if a layer is replaced after packing."""
    if any(layer.is_packed for layer in layers):
        for layer in layers:
            if not layer.is_packed:
                layer.pack(torch.empty_like(layer.weight_q, memory_format=torch.contiguous_format).view(-1))


def _concat_weights(weights: Sequence[Tensor]) -> Tensor:
    """Returns the rows of all weights as one tensor: a view if they are adjacent in memory, else a copy."""
    first, rows = weights[0], sum(map(len, weights))
    if all(_are_adjacent(a, b) for a, b in pairwise(weights)):
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    return torch.cat([w.view(torch.uint8) for w in weights]).view(first.dtype)


def _are_adjacent(a: Tensor, b: Tensor) -> bool:
    is_same_storage = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return is_same_storage and a.is_contiguous() and b.is_contiguous() and a.data_ptr() + a.nbytes == b.data_ptr()
