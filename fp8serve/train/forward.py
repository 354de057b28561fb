"""One forward pass over a flattened batch, with FP32 masters cast on the fly, and log-probabilities of its targets.

Rows are laid end to end, never padded. Positions start again at 0 with each document, and `lengths` tells the attention
where documents end, so that no document attends to another.

`Network` wraps the decoder so that its parameters can be swapped for BF16 casts in one call
(`torch.func.functional_call`): autograd then carries gradients through the cast into the FP32 masters. The weights of
FP8 layers are handed over as they are, because their quantizer reads FP32, and a cast to BF16 first would round them
twice. Adapters, too, get FP32 weights and round them themselves (fp8/lora.py). Attention runs in FP8 where the recipe
says so (`fp8_dpa`, `fp8_mha`). Only positions whose next token carries loss go through `lm_head`: with masked prompts
most of the largest matrix product is never computed.

The terms of the loss are log-probabilities with the bits that a server of the same weights and scales returns on a CPU;
`Forward.differences` says where that cannot be (model/parity.py). log_softmax of FP32 logits [P, vocab] as one op would
keep three such matrices for its backward pass: with 512 tokens and a vocabulary of 49,152 that is 300 MB. Here the
logits stay as the head computed them, in BF16, and are widened for LOGITS_AT_ONCE elements at a time, once in each
direction. A row has the same bits as in one op over all of them.
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
from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.batch_invariant_linear import has_batch_invariant_products, use_batch_invariant_products
from fp8serve.fp8.distributed import default_group
from fp8serve.fp8.dpa import DotProductAttention
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.lora import LoraLinear
from fp8serve.fp8.recipe import Recipe, attends_in_fp8, delayed, reduced
from fp8serve.fp8.served_attention import KvScale, served_attention
from fp8serve.fp8.session import Session, common
from fp8serve.fp8.stateful import Stateful
from fp8serve.fp8.steps import one_update
from fp8serve.model.building import Model
from fp8serve.model.config.mixture import keeps_fp32
from fp8serve.model.network.decoder import rotated
from fp8serve.model.network.experts import Expert, Experts, every_expert, mixtures
from fp8serve.model.network.rotary import Attend
from fp8serve.model.parity import differences
from fp8serve.ranks import ALONE, Ranks
from fp8serve.train.data import Row
from fp8serve.train.memory import LOGITS_AT_ONCE

AttentionOptions = tuple[float, int | None, float | None, Tensor | None]  # `Decoder.attention_options`
"""Logits [P, vocab] of the positions of a batch whose next token carries loss, in BF16, as the head computes them."""


class _TargetLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, hits: Tensor | None) -> Tensor:
        """hits: bool [P], which is filled in: whether the likeliest token is the target."""
        ctx.save_for_backward(logits, targets)
        ctx.temperature = temperature
        result = logits.new_empty(len(logits), dtype=torch.float32)
        for rows, wide, spare in _pieces(logits, temperature):
            if hits is not None:
                hits[rows] = wide.argmax(-1) == targets[rows]
            torch.log_softmax(wide, -1, out=spare)
            result[rows] = spare.gather(1, targets[rows, None])[:, 0]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        """dy_i (onehot(target_i) - softmax_i) / temperature, rounded to the dtype of the logits."""
        logits, targets = ctx.saved_tensors
        dx, dy = torch.empty_like(logits), dy / ctx.temperature
        for rows, wide, spare in _pieces(logits, ctx.temperature):
            torch.softmax(wide, -1, out=spare)
            dx[rows] = spare.mul_(-dy[rows, None]).scatter_add_(1, targets[rows, None], dy[rows, None])
        return dx, None, None, None


def _pieces(logits: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, their logits in FP32 divided by the temperature, scratch memory of the same size), for pieces of about
    LOGITS_AT_ONCE elements. The next piece overwrites both tensors."""
    size = max(1, LOGITS_AT_ONCE // max(1, logits.shape[1]))
    wide, spare = logits.new_empty(2, min(size, len(logits)), logits.shape[1], dtype=torch.float32)
    for start in range(0, len(logits), size):
        rows = slice(start, min(start + size, len(logits)))
        count = rows.stop - start
        part = wide[:count].copy_(logits[rows])
        yield rows, part if temperature == 1 else part.div_(temperature), spare[:count]


def target_log_probs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """logits [P, vocab] of any floating type, targets int64 [P] -> FP32 [P], in nats: log softmax(logits / temperature)
    at the targets; differentiable."""
    return cast(Tensor, _TargetLogProbs.apply(logits, targets, temperature, None))  # type: ignore[no-untyped-call]


def summed_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of the cross-entropies in nats, number of positions whose likeliest token is the target)."""
    hits = torch.empty_like(targets, dtype=torch.bool)
    result = _TargetLogProbs.apply(logits, targets, 1.0, hits)  # type: ignore[no-untyped-call]
    return -result.sum(), hits.sum()


@dataclass(frozen=True)
class PackedBatch:
    """A flattened microbatch of T tokens; all tensors int64.

    token_ids [T], positions [T]; lengths: tokens per document; predict [P]: where the next token carries loss, and
    targets [P]: that token.
    """

    token_ids: Tensor
    positions: Tensor
    lengths: list[int]
    predict: Tensor
    targets: Tensor


def collate(rows: Sequence[Row], device: str) -> PackedBatch:
    """Lay `rows` end to end on `device`."""
    lengths = [row.tokens for row in rows]
    token_ids = np.concatenate([row.ids[:-1] for row in rows])
    positions = np.concatenate([np.arange(n) for n in lengths])
    predict = np.flatnonzero(np.concatenate([row.loss[1:] for row in rows]))
    targets = np.concatenate([row.ids[1:] for row in rows])[predict]
    as_tensor = [torch.from_numpy(a.astype(np.int64)).to(device) for a in (token_ids, positions, predict, targets)]
    return PackedBatch(as_tensor[0], as_tensor[1], lengths, as_tensor[2], as_tensor[3])


Logits = Callable[[PackedBatch], Tensor]


class Network(nn.Module):
    """batch -> logits [P, vocab] of the positions whose next token carries loss, in the dtype of the head.

    cache: the scales of every layer's keys and values, for attention as a server with an FP8 cache computes it.
    recompute: see `Forward`. units: where weights are divided among processes, what runs the decoder's parts
    (`train.sharded`).
    """

    def __init__(self, decoder: Model, cache: Sequence[KvScale] | None = None, recompute: bool = False) -> None:
        super().__init__()
        self.decoder, self.recompute = decoder, recompute
        self.units: nn.ModuleList | None = None
        # where attention is over latent vectors, keys and values lie in one cache, with the keys' scale
        shared = cache is not None and decoder.config.latent is not None
        self.cache = [KvScale.of(scale.k, scale.k) for scale in cache or ()] if shared else cache
        self.attention = nn.ModuleList(DotProductAttention() for _ in range(decoder.config.num_layers))

    def forward(self, batch: PackedBatch) -> Tensor:
        return self.decoder.narrow_logits(self.hidden(batch)[batch.predict])

    def hidden(self, batch: PackedBatch) -> Tensor:
        """[T, hidden], after the final norm."""
        options = self._attention_options()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            inputs = q, k, v, batch.lengths, *options(layer)
            if self.cache is not None:
                return served_attention(*inputs, scale=self.cache[layer])
            return self.attention[layer](*inputs)  # type: ignore[no-any-return]

        if self.units is not None:
            return self._by_parts(batch, rotated(attend), self.units)
        if self.recompute and torch.is_grad_enabled():
            return self._by_parts(batch, rotated(attend), [partial(_recomputed, part) for part in self.decoder.parts])
        return self.decoder(batch.token_ids, batch.positions, rotated(attend))  # type: ignore[no-any-return]

    def _attention_options(self) -> Callable[[int], AttentionOptions]:
        """Those of a layer. They include weights: a unit has its own only while it runs, and a layer that runs again,
        after the caller's `functional_call` has ended, must be given those of its first run."""
        if self.units is not None:
            return self.decoder.attention_options
        return [self.decoder.attention_options(layer) for layer in range(self.decoder.config.num_layers)].__getitem__

    def _by_parts(self, batch: PackedBatch, attend: Attend, parts: Iterable[Callable[..., Tensor]]) -> Tensor:
        x = self.decoder.enter(batch.token_ids)
        places = self.decoder.places(batch.positions, x.dtype)
        for part, place in zip(parts, places, strict=True):
            x = part(x, place, attend)
        return self.decoder.leave(x)


def _recomputed(part: nn.Module, *source: Any) -> Tensor:
    """A part that is run again for the backward pass. It is given its weights by hand, for at its second run those of
    the caller's `functional_call` are gone."""
    weights = dict(part.named_parameters())
    return checkpoint(functional_call, part, weights, source, use_reentrant=False)  # type: ignore[no-any-return]


class Forward:
    """Runs a network under a recipe (None: high precision) with BF16 activations; its linears are converted already.

    cache: see `Network`. Linears that are not converted become `BatchInvariantLinear`, in place. `ranks`: the processes
    that take steps together; delayed scales are those of all of them. `recompute`: only the inputs of layers are kept
    for the backward pass, and the rest is computed again: less memory and more time for the same bits. device: where a
    decoder without weights will have them.
    """

    def __init__(
        self,
        decoder: Model,
        recipe: Recipe | None,
        cache: Sequence[KvScale] | None = None,
        ranks: Ranks = ALONE,
        recompute: bool = False,
        device: str | None = None,
    ) -> None:
        if cache is not None and attends_in_fp8(recipe):
            raise RecipeError("fp8_dpa and fp8_mha round keys by themselves; leave the scales of a cache out.")
        self.network = Network(decoder, cache, recompute)
        self.recipe = recipe
        self.device = decoder.embedding.weight.device.type if device is None else torch.device(device).type
        if has_batch_invariant_products(self.device):
            use_batch_invariant_products(decoder)
        self._run_by = reduced(recipe, ranks.size > 1)  # a run alone stays so in a script that torchrun has started
        self._session = common() if delayed(recipe) is None else Session(self.network)
        self.linears = {name: m for name, m in decoder.named_modules() if isinstance(m, Linear)}
        self.as_is = {f"decoder.{name}.weight" for name in self.linears} if recipe is not None else set()
        self.as_is |= {name for name, _ in self.network.named_parameters() if keeps_fp32(name)}
        adapters = {f"decoder.{name}" for name, m in decoder.named_modules() if isinstance(m, LoraLinear)}
        self.as_is |= {name for name, _ in self.network.named_parameters() if name.rpartition(".")[0] in adapters}

    def scaled(self) -> Iterator[tuple[str, Stateful]]:
        """Every module that keeps scales, by its name in the model."""
        yield from self.linears.items()
        if attends_in_fp8(self.recipe):
            for layer, attention in enumerate(self.network.attention):
                yield f"model.layers.{layer}.self_attn", cast(DotProductAttention, attention)

    def differences(self) -> list[str]:
        """Why a server's log-probabilities are not those of this forward pass, a sentence each; none: they are."""
        return list(differences(self.recipe, self.network.decoder.config, self.device))

    def log_probs(self, batch: PackedBatch) -> Tensor:
        """FP32 [P], of the targets, as a server returns them; differentiable. Their negative sum is `summed_loss`."""
        return target_log_probs(self.logits(batch), batch.targets)

    def logits(self, batch: PackedBatch, is_first_microbatch: bool | None = None) -> Tensor:
        """BF16 [P, vocab]; under `torch.no_grad()` the scaling state stays as it is.

        is_first_microbatch: whether it is the first of those whose gradients accumulate, see `autocast`.
        """
        rules: dict[str, Any] = {"recipe": self._run_by, "session": self._session}
        with autocast(enabled=self.recipe is not None, is_first_microbatch=is_first_microbatch, **rules):
            return self._logits(batch)

    def one_update(self) -> AbstractContextManager[None]:
        """Forward and backward passes inside are one step: delayed scales change at its end, once."""
        rules = delayed(self._run_by)
        return nullcontext() if rules is None else one_update(self._session, rules, default_group())

    def _logits(self, batch: PackedBatch) -> Tensor:
        if self.network.units is not None:
            return self.network(batch)  # type: ignore[no-any-return]
        weights = {n: p if n in self.as_is else p.to(torch.bfloat16) for n, p in self.network.named_parameters()}
        return functional_call(self.network, weights, (batch,))  # type: ignore[no-any-return]

    def observe(self, loss: Callable[[Logits], Tensor]) -> None:
        """Forward and backward in high precision that only record amaxes, of gradients too, into the delayed states.

        `loss` is given a function from batches to logits and returns the loss of a whole step, divided as in training,
        so that gradients have the size that they will have. Leaves no gradient behind. Every expert of a mixture sees
        every token; a gradient of one that no token chose begins with the scale of another's.
        """
        calibrating = autocast(enabled=False, recipe=self._run_by, calibrating=True, session=self._session)
        with every_expert(self.network):  # in the backward pass, too, which may run layers again
            with calibrating:
                result = loss(self._logits)
            result.backward()  # type: ignore[no-untyped-call]
        self.network.zero_grad(set_to_none=True)
        for mixture in mixtures(self.network).values():
            _lend_gradient_scales(mixture)


@torch.no_grad()
def _lend_gradient_scales(mixture: Experts) -> None:
    """Projections of experts that have seen no gradient take the smallest scale of those that have: that of the largest
    gradient. At scale 1, most of a gradient would become zero."""
    experts = [expert for expert in mixture if isinstance(expert, Expert)]
    for linears in zip(*(expert.linears() for expert in experts), strict=True):
        states = [linear.scaling["grad_output"] for linear in linears if isinstance(linear, Linear)]
        seen = [state.scale for state in states if bool(state.amax_history.any())]
        for state in states:
            if seen and not bool(state.amax_history.any()):
                state.scale.copy_(torch.stack(seen).min())


def mean_loss(batch: PackedBatch) -> Callable[[Logits], Tensor]:
    """For `Forward.observe`: a function that computes the mean of `summed_loss` over the targets of `batch`."""
    return lambda logits: summed_loss(logits(batch), batch.targets)[0] / len(batch.targets)
