"""The decoder-only transformer. Its configuration turns it into any family of `families.py`.

Calibration, training and serving use the same code. They differ in two ways. They use different classes for the linear
layers, which fusion.py runs with fused ops if possible. And tokens attend either to a paged cache or to the other
tokens of the same call. The caller's function `attend` computes attention, including the windows in
`config.layer_windows`; this module has no cache.

The tokens of all sequences are concatenated: there is no batch dimension and no padding, so a linear layer gets one
matrix `[tokens, hidden]`. Module and parameter names are those of Hugging Face checkpoints
(`model.layers.0.self_attn.q_proj.weight`). Sums of squares and angles are computed in FP32 and rounded where
transformers rounds. With the reference ops, BF16 logits equal those of transformers to the bit. With kernels, they may
differ through the order of the sum in a norm, and through the last bit of an exponential.

Serving needs the logits of few rows: the last token of each complete prompt, and each decoding sequence's token. The
last layer computes queries, keys and values for all rows. The rest of that layer, the final norm and the head compute
only `output_rows`. Rows do not depend on each other, so this changes no bit. The linears in `pruned_names` therefore do
not see the other rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn

from fp8serve.fp8.elementwise import rotary
from fp8serve.fp8.stacked import StackedExperts
from fp8serve.model.config.model_config import (
    ModelConfig,
    attention_linear_groups,
    experts_of,
    linear_names,
    mlp_linear_groups,
)
from fp8serve.model.network.experts import Mixture
from fp8serve.model.network.fusion import IDENTITY, OutputTransform, Projections, add_mlp, add_projection, forward_of
from fp8serve.model.network.latent_attention import CachedAttention, LatentAttention
from fp8serve.model.network.norms import make_embedding, make_head_norm, make_norm
from fp8serve.model.network.rotary import Attend, Heads, PendingHeads, PositionEmbedding, Rotary, Rotation


class XIELU(nn.Module):
    """The activation a x^2 + beta x for x > 0, and b (exp(x) - 1 - x) + beta x otherwise (arXiv 2411.13010).

    Every step is computed in the dtype of the input and rounded where transformers rounds. alpha_p and alpha_n [1] are
    trained: a = softplus(alpha_p) > 0 and b = beta + softplus(alpha_n) > beta. beta and eps are constants in the
    checkpoint that stay FP32 and are not trained (`needs_fp32`). eps is the upper bound of x in expm1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.full((1,), 0.8).expm1().log())
        self.alpha_n = nn.Parameter(torch.full((1,), 0.8 - 0.5).expm1().log())
        self.beta = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.eps = nn.Parameter(torch.tensor(-1e-6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        beta, eps = self.beta.to(x.dtype), self.eps.to(x.dtype)
        a, b = F.softplus(self.alpha_p), beta + F.softplus(self.alpha_n)
        linear = beta * x
        return torch.where(x > 0, a * x * x + linear, (torch.expm1(torch.minimum(x, eps)) - x) * b + linear)


class ApertusMLP(nn.Module):
    """The MLP of Apertus, which has no gate: down(xIELU(up(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.act_fn = XIELU()
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.up = Projections(self, "up_proj")

    def forward(
        self, x: Tensor, norm: nn.Module | None, transform: OutputTransform, residual: Tensor | None = None
    ) -> Tensor:
        """Returns residual + transform(MLP(norm(x))), [T, hidden]. If `residual` is None, x is the residual."""
        (up,) = self.up(x, norm)
        residual = x if residual is None else residual
        return add_projection(residual, self._modules["down_proj"], self.act_fn(up), transform)  # type: ignore[arg-type]

    def join(self) -> None:
        """Prepares for serving: fuses the norm with the cast of the projection's input."""
        self.up.join()

    def matrices(self) -> Iterator[nn.Module | Projections]:
        yield from (*self.up.matrices(), self.down_proj)


def make_attend(attention: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Attend:
    """Returns an `attend` function that rotates queries and keys and then calls attention(layer, q, k, v)."""

    def attend(layer: int, heads: Heads, rotation: Rotation, output_rows: Tensor | None) -> Tensor:
        q, k, v = heads
        output = attention(layer, rotary(q, *rotation), rotary(k, *rotation), v)
        return output if output_rows is None else output[output_rows]

    return attend


class Attention(CachedAttention):
    """Grouped-query attention with rotary position. The caller's `attend` computes the attention itself."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.normalizes_all_heads = config.qk_norm_weight == "all_heads"
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = _projections(
            self,
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            config.attention_bias,
            "qkv_proj" if config.fused_qkv else None,
        )
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_out_bias)
        self.register_module("q_norm", make_head_norm(config, config.num_heads))
        self.register_module("k_norm", make_head_norm(config, config.num_kv_heads))
        sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.attention_sinks else None
        self.register_parameter("sinks", sinks)

    def add_output(self, x: Tensor, output: Tensor, transform: OutputTransform) -> Tensor:
        return add_projection(x, self._modules["o_proj"], output.reshape(x.size(0), -1), transform)  # type: ignore[arg-type]

    def matrices(self) -> Iterator[nn.Module | Projections]:
        yield from (*self.qkv.matrices(), self.o_proj)

    def heads(self, x: Tensor, norm: nn.Module | None, position: PositionEmbedding) -> Heads:
        tokens, head_dim = x.size(0), self.head_dim
        q_norm, k_norm = self._modules["q_norm"], self._modules["k_norm"]
        if q_norm is None and position.order is None and position.query_scale is None:
            product = self.qkv.operands(x, norm)
            if product is not None:
                return PendingHeads(*product, head_dim)
        q, k, v = [part.view(tokens, -1, head_dim) for part in self.qkv(x, norm)]
        if q_norm is not None and k_norm is not None:
            q, k = self._normalize(q, q_norm), self._normalize(k, k_norm)
        if position.order is not None:
            q, k = q.index_select(-1, position.order), k.index_select(-1, position.order)
        if position.query_scale is not None:
            q = q * position.query_scale
        return q, k, v

    def _normalize(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Normalizes x [T, heads, head_dim] per head, or all heads as one vector."""
        return forward_of(norm)(x.flatten(1)).view_as(x) if self.normalizes_all_heads else forward_of(norm)(x)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """The gated MLP: down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate_up = _projections(
            self,
            config.hidden_size,
            dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
            config.mlp_bias,
            "gate_up_proj" if config.fused_gate_up else None,
        )
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(
        self, x: Tensor, norm: nn.Module | None, transform: OutputTransform, residual: Tensor | None = None
    ) -> Tensor:
        """Returns residual + transform(MLP(norm(x))), [T, hidden]. If `residual` is None, x is the residual."""
        residual = x if residual is None else residual
        down: nn.Module = self._modules["down_proj"]  # type: ignore[assignment]
        if self.activation == "silu" and torch.is_grad_enabled():
            y = self.gate_up.run_gated_mlp(x, norm, down)
            if y is not None:
                return residual + transform(y).to(residual.dtype)
        return add_mlp(residual, down, self.gate_up, x, norm, self.activation, transform)

    def join(self) -> None:
        self.gate_up.join()

    def matrices(self) -> Iterator[nn.Module | Projections]:
        yield from (*self.gate_up.matrices(), self.down_proj)


def _projections(owner: nn.Module, inputs: int, sizes: Mapping[str, int], bias: bool, fused: str | None) -> Projections:
    """Registers the linears in `sizes` as children of `owner`. If `fused` is a name, registers one linear for all."""
    if fused is not None:
        owner.register_module(fused, nn.Linear(inputs, sum(sizes.values()), bias=bias))
        return Projections(owner, fused, widths=list(sizes.values()))
    for name, size in sizes.items():
        owner.register_module(name, nn.Linear(inputs, size, bias=bias))
    return Projections(owner, *sizes)


class Layer(nn.Module):
    """One decoder layer: x = x + attention(norm(x)), then x = x + MLP(norm(x)).

    Some families also, or only, normalize the output of attention and MLP, or scale it. In families with a parallel
    residual, the MLP reads the input of attention.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        latent = config.latent
        self.self_attn = Attention(config, layer) if latent is None else LatentAttention(config, latent, layer)
        mlp: nn.Module
        experts = experts_of(config, layer)
        if experts is None:
            self.mlp_name, mlp = "mlp", ApertusMLP(config) if config.activation == "xielu" else MLP(config)
        else:
            self.mlp_name, mlp = experts.names.block, Mixture(config, experts)
        self.register_module(self.mlp_name, mlp)
        self.norms, self.residual_scale, self.is_parallel = config.norms, config.residual_scale, config.parallel
        for name in dict.fromkeys(astuple(config.norms)):
            if name is not None:
                self.register_module(name, make_norm(config, config.hidden_size))

    def forward(
        self, x: Tensor, position: PositionEmbedding, attend: Attend, output_rows: Tensor | None = None
    ) -> Tensor:
        """Returns the layer's output for x [T, hidden]: [T, hidden], or [R, hidden] for `output_rows` [R]."""
        modules: dict[str | None, nn.Module] = self._modules  # type: ignore[assignment]  # none of them is None
        norms = self.norms
        norm, transform = modules.get(norms.before_attention), self._output_transform(norms.after_attention)
        attended = forward_of(modules["self_attn"])(x, norm, position, attend, transform, output_rows)
        if output_rows is not None and attended.size(0) == 0:
            return attended  # type: ignore[no-any-return]
        mlp, norm = forward_of(modules[self.mlp_name]), modules.get(norms.before_mlp)
        transform = self._output_transform(norms.after_mlp)
        if self.is_parallel:
            return mlp(x if output_rows is None else x[output_rows], norm, transform, attended)  # type: ignore[no-any-return]
        return mlp(attended, norm, transform)  # type: ignore[no-any-return]

    def _output_transform(self, norm: str | None) -> OutputTransform:
        """Returns the transform of a module's output; `norm` is the name of the norm that follows the module."""
        if norm is None and self.residual_scale == 1.0:
            return IDENTITY
        return OutputTransform(None if norm is None else self._modules[norm], self.residual_scale)


class Backbone(nn.Module):
    """The embedding, the layers and the final norm, which Hugging Face checkpoints call `model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = make_embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = make_norm(config, config.hidden_size)
        self.rotary = Rotary(config)
        self.embedding_scale, self.rounds_scale = config.embedding_scale, config.rounds_embedding_scale

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, output_rows: Tensor | None = None
    ) -> Tensor:
        x = self.embed(token_ids)
        embeddings = self.rotary.position_embeddings(positions, x.dtype)
        *earlier_layers, (last_layer, last_position) = zip(self.layers, embeddings, strict=True)
        for layer, position in earlier_layers:
            x = forward_of(layer)(x, position, attend)
        return self.norm(forward_of(last_layer)(x, last_position, attend, output_rows))  # type: ignore[no-any-return]

    def embed(self, token_ids: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(token_ids)
        if self.embedding_scale == 1.0:
            return x
        return x * (torch.tensor(self.embedding_scale, dtype=x.dtype) if self.rounds_scale else self.embedding_scale)


class Decoder(nn.Module):
    """The model. `decoder(token_ids, positions, attend)` returns hidden states and `decoder.logits(hidden)` logits.

    On the device "meta" nothing is allocated. Otherwise weights have PyTorch's initial values, until they are trained
    or replaced by those of a checkpoint.
    """

    def __init__(
        self, config: ModelConfig, device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.config, self.head_name = config, "lm_head" if config.head is None else "score"
        rows = config.vocab_size if config.head is None else len(config.head.labels)
        with torch.device(device):
            self.model = Backbone(config)
            self.register_module(self.head_name, nn.Linear(config.hidden_size, rows, bias=config.head_bias))
        self.tie()
        self.to(dtype)

    def tie(self) -> None:
        """Ties the head to the embedding if configured. Must be called again after either weight was replaced."""
        if self.config.tie_word_embeddings:
            self.head.weight = self.model.embed_tokens.weight

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, output_rows: Tensor | None = None
    ) -> Tensor:
        """Returns the hidden states after the final norm, [T, hidden], for token_ids [T] and positions [T].

        If `output_rows`, int64 [R], is given, returns only these rows, [R, hidden].
        """
        return self.model(token_ids, positions, attend, output_rows)  # type: ignore[no-any-return]

    def attention_options(self, layer: int) -> tuple[float, int | None, float | None, Tensor | None]:
        """Returns (softmax_scale, window, softcap, sinks), the options of the layer's attention."""
        config, attention = self.config, cast(nn.Module, self.model.layers[layer].self_attn)
        sinks = attention._parameters.get("sinks")
        scores = config.softmax_scale, config.layer_windows[layer], config.attention_softcap
        return *scores, None if sinks is None else sinks.float()

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The layers, in order. `part(x, position, attend)` runs one, after `embed` and before `apply_final_norm`."""
        return list(self.model.layers)

    def modules_of_output_rows(self) -> list[nn.Module]:
        """Returns the modules that compute only the output rows: those after the attention of the last layer."""
        layer = cast(Layer, self.model.layers[-1])
        return [layer.self_attn.o_proj, *layer.get_submodule(layer.mlp_name).modules()]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Returns the input of the first layer, [T, hidden], for token_ids [T]."""
        return self.model.embed(token_ids)

    def position_embeddings(self, positions: Tensor, dtype: torch.dtype) -> Sequence[PositionEmbedding]:
        """Returns each layer's position embedding for the integers positions [T]."""
        return self.model.rotary.position_embeddings(positions, dtype)

    def apply_final_norm(self, x: Tensor) -> Tensor:
        """Returns the hidden states [T, hidden] for the last layer's output x."""
        return self.model.norm(x)  # type: ignore[no-any-return]

    def names_in_part(self, part: int, names: Iterable[str]) -> list[str]:
        """Returns the names of modules and tensors in `names` that belong to the part with this index."""
        return [name for name in names if name.startswith(f"model.layers.{part}.")]

    @property
    def head(self) -> nn.Module:
        """The linear layer that computes the logits of tokens or labels."""
        return cast(nn.Module, self._modules[self.head_name])

    @property
    def embedding(self) -> nn.Embedding:
        return self.model.embed_tokens

    def linear_names(self) -> list[str]:
        """Returns the names of the linears that may run in FP8: those of every layer, without routers and head."""
        return linear_names(self.config)

    def pruned_names(self) -> list[str]:
        """Returns the names of the linears that see only `output_rows`: those after the last layer's attention."""
        last = self.config.num_layers - 1
        groups = (attention_linear_groups(self.config, last)[-1], *mlp_linear_groups(self.config, last))
        return [name for group in groups for name in group]

    def set_max_length(self, length: int) -> None:
        """Sets the maximum length of a sequence with a KV cache, as `Rotary` explains."""
        self.model.rotary.max_length = length

    def join(self) -> None:
        """Prepares for serving: joins q, k and v, and gate and up, in each layer if possible, and stacks experts."""
        layers: Any = self.model.layers
        for layer in layers:
            layer.self_attn.qkv.join()
            layer.get_submodule(layer.mlp_name).join()

    def matrices(self) -> Iterator[nn.Module | Projections | StackedExperts]:
        """Yields the modules whose weights a forward pass multiplies by, in order. Joined linears are one module."""
        layers: Any = self.model.layers
        for layer in layers:
            attention, mlp = layer.self_attn, layer.get_submodule(layer.mlp_name)
            yield from (*attention.matrices(), *mlp.matrices())
        yield self.head

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns FP32 logits [T, vocab] or [T, labels], computed in the weights' dtype as in transformers."""
        return self.logits_in_weight_dtype(hidden).float()

    def logits_in_weight_dtype(self, hidden: Tensor) -> Tensor:
        """Returns the logits of hidden [T, hidden] in the weights' dtype."""
        logits, cap = self.head(hidden), self.config.logits_softcap
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits  # type: ignore[no-any-return]
