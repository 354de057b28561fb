"""ModernBERT: norms before, gated MLPs, rotary position, no biases, and layers that see some tokens to either side.

Its interface is that of `Encoder`: sequences are concatenated, and each attends only to itself. transformers rotates
queries and keys in FP32 by angles in the weights' type, and rounds once.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn

from fp8serve.model.config.encoder import EncoderConfig
from fp8serve.model.network.encoder import Encoder, activated


class Embeddings(nn.Module):
    """The embedding of a token, normalised."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = _norm(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.tok_embeddings(ids))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Every token attends to all tokens of its sequence, or to those near it."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, config.layer_windows[layer]
        self.theta = config.layer_thetas[layer]
        self.Wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.Wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        qkv = torch.split(self.Wqkv(x).view(len(x), 3, -1, self.head_dim), list(lengths))
        return self.Wo(torch.cat([self._attended(part) for part in qkv]).flatten(1))  # type: ignore[no-any-return]

    def _attended(self, qkv: Tensor) -> Tensor:
        """One sequence [length, 3, heads, head_dim]; alone, because a batch may be divided differently among
        threads."""
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in qkv.unbind(1))
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=q.device) / self.head_dim
        half = torch.arange(len(qkv), device=q.device).float()[:, None] * (1.0 / self.theta**steps)
        angles = torch.cat((half, half), 1)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        return F.scaled_dot_product_attention(q, k, v, self._near(len(qkv), q.device)).squeeze(0).transpose(0, 1)

    def _near(self, length: int, device: torch.device) -> Tensor | None:
        """bool [length, length]: the tokens that each token sees; None: all."""
        if self.window is None or length <= self.window + 1:
            return None
        at = torch.arange(length, device=device)
        return (at[:, None] - at).abs() <= self.window


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


class MLP(nn.Module):
    """Wo(gelu(first half of Wi) * second half)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.Wi = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.Wo = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.Wi(x).chunk(2, -1)
        return self.Wo(activated(x, self.activation) * gate)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Normalise, attend, add; normalise, MLP, add. The first layer's input is already normalised."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = _norm(config) if layer else nn.Identity()
        self.attn, self.mlp_norm, self.mlp = Attention(config, layer), _norm(config), MLP(config)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        x = x + self.attn(self.attn_norm(x), lengths)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class ModernEncoder(Encoder):
    """See `Encoder`."""

    def _add_layers(self, config: EncoderConfig) -> None:
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.final_norm = _norm(config)

    def forward(self, ids: Tensor, lengths: Sequence[int], segments: Tensor | None = None) -> Tensor:
        """See `Encoder`; there are no segments."""
        return self.final_norm(super().forward(ids, lengths))  # type: ignore[no-any-return]

    def enter(self, ids: Tensor, lengths: Sequence[int], segments: Tensor | None = None) -> Tensor:
        """The input of the first layer."""
        return cast(Tensor, self.embeddings(ids))

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The layers, which a pass goes through one after the other."""
        return list(self.layers)

    def named_in(self, part: int, names: Iterable[str]) -> list[str]:
        """Those of these names of modules and tensors that belong to a layer."""
        return [name for name in names if name.startswith(f"layers.{part}.")]

    def linear_names(self) -> list[str]:
        """Names of the linears that FP8 may run, in the model's order."""
        parts = ("attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo")
        return [f"layers.{layer}.{part}" for layer in range(self.config.num_layers) for part in parts]


def _norm(config: EncoderConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, config.layer_norm_eps, bias=False)


def encoder_class(config: EncoderConfig) -> type[Encoder]:
    """The network of a configuration."""
    return ModernEncoder if config.layer_windows else Encoder
