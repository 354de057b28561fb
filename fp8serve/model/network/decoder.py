"""One decoder-only transformer, which a configuration turns into any family of `families.py`.

It is written once, for calibration, training and serving. These differ in two ways. Their projections are different
linears, and each piece of a layer runs them as fast as it can (fusing.py). And a token attends to earlier ones in a
paged cache, or to the other tokens of the same call: the caller's `attend` does that, and this file knows no cache.
Windows are also left to the caller: `config.layer_windows`.

Tokens of all sequences arrive flattened: there is no batch dimension and no padding, so a linear layer sees one matrix
`[tokens, hidden]`. Module and parameter names equal those in Hugging Face files
(`model.layers.0.self_attn.q_proj.weight`). Sums of squares and angles are computed in FP32 and rounded where
transformers rounds: with the reference ops BF16 logits are the same to the bit; with kernels they may differ through
the order in which a norm adds its squares and the last bit of an exponential.

Serving needs logits of few rows: the last token of each complete prompt, and every decoding one. The last layer takes
the keys and values of all rows and computes the rest for these rows (`last`) only, as do the final norm and the head;
where there are none, it stops there. Rows do not depend on each other, so this changes no bit, but the linears in
`pruned_names` see and count no other rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn

from fp8serve.fp8.elementwise import rotary
from fp8serve.fp8.stacked import Stacked
from fp8serve.model.config.mixture import Experts
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.network.experts import Mixture
from fp8serve.model.network.fusing import PLAIN, Ending, Projections, add_gated, add_projection, direct
from fp8serve.model.network.latent_attention import LatentAttention
from fp8serve.model.network.norms import make_head_norm, make_norm
from fp8serve.model.network.rotary import Attend, Heads, Placement, Rotary, Rotation


class XIELU(nn.Module):
    """Element by element: a x^2 + beta x for x > 0, else b (exp(x) - 1 - x) + beta x (arXiv 2411.13010).

    Computed step by step in the type of the input, and rounded where transformers rounds. alpha_p, alpha_n [1] are
    trained: a = softplus(alpha_p) > 0, b = beta + softplus(alpha_n) > beta. beta and eps are constants of the file,
    which stay FP32 and are not trained (`keeps_fp32`); eps is the upper bound of x inside expm1 where x < 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.full((1,), 0.8).expm1().log())
        self.alpha_n = nn.Parameter(torch.full((1,), 0.8 - 0.5).expm1().log())
        self.beta = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.eps = nn.Parameter(torch.tensor(-1e-6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        beta, eps = self.beta.to(x.dtype), self.eps.to(x.dtype)
        above, below = F.softplus(self.alpha_p), beta + F.softplus(self.alpha_n)
        line = beta * x
        return torch.where(x > 0, above * x * x + line, (torch.expm1(torch.minimum(x, eps)) - x) * below + line)


class ApertusMLP(nn.Module):
    """Apertus' MLP without a gate: down(xIELU(up(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.act_fn = XIELU()
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.up = Projections(self, "up_proj")

    def forward(self, x: Tensor, norm: nn.Module | None, ending: Ending, residual: Tensor | None = None) -> Tensor:
        """residual [T, hidden], or x where there is none, plus ending(MLP of norm(x [T, hidden]))."""
        (up,) = self.up(x, norm)
        onto = x if residual is None else residual
        return add_projection(onto, self._modules["down_proj"], self.act_fn(up), ending)  # type: ignore[arg-type]

    def join(self) -> None:
        """For serving: fuse the norm before the projection with its cast."""
        self.up.join()

    def matrices(self) -> Iterator[nn.Module | Projections]:
        """The matrices that a step multiplies by."""
        yield from (*self.up.matrices(), self.down_proj)


def rotated(mix: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Attend:
    """An `attend` by mix(layer, q, k, v), which gets q and k with rotary position applied; differentiable if it is."""

    def attend(layer: int, heads: Heads, rotation: Rotation, last: Tensor | None) -> Tensor:
        q, k, v = heads
        mixed = mix(layer, rotary(q, *rotation), rotary(k, *rotation), v)
        return mixed if last is None else mixed[last]

    return attend


class Attention(nn.Module):
    """Grouped-query attention with rotary position; `attend` does the mixing between tokens."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.norms_whole = config.qk_norm_weight == "whole"
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

    def forward(
        self,
        x: Tensor,
        norm: nn.Module | None,
        place: Placement,
        attend: Attend,
        ending: Ending,
        last: Tensor | None = None,
    ) -> Tensor:
        """x [T, hidden] plus ending(attention over norm(x)); where `last` [R] is not None, [R, hidden] of its rows."""
        mixed = attend(self.layer, self._heads(x, norm, place), place.rotation, last)
        if last is not None:
            x = x[last]
            if x.size(0) == 0:
                return x
        return add_projection(x, self._modules["o_proj"], mixed.reshape(x.size(0), -1), ending)  # type: ignore[arg-type]

    def matrices(self) -> Iterator[nn.Module | Projections]:
        """The matrices that a step multiplies by."""
        yield from (*self.qkv.matrices(), self.o_proj)

    def _heads(self, x: Tensor, norm: nn.Module | None, place: Placement) -> Heads:
        tokens, head_dim = x.size(0), self.head_dim
        q, k, v = [part.view(tokens, -1, head_dim) for part in self.qkv(x, norm)]
        q_norm, k_norm = self._modules["q_norm"], self._modules["k_norm"]
        if q_norm is not None and k_norm is not None:
            q, k = self._normed(q, q_norm), self._normed(k, k_norm)
        if place.order is not None:
            q, k = q.index_select(-1, place.order), k.index_select(-1, place.order)
        if place.query_scale is not None:
            q = q * place.query_scale
        return q, k, v

    def _normed(self, x: Tensor, norm: nn.Module) -> Tensor:
        """x [T, heads, head_dim], normalised head by head or as one vector."""
        return direct(norm)(x.flatten(1)).view_as(x) if self.norms_whole else direct(norm)(x)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

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

    def forward(self, x: Tensor, norm: nn.Module | None, ending: Ending, residual: Tensor | None = None) -> Tensor:
        """residual [T, hidden], or x where there is none, plus ending(MLP of norm(x [T, hidden]))."""
        gate, up = self.gate_up(x, norm)
        onto = x if residual is None else residual
        return add_gated(onto, self._modules["down_proj"], gate, up, self.activation, ending)  # type: ignore[arg-type]

    def join(self) -> None:
        self.gate_up.join()

    def matrices(self) -> Iterator[nn.Module | Projections]:
        """The matrices that a step multiplies by."""
        yield from (*self.gate_up.matrices(), self.down_proj)


def _projections(owner: nn.Module, inputs: int, sizes: Mapping[str, int], bias: bool, fused: str | None) -> Projections:
    """Add linears of these sizes as children of `owner`: under their names, or all as one under the name `fused`."""
    if fused is not None:
        owner.register_module(fused, nn.Linear(inputs, sum(sizes.values()), bias=bias))
        return Projections(owner, fused, widths=list(sizes.values()))
    for name, size in sizes.items():
        owner.register_module(name, nn.Linear(inputs, size, bias=bias))
    return Projections(owner, *sizes)


def _block(config: ModelConfig, layer: int) -> tuple[str, MLP | ApertusMLP | Mixture]:
    """The module after attention, and its name in the file."""
    if config.experts is None or has_dense_mlp(config, layer):
        return "mlp", ApertusMLP(config) if config.activation == "xielu" else MLP(config)
    return config.experts.names.block, Mixture(config, config.experts)


class Layer(nn.Module):
    """Normalise, attend, add; normalise, MLP, add.

    Some families normalise the added output, as well or instead, or scale it; in some the MLP reads the input of
    attention.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        latent = config.latent
        self.self_attn = Attention(config, layer) if latent is None else LatentAttention(config, latent, layer)
        self.block, block = _block(config, layer)
        self.register_module(self.block, block)
        self.norms, self.residual_scale, self.is_parallel = config.norms, config.residual_scale, config.parallel
        for name in dict.fromkeys(astuple(config.norms)):
            if name is not None:
                self.register_module(name, make_norm(config, config.hidden_size))

    def forward(self, x: Tensor, place: Placement, attend: Attend, last: Tensor | None = None) -> Tensor:
        """x [T, hidden] -> the same; where `last` [R] is not None, [R, hidden] of these rows."""
        modules: dict[str | None, nn.Module] = self._modules  # type: ignore[assignment]  # of a layer all are there
        norms = self.norms
        ending = self._ending(norms.after_attention)
        attended = direct(modules["self_attn"])(x, modules.get(norms.before_attention), place, attend, ending, last)
        if last is not None and attended.size(0) == 0:
            return attended  # type: ignore[no-any-return]
        block, norm, ending = direct(modules[self.block]), modules.get(norms.before_mlp), self._ending(norms.after_mlp)
        if self.is_parallel:
            return block(x if last is None else x[last], norm, ending, attended)  # type: ignore[no-any-return]
        return block(attended, norm, ending)  # type: ignore[no-any-return]

    def _ending(self, norm: str | None) -> Ending:
        """The ending of a block that is followed by the norm of this name."""
        if norm is None and self.residual_scale == 1.0:
            return PLAIN
        return Ending(None if norm is None else self._modules[norm], self.residual_scale)


class Backbone(nn.Module):
    """Embedding, layers and final norm: what Hugging Face files call `model.`"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = make_norm(config, config.hidden_size)
        self.rotary = Rotary(config)
        self.embedding_scale, self.rounds_scale = config.embedding_scale, config.rounds_embedding_scale

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, last: Tensor | None = None) -> Tensor:
        x = self.embed(token_ids)
        *earlier, final = zip(self.layers, self.rotary.placements(positions, x.dtype), strict=True)
        for layer, place in earlier:
            x = direct(layer)(x, place, attend)
        return self.norm(direct(final[0])(x, final[1], attend, last))  # type: ignore[no-any-return]

    def embed(self, token_ids: Tensor) -> Tensor:
        """integer [T] -> the input of the first layer, [T, hidden]."""
        x: Tensor = self.embed_tokens(token_ids)
        if self.embedding_scale == 1.0:
            return x
        return x * (torch.tensor(self.embedding_scale, dtype=x.dtype) if self.rounds_scale else self.embedding_scale)


class Decoder(nn.Module):
    """The model: `decoder(token_ids, positions, attend)` then `decoder.logits(hidden)`.

    On "meta" nothing is allocated; otherwise weights are initialised as torch initialises its layers, to be replaced by
    a checkpoint or trained.
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
        """Share the embedding with the head where the configuration says so; needed again after replacing either."""
        if self.config.tie_word_embeddings:
            self.head.weight = self.model.embed_tokens.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, last: Tensor | None = None) -> Tensor:
        """token_ids, positions integer [T] -> hidden [R, hidden] of the rows `last` int64 [R], after the final norm.

        None: of all T.
        """
        return self.model(token_ids, positions, attend, last)  # type: ignore[no-any-return]

    def attention_options(self, layer: int) -> tuple[float, int | None, float | None, Tensor | None]:
        """(softmax_scale, window, softcap, sinks) of a layer, as attention takes them."""
        config, attention = self.config, cast(nn.Module, self.model.layers[layer].self_attn)
        sinks = attention._parameters.get("sinks")
        scores = config.softmax_scale, config.layer_windows[layer], config.attention_softcap
        return *scores, None if sinks is None else sinks.float()

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The parts of a pass in order: part(x, place, attend), from `enter` to `leave`."""
        return list(self.model.layers)

    def enter(self, token_ids: Tensor) -> Tensor:
        """integer [T] -> the input of the first part."""
        return self.model.embed(token_ids)

    def places(self, positions: Tensor, dtype: torch.dtype) -> Sequence[Placement]:
        """What every part gets for the positions integer [T]."""
        return self.model.rotary.placements(positions, dtype)

    def leave(self, x: Tensor) -> Tensor:
        """The last part's output -> hidden [T, hidden], after the final norm."""
        return self.model.norm(x)  # type: ignore[no-any-return]

    def named_in(self, part: int, names: Iterable[str]) -> list[str]:
        """Those of these names of modules and tensors that belong to a part."""
        return [name for name in names if name.startswith(f"model.layers.{part}.")]

    @property
    def head(self) -> nn.Module:
        """The linear layer that makes logits: of tokens, or of labels."""
        return cast(nn.Module, self._modules[self.head_name])

    @property
    def embedding(self) -> nn.Embedding:
        """The embedding of tokens."""
        return self.model.embed_tokens

    def linear_names(self) -> list[str]:
        """Names of the projections that FP8 may run: those of every layer, without routers and head, in the model's
        order."""
        layers = range(self.config.num_layers)
        return [name for layer in layers for group in inputs_of(self.config, layer) for name in group]

    def pruned_names(self) -> list[str]:
        """Names of the linears that see only the rows `last`: those after the attention of the last layer."""
        last = self.config.num_layers - 1
        groups = (attention_inputs(self.config, last)[-1], *block_inputs(self.config, last))
        return [name for group in groups for name in group]

    def expect(self, longest: int) -> None:
        """Sequences may reach this length, where keys are kept from one call to the next: see `Rotary`."""
        self.model.rotary.longest = longest

    def join(self) -> None:
        """For serving: q, k, v and gate, up of each layer become one matrix where they can (fp8/joined.py), and
        experts are stacked."""
        layers: Any = self.model.layers
        for layer in layers:
            layer.self_attn.qkv.join()
            layer.get_submodule(layer.block).join()

    def matrices(self) -> Iterator[nn.Module | Projections | Stacked]:
        """The matrices that a step multiplies by, in that order; joined ones as one."""
        layers: Any = self.model.layers
        for layer in layers:
            attention, block = layer.self_attn, layer.get_submodule(layer.block)
            yield from (*attention.matrices(), *block.matrices())
        yield self.head

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] -> FP32 [T, vocab], or [T, labels]: computed in the weights' dtype, then widened, as
        transformers does."""
        return self.narrow_logits(hidden).float()

    def narrow_logits(self, hidden: Tensor) -> Tensor:
        """The same in the weights' dtype."""
        logits, cap = self.head(hidden), self.config.logits_softcap
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits  # type: ignore[no-any-return]


Groups = tuple[tuple[str, ...], ...]  # names of linears, together where they read the same input


def has_dense_mlp(config: ModelConfig, layer: int) -> bool:
    """Whether the layer has an MLP; else it has a mixture of experts."""
    return config.experts is None or layer not in config.experts.layers


def inputs_of(config: ModelConfig, layer: int) -> Groups:
    """The linears of a layer by full name, in the order in which they run; those of each expert separately."""
    return attention_inputs(config, layer) + block_inputs(config, layer)


def attention_inputs(config: ModelConfig, layer: int) -> Groups:
    """`inputs_of` attention: first the linears that read the layer's input, last the one that reads attention's
    output."""
    qkv: Groups = (("qkv_proj",),) if config.fused_qkv else (("q_proj", "k_proj", "v_proj"),)
    if config.latent is not None:
        has_two = config.latent.q_rank is not None
        qkv = (("q_a_proj" if has_two else "q_proj", "kv_a_proj_with_mqa"), *([("q_b_proj",)] if has_two else []))
    return _named(f"model.layers.{layer}.self_attn", (*qkv, ("o_proj",)))


def block_inputs(config: ModelConfig, layer: int) -> Groups:
    """`inputs_of` the module after attention."""
    block = _dense(config) if has_dense_mlp(config, layer) else tuple(_of_experts(config.experts))
    return _named(f"model.layers.{layer}", block)


def _named(owner: str, groups: Groups) -> Groups:
    return tuple(tuple(f"{owner}.{name}" for name in group) for group in groups)


def _dense(config: ModelConfig) -> Groups:
    gate_up = ("mlp.gate_up_proj",) if config.fused_gate_up else ("mlp.gate_proj", "mlp.up_proj")
    return gate_up if config.activation != "xielu" else ("mlp.up_proj",), ("mlp.down_proj",)


def _of_experts(experts: Experts | None) -> Iterator[tuple[str, ...]]:
    if experts is None:
        return
    names = experts.names
    owners = [f"{names.block}.experts.{expert}" for expert in range(experts.count)]
    for owner in [*owners, f"{names.block}.{names.shared}"] if names.shared else owners:
        yield f"{owner}.{names.gate}", f"{owner}.{names.up}"
        yield (f"{owner}.{names.down}",)
