"""Writes a `transformers` model that was converted and trained in a user's own loop as a directory that can be served.

    model = convert(AutoModelForCausalLM.from_pretrained("base"))
    ...                                                        # train under autocast(recipe=recipe)
    export(model, "out", recipe=recipe)                        # fp8serve serve out

The scales are those of the model's delayed states, with which its next step would have quantized. Its parameters have
the names that the decoder reads, because both follow `transformers`; any other parameter is refused by name. Nothing of
`transformers` is imported here: a model is anything with `config.to_json_string()` and such parameters.

`save_pretrained` is no substitute: its output is for resuming training. It writes the delayed states among the
weights, by the names of a scaling checkpoint; `from_pretrained` skips them and names them as unexpected, because the
layers are converted only afterwards; our own readers skip them, too (stored.py), and other servers fail on unknown
names. `restore_scaling` restores them into a model that continues its training:

    model = convert(AutoModelForCausalLM.from_pretrained(path))
    restore_scaling(model, path)
"""

import json
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8serve import __version__
from fp8serve.errors import ModelError, RecipeError, ScalesError
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import Recipe, delayed
from fp8serve.fp8.scaling import ScalingState
from fp8serve.fp8.stateful import Stateful, restored, state_key
from fp8serve.model.building import build_on_meta
from fp8serve.model.config.decoder import parse_config
from fp8serve.model.config.families import FAMILIES
from fp8serve.model.config.mixture import keeps_fp32
from fp8serve.model.export import write_calibrated, write_hf_directory
from fp8serve.model.formats.scales import FILE_NAME, ScalingCheckpoint, TensorScale, check, load_scales
from fp8serve.model.storage.files import (
    CARRIED,
    MAX_CARRIED_BYTES,
    as_json,
    check_absent,
    read_file,
    with_floats,
    write_json,
)
from fp8serve.model.storage.opening import regular_file
from fp8serve.model.storage.shards import open_shards

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, checkpoint_wrapper


def export(
    model: nn.Module,
    out: Path | str,
    *,
    recipe: Recipe | None,
    tokenizer: Any = None,
    format: str = "compressed-tensors",
) -> Path:
    """Write the servable FP8 directory `out` from a converted and trained `transformers` model, and return its path.

    recipe: the recipe of the training. Delayed scaling brings the scales and histories that training kept; other
    recipes quantize the weights by their content; None, or a high-precision fprop, gives a high-precision directory.
    tokenizer: a tokenizer of `transformers` or the directory of one; None takes the directory that the model was loaded
    from. format: "compressed-tensors", "fp8" or "modelopt". Weights that are not quantized become BF16 (FP16 stays).
    RecipeError: `recipe` is not a recipe. ModelError: an architecture that is not served, a linear layer that was not
    converted, sharded weights, no tokenizer, or `out` is taken. ScalesError: a layer never ran under a delayed recipe.
    """
    out = Path(out)
    check_absent(out)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise RecipeError(f"recipe must be the recipe of the training, or None, found {recipe!r}.")
    inner = unwrapped(model)
    config = _config(inner)
    weights = _weights(inner)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        _write_small_files(source, inner, config, tokenizer)
        if recipe is None or recipe.override_linear_precision[0]:
            write_hf_directory(out, config, weights, carry_from=source)
        else:
            _check_converted(inner, config)
            write_calibrated(out, source, _scales(inner, config, recipe), weights=weights, format=format)
    return out


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get("_orig_mod")
    return model if inner is None else unwrapped(inner)


def plain_name(name: str) -> str:
    """The name that a module or parameter has without torch.compile and activation checkpointing around its owner."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _config(model: nn.Module) -> dict[str, Any]:
    """config.json of the model, checked to be that of a served architecture."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise ModelError(
            f"{type(model).__name__} has no configuration of transformers; give the causal language model."
        )
    if hasattr(model, "peft_config"):
        raise ModelError(
            "The model holds adapters; merge them into the weights (merge_and_unload) before it is exported."
        )
    architecture, family = _architecture(type(model)), FAMILIES.get(str(getattr(config, "model_type", None)))
    if family is not None and architecture != family.architecture:
        raise ModelError(f"{architecture} cannot be exported; give the causal language model, {family.architecture}.")
    raw = json.loads(config.to_json_string(), object_pairs_hook=with_floats) | {"architectures": [architecture]}
    dropped = ("quantization_config", "dtype", "torch_dtype")
    half = next(model.parameters()).dtype is torch.float16
    raw = {key: value for key, value in raw.items() if key not in dropped}
    raw |= {"dtype": "float16" if half else "bfloat16"}
    if parse_config(raw).experts is not None:
        raise ModelError(
            f"The experts of {type(model).__name__} are no linear layers in transformers, so they were not trained in "
            "FP8; fine-tune the model's directory with `fp8serve finetune` instead."
        )
    return raw


def _architecture(kind: type) -> str:
    """The name of the class, or of its first base class that is served, which covers a user's own subclass."""
    served = {family.architecture for family in FAMILIES.values()}
    return next((c.__name__ for c in kind.__mro__ if c.__name__ in served), kind.__name__)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    weights = {plain_name(n): p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
    weights |= {plain_name(n): b for n, b in model.named_buffers() if keeps_fp32(n)}  # constants that files hold
    if any(isinstance(w, DTensor) for w in weights.values()):
        raise ModelError(
            "The model is sharded over several processes; load its whole_state (fp8serve.fp8.fsdp) into a converted "
            "model of one process, and export that."
        )
    return weights


def _write_small_files(folder: Path, model: nn.Module, config: Mapping[str, Any], tokenizer: Any) -> None:
    """config.json, the tokenizer's files and the generation defaults, as a model directory has them."""
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
    else:
        _copy_tokenizer(folder, tokenizer or getattr(model, "name_or_path", ""))
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        (folder / "generation_config.json").write_text(generation.to_json_string(), encoding="utf-8")
    write_json(folder / "config.json", as_json(config))


def _copy_tokenizer(folder: Path, source: Any) -> None:
    files = [Path(source) / name for name in CARRIED if source and regular_file(Path(source) / name)]
    if not any(path.name.startswith("tokenizer") for path in files):
        raise ModelError(
            f"There is no tokenizer in {str(source)!r}; give the model's own, or the directory of it, as tokenizer=."
        )
    for path in files:
        (folder / path.name).write_bytes(read_file(path, MAX_CARRIED_BYTES))


def _check_converted(model: nn.Module, config: Mapping[str, Any]) -> None:
    """ModelError unless every projection that will be served in FP8 was trained in FP8; warns about any other layer."""
    ours = {plain_name(name) for name, module in model.named_modules() if isinstance(module, Linear)}
    served = build_on_meta(parse_config(config)).linear_names()
    if missing := [name for name in served if name not in ours]:
        raise ModelError(
            f"{missing[0]} was not converted ({len(missing)} of {len(served)} layers), and an FP8 directory holds all "
            "of them in FP8; convert the model with skip=('lm_head',)."
        )
    if more := sorted(ours - set(served)):
        warnings.warn(f"{', '.join(more)} ran in FP8 and will be served in high precision.", stacklevel=3)


def _scales(model: nn.Module, config: Mapping[str, Any], recipe: Recipe) -> ScalingCheckpoint:
    """The states of all layers that are served, as a scaling file."""
    states: dict[str, ScalingState] = {}
    served = set(build_on_meta(parse_config(config)).linear_names())
    if delayed(recipe) is not None:
        for name, module in model.named_modules():
            if isinstance(module, Linear) and plain_name(name) in served:
                states |= {f"{plain_name(name)}.{kind}": state for kind, state in module.scaling.items()}
        _check_ran(served, states)
    counts = {key: int(state.steps) for key, state in states.items() if _observed(state)}
    return ScalingCheckpoint(
        recipe=recipe,
        tensors={key: TensorScale(states[key].scale, _history_or_none(states[key].amax_history)) for key in counts},
        observations={"batches": max(counts.values(), default=0), "tensors": {k: max(n, 1) for k, n in counts.items()}},
        created_by=f"fp8serve {__version__} export",
    )


def _observed(state: ScalingState) -> bool:
    """Whether the state has recorded a step, or was restored from a file whose history shows it."""
    return bool(state.steps > 0) or bool(state.amax_history.any())


def _check_ran(served: set[str], states: Mapping[str, ScalingState]) -> None:
    idle = [n for n in sorted(served) if f"{n}.input" not in states or not _observed(states[f"{n}.input"])]
    if idle:
        raise ScalesError(
            f"{idle[0]} has not run with gradients under DelayedScaling ({len(idle)} of {len(served)} layers), so it "
            "has no scale; train the model, or name the recipe that it was trained under."
        )


def _history_or_none(history: Tensor) -> Tensor | None:
    """The history between two steps, with nothing staged; None for one without information, such as one of length 1."""
    history = history.clone()
    history[0] = 0.0
    return history if bool(history.any()) else None


StateFields = dict[str, Tensor]  # the fields of one state


def restore_scaling(model: nn.Module, path: Path | str) -> int:
    """Give the layers of a converted `model` the delayed states that a directory holds; returns how many states.

    path: a converted model as `save_pretrained` wrote it, or a directory with scales.safetensors (calibrated, exported
    or fine-tuned). Training continues from its scales and histories. Raises ScalesError when it holds no state of this
    model, or one that cannot be used.
    """
    path = Path(path)
    modules = {plain_name(name): m for name, m in unwrapped(model).named_modules() if isinstance(m, Stateful)}
    stored = _from_scales_file(path) if (path / FILE_NAME).exists() else _among_weights(path)
    fitting = [key for key in stored if key.rpartition(".")[0] in modules]
    if not fitting:
        raise ScalesError(f"{path} holds no scaling state of a layer of this model; was the model converted?")
    for owner, module in modules.items():
        keys = {name: f"{owner}.{name}" for name in module.state_names()}
        states = {n: restored(stored[key], key, module.state_device()) for n, key in keys.items() if key in stored}
        module.scaling.update(states)
    return len(fitting)


def _from_scales_file(path: Path) -> dict[str, StateFields]:
    """The states of scales.safetensors, which has no counters; where no history is kept, it is empty."""
    tensors = load_scales(path / FILE_NAME).tensors
    histories = {k: torch.zeros(1) if e.amax_history is None else e.amax_history for k, e in tensors.items()}
    return {key: {"scale": entry.scale, "amax_history": histories[key]} for key, entry in tensors.items()}


def _among_weights(path: Path) -> dict[str, StateFields]:
    shards = open_shards(path)
    states: dict[str, StateFields] = {}
    for name in shards:
        if (place := state_key(name)) is not None:
            tensor, field = place
            states.setdefault(tensor, {})[field] = shards[name]
    for key, state in states.items():
        _check(path, key, state)
    return states


def _check(path: Path, key: str, state: StateFields) -> None:
    """ScalesError for a state that `state_dict` cannot have written, or that `load_scales` would refuse."""
    sizes = {"scale": 0, "amax_history": 1, "nonfinite": 0, "steps": 0}
    if set(state) != set(sizes) or any(state[field].dim() != dim for field, dim in sizes.items()):
        raise ScalesError(f"{path}: the scaling state of {key} is not whole.")
    history = state["amax_history"]
    entry = TensorScale(state["scale"], history if bool(history.any()) else None)
    check(ScalingCheckpoint(None, {key: entry}), str(path))
