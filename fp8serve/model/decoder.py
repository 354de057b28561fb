"""One decoder-only transformer that is Llama, Mistral, Qwen2 and Qwen3 by configuration.

Tokens of all sequences arrive flattened: there is no batch dimension and no padding, so a linear layer sees one matrix
`[tokens, hidden]`. What differs between training, calibration and serving is only how a token attends to earlier ones
(a paged cache, or the other tokens of the same call); that is the caller's `attend`, and this file knows no cache.

    attend(layer, q [T, heads, head_dim], k [T, kv_heads, head_dim], v [T, kv_heads, head_dim]) -> [T, heads, head_dim]

q and k come with rotary position applied. Windows are the caller's too: `config.layer_windows`. Module and parameter
names equal those in Hugging Face files (`model.layers.0.self_attn.q_proj.weight`). Sums of squares and angles are
computed in FP32 and rounded where transformers rounds: with the reference ops BF16 logits are the same to the bit, with
kernels up to the order in which a norm adds its squares and the last bit of an exponential.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fp8serve.fp8.elementwise import rms_norm, rotary, silu_mul
from fp8serve.model.config import ModelConfig
from fp8serve.model.rotary import Rotary

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the mean square in FP32, the product with `weight` in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary position; `attend` does the mixing between tokens."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = attend(self.layer, rotary(q, *rotation), rotary(k, *rotation), v)
        return self.o_proj(mixed.reshape(len(x), -1)).to(x.dtype)  # type: ignore[no-any-return]  # FP32 under fp8_mha

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.head_dim)  # [T, heads * head_dim] -> [T, heads, head_dim]


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Normalise, attend, add; normalise, MLP, add."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Backbone(nn.Module):
    """Embedding, layers and final norm: what Hugging Face files call `model.`"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed_tokens(token_ids)
        rotation = self.rotary.cos_sin(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, attend)
        return self.norm(x)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The model: `decoder(token_ids, positions, attend)` then `decoder.logits(hidden)`.

    On "meta" nothing is allocated; otherwise weights are initialised as torch initialises its layers, to be replaced by
    a checkpoint or trained.
    """

    def __init__(
        self, config: ModelConfig, device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device(device):
            self.model = Backbone(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()
        self.to(dtype)

    def tie(self) -> None:
        """Share the embedding with the head where the configuration says so; needed again after replacing either."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions integer [T] -> hidden [T, hidden], after the final norm."""
        return self.model(token_ids, positions, attend)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] -> FP32 [T, vocab]: computed in the weights' dtype, then widened, as transformers does."""
        return self.lm_head(hidden).float()  # type: ignore[no-any-return]


def linear_names(model: nn.Module) -> list[str]:
    """Names of the projections that FP8 may run: the seven of every layer, not `lm_head`. In the model's order."""
    suffixes = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return [name for name, _ in model.named_modules() if name.endswith(suffixes)]
