"""Rotary position embedding: the frequencies and the angles; `fp8.elementwise.rotary` applies them.

Rounding follows transformers, because equal tokens are promised: frequencies and angles in FP32, cos and sin rounded
to the activations' dtype, then two multiplications and an addition in that dtype. The first half of a head's
dimensions pairs with the second half (the Hugging Face layout, not the interleaved one of the papers).
"""

import math

import torch
from torch import Tensor

from fp8serve.model.config import ModelConfig, RopeScaling


class Rotary:
    """Frequencies of one model. No nn.Module: `.to(bfloat16)` must not round them and `meta` must not lose them."""

    def __init__(self, config: ModelConfig) -> None:
        self._inv_freq = {torch.device("cpu"): inverse_frequencies(config)}  # FP32 [head_dim / 2], one copy per device
        self._attention_factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions integer [T] -> cos, sin `dtype` [T, 1, head_dim], ready to broadcast over heads."""
        device = positions.device
        if device not in self._inv_freq:
            self._inv_freq[device] = self._inv_freq[torch.device("cpu")].to(device)
        half = positions.float()[:, None] * self._inv_freq[device]  # [T, head_dim / 2]
        angles = torch.cat((half, half), dim=-1)[:, None, :]
        return (angles.cos() * self._attention_factor).to(dtype), (angles.sin() * self._attention_factor).to(dtype)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """FP32 [head_dim / 2] on the CPU: theta^(-2i/head_dim), stretched as `config.rope_scaling` says."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(inv_freq, scaling)
    return _yarn(config, scaling)


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


def _yarn(config: ModelConfig, s: RopeScaling) -> Tensor:
    """YaRN (arXiv 2309.00071), section 3.2: interpolate slow dimensions, keep fast ones, a linear ramp between."""
    dim, theta = config.head_dim, config.rope_theta

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
