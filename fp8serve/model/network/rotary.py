"""Rotary position embedding: the frequencies and the angles; `fp8.elementwise.rotary` applies them.

Rounding follows transformers, because equal tokens are promised: frequencies and angles in FP32, cos and sin rounded to
the activations' dtype, then two multiplications and an addition in that dtype. The first half of a head's dimensions
pairs with the second half (the Hugging Face layout). Where neighbours are pairs (the layout of the papers), or only a
part of a head is rotated, its elements are first read in an order that gives this layout, so kernels need only one.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.config.rope import LongRope, QueryScaling, Rope, RopeScaling

Rotation = tuple[Tensor, Tensor]  # cos, sin [T, 1, head_dim]
Heads = tuple[Tensor, Tensor, Tensor]  # q [T, heads, head_dim], k and v [T, kv_heads, head_dim]
# attend(layer, heads, rotation, last) -> [T, heads, head_dim]: rotates q and k, and attends; where `last` int64 [R] is
# not None only the queries of these rows do -> [R, heads, head_dim]
Attend = Callable[[int, Heads, Rotation, Tensor | None], Tensor]


class Placement(NamedTuple):
    """The effect of positions on the queries and keys of a layer, in this order."""

    rotation: Rotation
    order: Tensor | None  # int64 [head_dim], in which a head's elements are read, so that the halves are pairs
    query_scale: Tensor | None  # [T, 1, 1]: multiplies queries


class Rotary:
    """The placements of one model. Not an nn.Module: `.to(bfloat16)` must not round frequencies and `meta` not lose
    them.

    A layer without rotary position has frequencies of 0: multiplied by 1 and 0 its queries and keys do not change. The
    same goes for the elements of a head that are not rotated. longest: the length that sequences may reach, where keys
    are kept from one call to the next. It chooses among frequencies that depend on a sequence's length (`LongRope`), so
    that cached keys keep their angles. None: the sequences of a call are whole, and each one's own length chooses.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.longest: int | None = None
        kinds = list(dict.fromkeys(config.layer_ropes))
        self._kinds = [_Kind(config.head_dim, config.rotary_dim or config.head_dim, rope) for rope in kinds]
        self._of_layer = [kinds.index(rope) for rope in config.layer_ropes]
        self._query_scaling = config.query_scaling
        order = _order(config)
        self._order = None if order is None else _OnDevice(order)

    def placements(self, positions: Tensor, dtype: torch.dtype) -> list[Placement]:
        """positions integer [T] -> their effect in every layer, in `dtype`, ready to broadcast over heads."""
        order = None if self._order is None else self._order.on(positions.device)
        scale = None if self._query_scaling is None else query_scale(positions, self._query_scaling).to(dtype)
        placements = [Placement(kind.rotation(positions, dtype, self.longest), order, scale) for kind in self._kinds]
        return [placements[i] for i in self._of_layer]


class _OnDevice:
    """A CPU tensor with a copy on every device that has requested one."""

    def __init__(self, tensor: Tensor) -> None:
        self._copies = {tensor.device: tensor}

    def on(self, device: torch.device) -> Tensor:
        if device not in self._copies:
            self._copies[device] = self._copies[torch.device("cpu")].to(device)
        return self._copies[device]


def _order(config: ModelConfig) -> Tensor | None:
    """The order of a head's elements that puts pairs into the two halves; None: they already are.

    A dot product of queries and keys does not change when both are read in another order.
    """
    size, num_rotated = config.head_dim, config.rotary_dim or config.head_dim
    firsts = range(0, num_rotated, 2) if config.neighbours_pair else range(num_rotated // 2)
    seconds = range(1, num_rotated, 2) if config.neighbours_pair else range(num_rotated // 2, num_rotated)
    middle = (num_rotated + size) // 2  # each half has half of the elements that are not rotated
    order = [*firsts, *range(num_rotated, middle), *seconds, *range(middle, size)]
    return None if order == list(range(size)) else torch.tensor(order, device="cpu")


class _Kind:
    """The rotation of the first `num_rotated` elements of a head, which some layers share."""

    def __init__(self, head_dim: int, num_rotated: int, rope: Rope | None) -> None:
        self._unrotated = (head_dim - num_rotated) // 2
        self._scaling = None if rope is None else rope.scaling
        self._attention_factor = self._scaling.attention_factor if self._scaling else 1.0
        self._short, self._long = (
            _OnDevice(inverse_frequencies(num_rotated, rope, is_long=long)) for long in (False, True)
        )

    def rotation(self, positions: Tensor, dtype: torch.dtype, longest: int | None) -> Rotation:
        inv_freq, factor = self._stretched(positions, longest)
        half = positions.float()[:, None] * inv_freq  # [T, num_rotated / 2]
        angles = torch.cat((half, half), dim=-1)[:, None, :]
        cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
        return (
            (cos, sin)
            if not self._unrotated
            else (_filled(cos, self._unrotated, 1.0), _filled(sin, self._unrotated, 0.0))
        )

    def _stretched(self, positions: Tensor, longest: int | None) -> tuple[Tensor, float | Tensor]:
        """(frequencies [num_rotated / 2], the factor of cos and sin); where the length of a token's sequence decides,
        [T, num_rotated / 2] and [T, 1, 1]."""
        short, long = self._short.on(positions.device), self._long.on(positions.device)
        if not isinstance(self._scaling, LongRope):
            return short, self._attention_factor
        trained, factors = self._scaling.original_max_position_embeddings, self._scaling
        if longest is not None:
            is_long = longest > trained
            return (long, factors.long_attention_factor) if is_long else (short, factors.attention_factor)
        outgrown = (_lengths(positions) > trained)[:, None]
        several = torch.where(outgrown[..., None], factors.long_attention_factor, factors.attention_factor)
        return torch.where(outgrown, long, short), several


def _lengths(positions: Tensor) -> Tensor:
    """The length of each token's sequence, as far as it is in `positions` [T]; a sequence begins where these do not
    continue."""
    sequence = F.pad(positions.diff() != 1, (1, 0)).cumsum(0)
    newest = torch.zeros_like(positions).scatter_reduce(0, sequence, positions, "amax")
    return newest[sequence] + 1


def _filled(turns: Tensor, unrotated: int, value: float) -> Tensor:
    """[..., num_rotated] -> [..., head_dim]: `unrotated` elements of `value` behind each half."""
    return torch.cat([F.pad(half, (0, unrotated), value=value) for half in turns.chunk(2, dim=-1)], dim=-1)


def query_scale(positions: Tensor, scaling: QueryScaling) -> Tensor:
    """FP32 [T, 1, 1]: grows with the logarithm of the position, in steps of the trained context."""
    steps = torch.floor(positions / scaling.original_max_position_embeddings)
    return (1 + scaling.beta * torch.log(1 + steps))[:, None, None]


def inverse_frequencies(num_rotated: int, rope: Rope | None, *, is_long: bool = False) -> Tensor:
    """FP32 [num_rotated / 2] on the CPU: theta^(-2i/num_rotated), stretched as `rope.scaling` says; None: zeros.

    is_long: for sequences beyond the trained context, if the scaling distinguishes them.
    """
    if rope is None:
        return torch.zeros(num_rotated // 2, device="cpu")
    exponents = torch.arange(0, num_rotated, 2, dtype=torch.float32, device="cpu") / num_rotated
    scaling = rope.scaling
    if isinstance(scaling, LongRope):
        factors = scaling.long_factors if is_long else scaling.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * rope.theta**exponents)
    inv_freq = 1.0 / (rope.theta**exponents)
    if scaling is None:
        return inv_freq
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(inv_freq, scaling)
    return _yarn(num_rotated, rope.theta, scaling)


def _llama3(inv_freq: Tensor, s: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between blended linearly."""
    wavelength = 2 * math.pi / inv_freq
    longest = s.original_max_position_embeddings / s.low_freq_factor
    shortest = s.original_max_position_embeddings / s.high_freq_factor
    smooth = s.original_max_position_embeddings / wavelength - s.low_freq_factor
    smooth = smooth / (s.high_freq_factor - s.low_freq_factor)
    between = (1 - smooth) * inv_freq / s.factor + smooth * inv_freq
    stretched = torch.where(wavelength > longest, inv_freq / s.factor, inv_freq)
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, stretched)


def _yarn(dim: int, theta: float, s: RopeScaling) -> Tensor:
    """YaRN (arXiv 2309.00071), section 3.2: interpolate slow dimensions, keep fast ones, a linear ramp between."""

    def dimension(rotations: float) -> float:
        return dim * math.log(s.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    period = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    return 1.0 / (s.factor * period) * (1 - keep) + 1.0 / period * keep
