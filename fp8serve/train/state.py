"""A run's state to tensors and back: what a checkpoint holds, and what a fresh run begins from.

The scaling state goes by the names of `scales.safetensors` (`P.input.scale`, `P.input.amax_history`, ...), with the two
counters of each state beside them. A base model that carries histories (calibrated, or trained by us) seeds the state,
so that the first step quantizes with fitting scales and not with 1. Recipes without histories have no such state.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fp8serve.errors import JobError
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import DelayedScaling, Recipe
from fp8serve.fp8.scaling import FIELDS, ScalingState
from fp8serve.model.checkpoint import load_scales
from fp8serve.model.decoder import Decoder, linear_names
from fp8serve.train.checkpoint import TrainState
from fp8serve.train.optimizer import Optimizer


def states(decoder: Decoder, recipe: Recipe | None) -> Iterator[tuple[str, ScalingState]]:
    """(`P.input`, its state) for every FP8 layer P and each of its three tensors; created where they are not yet."""
    for name in linear_names(decoder):
        layer = decoder.get_submodule(name)
        if isinstance(layer, Linear) and isinstance(recipe, DelayedScaling):
            for kind, state in layer.delayed_states(recipe).items():
                yield f"{name}.{kind}", state


def scaling_tensors(decoder: Decoder, recipe: Recipe | None) -> dict[str, Tensor]:
    return {f"{name}.{part}": getattr(state, part) for name, state in states(decoder, recipe) for part in FIELDS}


@torch.no_grad()
def load_scaling(decoder: Decoder, recipe: Recipe | None, tensors: Mapping[str, Tensor]) -> None:
    """The reverse of `scaling_tensors`. Raises JobError when a state is missing or one is left over."""
    expected = {f"{name}.{part}" for name, _ in states(decoder, recipe) for part in FIELDS}
    if expected != set(tensors):
        raise JobError(
            f"The checkpoint's scaling state does not fit this model: {min(expected ^ set(tensors))!r} is only in "
            "one of them; start again in a fresh output directory."
        )
    for name, state in states(decoder, recipe):
        for part in FIELDS:
            setattr(state, part, tensors[f"{name}.{part}"].to(state.scale.device, copy=True))


@torch.no_grad()
def seed_scaling(decoder: Decoder, recipe: Recipe | None, model_dir: Path) -> int:
    """Start from the scales and histories that lie in `model_dir`; returns how many states were seeded.

    Raises ScalesError for a file that cannot be trusted or belongs to another model.
    """
    path = model_dir / "scales.safetensors"
    stored = load_scales(path, model_dir).tensors if path.exists() and isinstance(recipe, DelayedScaling) else {}
    found = {name: state for name, state in states(decoder, recipe) if name in stored}
    for name, state in found.items():
        state.scale.copy_(stored[name].scale)
        if (history := stored[name].amax_history) is not None:
            state.amax_history = history.to(state.scale.device, copy=True)
    return len(found)


def capture(decoder: Decoder, recipe: Recipe | None, optimizer: Optimizer, meta: dict[str, object]) -> TrainState:
    """References, not copies: to be written before the next step changes them."""
    return TrainState(
        model=dict(optimizer.masters),
        optimizer=optimizer.state(),
        scaling=scaling_tensors(decoder, recipe),
        random={"cpu": torch.get_rng_state()},
        meta=meta,
    )


def restore(decoder: Decoder, recipe: Recipe | None, optimizer: Optimizer, saved: TrainState) -> None:
    optimizer.load(saved.model, saved.optimizer)
    load_scaling(decoder, recipe, saved.scaling)
    torch.set_rng_state(saved.random["cpu"])
