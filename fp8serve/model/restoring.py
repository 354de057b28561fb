"""Restores the delayed states of a directory into a model, to continue its training.

    model = convert(AutoModelForCausalLM.from_pretrained(path))
    restore_scaling(model, path)

`save_pretrained` of a converted model writes its states among the weights, by the names of a scaling checkpoint.
`from_pretrained` skips them and names them as unexpected, because the layers are converted only afterwards; our own
readers skip them, too (stored.py). Other servers fail on unknown names: `export` writes for them.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from fp8serve.errors import ScalesError
from fp8serve.fp8.stateful import Stateful, restored, state_key
from fp8serve.model.converted import plain_name, unwrapped
from fp8serve.model.formats.scales import FILE_NAME, ScalingCheckpoint, TensorScale, check, load_scales
from fp8serve.model.storage.shards import open_shards

Found = dict[str, Tensor]  # the fields of one state


def restore_scaling(model: nn.Module, path: Path | str) -> int:
    """Give the layers of a converted `model` the delayed states that a directory holds; returns how many states.

    path: a converted model as `save_pretrained` wrote it, or a directory with scales.safetensors (calibrated, exported
    or fine-tuned). Training continues from its scales and histories. Raises ScalesError when it holds no state of this
    model, or one that cannot be used.
    """
    path = Path(path)
    modules = {plain_name(name): m for name, m in unwrapped(model).named_modules() if isinstance(m, Stateful)}
    stored = _beside(path) if (path / FILE_NAME).exists() else _among_weights(path)
    fitting = [key for key in stored if key.rpartition(".")[0] in modules]
    if not fitting:
        raise ScalesError(f"{path} holds no scaling state of a layer of this model; was the model converted?")
    for owner, module in modules.items():
        keys = {name: f"{owner}.{name}" for name in module.state_names()}
        found = {n: restored(stored[key], key, module.state_device()) for n, key in keys.items() if key in stored}
        module.scaling.update(found)
    return len(fitting)


def _beside(path: Path) -> dict[str, Found]:
    """The states of scales.safetensors, which has no counters; where no history is kept, it is empty."""
    tensors = load_scales(path / FILE_NAME).tensors
    histories = {k: torch.zeros(1) if e.amax_history is None else e.amax_history for k, e in tensors.items()}
    return {key: {"scale": entry.scale, "amax_history": histories[key]} for key, entry in tensors.items()}


def _among_weights(path: Path) -> dict[str, Found]:
    shards = open_shards(path)
    found: dict[str, Found] = {}
    for name in shards:
        if (place := state_key(name)) is not None:
            tensor, field = place
            found.setdefault(tensor, {})[field] = shards[name]
    for key, state in found.items():
        _check(path, key, state)
    return found


def _check(path: Path, key: str, state: Found) -> None:
    """ScalesError for a state that `state_dict` cannot have written, or that `load_scales` would refuse."""
    sizes = {"scale": 0, "amax_history": 1, "nonfinite": 0, "steps": 0}
    if set(state) != set(sizes) or any(state[field].dim() != dim for field, dim in sizes.items()):
        raise ScalesError(f"{path}: the scaling state of {key} is not whole.")
    history = state["amax_history"]
    entry = TensorScale(state["scale"], history if bool(history.any()) else None)
    check(ScalingCheckpoint(None, {key: entry}), str(path))
