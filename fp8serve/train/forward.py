"""The forward pass over a packed batch, with FP32 masters cast to BF16, and the log-probabilities of its targets.

A batch concatenates its rows without padding. Positions start at 0 in each document, and attention reads `lengths`, so
that no document attends to another one.

`Network` wraps the decoder so that `torch.func.functional_call` can replace its parameters by BF16 casts. Autograd then
propagates gradients through the casts to the FP32 masters. The weights of FP8 layers are not cast, because their
quantizer reads FP32, and a cast to BF16 would round them twice. Adapters receive FP32 weights and round them themselves
(fp8/lora.py). Attention runs in FP8 if the recipe has `fp8_dpa` or `fp8_mha`. In high precision it can record the
amaxes of keys and values, so that a server has scales for an FP8 KV cache. `lm_head` computes logits only for positions
whose next token is in the loss mask, which saves most of the largest matrix product if prompts are masked.

On a CPU, the log-probabilities have the bits that a server with the same weights and scales returns;
`Forward.differences` lists the exceptions (model/parity.py). log_softmax of FP32 logits [P, vocab] would keep three
such matrices for its backward pass, 300 MB for 512 tokens and a vocabulary of 49,152. Here the logits stay in BF16, and
LOGITS_PER_CHUNK elements at a time are converted to FP32, once in each direction. Each row has the same bits as in one
op over all rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fp8serve.errors import RecipeError
from fp8serve.fp8.attention import KvScale, served_attention
from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.batch_invariant import has_batch_invariant_products, log_softmax, use_batch_invariant_products
from fp8serve.fp8.distributed import default_group
from fp8serve.fp8.dpa import DotProductAttention, KvRecordingAttention
from fp8serve.fp8.frozen import make_rows_independent
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.lora import LoraLinear
from fp8serve.fp8.recipe import Recipe, as_delayed, uses_fp8_attention, with_amax_reduction
from fp8serve.fp8.session import Session, common_session
from fp8serve.fp8.stateful import Stateful, prepare_states
from fp8serve.fp8.steps import accumulated_update
from fp8serve.model.building import Model
from fp8serve.model.config.mixture import needs_fp32
from fp8serve.model.network.decoder import make_attend
from fp8serve.model.network.experts import Expert, Experts, mixtures, route_to_all_experts
from fp8serve.model.network.rotary import Attend
from fp8serve.model.parity import differences
from fp8serve.ranks import ALONE, Ranks
from fp8serve.train.data import Row
from fp8serve.train.memory import LOGITS_PER_CHUNK

AttentionOptions = tuple[float, int | None, float | None, Tensor | None]  # `Decoder.attention_options`


class _TargetLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, hits: Tensor | None) -> Tensor:
        """Returns the log-probabilities. Sets `hits`, bool [P], to whether the most likely token is the target."""
        ctx.save_for_backward(logits, targets)
        ctx.temperature = temperature
        log_probs = logits.new_empty(len(logits), dtype=torch.float32)
        for rows, scaled_logits, buffer in _fp32_chunks(logits, temperature):
            if hits is not None:
                hits[rows] = scaled_logits.argmax(-1) == targets[rows]
            log_probs[rows] = log_softmax(scaled_logits, out=buffer).gather(1, targets[rows, None])[:, 0]
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        """Returns dy_i (onehot(target_i) - softmax_i) / temperature, rounded to the dtype of the logits."""
        logits, targets = ctx.saved_tensors
        dx, dy = torch.empty_like(logits), dy / ctx.temperature
        for rows, scaled_logits, buffer in _fp32_chunks(logits, ctx.temperature):
            torch.softmax(scaled_logits, -1, out=buffer)
            dx[rows] = buffer.mul_(-dy[rows, None]).scatter_add_(1, targets[rows, None], dy[rows, None])
        return dx, None, None, None


def _fp32_chunks(logits: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields (rows, their logits in FP32 divided by the temperature, a buffer of the same shape) for chunks of about
    LOGITS_PER_CHUNK elements. The next chunk overwrites both tensors."""
    size = max(1, LOGITS_PER_CHUNK // max(1, logits.shape[1]))
    chunk, buffer = logits.new_empty(2, min(size, len(logits)), logits.shape[1], dtype=torch.float32)
    for start in range(0, len(logits), size):
        rows = slice(start, min(start + size, len(logits)))
        count = rows.stop - start
        part = chunk[:count].copy_(logits[rows])
        yield rows, part if temperature == 1 else part.div_(temperature), buffer[:count]


def target_log_probs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns log softmax(logits / temperature) at the targets, FP32 [P], in nats; it is differentiable.

    `logits` [P, vocab] has any floating-point dtype, `targets` int64 [P].
    """
    return cast(Tensor, _TargetLogProbs.apply(logits, targets, temperature, None))  # type: ignore[no-untyped-call]


def summed_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the summed cross-entropy in nats, and the number of positions whose most likely token is the target."""
    hits = torch.empty_like(targets, dtype=torch.bool)
    log_probs = _TargetLogProbs.apply(logits, targets, 1.0, hits)  # type: ignore[no-untyped-call]
    return -log_probs.sum(), hits.sum()


@dataclass(frozen=True)
class PackedBatch:
    """A microbatch of T tokens in documents of `lengths` tokens; all tensors are int64.

    `predict` [P] holds the indices whose next token is in the loss mask, and `targets` [P] holds these next tokens.
    `token_ids` and `positions` are [T].
    """

    token_ids: Tensor
    positions: Tensor
    lengths: list[int]
    predict: Tensor
    targets: Tensor


def collate(rows: Sequence[Row], device: str) -> PackedBatch:
    """Concatenates `rows` into a batch on `device`."""
    lengths = [row.tokens for row in rows]
    token_ids = np.concatenate([row.ids[:-1] for row in rows])
    positions = np.concatenate([np.arange(n) for n in lengths])
    predict = np.flatnonzero(np.concatenate([row.loss[1:] for row in rows]))
    targets = np.concatenate([row.ids[1:] for row in rows])[predict]
    arrays = token_ids, positions, predict, targets
    token_ids_t, positions_t, predict_t, targets_t = (torch.from_numpy(a.astype(np.int64)).to(device) for a in arrays)
    return PackedBatch(token_ids_t, positions_t, lengths, predict_t, targets_t)


Logits = Callable[[PackedBatch], Tensor]
"""Computes the BF16 logits [P, vocab] of a batch's positions whose next token is in the loss mask."""


class Network(nn.Module):
    """Computes logits [P, vocab] of the positions whose next token is in the loss mask, in the dtype of the head.

    With `cache`, the scales of each layer's keys and values, attention has the bits of a server with an FP8 KV cache.
    `recompute` enables activation checkpointing. In a sharded run, `units` run the layers (`train.sharded`). With
    `records_kv`, attention in high precision records the amaxes of keys and values.
    """

    def __init__(
        self,
        decoder: Model,
        cache: Sequence[KvScale] | None = None,
        recompute: bool = False,
        records_kv: bool = False,
    ) -> None:
        super().__init__()
        self.decoder, self.recompute = decoder, recompute
        self.units: nn.ModuleList | None = None
        # Latent attention has one cache for keys and values, with the keys' scale.
        is_latent = cache is not None and decoder.config.latent is not None
        self.cache = [KvScale.of(scale.k, scale.k) for scale in cache or ()] if is_latent else cache
        attention_type = KvRecordingAttention if records_kv else DotProductAttention
        self.attention = nn.ModuleList(attention_type() for _ in range(decoder.config.num_layers))

    def forward(self, batch: PackedBatch) -> Tensor:
        return self.decoder.logits_in_weight_dtype(self.hidden(batch)[batch.predict])

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Returns the hidden states [T, hidden] after the final norm."""
        options = self._attention_options()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            inputs = q, k, v, batch.lengths, *options(layer)
            if self.cache is not None:
                return served_attention(*inputs, scale=self.cache[layer])
            return self.attention[layer](*inputs)  # type: ignore[no-any-return]

        if self.units is not None:
            return self._run_layers(batch, make_attend(attend), self.units)
        if self.recompute and torch.is_grad_enabled():
            layers = [partial(_run_checkpointed, layer) for layer in self.decoder.parts]
            return self._run_layers(batch, make_attend(attend), layers)
        return self.decoder(batch.token_ids, batch.positions, make_attend(attend))  # type: ignore[no-any-return]

    def _attention_options(self) -> Callable[[int], AttentionOptions]:
        """Returns a function from a layer's index to its attention options, which contain weights.

        A unit's weights exist only while it runs, so its options are computed then. A layer that is recomputed runs
        after the caller's `functional_call` has ended, so its options are computed here.
        """
        if self.units is not None:
            return self.decoder.attention_options
        return [self.decoder.attention_options(layer) for layer in range(self.decoder.config.num_layers)].__getitem__

    def _run_layers(self, batch: PackedBatch, attend: Attend, layers: Iterable[Callable[..., Tensor]]) -> Tensor:
        x = self.decoder.embed(batch.token_ids)
        rotations = self.decoder.position_embeddings(batch.positions, x.dtype)
        for layer, rotation in zip(layers, rotations, strict=True):
            x = layer(x, rotation, attend)
        return self.decoder.apply_final_norm(x)


def prepare_as_server(model: Model, device: str, max_length: int) -> None:
    """Makes the rows of a model that was loaded to be served independent of each other, as a server does."""
    make_rows_independent(model)
    if has_batch_invariant_products(device):
        use_batch_invariant_products(model)
    model.set_max_length(max_length)


def _run_checkpointed(layer: nn.Module, *arguments: Any) -> Tensor:
    """Runs a layer with activation checkpointing. The weights are passed explicitly, because the caller's
    `functional_call` has ended when the backward pass runs the layer again."""
    weights = dict(layer.named_parameters())
    return checkpoint(functional_call, layer, weights, arguments, use_reentrant=False)  # type: ignore[no-any-return]


class Forward:
    """Runs a decoder with BF16 activations under a recipe, or in high precision if `recipe` is None.

    Args:
        decoder: The model. Its FP8 layers must be converted already. Other linear layers become `BatchInvariantLinear`.
        cache: The scales of an FP8 KV cache, see `Network`.
        ranks: The processes that share a step. Delayed scales depend on the amaxes of all of them.
        recompute: Whether to use activation checkpointing, which saves memory, takes time and gives the same bits.
        device: The device on which a decoder without weights will have its weights.
        records_kv: Whether to keep delayed scaling states of keys and values, for an FP8 KV cache of the served model.
            Requires a delayed recipe that does not quantize attention, and no `cache`.
    """

    def __init__(
        self,
        decoder: Model,
        recipe: Recipe | None,
        cache: Sequence[KvScale] | None = None,
        ranks: Ranks = ALONE,
        recompute: bool = False,
        device: str | None = None,
        records_kv: bool = False,
    ) -> None:
        if cache is not None and uses_fp8_attention(recipe):
            raise RecipeError("fp8_dpa and fp8_mha round keys by themselves; leave the scales of a cache out.")
        if records_kv and (cache is not None or as_delayed(recipe) is None or uses_fp8_attention(recipe)):
            raise RecipeError("records_kv needs a delayed recipe without fp8_dpa and fp8_mha, and no cache.")
        self.network = Network(decoder, cache, recompute, records_kv)
        self.recipe, self.records_kv = recipe, records_kv
        self.device = decoder.embedding.weight.device.type if device is None else torch.device(device).type
        if has_batch_invariant_products(self.device):
            use_batch_invariant_products(decoder)
        # Amaxes are reduced over the ranks of a run only, not over all processes that torchrun may have started.
        self._step_recipe = with_amax_reduction(recipe, ranks.size > 1)
        self._session = common_session() if as_delayed(recipe) is None else Session(self.network)
        self.linears = {name: m for name, m in decoder.named_modules() if isinstance(m, Linear)}
        self.uncast = {f"decoder.{name}.weight" for name in self.linears} if recipe is not None else set()
        self.uncast |= {name for name, _ in self.network.named_parameters() if needs_fp32(name)}
        adapters = {f"decoder.{name}" for name, m in decoder.named_modules() if isinstance(m, LoraLinear)}
        self.uncast |= {name for name, _ in self.network.named_parameters() if name.rpartition(".")[0] in adapters}

    def scaled_modules(self) -> Iterator[tuple[str, Stateful]]:
        """Yields (name in the model, module) for every module with scaling state."""
        yield from self.linears.items()
        if self.records_kv or uses_fp8_attention(self.recipe):
            for layer, attention in enumerate(self.network.attention):
                yield f"model.layers.{layer}.self_attn", cast(DotProductAttention, attention)

    def differences(self) -> list[str]:
        """Returns the reasons why a server's log-probabilities differ from those of this forward pass, as sentences."""
        return list(differences(self.recipe, self.network.decoder.config, self.device))

    def log_probs(self, batch: PackedBatch) -> Tensor:
        """Returns the log-probabilities of the targets, FP32 [P], as a server does. They are differentiable."""
        return target_log_probs(self.logits(batch), batch.targets)

    def logits(self, batch: PackedBatch, is_first_microbatch: bool | None = None) -> Tensor:
        """Returns the logits of the targets' positions, BF16 [P, vocab]. Under `torch.no_grad()` the scaling state does
        not change. `is_first_microbatch` is that of `autocast`."""
        options: dict[str, Any] = {"recipe": self._step_recipe, "session": self._session}
        with autocast(enabled=self.recipe is not None, is_first_microbatch=is_first_microbatch, **options):
            return self._logits(batch)

    def prepare_states(self) -> None:
        """Creates all scaling states, so that layers can share a compiled graph. Nothing may change their lengths or
        devices afterwards."""
        if (recipe := as_delayed(self._step_recipe)) is not None:
            prepare_states(self.network, recipe)
            self._session.prepared_length = recipe.amax_history_len

    def accumulated_update(self) -> AbstractContextManager[None]:
        """Returns a context for the microbatches of one step: delayed scales change once, at its end."""
        recipe = as_delayed(self._step_recipe)
        return nullcontext() if recipe is None else accumulated_update(self._session, recipe, default_group())

    def _logits(self, batch: PackedBatch) -> Tensor:
        if self.network.units is not None:
            return self.network(batch)  # type: ignore[no-any-return]
        weights = {n: p if n in self.uncast else p.to(torch.bfloat16) for n, p in self.network.named_parameters()}
        return functional_call(self.network, weights, (batch,))  # type: ignore[no-any-return]

    def observe(self, loss: Callable[[Logits], Tensor]) -> None:
        """Runs forward and backward in high precision, and records the amaxes of all tensors in the delayed states.

        `loss` receives a function from batches to logits. It must return a loss with the divisor of a training step, so
        that gradients have their usual size. Every expert of a mixture sees every token. All gradients are cleared.
        """
        calibrating = autocast(enabled=False, recipe=self._step_recipe, calibrating=True, session=self._session)
        with route_to_all_experts(self.network):  # also around the backward pass, which may recompute layers
            with calibrating:
                result = loss(self._logits)
            result.backward()  # type: ignore[no-untyped-call]
        self.network.zero_grad(set_to_none=True)
        for mixture in mixtures(self.network).values():
            _share_gradient_scales(mixture)


@torch.no_grad()
def _share_gradient_scales(mixture: Experts) -> None:
    """Gives the projections of experts without a gradient the smallest gradient scale of the other experts, which is
    that of the largest gradient. At scale 1, most values of a gradient would underflow."""
    experts = [expert for expert in mixture if isinstance(expert, Expert)]
    for linears in zip(*(expert.linears() for expert in experts), strict=True):
        states = [linear.scaling["grad_output"] for linear in linears if isinstance(linear, Linear)]
        observed_scales = [state.scale for state in states if bool(state.amax_history.any())]
        for state in states:
            if observed_scales and not bool(state.amax_history.any()):
                state.scale.copy_(torch.stack(observed_scales).min())


def mean_loss(batch: PackedBatch) -> Callable[[Logits], Tensor]:
    """Returns a function for `Forward.observe` that computes the mean of `summed_loss` over the targets of `batch`."""
    return lambda logits: summed_loss(logits(batch), batch.targets)[0] / len(batch.targets)
