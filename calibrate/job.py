"""A running calibration: its options, its observations, and the model as it would be served now."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.building import Model

from .compare import compare, freezer
from .data import Batches
from .layerwise import release_weights
from .measure import LayerTally
from .observe import Observer
from .options import CalibrationOptions
from .progress import Stages
from .result import HealingReport, KeptReport, Quality, SmoothingReport
from .sensitivity import kl_shares


@dataclass
class Job:
    """`linears` become FP8, by name: as they are in `rounded`, or else rounded to nearest by `states`."""

    source: Path
    recipe: Recipe
    asked: CalibrationOptions
    stages: Stages
    decoder: Model
    linears: dict[str, Linear]
    batches: Batches
    observer: Observer
    states: dict[str, ScalingState] = field(default_factory=dict)
    smoothed: Mapping[str, Tensor] = field(default_factory=dict)  # parameters that are not those of the source
    rounded: dict[str, FrozenLinear] | None = None
    kept: list[KeptReport] = field(default_factory=list)  # what stays in high precision
    smoothing: SmoothingReport | None = None
    healing: HealingReport | None = None
    notes: tuple[str, ...] = ()  # sentences about anything unexpected

    def compare(
        self, linears: Mapping[str, Linear] | None = None, rounded: Mapping[str, FrozenLinear] | None = None
    ) -> tuple[Quality, dict[str, LayerTally]]:
        """The cost of FP8 on the held-out batches, for these linears or all, rounded as given or as they are."""
        chosen, given = self.linears if linears is None else linears, self.rounded if rounded is None else rounded
        return compare(self.decoder, chosen, self.batches.held_out, self.recipe, self.states, self.stages, given)

    def shares(self) -> dict[str, float]:
        """What each linear's FP8 adds to the KL divergence on the held-out batches, nats per token."""
        freeze = freezer(self.recipe, self.states, self.rounded)

        def lossy(name: str, linear: nn.Module, x: Tensor) -> Tensor:
            frozen = freeze(name, self.linears[name])
            y: Tensor = frozen(x)
            release_weights({name: frozen})
            return y

        return kl_shares(
            self.decoder,
            self.linears,
            self.batches.held_out,
            lossy,
            stages=self.stages,
        )

    def keep(self, groups: Sequence[KeptReport]) -> list[str]:
        """These linears stay in high precision: none of their scales is stored. Returns their names."""
        names = [name for group in groups for name in group.names]
        for name in names:
            del self.linears[name]
            self.observer.forget(name)
            for role in self.observer.roles:
                self.states.pop(f"{name}.{role}", None)
        self.kept += groups
        return names
