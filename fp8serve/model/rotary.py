"""Rotary position embedding: the frequencies and the angles; `fp8.elementwise.rotary` applies them.

Rounding follows transformers, because equal tokens are promised: frequencies and angles in FP32, cos and sin rounded
to the activations' dtype, then two multiplications and an addition in that dtype. The first half of a head's
dimensions pairs with the second half (the Hugging Face layout, not the interleaved one of the papers).
"""

import math

import torch
from torch import Tensor

from fp8serve.model.config import ModelConfig
from fp8serve.model.rope import Rope, RopeScaling

Rotation = tuple[Tensor, Tensor]  # cos, sin [T, 1, head_dim]


class Rotary:
    """The rotations of one model. No nn.Module: `.to(bfloat16)` must not round frequencies and `meta` not lose them.

    A layer without rotary position has frequencies of 0: multiplied by 1 and 0 its queries and keys stay what they are.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._kinds = [_Kind(config.head_dim, rope) for rope in dict.fromkeys(config.layer_ropes)]
        places = {rope: i for i, rope in enumerate(dict.fromkeys(config.layer_ropes))}
        self._of_layer = [places[rope] for rope in config.layer_ropes]

    def rotations(self, positions: Tensor, dtype: torch.dtype) -> list[Rotation]:
        """positions integer [T] -> of every layer cos, sin `dtype` [T, 1, head_dim], ready to broadcast over heads."""
        found = [kind.rotation(positions, dtype) for kind in self._kinds]
        return [found[i] for i in self._of_layer]


class _Kind:
    """The rotation that some layers have in common."""

    def __init__(self, head_dim: int, rope: Rope | None) -> None:
        self._inv_freq = {torch.device("cpu"): inverse_frequencies(head_dim, rope)}  # one copy per device
        self._attention_factor = rope.scaling.attention_factor if rope is not None and rope.scaling else 1.0

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        device = positions.device
        if device not in self._inv_freq:
            self._inv_freq[device] = self._inv_freq[torch.device("cpu")].to(device)
        half = positions.float()[:, None] * self._inv_freq[device]  # [T, head_dim / 2]
        angles = torch.cat((half, half), dim=-1)[:, None, :]
        return (angles.cos() * self._attention_factor).to(dtype), (angles.sin() * self._attention_factor).to(dtype)


def inverse_frequencies(head_dim: int, rope: Rope | None) -> Tensor:
    """FP32 [head_dim / 2] on the CPU: theta^(-2i/head_dim), stretched as `rope.scaling` says; None: zeros."""
    if rope is None:
        return torch.zeros(head_dim // 2, device="cpu")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None:
        return inv_freq
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(inv_freq, scaling)
    return _yarn(head_dim, rope.theta, scaling)


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
