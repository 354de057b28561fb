"""Converts a run's state to tensors and back, for checkpoints and for the start of a run.

The scaling state has the names of `scales.safetensors` (`P.input.scale`, `P.input.amax_history`, ...), with the two
counters of each state beside them. A base model with histories (calibrated, or trained by fp8serve) seeds the state,
so that the first step quantizes with fitting scales instead of 1. Recipes without histories have no such state.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8serve.errors import JobError
from fp8serve.fp8.recipe import delayed
from fp8serve.fp8.scaling import FIELDS, ScalingState
from fp8serve.model.building import transposed_linears
from fp8serve.model.checkpoint import load_scales
from fp8serve.model.transformers_backend.files import transpose_weights
from fp8serve.train.checkpoint import TrainState
from fp8serve.train.forward import Forward
from fp8serve.train.optimizer import Optimizer

if TYPE_CHECKING:  # importing FSDP2 takes 0.4 s
    from fp8serve.train.sharded.building import Sharded
    from fp8serve.train.sharded.shards import Asking


def states(forward: Forward) -> Iterator[tuple[str, ScalingState]]:
    """(`P.input`, its state) for every FP8 layer P and each of its tensors; missing states are created."""
    if (rules := delayed(forward.recipe)) is not None:
        for name, module in forward.scaled():
            for kind, state in module.delayed_states(rules).items():
                yield f"{name}.{kind}", state


def scaling_tensors(forward: Forward) -> dict[str, Tensor]:
    return {f"{name}.{part}": getattr(state, part) for name, state in states(forward) for part in FIELDS}


@torch.no_grad()
def load_scaling(forward: Forward, tensors: Mapping[str, Tensor]) -> None:
    """The reverse of `scaling_tensors`. Raises JobError when a state is missing or one is left over."""
    expected = {f"{name}.{part}" for name, _ in states(forward) for part in FIELDS}
    if expected != set(tensors):
        raise JobError(
            f"The checkpoint's scaling state does not fit this model: {min(expected ^ set(tensors))!r} is only in "
            "one of them; start again in a fresh output directory."
        )
    for name, state in states(forward):
        for part in FIELDS:
            setattr(state, part, tensors[f"{name}.{part}"].to(state.scale.device, copy=True))


@torch.no_grad()
def seed_scaling(forward: Forward, model_dir: Path) -> int:
    """Starts from the scales and histories in `model_dir`; returns how many states were seeded.

    Raises ScalesError for a file that cannot be trusted or belongs to another model.
    """
    path = model_dir / "scales.safetensors"
    keeps_states = delayed(forward.recipe) is not None
    stored = load_scales(path, model_dir).tensors if keeps_states and path.exists() else {}
    results = {name: state for name, state in states(forward) if name in stored}
    for name, state in results.items():
        state.scale.copy_(stored[name].scale)
        if (history := stored[name].amax_history) is not None:
            state.amax_history = history.to(state.scale.device, copy=True)
    return len(results)


def capture(
    forward: Forward,
    optimizer: Optimizer,
    method: dict[str, Tensor],
    meta: dict[str, object],
    asking: "Asking | None" = None,
) -> TrainState:
    """References to the run's tensors, to be written before the next step. Only weights that files hold transposed are
    copied. asking: for the parts that the other ranks of a sharded run have, see `asking_for`."""
    masters = transpose_weights(optimizer.masters, transposed_linears(forward.network.decoder))
    moments = optimizer.state()
    return TrainState(
        model=masters if asking is None else _whole(asking, "model", masters),
        optimizer=moments if asking is None else _whole(asking, "optimizer", moments),
        scaling=scaling_tensors(forward),
        random={"cpu": torch.get_rng_state()},
        method=method,
        meta=meta,
    )


def asking_for(sharded: "Sharded", optimizer: Optimizer) -> "Asking":
    """What makes the tensors of a sharded run whole, for `capture`."""
    masters, moments = optimizer.masters, optimizer.state()
    tensors = {f"model/{name}": t for name, t in masters.items()} | {f"optimizer/{k}": t for k, t in moments.items()}
    owners = {f"model/{name}": name for name in masters}
    owners |= {f"optimizer/{key}": name for key, name in _parameters_of(moments).items()}
    return sharded.asking(tensors, owners)


def _parameters_of(keys: Iterable[str]) -> dict[str, str]:
    """The parameter that each tensor of an optimizer's state belongs to, by the tensor's name."""
    return {key: key.rpartition(".")[0] for key in keys}


def _whole(asking: "Asking", kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: asking.whole(f"{kind}/{name}") for name in tensors}


def restore(forward: Forward, optimizer: Optimizer, saved: TrainState, sharded: "Sharded | None" = None) -> None:
    """The reverse of `capture`; of a sharded run every process takes its parts."""
    masters: Mapping[str, Tensor] = transpose_weights(saved.model, transposed_linears(forward.network.decoder))
    moments: Mapping[str, Tensor] = saved.optimizer
    if sharded is not None:
        masters = sharded.shards.own(masters, {name: name for name in masters})
        moments = sharded.shards.own(moments, _parameters_of(moments))
    optimizer.load(masters, moments)
    load_scaling(forward, saved.scaling)
    torch.set_rng_state(saved.random["cpu"])
