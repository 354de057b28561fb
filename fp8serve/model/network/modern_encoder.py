"""ModernBERT: pre-norms, gated MLPs, rotary position, no biases, and layers with a local attention window.

Its interface is that of `Encoder`: sequences are concatenated, and each attends only to itself. As in transformers,
cos and sin are rounded to the weights' dtype, and queries and keys are rotated in FP32 and rounded once.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn

from fp8serve.model.config.encoder import EncoderConfig
from fp8serve.model.network.encoder import Encoder, gelu
from fp8serve.model.network.norms import make_embedding


class Embeddings(nn.Module):
    """The normalized embedding of a token."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.tok_embeddings = make_embedding(config.vocab_size, config.hidden_size)
        self.norm = _norm(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.tok_embeddings(ids))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention of every token to all tokens of its sequence, or to those within a window around it."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, config.layer_windows[layer]
        self.theta = config.layer_thetas[layer]
        self.Wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.Wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        qkv = torch.split(self.Wqkv(x).view(len(x), 3, -1, self.head_dim), list(lengths))
        return self.Wo(torch.cat([self._attention(part) for part in qkv]).flatten(1))  # type: ignore[no-any-return]

    def _attention(self, qkv: Tensor) -> Tensor:
        """Returns the attention of one sequence [length, 3, heads, head_dim]; see encoder.py for why it runs alone."""
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in qkv.unbind(1))
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=q.device) / self.head_dim
        half = torch.arange(len(qkv), device=q.device).float()[:, None] * (1.0 / self.theta**exponents)
        angles = torch.cat((half, half), 1)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        return F.scaled_dot_product_attention(q, k, v, self._mask(len(qkv), q.device)).squeeze(0).transpose(0, 1)

    def _mask(self, length: int, device: torch.device) -> Tensor | None:
        """Returns the attention mask, bool [length, length], or None if every token attends to all tokens."""
        if self.window is None or length <= self.window + 1:
            return None
        positions = torch.arange(length, device=device)
        return (positions[:, None] - positions).abs() <= self.window


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


class MLP(nn.Module):
    """The gated MLP: Wo(gelu(x) * gate), where Wi computes x and gate."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.Wi = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.Wo = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.Wi(x).chunk(2, -1)
        return self.Wo(gelu(x, self.activation) * gate)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One encoder layer: x = x + attention(norm(x)), then x = x + MLP(norm(x)).

    The first layer has no norm before attention, because the embedding is normalized already.
    """

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = _norm(config) if layer else nn.Identity()
        self.attn, self.mlp_norm, self.mlp = Attention(config, layer), _norm(config), MLP(config)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        x = x + self.attn(self.attn_norm(x), lengths)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class ModernEncoder(Encoder):
    """The ModernBERT model, with the interface of `Encoder`."""

    layer_prefix = "layers"
    linears_of_layer = ("attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo")

    def _add_layers(self, config: EncoderConfig) -> None:
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.final_norm = _norm(config)

    def apply_final_norm(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.final_norm(x))

    def embed(self, ids: Tensor, lengths: Sequence[int], segments: Tensor | None = None) -> Tensor:
        """Returns the input of the first layer, [T, hidden]. ModernBERT ignores `segments`."""
        return cast(Tensor, self.embeddings(ids))


def _norm(config: EncoderConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, config.layer_norm_eps, bias=False)


def encoder_class(config: EncoderConfig) -> type[Encoder]:
    """Returns the class of the model with this configuration."""
    return ModernEncoder if config.layer_windows else Encoder
