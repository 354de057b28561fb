"""A running calibration, and the two judges of its quality.

A model that writes text is judged by the divergence of its predictions (`Divergence`: perplexity, KL, and each layer's
share of it), one that embeds by the cosine of its vectors with those in high precision (`Cosine`). An encoder is small,
so its choice of layers that stay in BF16 is measured: every choice alone in FP8, with one pass for each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from fp8serve.calibration.compare import compare, freezer, kl_shares
from fp8serve.calibration.data import Batches
from fp8serve.calibration.embedding import Closeness
from fp8serve.calibration.measure import LayerTally
from fp8serve.calibration.observe import Observer, observe, observe_texts
from fp8serve.calibration.options import CalibrationOptions
from fp8serve.calibration.passes import in_fp8, in_place, release_weights
from fp8serve.calibration.progress import Stages
from fp8serve.calibration.result import HealingReport, LayerReport, LinearGroup, Quality, SmoothingReport
from fp8serve.calibration.techniques.precision import Target, choices, fewest, ordered, restore, saved
from fp8serve.errors import RecipeError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.building import AnyModel, Model, hidden_states
from fp8serve.model.network.pooling import Pooling
from fp8serve.ranks import ALONE, Ranks

Layers = tuple[LayerReport, ...]


@dataclass
class Job:
    """`linears` become FP8, by name: as they are in `rounded`, or else rounded to nearest by `states`."""

    source: Path
    recipe: Recipe
    options: CalibrationOptions
    stages: Stages
    model: AnyModel
    linears: dict[str, Linear]
    batches: Batches
    observer: Observer
    judge: "Judge"
    states: dict[str, ScalingState] = field(default_factory=dict)
    smoothed: Mapping[str, Tensor] = field(default_factory=dict)  # parameters that are not those of the source
    rounded: dict[str, FrozenLinear] | None = None
    in_bf16: list[LinearGroup] = field(default_factory=list)
    smoothing: SmoothingReport | None = None
    healing: HealingReport | None = None
    notes: tuple[str, ...] = ()  # sentences about anything unexpected

    @property
    def decoder(self) -> Model:
        """The model, if it writes text."""
        return cast(Model, self.model)

    def leave_in_bf16(self, groups: Iterable[LinearGroup]) -> None:
        """These linears stay in high precision: none of their scales is stored."""
        for group in groups:
            self.in_bf16.append(group)
            restore(self.model, group.names)
            for name in group.names:
                del self.linears[name]
                self.observer.forget(name)
                for role in self.observer.roles:
                    self.states.pop(f"{name}.{role}", None)


class Judge(Protocol):
    """Observes a job's calibration batches, and measures the cost of FP8 on its held-out ones."""

    def observe(self, job: Job, ranks: Ranks = ALONE) -> Observer: ...

    def meet_target(self, job: Job) -> None:
        """Leaves as many linears in high precision as the target needs. RecipeError when it needs all."""

    def measure(self, job: Job) -> tuple[Any, Layers]: ...


class Divergence:
    """See `Judge`; for models that predict the next token."""

    def observe(self, job: Job, ranks: Ranks = ALONE) -> Observer:
        options = job.options
        return observe(
            job.decoder, job.linears, job.batches.calibration, job.recipe, kv_cache=options.kv_cache,
            gradients=options.gradients, all_experts=options.all_experts, stages=job.stages, ranks=ranks,
        )  # fmt: skip

    def meet_target(self, job: Job) -> None:
        if (target := Target.of(job.options)) is None:
            return

        def is_met(groups: Sequence[LinearGroup]) -> bool:
            names = {name for group in groups for name in group.names}
            return target.is_met(self.compare(job, {n: x for n, x in job.linears.items() if n not in names})[0])

        candidates = ordered(job.linears, self._shares(job))
        count = fewest(candidates, is_met)
        if count == len(candidates):
            raise RecipeError(
                "The target asks for every linear layer in high precision; allow more, or do not calibrate."
            )
        job.leave_in_bf16(candidates[:count])

    def measure(self, job: Job) -> tuple[Quality, Layers]:
        quality, layers = self.compare(job)
        shares = self._shares(job)
        return quality, tuple(tally.report(name, shares.get(name)) for name, tally in layers.items())

    def compare(
        self, job: Job, linears: Mapping[str, Linear] | None = None, rounded: Mapping[str, FrozenLinear] | None = None
    ) -> tuple[Quality, dict[str, LayerTally]]:
        """The cost of these linears in FP8 or of all, in total and for each. `rounded`: instead of the job's."""
        linears = job.linears if linears is None else linears
        rounded = job.rounded if rounded is None else rounded
        return compare(job.decoder, linears, job.batches.held_out, job.recipe, job.states, job.stages, rounded)

    def _shares(self, job: Job) -> dict[str, float]:
        """What each linear's FP8 adds to the KL divergence on the held-out batches, nats per token."""
        freeze = freezer(job.recipe, job.states, job.rounded)

        def lossy(name: str, linear: nn.Module, x: Tensor) -> Tensor:
            frozen = freeze(name, job.linears[name])
            y: Tensor = frozen(x)
            release_weights({name: frozen})
            return y

        return kl_shares(job.decoder, job.linears, job.batches.held_out, lossy, stages=job.stages)


class Cosine:
    """See `Judge`; for models that embed. There are no next tokens, so both models embed each held-out text."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._exact: Tensor | None = None

    def observe(self, job: Job, ranks: Ranks = ALONE) -> Observer:
        return observe_texts(job.model, job.observer, job.batches.calibration, job.recipe, job.stages)

    def meet_target(self, job: Job) -> None:
        """Starts with the linears whose FP8 moves vectors most for each byte that it saves."""
        if (cosine := job.options.target_cosine) is None:
            return
        frozen = self._frozen(job)

        def is_met(groups: Sequence[LinearGroup]) -> bool:
            names = {name for group in groups for name in group.names}
            return self._closeness(job, {n: x for n, x in frozen.items() if n not in names}).median >= cosine

        candidates = []
        for names in job.stages.steps("rank", choices(frozen)):
            alone = self._closeness(job, {name: frozen[name] for name in names}).mean
            candidates.append(LinearGroup(names, sum(saved(job.linears[name]) for name in names), None, alone))
        candidates.sort(key=lambda group: ((group.cosine or 0.0) - 1) / group.bytes)
        count = fewest(candidates, is_met)
        if count == len(candidates):
            raise RecipeError(
                f"A cosine of {cosine} asks for every linear layer in high precision; allow less, or do not calibrate."
            )
        job.leave_in_bf16(candidates[:count])

    def measure(self, job: Job) -> tuple[Closeness, Layers]:
        exact, frozen = self._in_high_precision(job), self._frozen(job)
        tallies = {name: LayerTally() for name in frozen}
        for name, layer in frozen.items():
            tallies[name].add_weight(job.linears[name].weight, layer)
        with in_fp8(job.linears, lambda name, linear: frozen[name], tallies):
            vectors = self._vectors(job, "compare")
        return Closeness.of(exact, vectors), tuple(tally.report(name) for name, tally in tallies.items())

    def _frozen(self, job: Job) -> dict[str, FrozenLinear]:
        """Every linear that becomes FP8, as it is served."""
        freeze = freezer(job.recipe, job.states, job.rounded)
        frozen = {name: freeze(name, linear) for name, linear in job.linears.items()}
        for layer in frozen.values():
            layer.make_rows_independent()
        return frozen

    def _closeness(self, job: Job, frozen: Mapping[str, FrozenLinear]) -> Closeness:
        """Of the vectors with these linears in FP8 and the others in high precision."""
        exact = self._in_high_precision(job)
        with in_place(job.model, frozen):
            return Closeness.of(exact, self._vectors(job))

    def _in_high_precision(self, job: Job) -> Tensor:
        if self._exact is None:
            self._exact = self._vectors(job)
        return self._exact

    @torch.no_grad()
    def _vectors(self, job: Job, stage: str | None = None) -> Tensor:
        """The vectors of the held-out texts by the current model."""
        held_out = job.batches.held_out
        batches = held_out if stage is None else job.stages.steps(stage, held_out)
        return torch.cat([self._pooling(hidden_states(job.model, b.ids, b.lengths), b.lengths) for b in batches])
