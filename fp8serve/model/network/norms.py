"""The norms of decoders, over the last dimension, and embeddings. Norms round where transformers rounds.

Serving fuses an `RMSNorm` and the cast after it into one op (fusion.py). The other norms are called as modules.
"""

from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn

from fp8serve.fp8.elementwise import rms_norm
from fp8serve.model.config.model_config import ModelConfig


def make_embedding(rows: int, width: int) -> nn.Embedding:
    """Returns a new embedding. On the device "meta" its weight is not initialized, because for that PyTorch imports its
    compiler, which adds one to two seconds to the start of every process."""
    if torch.get_default_device().type == "meta":
        return cast(nn.Embedding, nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False))  # type: ignore[no-untyped-call]
    return nn.Embedding(rows, width)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with the mean square in FP32 and the product with `weight` in x's dtype."""

    weight: nn.Parameter

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._parameters["weight"], self.eps)  # type: ignore[arg-type]  # it is not None

    def fused_weight(self, x: Tensor) -> Tensor | None:
        """Returns the weight if a fused op may normalize x, or None if the module must be called."""
        weight = self._parameters["weight"]
        hooks = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks
        is_fusible = not hooks and "forward" not in self.__dict__ and weight.dtype == x.dtype  # type: ignore[union-attr]
        return weight if is_fusible else None


class Fp32RMSNorm(RMSNorm):
    """OLMo's norm: x / rms(x) * weight in FP32, rounded once at the end."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), self.weight.float(), self.eps).to(x.dtype)


class OffsetRMSNorm(RMSNorm):
    """Gemma's norm: x / rms(x) * (1 + weight) in FP32, rounded once at the end."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), 1 + self.weight.float(), self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight (+ bias) in FP32, rounded once at the end. Weights [..., K] may differ per head."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, shape: int | tuple[int, int], eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.register_parameter("bias", nn.Parameter(torch.zeros(shape)) if bias else None)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        output = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * self.weight.float()
        return (output if self.bias is None else output + self.bias.float()).to(x.dtype)


def make_norm(config: ModelConfig, size: int) -> nn.Module:
    """Returns the model's norm over `size` elements."""
    if config.norm == "layer":
        return LayerNorm(size, config.rms_norm_eps, config.norm_bias)
    kind = OffsetRMSNorm if config.offset_norms else Fp32RMSNorm if config.norm == "fp32_rms" else RMSNorm
    return kind(size, config.rms_norm_eps)


def make_head_norm(config: ModelConfig, heads: int) -> nn.Module | None:
    """Returns the norm of queries or keys with this number of heads, or None; see `HeadNorm` for the kinds."""
    if not config.qk_norm:
        return None
    if config.qk_norm_weight == "by_head":
        return LayerNorm((heads, config.head_dim), config.rms_norm_eps, bias=False)
    return make_norm(config, config.head_dim * (heads if config.qk_norm_weight == "all_heads" else 1))
