"""The state of a running calibration, and the two judges of its error.

For a model that generates text, `DivergenceJudge` measures the error of FP8 by the predictions: perplexity, KL
divergence, and the share of each layer. For a model that embeds, `CosineJudge` measures the cosine of its vectors with
those in high precision. An encoder is small, so the layers that stay in BF16 are chosen by measurement: one pass for
each group of layers, with only this group in FP8.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from fp8serve.calibration.compare import compare, freeze_function, kl_shares
from fp8serve.calibration.data import Batches
from fp8serve.calibration.embedding import CosineSummary
from fp8serve.calibration.measure import LayerTally, read_tallies
from fp8serve.calibration.observe import Observer
from fp8serve.calibration.options import CalibrationOptions
from fp8serve.calibration.passes import release_weights, replaced_modules, run_in_fp8
from fp8serve.calibration.progress import Stages
from fp8serve.calibration.result import HealingReport, LayerReport, LinearGroup, Quality, SmoothingReport
from fp8serve.calibration.techniques.precision import (
    bytes_saved,
    groups_by_cost,
    min_groups_in_bf16,
    restore_linears,
    serving_groups,
)
from fp8serve.errors import RecipeError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.building import AnyModel, Model, hidden_states
from fp8serve.model.network.pooling import Pooling

Layers = tuple[LayerReport, ...]


@dataclass
class Job:
    """The state of a running calibration, in which `linears` become FP8.

    If `rounded` is None, their weights are rounded to nearest with the scales in `states`.
    """

    source: Path
    recipe: Recipe
    options: CalibrationOptions
    stages: Stages
    model: AnyModel
    linears: dict[str, Linear]
    batches: Batches
    observer: Observer
    judge: "DivergenceJudge | CosineJudge"
    states: dict[str, ScalingState] = field(default_factory=dict)
    smoothed: Mapping[str, Tensor] = field(default_factory=dict)  # parameters that replace those of the source
    rounded: dict[str, FrozenLinear] | None = None
    in_bf16: list[LinearGroup] = field(default_factory=list)
    smoothing: SmoothingReport | None = None
    healing: HealingReport | None = None
    notes: tuple[str, ...] = ()  # sentences about unexpected facts

    @property
    def decoder(self) -> Model:
        """The model as a decoder; only for models that generate text."""
        return cast(Model, self.model)

    def leave_in_bf16(self, groups: Iterable[LinearGroup]) -> None:
        """Excludes groups of linears from FP8 and removes their scales."""
        for group in groups:
            self.in_bf16.append(group)
            restore_linears(self.model, group.names)
            for name in group.names:
                del self.linears[name]
                self.observer.remove_linear(name)
                for role in self.observer.roles:
                    self.states.pop(f"{name}.{role}", None)


def _leave_in_bf16(
    job: Job, candidates: Sequence[LinearGroup], is_met: Callable[[Collection[str]], bool], refusal: str
) -> None:
    """Leaves as few of the first `candidates` in BF16 as `is_met`, called with the names of the FP8 linears, allows.

    Raises RecipeError with `refusal` if all of them would stay in BF16.
    """

    def is_met_without(groups: Sequence[LinearGroup]) -> bool:
        excluded = {name for group in groups for name in group.names}
        return is_met([name for name in job.linears if name not in excluded])

    count = min_groups_in_bf16(candidates, is_met_without)
    if count == len(candidates):
        raise RecipeError(refusal)
    job.leave_in_bf16(candidates[:count])


class DivergenceJudge:
    """Measures the error of a model that generates text."""

    def meet_target(self, job: Job) -> None:
        """Leaves as few linears in BF16 as `target_kl` allows. Raises RecipeError if it needs all of them."""
        if (target := job.options.target_kl) is None:
            return

        def is_met(names: Collection[str]) -> bool:
            quality, _ = self.compare(job, {name: job.linears[name] for name in names})
            return (quality.kl_divergence or 0.0) <= target

        refusal = "The target needs every linear layer in high precision; set a higher limit, or do not calibrate."
        _leave_in_bf16(job, groups_by_cost(job.linears, self._shares(job)), is_met, refusal)

    def measure(self, job: Job) -> tuple[Quality, Layers]:
        """Returns the quality of the model, and the statistics of every linear."""
        quality, layers = self.compare(job)
        shares = self._shares(job)
        return quality, tuple(tally.report(name, shares.get(name)) for name, tally in layers.items())

    def compare(
        self, job: Job, linears: Mapping[str, Linear] | None = None, rounded: Mapping[str, FrozenLinear] | None = None
    ) -> tuple[Quality, dict[str, LayerTally]]:
        """Measures the error with `linears` in FP8, in total and for each; the default are the linears of the job."""
        linears = job.linears if linears is None else linears
        rounded = job.rounded if rounded is None else rounded
        return compare(job.decoder, linears, job.batches.held_out, job.recipe, job.states, job.stages, rounded)

    def _shares(self, job: Job) -> dict[str, float]:
        """Returns the nats per token that the FP8 of each linear adds to the KL divergence on the held-out batches."""
        freeze = freeze_function(job.recipe, job.states, job.rounded)

        def quantized_output(name: str, linear: nn.Module, x: Tensor) -> Tensor:
            frozen = freeze(name, job.linears[name])
            y: Tensor = frozen(x)
            release_weights({name: frozen})
            return y

        return kl_shares(job.decoder, job.linears, job.batches.held_out, quantized_output, stages=job.stages)


class CosineJudge:
    """Measures the error of a model that embeds: compares the vectors of each held-out text by both models."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._exact: Tensor | None = None

    def meet_target(self, job: Job) -> None:
        """See `DivergenceJudge`. The groups that change the vectors most per byte saved stay in BF16 first."""
        if (cosine := job.options.target_cosine) is None:
            return
        frozen = self._frozen(job)

        def is_met(names: Collection[str]) -> bool:
            return self._compare(job, {name: frozen[name] for name in names}).median >= cosine

        candidates = []
        for names in job.stages.steps("rank", serving_groups(frozen)):
            group_cosine = self._compare(job, {name: frozen[name] for name in names}).mean
            size = sum(bytes_saved(job.linears[name]) for name in names)
            candidates.append(LinearGroup(names, size, None, group_cosine))
        candidates.sort(key=lambda group: ((group.cosine or 0.0) - 1) / group.bytes)
        refusal = (
            f"A cosine of {cosine} needs every linear layer in high precision; set a lower target, or do not calibrate."
        )
        _leave_in_bf16(job, candidates, is_met, refusal)

    def measure(self, job: Job) -> tuple[CosineSummary, Layers]:
        exact, frozen = self._exact_vectors(job), self._frozen(job)
        tallies = {name: LayerTally() for name in frozen}
        for name, layer in frozen.items():
            tallies[name].add_weight(job.linears[name].weight, layer)
        with run_in_fp8(job.linears, lambda name, linear: frozen[name], tallies):
            vectors = self._vectors(job, "compare")
        read_tallies(tallies.values())
        return CosineSummary.of(exact, vectors), tuple(tally.report(name) for name, tally in tallies.items())

    def _frozen(self, job: Job) -> dict[str, FrozenLinear]:
        """Returns every linear that becomes FP8 in the form in which it is served."""
        freeze = freeze_function(job.recipe, job.states, job.rounded)
        frozen = {name: freeze(name, linear) for name, linear in job.linears.items()}
        for layer in frozen.values():
            layer.make_rows_independent()
        return frozen

    def _compare(self, job: Job, frozen: Mapping[str, FrozenLinear]) -> CosineSummary:
        """Compares the exact vectors with the vectors of the model in which only the `frozen` linears are in FP8."""
        exact = self._exact_vectors(job)
        with replaced_modules(job.model, frozen):
            return CosineSummary.of(exact, self._vectors(job))

    def _exact_vectors(self, job: Job) -> Tensor:
        if self._exact is None:
            self._exact = self._vectors(job)
        return self._exact

    @torch.no_grad()
    def _vectors(self, job: Job, stage: str | None = None) -> Tensor:
        """Returns the vectors of the held-out texts by the model in its current state."""
        held_out = job.batches.held_out
        batches = held_out if stage is None else job.stages.steps(stage, held_out)
        return torch.cat([self._pooling(hidden_states(job.model, b.ids, b.lengths), b.lengths) for b in batches])
