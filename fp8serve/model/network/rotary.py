"""Rotary position embedding: the frequencies, cos and sin. `fp8.elementwise.rotary` applies them.

Rounding follows transformers, so that fp8serve gives the same tokens: frequencies and angles are FP32, cos and sin are
rounded to the activations' dtype, and the products and the sum are in that dtype. Kernels support only the Hugging Face
layout, in which the first half of a head's elements pairs with the second half. Heads in the papers' layout, in which
neighbouring elements form pairs, and heads that are rotated only in part are first reordered.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.fp8.frozen import Operands
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.config.rope import LongRope, QueryScaling, Rope, RopeScaling

Rotation = tuple[Tensor, Tensor]  # cos, sin [T, 1, head_dim]


@dataclass(frozen=True)
class PendingHeads:
    """The operands of the projections to q, k and v, before their GEMM, so that one op may run the GEMM, rotate q
    and k, and write k and v to a cache. Iteration runs the GEMM and yields q [T, heads, head_dim], k and v
    [T, kv_heads, head_dim]."""

    operands: Operands
    widths: Sequence[int]  # of q, k and v
    head_dim: int

    def __iter__(self) -> Iterator[Tensor]:
        parts = self.operands.multiply().split_with_sizes(list(self.widths), 1)
        return (part.view(len(part), -1, self.head_dim) for part in parts)


Heads = tuple[Tensor, Tensor, Tensor] | PendingHeads  # q [T, heads, head_dim], k and v [T, kv_heads, head_dim]
# attend(layer, heads, rotation, output_rows) rotates q and k and returns the output of attention, [T, heads, head_dim].
# If `output_rows`, int64 [R], is not None, it returns only these rows, [R, heads, head_dim].
Attend = Callable[[int, Heads, Rotation, Tensor | None], Tensor]


class PositionEmbedding(NamedTuple):
    """How a layer changes queries and keys depending on their positions."""

    rotation: Rotation
    order: Tensor | None  # int64 [head_dim]: the indices that reorder a head's elements into the Hugging Face layout
    query_scale: Tensor | None  # [T, 1, 1], multiplies queries


class Rotary:
    """The rotary position embeddings of one model.

    This is not an nn.Module, because `.to(bfloat16)` must not round frequencies and the device "meta" must not drop
    them. A layer without rotary position has frequencies of 0: cos = 1 and sin = 0 leave its queries and keys
    unchanged. Elements of a head that are not rotated also have cos = 1 and sin = 0.

    `LongRope` has other frequencies for long sequences. Cached keys must keep their angles when their sequence grows,
    so the engine sets `max_length`, the maximum length of all sequences, and the frequencies follow from it. If it is
    None, every call has whole sequences, and the frequencies of each follow from its own length.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.max_length: int | None = None
        ropes = list(dict.fromkeys(config.layer_ropes))
        self._rotations = [_LayerRotation(config.head_dim, config.rotary_dim or config.head_dim, r) for r in ropes]
        self._index_by_layer = [ropes.index(rope) for rope in config.layer_ropes]
        self._query_scaling = config.query_scaling
        order = _order(config)
        self._order = None if order is None else _CachedCopies(order)

    def position_embeddings(self, positions: Tensor, dtype: torch.dtype) -> list[PositionEmbedding]:
        """Returns each layer's position embedding for integer positions [T]. cos and sin have the type `dtype`."""
        order = None if self._order is None else self._order.to(positions.device)
        scale = None if self._query_scaling is None else query_scale(positions, self._query_scaling).to(dtype)
        rotations = [rotation(positions, dtype, self.max_length) for rotation in self._rotations]
        return [PositionEmbedding(rotations[i], order, scale) for i in self._index_by_layer]


class _CachedCopies:
    """A CPU tensor, and its copy on every device that was requested."""

    def __init__(self, tensor: Tensor) -> None:
        self._copies = {tensor.device: tensor}

    def to(self, device: torch.device) -> Tensor:
        if device not in self._copies:
            self._copies[device] = self._copies[torch.device("cpu")].to(device)
        return self._copies[device]


def _order(config: ModelConfig) -> Tensor | None:
    """Returns the order of a head's elements that moves pairs into the two halves, or None if they are there already.

    Reordering queries and keys in the same way does not change their dot product.
    """
    size, num_rotated = config.head_dim, config.rotary_dim or config.head_dim
    firsts = range(0, num_rotated, 2) if config.rope_interleaved else range(num_rotated // 2)
    seconds = range(1, num_rotated, 2) if config.rope_interleaved else range(num_rotated // 2, num_rotated)
    middle = (num_rotated + size) // 2  # each half has half of the elements that are not rotated
    order = [*firsts, *range(num_rotated, middle), *seconds, *range(middle, size)]
    return None if order == list(range(size)) else torch.tensor(order, device="cpu")


class _LayerRotation:
    """The rotation of the first `num_rotated` elements of a head, for all layers with the same `rope`."""

    def __init__(self, head_dim: int, num_rotated: int, rope: Rope | None) -> None:
        self._unrotated = (head_dim - num_rotated) // 2
        self._scaling = None if rope is None else rope.scaling
        self._attention_factor = self._scaling.attention_factor if self._scaling else 1.0
        self._short, self._long = (
            _CachedCopies(inverse_frequencies(num_rotated, rope, is_long=is_long)) for is_long in (False, True)
        )

    def __call__(self, positions: Tensor, dtype: torch.dtype, max_length: int | None) -> Rotation:
        inv_freq, factor = self._frequencies(positions, max_length)
        half = positions.float()[:, None] * inv_freq  # [T, num_rotated / 2]
        angles = torch.cat((half, half), dim=-1)[:, None, :]
        cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
        if not self._unrotated:
            return cos, sin
        return _pad_halves(cos, self._unrotated, 1.0), _pad_halves(sin, self._unrotated, 0.0)

    def _frequencies(self, positions: Tensor, max_length: int | None) -> tuple[Tensor, float | Tensor]:
        """Returns the frequencies [num_rotated / 2] and the factor of cos and sin.

        If they depend on the length of each token's sequence, the shapes are [T, num_rotated / 2] and [T, 1, 1].
        """
        short, long = self._short.to(positions.device), self._long.to(positions.device)
        if not isinstance(self._scaling, LongRope):
            return short, self._attention_factor
        trained, factors = self._scaling.original_max_position_embeddings, self._scaling
        if max_length is not None:
            is_long = max_length > trained
            return (long, factors.long_attention_factor) if is_long else (short, factors.attention_factor)
        are_long = (_sequence_lengths(positions) > trained)[:, None]
        attention_factors = torch.where(are_long[..., None], factors.long_attention_factor, factors.attention_factor)
        return torch.where(are_long, long, short), attention_factors


def _sequence_lengths(positions: Tensor) -> Tensor:
    """Returns the length of each token's sequence, [T]. A sequence starts where positions [T] do not increase by 1."""
    sequence_ids = F.pad(positions.diff() != 1, (1, 0)).cumsum(0)
    last_positions = torch.zeros_like(positions).scatter_reduce(0, sequence_ids, positions, "amax")
    return last_positions[sequence_ids] + 1


def _pad_halves(x: Tensor, count: int, value: float) -> Tensor:
    """Appends `count` elements with this value to each half of x [..., num_rotated]; returns [..., head_dim]."""
    return torch.cat([F.pad(half, (0, count), value=value) for half in x.chunk(2, dim=-1)], dim=-1)


def query_scale(positions: Tensor, scaling: QueryScaling) -> Tensor:
    """Returns the factor of queries, FP32 [T, 1, 1], which grows with the logarithm of the position."""
    steps = torch.floor(positions / scaling.original_max_position_embeddings)
    return (1 + scaling.beta * torch.log(1 + steps))[:, None, None]


def inverse_frequencies(num_rotated: int, rope: Rope | None, *, is_long: bool = False) -> Tensor:
    """Returns the frequencies theta^(-2i/num_rotated), scaled by `rope.scaling`: FP32 [num_rotated / 2] on the CPU.

    If `rope` is None, they are zeros. With `is_long`, they are LongRoPE's for sequences beyond the trained context.
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
    """Llama 3.1: divides low frequencies by the factor, keeps high ones, and interpolates linearly between them."""
    wavelength = 2 * math.pi / inv_freq
    longest = s.original_max_position_embeddings / s.low_freq_factor
    shortest = s.original_max_position_embeddings / s.high_freq_factor
    smooth = s.original_max_position_embeddings / wavelength - s.low_freq_factor
    smooth = smooth / (s.high_freq_factor - s.low_freq_factor)
    interpolated = (1 - smooth) * inv_freq / s.factor + smooth * inv_freq
    scaled = torch.where(wavelength > longest, inv_freq / s.factor, inv_freq)
    return torch.where((wavelength >= shortest) & (wavelength <= longest), interpolated, scaled)


def _yarn(dim: int, theta: float, s: RopeScaling) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): interpolates low frequencies, keeps high ones, with a linear ramp."""

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
