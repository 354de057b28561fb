"""Observes every quantized tensor while a model runs: running maxima, counts, histories, and scales from them.

The amaxes themselves are recorded where training records them, in the `ScalingState`s of the converted linears, while
`autocast(enabled=False, calibrating=True)` keeps the maths in high precision. Here they are read out after every batch,
so that no batch is lost when the history is shorter than the data: a history holds the newest N-1 batches, the running
maximum covers all of them. With `amax_compute_algo="max"` the scale comes from the running maximum and does not depend
on the order of the batches; with "most_recent" it is that of the last batch, by definition.

With gradients a batch is a forward and a backward pass; otherwise the decoder is run layer by layer (passes.py), to the
same bits.

Keys and values of the attention have states of the same kind here (`model.layers.0.self_attn.k`), fed by `tap`.
Scales are made by `fp8.scaling.update` only.

An expert that no token reaches has no amax, so no scale can be found for its inputs. The error names the expert; no
scale is made up. Without more data, every token can be routed through every expert while observing: an expert is then
measured on tokens that its router sends elsewhere, and the model's result does not change.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from fp8serve.calibration.data import Batch
from fp8serve.calibration.passes import (
    Linears,
    attention_names,
    backward,
    blame,
    forward,
    layers,
    releasing,
    streams,
    tracked,
    within,
)
from fp8serve.calibration.progress import Stages
from fp8serve.calibration.result import HISTORY_LENGTH
from fp8serve.errors import ScalesError
from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.ops.arithmetic import amax
from fp8serve.fp8.recipe import DelayedScaling, Recipe, delayed
from fp8serve.fp8.scaling import FIELDS, Entry, ScalingState, fp8_max, update
from fp8serve.model.building import AnyModel, Model, hidden_states
from fp8serve.model.network.experts import every_expert, mixtures, reset_token_counts
from fp8serve.ranks import ALONE, Ranks

Counts = dict[str, Tensor]  # by the name of a mixture: tokens that each expert was given, int64 [E]
NAMED = 3  # of many
T = TypeVar("T")


@contextmanager
def counting(decoder: Model, *, all_experts: bool) -> Iterator[Counts]:
    """Inside the context, tokens are counted from zero; the counts are available at the end. all_experts: all tokens
    run through all experts, but are counted where the router sends them."""
    counts = Counts()
    reset_token_counts(decoder)
    with every_expert(decoder) if all_experts else nullcontext():
        yield counts
    counts |= {name: mixture.tokens.cpu().clone() for name, mixture in mixtures(decoder).items()}


def sum_counts(shares: Sequence[Counts]) -> Counts:
    """The counts of several processes."""
    return {name: torch.stack([share[name] for share in shares]).sum(0) for name in shares[0]}


def unreached_experts(counts: Mapping[str, Tensor]) -> list[str]:
    """The names of the experts without a token."""
    return [f"{name}.experts.{i}" for name, tokens in counts.items() for i, n in enumerate(tokens.tolist()) if n == 0]


def listed(names: Sequence[str]) -> str:
    """The first of them, and how many more."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def experts_note(counts: Mapping[str, Tensor], *, all_experts: bool) -> tuple[str, ...]:
    """A sentence for the report where experts went without tokens."""
    names = unreached_experts(counts)
    if not names:
        return ()
    message = "their scales come from tokens of other experts" if all_experts else "nothing of them was observed"
    return (f"The router sent no calibration token to {listed(names)}; {message}.",)


@dataclass
class Seen:
    """One tensor's record. `newest` are the amaxes of the last batches, for the report."""

    amax: float = 0.0
    batches: int = 0
    nonfinite: int = 0  # batches whose amax was infinite
    newest: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY_LENGTH))
    staged: list[float] = field(default_factory=list)  # the amax of every batch; 0 where the tensor did not occur


class Observer:
    """Watches converted `linears` (by name) and the keys and values of the attention modules named in `kv_layers`.

    `recipe` is the argument of `autocast` around every pass; `target` is the recipe for which the caller needs scales.
    """

    def __init__(
        self,
        linears: Linears,
        target: DelayedScaling,
        *,
        gradients: bool = False,
        kv_layers: Iterable[str] = (),
    ) -> None:
        self.linears, self.target = linears, target
        self.recipe = recipe = observation_recipe(target)
        self.roles = ("input", "weight", "grad_output") if gradients else ("input", "weight")
        device = next(iter(linears.values())).weight.device
        names = [f"{layer}.{part}" for layer in kv_layers for part in "kv"]
        self.kv = {name: ScalingState.create(recipe.amax_history_len, device) for name in names}
        # All states are made here: if made during a pass, between large temporaries, they would fragment the heap by
        # gigabytes.
        self.seen = {name: Seen() for name in self.states()}
        self.tokens = Counts()  # given to experts

    def tap(self, layer: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Record keys and values [tokens, kv_heads, head_dim] as they enter the cache (after rotary embedding)."""
        for part, x in (("k", k), ("v", v)):
            if state := self.kv.get(f"{layer}.{part}"):
                state.stage(amax(x.detach()))
        return k, v

    def states(self) -> dict[str, ScalingState]:
        """Every state by tensor name."""
        owned = {name: linear.delayed_states(self.recipe) for name, linear in self.linears.items()}
        return {f"{name}.{role}": states[role] for name, states in owned.items() for role in self.roles} | self.kv

    def of_layer(self, decoder: Model, index: int) -> "Observer":
        """Watches only the tensors of one layer, in the same states and records."""
        part = copy(self)
        part.linears, part.kv = within(decoder, index, self.linears), within(decoder, index, self.kv)
        return part

    def forget(self, linear: str) -> None:
        """Drop the observations of a linear that will not be quantized."""
        self.linears = {name: module for name, module in self.linears.items() if name != linear}
        for role in self.roles:
            del self.seen[f"{linear}.{role}"]

    @torch.no_grad()
    def replay(self, batches: Sequence[Mapping[str, float]]) -> None:
        """Take in the amaxes of only these batches, as `end_batch` would have."""
        states = self.states()
        entries = [Entry(state, fp8_max(self.recipe, name.rpartition(".")[2])) for name, state in states.items()]
        for name, state in states.items():
            _begin_anew(state)
            self.seen[name] = Seen()
        for amaxes in batches:
            for name, state in states.items():
                state.stage(torch.tensor(amaxes[name], device=state.scale.device))
            update(entries, self.recipe)
            self._read(states)

    @torch.no_grad()
    def end_batch(self) -> None:
        """Read what this batch recorded; after the context and the backward pass have ended. One transfer per batch."""
        if self.kv:
            update([Entry(state, fp8_max(self.recipe, "k")) for state in self.kv.values()], self.recipe)
        self._read(self.states())

    def _read(self, states: Mapping[str, ScalingState]) -> None:
        if not states:  # of a layer that stays in high precision
            return
        rows = torch.stack([_row(state) for state in states.values()]).tolist()
        for name, (newest, steps, nonfinite) in zip(states, rows, strict=True):
            _note(self.seen[name], newest, int(steps), int(nonfinite))


def observation_recipe(recipe: DelayedScaling) -> DelayedScaling:
    """`recipe` as calibration runs it: in this process, every batch makes a scale, and a history can hold one."""
    return replace(recipe, interval=1, amax_history_len=max(2, recipe.amax_history_len), reduce_amax=False)


def _begin_anew(state: ScalingState) -> None:
    fresh = ScalingState.create(len(state.amax_history), state.scale.device)
    for name in FIELDS:
        getattr(state, name).copy_(getattr(fresh, name))


def _row(state: ScalingState) -> Tensor:
    """[newest amax, steps recorded, steps dropped] as FP64 [3]."""
    return torch.stack([x.double() for x in (state.amax_history[-1], state.steps, state.nonfinite)])


def _note(seen: Seen, newest: float, steps: int, nonfinite: int) -> None:
    seen.staged.append(math.inf if nonfinite > seen.nonfinite else newest if steps > seen.batches else 0.0)
    if steps > seen.batches:  # a tensor that did not occur in this batch has not moved
        seen.amax = max(seen.amax, newest)
        seen.newest.append(newest)
    seen.batches, seen.nonfinite = steps, nonfinite


def settle(observer: Observer, chosen: Mapping[str, float] | None = None) -> dict[str, ScalingState]:
    """The final states, with scales from all batches and histories of the requested length.

    chosen: amaxes from which the scales of some tensors are made instead of from the observed ones. Their histories are
    limited to these, because a state's scale must represent its history.
    """
    states, recipe, chosen = observer.states(), observer.target, chosen or {}
    amaxes = {n: seen.amax for n, seen in observer.seen.items() if recipe.amax_compute_algo == "max"} | dict(chosen)
    for name, largest in amaxes.items():
        states[name].scale.copy_(scale_of(largest, name, recipe).to(states[name].scale.device))
    for name, largest in chosen.items():
        states[name].amax_history.clamp_(max=largest)
    for state in states.values():
        state.resize(recipe.amax_history_len)
    return states


def scale_of(largest: float, name: str, recipe: DelayedScaling) -> Tensor:
    """The scale FP32 [] that delayed scaling gives the tensor `name` after seeing the amax `largest`."""
    state = ScalingState.create(2, torch.device("cpu"))
    state.stage(torch.tensor(largest, dtype=torch.float32))
    update([Entry(state, fp8_max(recipe, name.rpartition(".")[2]))], replace(recipe, interval=1))
    return state.scale


def check(seen: Mapping[str, Seen], needed: Collection[str], batches: int) -> None:
    """ScalesError naming the first tensor that was infinite, or that is `needed` and was always zero or never seen."""
    for name, record in seen.items():
        if record.nonfinite:
            raise ScalesError(
                f"{name} was not finite in {record.nonfinite} of {batches} batches; "
                "the model overflows on these data, so no scale can represent it."
            )
    missing = [name for name in needed if seen[name].amax == 0]
    if missing:
        raise ScalesError(
            f"{missing[0]} was zero or never observed in {batches} batches ({len(missing)} of {len(seen)} tensors); "
            "it would get a meaningless scale: calibrate on data that reach it, or check the model's weights."
        )


def check_experts(tokens: Counts, batches: int) -> None:
    """ScalesError naming experts that no token reached."""
    if names := unreached_experts(tokens):
        raise ScalesError(
            f"No token of {batches} batches reached {listed(names)}, so no scale can be found for their inputs; "
            "calibrate on more data, or send every token through every expert while observing (--all-experts)."
        )


def observer_of(
    decoder: Model, linears: Linears, recipe: Recipe, *, kv_cache: bool = False, gradients: bool = False
) -> Observer:
    """An observer that has seen nothing yet. A recipe that scales by content is observed as the default delayed
    recipe."""
    target = delayed(recipe) or DelayedScaling()
    return Observer(linears, target, gradients=gradients, kv_layers=attention_names(decoder) if kv_cache else ())


def observe(
    decoder: Model,
    linears: Linears,
    batches: Sequence[Batch],
    recipe: Recipe,
    *,
    kv_cache: bool = False,
    gradients: bool = False,
    all_experts: bool = False,
    stages: Stages | None = None,
    ranks: Ranks = ALONE,
) -> Observer:
    """Run every batch once in high precision and record. all_experts: all tokens through all experts of a mixture.

    ScalesError: a tensor is not finite or can have no scale, or no token reached an expert.
    """
    observer = observer_of(decoder, linears, recipe, kv_cache=kv_cache, gradients=gradients)
    passes = _forward_and_backward if gradients else _layer_by_layer
    with ranks.together(), counting(decoder, all_experts=all_experts) as tokens:
        passes(decoder, ranks.own(batches), observer, stages)
    observer.tokens = sum_counts(ranks.gather(tokens))
    if ranks.size > 1:
        # batches are dealt out to ranks one by one
        columns = {name: seen.staged for name, seen in observer.seen.items()}
        shares = ranks.gather([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
        observer.replay([shares[index % len(shares)][index // len(shares)] for index in range(len(batches))])
    needed = observer.kv if delayed(recipe) is None else observer.seen
    if needed is observer.seen and not all_experts:
        check_experts(observer.tokens, len(batches))
    check(observer.seen, needed, len(batches))
    return observer


@torch.no_grad()
def observe_texts(
    model: AnyModel, observer: Observer, batches: Sequence[Batch], recipe: Recipe, stages: Stages
) -> Observer:
    """As `observe`, of a model that reads whole texts (`model.building`), into `observer`."""
    for batch in stages.steps("observe", batches):
        with autocast(enabled=False, calibrating=True, recipe=observer.recipe), torch.enable_grad():
            hidden_states(model, batch.ids, batch.lengths)
        observer.end_batch()
    check(observer.seen, () if delayed(recipe) is None else observer.seen, len(batches))
    return observer


@torch.no_grad()
def _layer_by_layer(decoder: Model, batches: Sequence[Batch], observer: Observer, stages: Stages | None) -> None:
    running = streams(decoder, batches, observer.tap)
    for index in layers(decoder, "observe", stages):
        part = observer.of_layer(decoder, index)
        for stream in running:
            with autocast(enabled=False, calibrating=True, recipe=observer.recipe):
                stream.advance(index)
            part.end_batch()
    for stream in running:
        _check_finite(decoder, decoder.leave(stream.hidden), observer, stream.batch)


def _forward_and_backward(decoder: Model, batches: Sequence[Batch], observer: Observer, stages: Stages | None) -> None:
    with tracked(decoder), releasing(decoder):
        for batch in (stages or Stages()).steps("observe", batches):
            with autocast(enabled=False, calibrating=True, recipe=observer.recipe):
                hidden = forward(decoder, batch, observer.tap)
            _check_finite(decoder, hidden, observer, batch)
            backward(decoder, hidden, batch.targets)
            observer.end_batch()


def _check_finite(decoder: Model, hidden: Tensor, observer: Observer, batch: Batch) -> None:
    if not bool(hidden.isfinite().all()):
        raise blame(decoder, observer.linears, batch)
