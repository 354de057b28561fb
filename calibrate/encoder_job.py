"""A running calibration of a model that embeds: the model, its observations, and its cost as it is served."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fp8serve.errors import RecipeError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.building import AnyModel
from fp8serve.model.network.pooling import Pooling
from fp8serve.model.reading import hidden_states

from .closeness import Closeness
from .compare import freezer
from .data import Batches
from .measure import LayerTally
from .observe import Observer
from .options import CalibrationOptions
from .passes import in_fp8, in_place
from .precision import choices, fewest, restore, saved
from .progress import Stages
from .result import KeptReport, LayerReport, Made


@dataclass
class EncoderJob:
    """`linears` become FP8, by name: as they are in `rounded`, or else rounded to nearest by `states`."""

    source: Path
    recipe: Recipe
    asked: CalibrationOptions
    stages: Stages
    model: AnyModel
    linears: dict[str, Linear]
    batches: Batches
    pooling: Pooling
    observer: Observer
    states: dict[str, ScalingState] = field(default_factory=dict)
    rounded: dict[str, FrozenLinear] | None = None
    kept: list[KeptReport] = field(default_factory=list)  # what stays in high precision
    made: Made | None = None

    @cached_property
    def exact(self) -> Tensor:
        """The held-out texts' vectors in high precision."""
        return self._vectors()

    def served(self) -> dict[str, FrozenLinear]:
        """Every linear that becomes FP8, as it is served."""
        freeze = freezer(self.recipe, self.states, self.rounded)
        frozen = {name: freeze(name, linear) for name, linear in self.linears.items()}
        for layer in frozen.values():
            layer.make_rows_independent()
        return frozen

    def closeness(self, frozen: Mapping[str, FrozenLinear]) -> Closeness:
        """The closeness of the held-out texts' vectors with these linears in FP8 and the others in high precision."""
        exact = self.exact
        with in_place(self.model, frozen):
            return Closeness.of(exact, self._vectors())

    def measure(self) -> tuple[Closeness, tuple[LayerReport, ...]]:
        """The cost of FP8 for the held-out texts' vectors and for every linear's output."""
        exact, frozen = self.exact, self.served()
        tallies = {name: LayerTally() for name in frozen}
        for name, layer in frozen.items():
            tallies[name].add_weight(self.linears[name].weight, layer)
        with in_fp8(self.linears, lambda name, linear: frozen[name], tallies):
            got = self._vectors("compare")
        return Closeness.of(exact, got), tuple(tally.report(name) for name, tally in tallies.items())

    def meet(self, cosine: float) -> None:
        """Leave as many linears in high precision as this median needs, starting with those whose FP8 moves vectors
        most for each byte that it saves. RecipeError when it needs all."""
        frozen = self.served()

        def enough(kept: Sequence[KeptReport]) -> bool:
            names = {name for group in kept for name in group.names}
            return self.closeness({n: x for n, x in frozen.items() if n not in names}).median >= cosine

        candidates = self._dearest_first(frozen)
        count = fewest(candidates, enough)
        if count == len(candidates):
            raise RecipeError(
                f"A cosine of {cosine} asks for every linear layer in high precision; allow less, or do not calibrate."
            )
        self.keep(candidates[:count])

    def keep(self, groups: Iterable[KeptReport]) -> None:
        """These linears stay in high precision: none of their scales is stored."""
        for group in groups:
            self.kept.append(group)
            restore(self.model, group.names)
            for name in group.names:
                del self.linears[name]
                self.observer.forget(name)
                for role in self.observer.roles:
                    self.states.pop(f"{name}.{role}", None)

    def _dearest_first(self, frozen: Mapping[str, FrozenLinear]) -> list[KeptReport]:
        """The possible choices, each measured alone in FP8."""
        found = []
        for names in self.stages.steps("rank", choices(frozen)):
            size = sum(saved(self.linears[name]) for name in names)
            alone = self.closeness({name: frozen[name] for name in names})
            found.append(KeptReport(names, size, None, alone.mean))
        return sorted(found, key=lambda group: ((group.cosine or 0.0) - 1) / group.bytes)

    @torch.no_grad()
    def _vectors(self, stage: str | None = None) -> Tensor:
        """The vectors of the held-out texts by the current model."""
        held_out = self.batches.held_out
        batches = held_out if stage is None else self.stages.steps(stage, held_out)
        return torch.cat([self.pooling(hidden_states(self.model, b.ids, b.lengths), b.lengths) for b in batches])
