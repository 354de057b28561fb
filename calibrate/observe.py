"""Observes every quantized tensor while a model runs: running maxima, counts, amax histories, and their scales.

The converted linears record amaxes in their `ScalingState`s, as in training, while
`autocast(enabled=False, calibrating=True)` keeps the computation in high precision. The observer reads the states after
every batch, because a history holds only the newest N-1 batches. The values stay on the device until `read_records`
copies those of all batches at once, because each copy would wait for the device. The running maximum covers all
batches. With `amax_compute_algo="max"` the scale comes from the running maximum, so the order of the batches does not
matter. With "most_recent" it comes from the last batch.

With gradients a batch is a forward and a backward pass. Without gradients the decoder runs layer by layer (passes.py),
with the same bits.

The keys and values of the attention have states of the same type (`model.layers.0.self_attn.k`), which `record_kv`
fills. Only `fp8.scaling.update` computes scales.

An expert that receives no token has no amax, so there is no scale for its inputs. This raises an error that names the
expert. If there are no more data, every token can be sent through every expert while observing. The amaxes of an expert
then include tokens that the router sends to other experts. The output of the model does not change.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from fp8serve.calibration.data import Batch
from fp8serve.calibration.passes import (
    Linears,
    attention_names,
    backward,
    entries_of_layer,
    forward,
    layer_indices,
    layerwise_passes,
    nonfinite_error,
    releasing_layers,
    with_activation_gradients,
)
from fp8serve.calibration.progress import Stages
from fp8serve.calibration.result import HISTORY_LENGTH, list_names
from fp8serve.errors import ScalesError
from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.ops.arithmetic import amax
from fp8serve.fp8.recipe import DelayedScaling, Recipe, as_delayed
from fp8serve.fp8.scaling import FIELDS, Entry, ScalingState, fp8_max, update
from fp8serve.model.building import AnyModel, Model
from fp8serve.model.network.experts import mixtures, reset_token_counts, route_to_all_experts
from fp8serve.ranks import ALONE, Ranks

Counts = dict[str, Tensor]  # by the name of a mixture: the number of tokens of each expert, int64 [E]


@contextmanager
def count_expert_tokens(decoder: AnyModel, *, all_experts: bool) -> Iterator[Counts]:
    """Counts the tokens of every expert inside the context; the yielded counts are filled when the context ends.

    With `all_experts` every expert computes every token, but a token counts only for the experts that its router
    chose.
    """
    counts = Counts()
    reset_token_counts(decoder)
    with route_to_all_experts(decoder) if all_experts else nullcontext():
        yield counts
    counts |= {name: mixture.tokens.cpu().clone() for name, mixture in mixtures(decoder).items()}


def unreached_experts(counts: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the experts that received no token."""
    return [f"{name}.experts.{i}" for name, tokens in counts.items() for i, n in enumerate(tokens.tolist()) if n == 0]


def unreached_experts_note(counts: Mapping[str, Tensor], *, all_experts: bool) -> tuple[str, ...]:
    """Returns a note for the report if some experts received no token, or else an empty tuple."""
    names = unreached_experts(counts)
    if not names:
        return ()
    result = "their scales come from tokens of other experts" if all_experts else "their inputs were not observed"
    return (f"The router sent no calibration token to {list_names(names)}; {result}.",)


@dataclass
class TensorRecord:
    """The observations of one tensor."""

    amax: float = 0.0
    batches: int = 0
    nonfinite: int = 0  # batches whose amax was infinite
    recent_amaxes: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY_LENGTH))  # for the report
    batch_amaxes: list[float] = field(default_factory=list)  # of every batch; 0 if the tensor did not occur


class Observer:
    """Records the amaxes of converted `linears`, and of the keys and values of the attention modules `kv_layers`.

    `target` is the recipe that the scales are for. `recipe` is the recipe to pass to `autocast` around every pass. If
    `scales_linears` is false, the amaxes of linears are only for the report.
    """

    def __init__(
        self,
        linears: Linears,
        target: DelayedScaling,
        *,
        gradients: bool = False,
        kv_layers: Iterable[str] = (),
        scales_linears: bool = True,
    ) -> None:
        self.linears, self.target, self.scales_linears = linears, target, scales_linears
        # a scale after each batch, a history of at least 2, no reduction over ranks
        history_len = max(2, target.amax_history_len)
        self.recipe = recipe = replace(target, interval=1, amax_history_len=history_len, reduce_amax=False)
        self.roles = ("input", "weight", "grad_output") if gradients else ("input", "weight")
        device = next(iter(linears.values())).weight.device
        names = [f"{layer}.{part}" for layer in kv_layers for part in "kv"]
        self.kv = {name: ScalingState.create(recipe.amax_history_len, device) for name in names}
        # `states()` creates all states now: created during a pass, between large temporaries, they would fragment the
        # heap by gigabytes.
        self.records = {name: TensorRecord() for name in self.states()}
        self._unread: list[tuple[tuple[str, ...], Tensor]] = []  # (names, rows of `_rows`) of batches, oldest first
        self.tokens = Counts()  # tokens of every expert

    def record_kv(self, layer: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Records the amaxes of keys and values [tokens, kv_heads, head_dim] after rotary embedding; returns both."""
        for part, x in (("k", k), ("v", v)):
            if state := self.kv.get(f"{layer}.{part}"):
                state.stage(amax(x.detach()))
        return k, v

    def states(self) -> dict[str, ScalingState]:
        by_linear = {name: linear.delayed_states(self.recipe) for name, linear in self.linears.items()}
        return {f"{name}.{role}": states[role] for name, states in by_linear.items() for role in self.roles} | self.kv

    def for_layer(self, decoder: AnyModel, index: int) -> "Observer":
        """Returns an observer of the tensors of one layer. It shares this one's states, records and unread batches."""
        observer = copy(self)
        observer.linears = entries_of_layer(decoder, index, self.linears)
        observer.kv = entries_of_layer(decoder, index, self.kv)
        return observer

    def remove_linear(self, linear: str) -> None:
        """Removes a linear that will not be quantized, and its records."""
        self.linears = {name: module for name, module in self.linears.items() if name != linear}
        for role in self.roles:
            del self.records[f"{linear}.{role}"]

    @torch.no_grad()
    def replay(self, batches: Sequence[Mapping[str, float]]) -> None:
        """Replaces all observations by the given amaxes of every batch, as if this observer had seen these batches."""
        states = self.states()
        entries = [Entry(state, fp8_max(self.recipe, name.rpartition(".")[2])) for name, state in states.items()]
        for name, state in states.items():
            initial = ScalingState.create(len(state.amax_history), state.scale.device)
            for column in FIELDS:
                getattr(state, column).copy_(getattr(initial, column))
            self.records[name] = TensorRecord()
        for amaxes in batches:
            for name, state in states.items():
                state.stage(torch.tensor(amaxes[name], device=state.scale.device))
            update(entries, self.recipe)
            self._store_states(states)
        self.read_records()

    @torch.no_grad()
    def end_batch(self) -> None:
        """Stores the amaxes of a batch; call it after the backward pass. `read_records` adds them to the records."""
        if self.kv:
            update([Entry(state, fp8_max(self.recipe, "k")) for state in self.kv.values()], self.recipe)
        self._store_states(self.states())

    def _store_states(self, states: Mapping[str, ScalingState]) -> None:
        if states:  # empty if the layer stays in high precision
            self._unread.append((tuple(states), _rows(list(states.values()))))

    def read_records(self) -> None:
        """Adds the amaxes of all batches since the last call to `records`, in one transfer from the device."""
        if not self._unread:
            return
        names = [name for batch, _ in self._unread for name in batch]
        rows = torch.cat([rows for _, rows in self._unread]).tolist()
        self._unread.clear()
        for name, (latest_amax, steps, nonfinite) in zip(names, rows, strict=True):
            _add_to_record(self.records[name], latest_amax, int(steps), int(nonfinite))


def _rows(states: Sequence[ScalingState]) -> Tensor:
    """Returns for each state [newest amax, recorded steps, nonfinite steps] as FP64 [states, 3]."""
    columns = (
        [s.amax_history[-1] for s in states],
        [s.steps for s in states],
        [s.nonfinite for s in states],
    )
    return torch.stack([torch.stack(column).double() for column in columns], dim=1)


def _add_to_record(record: TensorRecord, latest_amax: float, steps: int, nonfinite: int) -> None:
    has_occurred = steps > record.batches
    record.batch_amaxes.append(math.inf if nonfinite > record.nonfinite else latest_amax if has_occurred else 0.0)
    if has_occurred:
        record.amax = max(record.amax, latest_amax)
        record.recent_amaxes.append(latest_amax)
    record.batches, record.nonfinite = steps, nonfinite


def final_states(observer: Observer) -> dict[str, ScalingState]:
    """Returns the states with scales from all batches and with histories of the length that the recipe asks for."""
    states, recipe = observer.states(), observer.target
    if recipe.amax_compute_algo == "max":
        amaxes = {name: record.amax for name, record in observer.records.items()}
        for name, scale in scales_of(amaxes, recipe, next(iter(states.values())).scale.device).items():
            states[name].scale.copy_(scale)
    for state in states.values():
        state.resize(recipe.amax_history_len)
    return states


def scales_of(amaxes: Mapping[str, float], recipe: DelayedScaling, device: torch.device) -> dict[str, Tensor]:
    """Returns the scales, FP32 [], that delayed scaling computes for tensors from their amaxes, by name."""
    if not amaxes:
        return {}
    scales, counts = torch.ones(len(amaxes)), torch.zeros(2, len(amaxes), dtype=torch.int64)
    histories = torch.zeros(len(amaxes), 2)
    histories[:, 0] = torch.tensor(list(amaxes.values()), dtype=torch.float32)  # staged
    states = map(ScalingState, scales.unbind(), histories.unbind(), *(column.unbind() for column in counts))
    maxima = (fp8_max(recipe, name.rpartition(".")[2]) for name in amaxes)
    update([Entry(*entry) for entry in zip(states, maxima, strict=True)], replace(recipe, interval=1))
    return dict(zip(amaxes, scales.to(device).unbind(), strict=True))


@torch.no_grad()
def share_weight_scales(states: Mapping[str, ScalingState], groups: Iterable[Sequence[str]]) -> None:
    """Gives the weights of each group of linears one scale: the smallest, which is that of the largest amax.

    Their histories become equal, too, because the scale of a state must represent its history.
    """
    for group in groups:
        members = [states[f"{linear}.weight"] for linear in group]
        scale = torch.stack([state.scale for state in members]).amin()
        history = torch.stack([state.amax_history for state in members]).amax(0)
        for state in members:
            state.scale.copy_(scale)
            state.amax_history.copy_(history)


def check_records(records: Mapping[str, TensorRecord], needed: Collection[str], batches: int) -> None:
    """Raises ScalesError if a tensor was not finite, or if a tensor in `needed` was always zero or never observed."""
    for name, record in records.items():
        if record.nonfinite:
            raise ScalesError(
                f"{name} was not finite in {record.nonfinite} of {batches} batches; "
                "the model overflows on these data, so no scale can represent this tensor."
            )
    missing = [name for name in needed if records[name].amax == 0]
    if missing:
        raise ScalesError(
            f"{missing[0]} was zero or never observed in {batches} batches ({len(missing)} of {len(records)} tensors), "
            "so it can have no scale; calibrate on data that reach this tensor, or check the model's weights."
        )


def check_experts(tokens: Counts, batches: int) -> None:
    """Raises ScalesError if some experts received no token."""
    if names := unreached_experts(tokens):
        raise ScalesError(
            f"No token of {batches} batches reached {list_names(names)}, so no scale can be found for their inputs; "
            "calibrate on more data, or send every token through every expert while observing (--all-experts)."
        )


def make_observer(
    decoder: AnyModel, linears: Linears, recipe: Recipe, *, kv_cache: bool = False, gradients: bool = False
) -> Observer:
    """Returns a new observer. If `recipe` is not delayed scaling, the observer uses the default delayed recipe, and
    only keys and values need scales, with NVFP4 inputs the linears, too (`stored_states`). An encoder has no keys,
    values and gradients to observe."""
    target = as_delayed(recipe)
    scales_linears = target is not None or recipe.specs.linear["input"].is_4bit
    kv_layers = attention_names(cast(Model, decoder)) if kv_cache else ()
    return Observer(
        linears, target or DelayedScaling(), gradients=gradients, kv_layers=kv_layers, scales_linears=scales_linears
    )


def observe(
    decoder: AnyModel,
    observer: Observer,
    batches: Sequence[Batch],
    stages: Stages | None = None,
    ranks: Ranks = ALONE,
    *,
    all_experts: bool = False,
) -> Observer:
    """Runs every batch once in high precision and returns the observer, which has the amaxes.

    With `all_experts` every token passes through all experts of a mixture. Raises ScalesError if a tensor is not finite
    or can have no scale, or if an expert received no token.
    """
    with ranks.shared_errors(), count_expert_tokens(decoder, all_experts=all_experts) as tokens:
        if "grad_output" in observer.roles:
            _forward_and_backward(cast(Model, decoder), ranks.shard(batches), observer, stages)
        else:
            _layer_by_layer(decoder, ranks.shard(batches), observer, stages)
    of_ranks = ranks.gather(tokens)
    observer.tokens = {name: torch.stack([counts[name] for counts in of_ranks]).sum(0) for name in tokens}
    if ranks.size > 1:
        # Rank r runs the batches r, r + size, r + 2 * size and so on.
        columns = {name: record.batch_amaxes for name, record in observer.records.items()}
        shares = ranks.gather([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
        observer.replay([shares[index % len(shares)][index // len(shares)] for index in range(len(batches))])
    if observer.scales_linears and not all_experts:
        check_experts(observer.tokens, len(batches))
    check_records(observer.records, observer.records if observer.scales_linears else observer.kv, len(batches))
    return observer


@torch.no_grad()
def _layer_by_layer(decoder: AnyModel, batches: Sequence[Batch], observer: Observer, stages: Stages | None) -> None:
    passes = layerwise_passes(decoder, batches, observer.record_kv)
    for index in layer_indices(decoder, "observe", stages):
        layer_observer = observer.for_layer(decoder, index)
        for layerwise_pass in passes:
            with autocast(enabled=False, calibrating=True, recipe=observer.recipe):
                layerwise_pass.advance(index)
            layer_observer.end_batch()
    observer.read_records()
    for layerwise_pass in passes:
        _check_finite(decoder, decoder.apply_final_norm(layerwise_pass.hidden), observer, layerwise_pass.batch)


def _forward_and_backward(decoder: Model, batches: Sequence[Batch], observer: Observer, stages: Stages | None) -> None:
    with with_activation_gradients(decoder), releasing_layers(decoder):
        for batch in (stages or Stages()).steps("observe", batches):
            with autocast(enabled=False, calibrating=True, recipe=observer.recipe):
                hidden = forward(decoder, batch, observer.record_kv)
            _check_finite(decoder, hidden, observer, batch)
            backward(decoder, hidden, batch.targets)
            observer.end_batch()
    observer.read_records()


def _check_finite(decoder: AnyModel, hidden: Tensor, observer: Observer, batch: Batch) -> None:
    if not bool(hidden.isfinite().all()):
        raise nonfinite_error(decoder, observer.linears, batch)
