"""Writes a `transformers` model, trained in FP8 in the user's own loop, to a directory that can be served.

    model = convert(AutoModelForCausalLM.from_pretrained("base"))
    ...                                                        # train under autocast(recipe=recipe)
    export(model, "out", recipe=recipe)                        # fp8serve serve out

The exported scales are those with which the next training step would have quantized. `transformers` is not imported
here: a model is any module with `config.to_json_string()` and transformers' parameter names.

`save_pretrained` is for resuming training, not for serving: it writes the scaling states of DelayedScaling among the
weights. `from_pretrained` and `open_checkpoint` ignore them, but other servers fail on the unknown names.
`restore_scaling` loads them into a model that continues its training:

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
from fp8serve.fp8.recipe import Recipe, as_delayed
from fp8serve.fp8.scaling import ScalingState
from fp8serve.fp8.stateful import Stateful, state_from_tensors, state_key
from fp8serve.model.building import build_on_meta
from fp8serve.model.config.decoder import parse_config
from fp8serve.model.config.families import FAMILIES
from fp8serve.model.config.mixture import needs_fp32
from fp8serve.model.export import write_calibrated, write_hf_directory
from fp8serve.model.formats.scales import FILE_NAME, ScalingCheckpoint, TensorScale, check_scales, load_scales
from fp8serve.model.storage.files import check_absent, copied_files, decode_nonfinite, encode_nonfinite, write_json
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
    """Writes a converted and trained `transformers` model as the FP8 directory `out` and returns its path.

    Weights that are not quantized are written in BF16, or in FP16 if the model is in FP16.

    Args:
        recipe: the recipe of the training. `DelayedScaling` exports the scales and amax histories of the training;
            other recipes quantize the weights by their own amax. None, or a recipe with a high-precision fprop, gives a
            high-precision directory.
        tokenizer: a tokenizer of `transformers`, or its directory; None is the directory that the model was loaded from
        format: "compressed-tensors", "fp8" or "modelopt"

    Raises RecipeError if `recipe` is not a recipe, and ScalesError if a layer never ran under `DelayedScaling`. Raises
    ModelError if the architecture is not served, a linear layer was not converted, weights are sharded, the tokenizer
    is missing, or `out` exists.
    """
    out = Path(out)
    check_absent(out)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise RecipeError(f"recipe must be the recipe of the training, or None, found {recipe!r}.")
    inner = unwrap_model(model)
    config = _config(inner)
    weights = _weights(inner)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        _write_small_files(source, inner, config, tokenizer)
        if recipe is None or recipe.override_linear_precision[0]:
            write_hf_directory(out, config, weights, copy_files_from=source)
        else:
            _check_converted(inner, config)
            write_calibrated(out, source, _scales(inner, config, recipe), weights=weights, format=format)
    return out


def unwrap_model(model: nn.Module) -> nn.Module:
    """Returns the model inside DistributedDataParallel and torch.compile."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get("_orig_mod")
    return model if inner is None else unwrap_model(inner)


def strip_wrapper_prefixes(name: str) -> str:
    """Removes the prefixes that torch.compile and activation checkpointing add to a module's or parameter's name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _config(model: nn.Module) -> dict[str, Any]:
    """Returns the content of the model's config.json. Raises ModelError if its architecture is not served."""
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
    raw = json.loads(config.to_json_string(), object_pairs_hook=decode_nonfinite) | {"architectures": [architecture]}
    replaced_keys = ("quantization_config", "dtype", "torch_dtype")
    is_fp16 = next(model.parameters()).dtype is torch.float16
    raw = {key: value for key, value in raw.items() if key not in replaced_keys}
    raw |= {"dtype": "float16" if is_fp16 else "bfloat16"}
    if parse_config(raw).experts is not None:
        raise ModelError(
            f"The experts of {type(model).__name__} are no linear layers in transformers, so they were not trained in "
            "FP8; fine-tune the model's directory with `fp8serve finetune` instead."
        )
    return raw


def _architecture(kind: type) -> str:
    """Returns the first served architecture among the class and its base classes, else the class's own name."""
    served = {family.architecture for family in FAMILIES.values()}
    return next((c.__name__ for c in kind.__mro__ if c.__name__ in served), kind.__name__)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    weights = {strip_wrapper_prefixes(n): p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
    weights |= {strip_wrapper_prefixes(n): b for n, b in model.named_buffers() if needs_fp32(n)}
    if any(isinstance(w, DTensor) for w in weights.values()):
        raise ModelError(
            "The model is sharded over several processes; load its whole_state (fp8serve.fp8.fsdp) into a converted "
            "model of one process, and export that."
        )
    return weights


def _write_small_files(folder: Path, model: nn.Module, config: Mapping[str, Any], tokenizer: Any) -> None:
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
    else:
        source = tokenizer or getattr(model, "name_or_path", "")
        files = dict(copied_files(Path(source))) if source else {}
        if not any(name.startswith("tokenizer") for name in files):
            raise ModelError(
                f"There is no tokenizer in {str(source)!r}; pass the model's tokenizer, or its directory, as "
                "tokenizer=."
            )
        for name, content in files.items():
            (folder / name).write_bytes(content)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        (folder / "generation_config.json").write_text(generation.to_json_string(), encoding="utf-8")
    write_json(folder / "config.json", encode_nonfinite(config))


def _check_converted(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Raises ModelError if a layer that will be served in FP8 was not trained in FP8, and warns of the opposite."""
    converted = {strip_wrapper_prefixes(name) for name, module in model.named_modules() if isinstance(module, Linear)}
    served = build_on_meta(parse_config(config)).linear_names()
    if missing := [name for name in served if name not in converted]:
        raise ModelError(
            f"{missing[0]} was not converted ({len(missing)} of {len(served)} layers), and an FP8 directory holds all "
            "of them in FP8; convert the model with skip=('lm_head',)."
        )
    if unserved := sorted(converted - set(served)):
        warnings.warn(f"{', '.join(unserved)} ran in FP8 and will be served in high precision.", stacklevel=3)


def _scales(model: nn.Module, config: Mapping[str, Any], recipe: Recipe) -> ScalingCheckpoint:
    """Returns the scaling states of all served layers as a `ScalingCheckpoint`."""
    states: dict[str, ScalingState] = {}
    served = set(build_on_meta(parse_config(config)).linear_names())
    if as_delayed(recipe) is not None:
        for name, module in model.named_modules():
            if isinstance(module, Linear) and strip_wrapper_prefixes(name) in served:
                states |= {f"{strip_wrapper_prefixes(name)}.{kind}": state for kind, state in module.scaling.items()}
        if idle := [n for n in sorted(served) if f"{n}.input" not in states or not _has_amax(states[f"{n}.input"])]:
            raise ScalesError(
                f"{idle[0]} has not run with gradients under DelayedScaling ({len(idle)} of {len(served)} layers), so "
                "it has no scale; train the model, or name the recipe that it was trained under."
            )
    steps = {key: int(state.steps) for key, state in states.items() if _has_amax(state)}
    return ScalingCheckpoint(
        recipe=recipe,
        tensors={key: TensorScale(states[key].scale, _history_or_none(states[key].amax_history)) for key in steps},
        observations={"batches": max(steps.values(), default=0), "tensors": {k: max(n, 1) for k, n in steps.items()}},
        created_by=f"fp8serve {__version__} export",
    )


def _has_amax(state: ScalingState) -> bool:
    """Whether the state recorded a step, or was restored with a history from a file, which has no step counter."""
    return bool(state.steps > 0) or bool(state.amax_history.any())


def _history_or_none(history: Tensor) -> Tensor | None:
    """Returns the history without the amax of a step in progress, or None if it holds no other amax."""
    history = history.clone()
    history[0] = 0.0
    return history if bool(history.any()) else None


StateFields = dict[str, Tensor]  # the fields of one `ScalingState` by name


def restore_scaling(model: nn.Module, path: Path | str) -> int:
    """Loads scaling states of DelayedScaling from `path` into the layers of `model` and returns the number of states.

    `path` is a directory with scales.safetensors, or one that `save_pretrained` of a converted model wrote. Training
    continues with the loaded scales and amax histories. Raises ScalesError if the directory has no usable state of
    this model.
    """
    path = Path(path)
    named_modules = unwrap_model(model).named_modules()
    modules = {strip_wrapper_prefixes(name): m for name, m in named_modules if isinstance(m, Stateful)}
    entries = _read_scales_file(path) if (path / FILE_NAME).exists() else _read_states_in_weights(path)
    matching = [key for key in entries if key.rpartition(".")[0] in modules]
    if not matching:
        raise ScalesError(f"{path} holds no scaling state of a layer of this model; was the model converted?")
    for owner, module in modules.items():
        keys = {name: f"{owner}.{name}" for name in module.state_names()}
        states = {
            n: state_from_tensors(entries[key], key, module.state_device()) for n, key in keys.items() if key in entries
        }
        module.scaling.update(states)
    return len(matching)


def _read_scales_file(path: Path) -> dict[str, StateFields]:
    """Reads the states of scales.safetensors, which has no step counters; a missing amax history becomes zeros."""
    tensors = load_scales(path / FILE_NAME).tensors
    histories = {k: torch.zeros(1) if e.amax_history is None else e.amax_history for k, e in tensors.items()}
    return {key: {"scale": entry.scale, "amax_history": histories[key]} for key, entry in tensors.items()}


def _read_states_in_weights(path: Path) -> dict[str, StateFields]:
    shards = open_shards(path)
    states: dict[str, StateFields] = {}
    for name in shards:
        if (split_name := state_key(name)) is not None:
            tensor, field = split_name
            states.setdefault(tensor, {})[field] = shards[name]
    dimensions = {"scale": 0, "amax_history": 1, "nonfinite": 0, "steps": 0}
    for key, state in states.items():
        if set(state) != set(dimensions) or any(state[field].dim() != dim for field, dim in dimensions.items()):
            raise ScalesError(f"{path}: the scaling state of {key} is incomplete.")
        history = state["amax_history"]
        entry = TensorScale(state["scale"], history if bool(history.any()) else None)
        check_scales(ScalingCheckpoint(None, {key: entry}), str(path))
    return states
