"""Frozen layers that read one input, joined: one cast of it, one product, and each layer's output a view.

The layers stay modules with their names, tensors and counters. Their weights, weight scales and biases become views of
the joined ones, so that nothing is in memory twice and the product reads what is written into a layer. Weights that are
already adjacent (as gate and up are in a mapped file) are joined in place; others are copied once. A weight scale per
tensor becomes one per row, which multiplies the same sum. The first layer casts the input, because all layers share one
input scale and one set of counters.

A tensor that is replaced instead of written to (an assignment, `.data`, `.to`, another module in a layer's place) is no
longer a view. The listener is told that something may have been replaced (replacing.py); then `is_current` sees in
torch's own dictionaries and in the tensors' addresses whether it was.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from fp8serve.fp8.frozen import FrozenLinear, multiply, packed
from fp8serve.fp8.ops.arithmetic import BLOCK
from fp8serve.fp8.ops.packing import GROUP, is_packable
from fp8serve.fp8.replacing import Listener, part

_joined_mm = torch.ops.fp8serve.joined_mm.default


class _View(NamedTuple):
    """A layer, by its name, with its tensors as they were joined and their addresses.

    The dictionaries are those of the layer: torch creates them with a module and keeps them.
    """

    name: str
    layer: FrozenLinear
    tensors: dict[str, Tensor | None]
    hooks: Mapping[int, Any]
    pre_hooks: Mapping[int, Any]
    weight: Tensor
    weight_place: int
    scale: Tensor
    scale_place: int
    bias: Tensor | None
    bias_place: int
    input_scale: Tensor | None
    input_scale_inv: Tensor | None

    @classmethod
    def of(cls, name: str, layer: FrozenLinear) -> "_View":
        weight, scale, bias = layer.weight_q, layer.weight_scale_inv, layer.bias
        places = weight.data_ptr(), scale.data_ptr(), 0 if bias is None else bias.data_ptr()
        own = layer._buffers, layer._forward_hooks, layer._forward_pre_hooks
        inputs = layer.input_scale, layer.input_scale_inv
        return cls(name, layer, *own, weight, places[0], scale, places[1], bias, places[2], *inputs)


class Joined:
    """`layers` [N_i, K], by their names in the module that holds them, as one [sum of N_i, K].

    Changes the layers: see above. `can_join` must be true for them. The listener is told when a layer's weight, scale
    or bias may have been given other memory; `note_replacements` lets it be told of the rest.
    """

    @torch.inference_mode(False)  # an inference tensor cannot be written to outside of inference mode
    @torch.no_grad()
    def __init__(self, layers: Mapping[str, FrozenLinear], listener: Listener) -> None:
        self._layers, self._listener = dict(layers), listener
        self._in_order = parts = list(layers.values())
        self._first = parts[0]
        self._widths = [part.out_features for part in parts]
        _pack_alike(parts)
        self.weight = _stack([part.weight_q for part in parts])
        scales = [_as_rows(part) for part in parts]
        self._scale, self._scale_rows = torch.cat(scales), [len(scale) for scale in scales]
        self._ends = None if are_whole_blocks(parts) else torch.tensor(self._widths).cumsum(0).to(torch.int32)
        biases = [part.bias for part in parts if part.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._share()

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """x [M, K] through every layer: [M, N_i] each."""
        return self._multiply(*self._first.cast(x), x.dtype)

    def of_normed(self, x: Tensor, norm_weight: Tensor, eps: float) -> Sequence[Tensor]:
        """rms_norm(x [M, K], norm_weight [K], eps) through every layer: [M, N_i] each."""
        return self._multiply(*self._first.cast_norm(x, norm_weight, eps), x.dtype)

    def _multiply(self, q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        dtype = self._first.out_dtype or dtype
        if self._ends is None:
            y = multiply(q, scale_inv, self.weight, self._scale, self._bias, dtype)
        else:
            y = _joined_mm(q, self.weight, scale_inv, self._scale, self._ends, self._bias, dtype)
        return y.split_with_sizes(self._widths, 1)

    def is_current(self, modules: Mapping[str, nn.Module | None]) -> bool:
        """Whether every layer is the module of its name, has no hook, and holds the very tensors that were joined."""
        for (
            name, layer, tensors, hooks, pre_hooks, weight, weight_place, scale, scale_place, bias, bias_place,
            input_scale, input_scale_inv,
        ) in self._views:  # fmt: skip
            if (
                modules[name] is not layer
                or hooks
                or pre_hooks
                or tensors["weight_q"] is not weight
                or weight.data_ptr() != weight_place
                or tensors["weight_scale_inv"] is not scale
                or scale.data_ptr() != scale_place
                or tensors["bias"] is not bias
                or (bias is not None and bias.data_ptr() != bias_place)
                or tensors["input_scale"] is not input_scale
                or tensors["input_scale_inv"] is not input_scale_inv
            ):
                return False
        return True

    @property
    def is_packable(self) -> bool:
        """Each layer must begin at a group of rows, because its weight stays a view."""
        return is_packable(self.weight) and not any(width % GROUP for width in self._widths)

    @torch.inference_mode(False)
    @torch.no_grad()
    def pack(self, out: Tensor) -> None:
        """See FrozenLinear.pack."""
        self.weight = packed(self.weight, out)
        self._share()

    @property
    def layers(self) -> Sequence[FrozenLinear]:
        """The joined layers, in their order."""
        return self._in_order

    @property
    def first(self) -> FrozenLinear:
        """The layer whose input scale and counters all layers share."""
        return self._first

    @property
    def scale(self) -> Tensor:
        """Of the weight: FP32 [N, 1], or of its blocks."""
        return self._scale

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    @torch.no_grad()
    def lie_at(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        """From now on use these equal tensors as the weight and its scales and biases."""
        self.weight, self._scale, self._bias = weight, scale, bias
        self._share()

    def read_inputs_at(
        self, amax: Tensor, saturated: Tensor, input_scale: Tensor | None, input_scale_inv: Tensor | None
    ) -> None:
        """From now on count inputs in these counters and cast by this equal scale; None: cast by content."""
        first = self._first
        first.amax, first.saturated = amax, saturated
        first.input_scale, first.input_scale_inv = input_scale, input_scale_inv
        self._share()

    def _share(self) -> None:
        """The layers' tensors become views of the joined ones."""
        unit = GROUP if self.weight.dim() == 3 else 1
        weights = self.weight.split_with_sizes([width // unit for width in self._widths])
        scales = self._scale.split_with_sizes(self._scale_rows)
        biases = [None] * len(scales) if self._bias is None else self._bias.split_with_sizes(self._widths)
        for layer, weight, scale, bias in zip(self._layers.values(), weights, scales, biases, strict=True):
            layer.weight_q, layer.weight_scale_inv = part(weight, self._listener), part(scale, self._listener)
            layer.bias = None if bias is None else part(bias, self._listener)
            for name in ("input_scale", "input_scale_inv", "amax", "saturated"):
                setattr(layer, name, getattr(self._first, name))
        self._views = [_View.of(name, layer) for name, layer in self._layers.items()]


def can_join(layers: Sequence[nn.Module | None]) -> TypeGuard[Sequence[FrozenLinear]]:
    """Whether all are frozen, cast their input alike, and have weight scales that can be stacked.

    Block scales can be stacked where every layer but the last has whole blocks of rows, or on a CPU all have groups of
    16. Layers with hooks are not joined, because their hooks must be called.
    """
    parts = [layer for layer in layers if isinstance(layer, FrozenLinear) and not _is_hooked(layer)]
    if len(parts) < len(layers):
        return False
    first = parts[0]
    if len({_is_blocked(part) for part in parts}) > 1 or not all(_casts_alike(part, first) for part in parts):
        return False
    is_some_packed = any(part.is_packed for part in parts)
    if is_some_packed and not all(part.is_packed or is_packable(part.weight_q) for part in parts):
        return False
    in_groups = not any(part.weight_q.is_cuda or part.out_features % GROUP for part in parts)
    return in_groups or are_whole_blocks(parts)


def are_whole_blocks(parts: Sequence[FrozenLinear]) -> bool:
    """Whether their block scales, if they have such, are also the block scales of the joined weight."""
    return not (_is_blocked(parts[0]) and any(part.out_features % BLOCK for part in parts[:-1]))


def _is_hooked(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _casts_alike(part: FrozenLinear, first: FrozenLinear) -> bool:
    """Whether it casts as `first` does, gives outputs of the same type, and has a bias if `first` has one."""
    how, same = ((layer.input_spec, layer.out_dtype, layer.in_features, layer.bias is None) for layer in (part, first))
    return how == same and _equal(part.input_scale, first.input_scale)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return torch.equal(a, b) if a is not None and b is not None else a is b


def _is_blocked(part: FrozenLinear) -> bool:
    scale = part.weight_scale_inv
    return scale.dim() == 2 and tuple(scale.shape) != (part.out_features, 1)


def _as_rows(part: FrozenLinear) -> Tensor:
    """The weight's scale in a shape that can be stacked with others."""
    scale = part.weight_scale_inv
    return scale if scale.dim() else scale.expand(part.out_features, 1)


def _pack_alike(parts: Sequence[FrozenLinear]) -> None:
    """If some are already packed, pack the others, which were added later."""
    if any(part.is_packed for part in parts):
        for part in parts:
            if not part.is_packed:
                part.pack(torch.empty_like(part.weight_q, memory_format=torch.contiguous_format).view(-1))


def _stack(weights: Sequence[Tensor]) -> Tensor:
    """Their rows as one tensor: a view where they are adjacent in memory, else a copy."""
    first, rows = weights[0], sum(map(len, weights))
    if all(_follows(a, b) for a, b in pairwise(weights)):
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    return torch.cat([w.view(torch.uint8) for w in weights]).view(first.dtype)


def _follows(a: Tensor, b: Tensor) -> bool:
    together = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return together and a.is_contiguous() and b.is_contiguous() and a.data_ptr() + a.nbytes == b.data_ptr()
