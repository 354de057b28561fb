"""A run's state to tensors and back: what a checkpoint holds, and what a fresh run begins from.

The scaling state goes by the names of `scales.safetensors` (`P.input.scale`, `P.input.amax_history`, ...), with the
count of non-finite amaxes beside them. A base model that carries histories (calibrated, or trained by us) seeds the
state, so that the first step quantizes with fitting scales and not with 1.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fp8serve.errors import JobError
from fp8serve.fp8.linear import Linear, scaling_state
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.checkpoint import load_scales
from fp8serve.model.decoder import Decoder, linear_names
from fp8serve.train.checkpoint import TrainState
from fp8serve.train.optimizer import Optimizer

KINDS = ("input", "weight", "grad_output")
PARTS = ("scale", "amax_history", "nonfinite")


def states(decoder: Decoder) -> Iterator[tuple[str, ScalingState]]:
    """(`P.input`, its state) for every FP8 layer P and each of its three tensors."""
    for name in linear_names(decoder):
        layer = decoder.get_submodule(name)
        if isinstance(layer, Linear):
            for kind, state in scaling_state(layer).items():
                yield f"{name}.{kind}", state


def scaling_tensors(decoder: Decoder) -> dict[str, Tensor]:
    return {f"{name}.{part}": getattr(state, part) for name, state in states(decoder) for part in PARTS}


@torch.no_grad()
def load_scaling(decoder: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """The reverse of `scaling_tensors`. Raises JobError when a state is missing or one is left over."""
    expected = {f"{name}.{part}" for name, _ in states(decoder) for part in PARTS}
    if expected != set(tensors):
        raise JobError(
            f"The checkpoint's scaling state does not fit this model: {min(expected ^ set(tensors))!r} is only in "
            "one of them; start again in a fresh output directory."
        )
    for name, state in states(decoder):
        state.amax_history = tensors[f"{name}.amax_history"].to(state.scale.device)
        state.scale.copy_(tensors[f"{name}.scale"])
        state.nonfinite.copy_(tensors[f"{name}.nonfinite"])


@torch.no_grad()
def seed_scaling(decoder: Decoder, scales: Path) -> int:
    """Start from the scales and histories in `scales` where it has them; returns how many states were seeded."""
    stored = load_scales(scales).tensors
    seeded = 0
    for name, state in states(decoder):
        if name in stored:
            state.scale.copy_(stored[name].scale)
            if (history := stored[name].amax_history) is not None:
                state.amax_history = history.to(state.scale.device)
            seeded += 1
    return seeded


def capture(decoder: Decoder, optimizer: Optimizer, meta: dict[str, object]) -> TrainState:
    """References, not copies: to be written before the next step changes them."""
    return TrainState(
        model=dict(optimizer.masters),
        optimizer=optimizer.state(),
        scaling=scaling_tensors(decoder),
        random={"cpu": torch.get_rng_state()},
        meta=meta,
    )


def restore(decoder: Decoder, optimizer: Optimizer, state: TrainState) -> None:
    optimizer.load(state.model, state.optimizer)
    load_scaling(decoder, state.scaling)
    torch.set_rng_state(state.random["cpu"])
