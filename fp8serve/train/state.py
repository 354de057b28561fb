"""Converts a run's state to tensors and back, for checkpoints and for the start of a run.

The tensors of the scaling state have the names of `scales.safetensors` (`P.input.scale`, `P.input.amax_history`, ...),
and there are two counters for each state. A base model with amax histories (calibrated, or trained by fp8serve)
initialises the scaling state, so that the first step quantizes with fitting scales instead of 1. Recipes without amax
histories have no scaling state.

If the base model has scales of keys and values, a run whose attention is in high precision also has states of keys and
values (`model.layers.0.self_attn.k` and `.v`). No step computes with them: they are for the FP8 KV cache of the served
result. Calibration stores no histories of keys and values, so these histories start with the amax that gives the stored
scale. Until that amax leaves the history, the scale covers what calibration observed.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8serve.errors import JobError, ModelError, ScalesError
from fp8serve.fp8.recipe import DelayedScaling, as_delayed, uses_fp8_attention
from fp8serve.fp8.scaling import FIELDS, ScalingState, fp8_max
from fp8serve.model.building import transposed_linears
from fp8serve.model.checkpoint import ScalingCheckpoint, TensorScale, kv_scales, load_scales
from fp8serve.model.storage.shards import load_tensors
from fp8serve.model.transformers_backend.files import transpose_weights
from fp8serve.train.checkpoint import TrainState
from fp8serve.train.config import TrainConfig
from fp8serve.train.forward import Forward
from fp8serve.train.optimizer import Optimizer

if TYPE_CHECKING:  # importing FSDP2 takes 0.4 s
    from fp8serve.train.sharded.building import ShardedModel
    from fp8serve.train.sharded.shards import TensorGatherer


def records_kv(config: TrainConfig, source: Path) -> bool:
    """Returns whether a run records the amaxes of keys and values.

    It does if the recipe is delayed and casts linear layers but not attention, and the base model or the checkpoint
    `source` has scales of keys and values.
    """
    recipe = as_delayed(config.fp8_recipe)
    if config.lora_rank or recipe is None or recipe.override_linear_precision[0] or uses_fp8_attention(recipe):
        return False
    path = source / "scaling.safetensors"
    if path.exists() and any(name.endswith(".self_attn.k.scale") for name in load_tensors(path)):
        return True
    try:
        return bool(kv_scales(config.model))
    except (ModelError, ScalesError):  # the run needs no base model after the first checkpoint, and no such scales
        return False


def scaling_states(forward: Forward) -> Iterator[tuple[str, ScalingState]]:
    """Yields (`P.input`, its state) for every FP8 layer P and each of its tensors. Creates missing states.

    Layers with the same input may share its state. Call `separate_states` before writing to states.
    """
    if (rules := as_delayed(forward.recipe)) is not None:
        for name, module in forward.scaled_modules():
            module.prepare(rules.amax_history_len)
            for kind, state in module.scaling.items():
                yield f"{name}.{kind}", state


def separate_states(forward: Forward) -> None:
    """Gives every FP8 layer states of its own."""
    for _, module in forward.scaled_modules():
        module.separate_states()


def scaling_tensors(forward: Forward) -> dict[str, Tensor]:
    """Returns copies of the states' tensors, because layers may share a state, and files need a tensor for each."""
    return {
        f"{name}.{part}": getattr(state, part).clone() for name, state in scaling_states(forward) for part in FIELDS
    }


@torch.no_grad()
def load_scaling(forward: Forward, tensors: Mapping[str, Tensor]) -> None:
    """Loads the result of `scaling_tensors`. Raises JobError if the names of the states differ.

    Checkpoints of older versions have no states of keys and values if attention is in high precision. Such states are
    then left as they are.
    """
    expected = {f"{name}.{part}" for name, _ in scaling_states(forward) for part in FIELDS}
    optional = {key for key in expected if forward.records_kv and key.rpartition(".")[0].endswith((".k", ".v"))}
    if set(tensors) not in (expected, expected - optional):
        raise JobError(
            f"The checkpoint's scaling state does not fit this model: {min(expected ^ set(tensors))!r} is only in one "
            "of the two; start again in a new output directory."
        )
    separate_states(forward)
    for name, state in scaling_states(forward):
        for part in FIELDS:
            if (tensor := tensors.get(f"{name}.{part}")) is not None:
                setattr(state, part, tensor.to(state.scale.device, copy=True))


@torch.no_grad()
def seed_scaling(forward: Forward, model_dir: Path) -> int:
    """Initialises the scaling state from the scales and histories in `model_dir`. Returns the number of states that
    were initialised.

    Raises ScalesError if the file is damaged or belongs to another model.
    """
    path = model_dir / "scales.safetensors"
    has_states = as_delayed(forward.recipe) is not None
    separate_states(forward)
    checkpoint = load_scales(path, model_dir) if has_states and path.exists() else ScalingCheckpoint(None, {})
    tensor_scales, rules = checkpoint.tensors, as_delayed(checkpoint.recipe) or DelayedScaling()
    if forward.records_kv and model_dir.exists():  # of another tool: among the tensors of the checkpoint
        owners = {f"model.layers.{layer}.self_attn": pair for layer, pair in kv_scales(model_dir).items()}
        pairs = {owner: zip("kv", pair, strict=True) for owner, pair in owners.items()}
        scales = {f"{owner}.{name}": TensorScale(scale, None) for owner, pair in pairs.items() for name, scale in pair}
        tensor_scales = scales | tensor_scales
    seeded = {name: state for name, state in scaling_states(forward) if name in tensor_scales}
    for name, state in seeded.items():
        state.scale.copy_(tensor_scales[name].scale)
        if (history := tensor_scales[name].amax_history) is not None:
            state.amax_history = history.to(state.scale.device, copy=True)
        elif forward.records_kv and name.endswith((".k", ".v")):
            amax = fp8_max(rules, name.rpartition(".")[2]) / 2.0**rules.margin / state.scale
            state.amax_history[1:][-1:] = amax  # the newest slot, if there is one besides the staging slot
    return len(seeded)


def capture(
    forward: Forward,
    optimizer: Optimizer,
    reference: dict[str, Tensor],
    meta: dict[str, object],
    gatherer: "TensorGatherer | None" = None,
) -> TrainState:
    """Returns references to the run's tensors, which must be written before the next step. Of weights and
    moments, only weights that files store transposed are copied. A sharded run needs a `tensor_gatherer`."""
    masters = transpose_weights(optimizer.masters, transposed_linears(forward.network.decoder))
    moments = optimizer.state()
    return TrainState(
        model=masters if gatherer is None else _gathered(gatherer, "model", masters),
        optimizer=moments if gatherer is None else _gathered(gatherer, "optimizer", moments),
        scaling=scaling_tensors(forward),
        random={"cpu": torch.get_rng_state()},
        method=reference,
        meta=meta,
    )


def tensor_gatherer(sharded: "ShardedModel", optimizer: Optimizer) -> "TensorGatherer":
    """Returns the gatherer of a sharded run's masters and moments, for `capture`."""
    from fp8serve.train.sharded.shards import TensorGatherer

    masters, moments = optimizer.masters, optimizer.state()
    tensors = {f"model/{name}": t for name, t in masters.items()} | {f"optimizer/{k}": t for k, t in moments.items()}
    parameter_names = {f"model/{name}": name for name in masters}
    parameter_names |= {f"optimizer/{key}": name for key, name in _parameters_of(moments).items()}
    return TensorGatherer(sharded.shards, tensors, parameter_names)


def _parameters_of(keys: Iterable[str]) -> dict[str, str]:
    """Maps the names of an optimizer's tensors to the names of the parameters that they belong to."""
    return {key: key.rpartition(".")[0] for key in keys}


def _gathered(gatherer: "TensorGatherer", kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: gatherer.full_tensor(f"{kind}/{name}") for name in tensors}


def restore(
    forward: Forward, optimizer: Optimizer, train_state: TrainState, sharded: "ShardedModel | None" = None
) -> None:
    """Loads the result of `capture`. In a sharded run, every process loads its shards."""
    masters: Mapping[str, Tensor] = transpose_weights(train_state.model, transposed_linears(forward.network.decoder))
    moments: Mapping[str, Tensor] = train_state.optimizer
    if sharded is not None:
        masters = sharded.shards.local_shards(masters, {name: name for name in masters})
        moments = sharded.shards.local_shards(moments, _parameters_of(moments))
    optimizer.load(masters, moments)
    load_scaling(forward, train_state.scaling)
    torch.set_rng_state(train_state.random["cpu"])
