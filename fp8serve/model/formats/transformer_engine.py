"""Converts Transformer Engine's `_extra_state` to fp8serve's scaling state, and back.

Each module M of a Transformer Engine model stores one uint8 tensor `M._extra_state`, which is empty if M has no FP8
state. Otherwise it is a pickle (in 1.x also a torch.save file) of

    recipe                 a DelayedScaling object; absent in 1.x, which had no other recipe
    scale_fwd              FP32 [3 g]      per GEMM: input, weight, output
    amax_history_fwd       FP32 [N, 3 g]   row 0 is being filled, 1 is the oldest, N-1 the newest, as in fp8serve
    scale_bwd              FP32 [2 g]      per GEMM: output gradient, input gradient
    amax_history_bwd       FP32 [N, 2 g]
    extra_fp8_variables    {"num_gemms": g, "fp8_max_fwd": 448.0, ...}

In both projects a scale quantizes. Loading a pickle runs the code in it, so recent versions of Transformer Engine
refuse to load one unless they are told otherwise. `restricted_pickle` reads it as data and imports or calls nothing.

A model whose nn.Linear modules were replaced has its Hugging Face names. The fused modules of TransformerLayer and
Megatron are mapped to the linears that they combine. These linears share the scales of the fused module, because they
were one tensor. The argument `names` has the mapping for other models. Neither project uses the slots of outputs and
input gradients.

The import raises ScalesError for more than two GEMMs (grouped linears, whose slot order changed between versions), for
states of FP8 attention, for recipes with functions, and for tensors with a wrong type, shape or value.

The export writes a pickle, because Transformer Engine reads nothing else. It has the format of 1.x without a recipe
object, which every version reads, and contains only tensors, numbers and text. It was not yet tested with a real
Transformer Engine.
"""

import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8serve.errors import Fp8ServeError, RecipeError, ScalesError
from fp8serve.fp8.recipe import DelayedScaling, Format, as_delayed
from fp8serve.fp8.scaling import fp8_max
from fp8serve.model.formats.restricted_pickle import Call, Global, Storages, describe_record, read_state, read_tensor
from fp8serve.model.formats.scales import ScalingCheckpoint, TensorScale, check_scales, fingerprint
from fp8serve.model.storage.shards import Shards, read_header, type_name

KEY = "_extra_state"
MAX_BYTES = 16 << 20  # of one state; a history of 1024 steps takes 20 KiB
Names = Mapping[str, Sequence[Sequence[str]]]  # by module: for each of its GEMMs, the names of the linears

_RECIPES = "transformer_engine.common.recipe"
_ATTENTION_FIELDS = ("fp8_dpa", "fp8_mha")  # concern modules that are not imported
_FORMATS = {(448, 448): Format.E4M3, (448, 57344): Format.HYBRID}
_SLOTS = {"input": ("fwd", 3, 0), "weight": ("fwd", 3, 1), "grad_output": ("bwd", 2, 0)}  # (pass, slots per GEMM, slot)


@dataclass(frozen=True)
class ModuleState:
    """The delayed scaling of one module."""

    recipe: DelayedScaling
    tensors: list[dict[str, TensorScale]]  # for each GEMM, by "input", "weight" and "grad_output"


def read_module(state: Tensor, where: str = KEY) -> ModuleState | None:
    """Returns the state in one `_extra_state`, uint8 [bytes], or None if it is empty or its recipe has no state.

    Raises ScalesError, with the name `where`, if it is damaged, hostile or not supported.
    """
    if state.dtype is not torch.uint8 or state.dim() != 1 or state.numel() > MAX_BYTES:
        raise ScalesError(
            f"{where} is {type_name(state.dtype)} {list(state.shape)} where a uint8 [at most {MAX_BYTES}] was expected."
        )
    try:
        return _parse(state.detach().cpu().numpy().tobytes())
    except Fp8ServeError as error:
        raise ScalesError(f"{where} cannot be imported: {error}") from None


def _parse(data: bytes) -> ModuleState | None:
    if not data:
        return None
    value, storages = read_state(data)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ScalesError(f"It holds a {type(value).__name__} where Transformer Engine stores a dictionary.")
    if "forward" in value or "backward" in value:
        raise ScalesError("It is of Transformer Engine's operation fuser; only states of its modules are read.")
    extra = value.get("extra_fp8_variables", {})
    if not isinstance(extra, dict):
        raise ScalesError("Its extra_fp8_variables are not a dictionary.")
    if "recipe" in value:
        recipe = _recipe(value["recipe"])
    else:  # 1.x
        recipe = DelayedScaling(fp8_format=Format.E4M3 if extra.get("fp8_max_bwd") == 448 else Format.HYBRID)
    return None if recipe is None else _state(recipe, value, storages, extra)


def _recipe(value: Any) -> DelayedScaling | None:
    """Returns the recipe in a record, or None if it is a recipe without state."""
    if not isinstance(value, Call) or not isinstance(value.function, Global) or value.function.module != _RECIPES:
        raise ScalesError("Its recipe is not one of Transformer Engine's.")
    if value.function.name != "DelayedScaling":
        return None
    fields = value.state if isinstance(value.state, dict) else {}
    values = {k: v for k, v in fields.items() if v is not None and not k.startswith("_")}
    try:
        return DelayedScaling(**{k: _field(k, v) for k, v in values.items() if k not in _ATTENTION_FIELDS})
    except (RecipeError, TypeError) as error:
        raise ScalesError(f"Its recipe cannot be used: {error}") from None


def _field(name: str, value: Any) -> Any:
    """Returns the value of a recipe's field. Raises ScalesError unless it is short text, an integer or a triple of
    bool."""
    if name == "fp8_format":
        return _format(value)
    if name == "override_linear_precision" and isinstance(value, Call):
        value = value.args  # the three items of a named tuple
    if isinstance(value, tuple) and len(value) == 3 and all(isinstance(v, bool) for v in value):
        return value
    if isinstance(value, str) and len(value) < 64:
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    raise ScalesError(f"Its recipe's {name[:80]} is {describe_record(value)}, which is not read from files.")


def _format(value: Any) -> Format:
    """Returns the format. Python pickles Format(_FormatHelper(448, 57344)); 3.11.0 to 3.11.3 pickle the enum's name."""
    match value:
        case Call(Global(module, "Format"), (Call(_, (int() | float() as forward, int() | float() as backward)),)):
            result = _FORMATS.get((int(forward), int(backward))) if module == _RECIPES else None
        case Call(Global("builtins", "getattr"), (Global(module, "Format"), str(name))) if module == _RECIPES:
            result = Format.__members__.get(name)
        case _:
            result = None
    if result is None:
        raise ScalesError("Its recipe has a format that is neither E4M3 nor HYBRID.")
    return result


def _state(
    recipe: DelayedScaling, value: dict[str, Any], storages: Storages, extra: dict[str, Any]
) -> ModuleState | None:
    tensors = {
        (name, part): read_tensor(value[f"{name}_{part}"], storages, f"{name}_{part}")
        for name in ("scale", "amax_history")
        for part in ("fwd", "bwd")
        if f"{name}_{part}" in value
    }
    if ("scale", "fwd") not in tensors or ("amax_history", "fwd") not in tensors:
        raise ScalesError("It has a delayed recipe and no scale_fwd or amax_history_fwd.")
    gemms = _check(tensors, extra)
    length = tensors["amax_history", "fwd"].shape[0]
    return ModuleState(replace(recipe, amax_history_len=length), [_gemm(tensors, i) for i in range(gemms)])


def _check(tensors: dict[tuple[str, str], Tensor], extra: dict[str, Any]) -> int:
    """Returns the number of GEMMs. Raises ScalesError if a tensor has a wrong shape or an invalid value."""
    gemms, rows = tensors["scale", "fwd"].numel() // 3, tensors["amax_history", "fwd"].shape[:1]
    if gemms not in (1, 2) or extra.get("num_gemms", gemms) != gemms:
        raise ScalesError(f"It has states of {gemms} GEMMs or announces another number; only one or two are read.")
    for (name, part), values in tensors.items():
        width = gemms * (3 if part == "fwd" else 2)
        expected = (width,) if name == "scale" else (*rows, width)
        if tuple(values.shape) != expected or not rows or rows[0] == 0:
            raise ScalesError(f"{name}_{part} has the shape {list(values.shape)} where {list(expected)} was expected.")
        if not bool(values.isfinite().all()) or bool((values < 0).any()):
            raise ScalesError(f"{name}_{part} holds a negative, infinite or NaN value.")
    return gemms


def _gemm(tensors: dict[tuple[str, str], Tensor], gemm: int) -> dict[str, TensorScale]:
    """Returns the tensors of one GEMM, without a gradient that was never observed."""
    result = {}
    for role, (part, slots, slot) in _SLOTS.items():
        if ("scale", part) not in tensors or ("amax_history", part) not in tensors:
            continue
        column = gemm * slots + slot
        history = tensors["amax_history", part][:, column].clone()
        if role != "grad_output" or bool(history.any()):
            result[role] = TensorScale(tensors["scale", part][column].clone(), history)
    return result


_HF = re.compile(r"(?:.*\.)?(model\.layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj))")
_FUSED: list[tuple[re.Pattern[str], tuple[tuple[str, ...], ...]]] = [
    (re.compile(rf"(?:.*\.)?layers\.(\d+)\.{module}"), gemms)
    for module, gemms in {
        "self_attention\\.(?:layernorm_qkv|linear_qkv)": (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ),
        "self_attention\\.(?:proj|linear_proj)": (("self_attn.o_proj",),),
        "mlp\\.linear_fc1": (("mlp.gate_proj", "mlp.up_proj"),),
        "mlp\\.linear_fc2": (("mlp.down_proj",),),
        "layernorm_mlp": (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)),
    }.items()
]


def linears_of(module: str) -> Sequence[Sequence[str]]:
    """Returns the linears of each GEMM of a Transformer Engine module: "layers.0.mlp.linear_fc2" -> ((...down_proj,),).

    Raises ScalesError if the module's name is unknown.
    """
    if match := _HF.fullmatch(module):
        return ((match[1],),)
    for pattern, gemms in _FUSED:
        if match := pattern.fullmatch(module):
            return tuple(tuple(f"model.layers.{match[1]}.{name}" for name in gemm) for gemm in gemms)
    raise ScalesError(
        f"{module} is not a module of a supported model; import the states in Python, where the argument `names` "
        "of read_file says which linears a module stands for (docs/transformer-engine.md)."
    )


def import_states(
    tensors: Mapping[str, Tensor],
    model_dir: Path | str | None = None,
    *,
    names: Names | None = None,
    skip: Sequence[str] = (),
    where: str = "the Transformer Engine state",
) -> ScalingCheckpoint:
    """Returns a scaling checkpoint of all `M._extra_state` in `tensors`, for `save_scales`.

    The scales get the fingerprint of the Hugging Face directory `model_dir`. `names` has the linears of modules that
    `linears_of` does not know, and `skip` patterns of modules to ignore. Raises ScalesError if there is no valid state,
    if the modules have different recipes, or if a tensor was never observed. `where` is the source for messages.
    """
    entries: dict[str, TensorScale] = {}
    recipes: dict[DelayedScaling, str] = {}
    for module in sorted(key.removesuffix(f".{KEY}") for key in tensors if key.endswith(f".{KEY}")):
        if any(fnmatch(module, pattern) for pattern in skip):
            continue
        state = read_module(tensors[f"{module}.{KEY}"], f"{module}.{KEY}")
        if state is not None:
            entries |= _scales_by_linear(module, state, (names or {}).get(module) or linears_of(module))
            recipes.setdefault(state.recipe, module)
    if not recipes:
        raise ScalesError(f"{where} holds no {KEY} with delayed scales.")
    if len(recipes) > 1:
        raise ScalesError(
            f"{where}: the recipes of {' and '.join(list(recipes.values())[:2])} differ; import them apart."
        )
    model = fingerprint(model_dir) if model_dir is not None else ""
    result = ScalingCheckpoint(next(iter(recipes)), entries, model, {}, "Transformer Engine, imported by fp8serve")
    check_scales(result, where)
    return result


def _scales_by_linear(module: str, state: ModuleState, linears: Sequence[Sequence[str]]) -> dict[str, TensorScale]:
    if len(linears) != len(state.tensors):
        raise ScalesError(f"{module}.{KEY} has {len(state.tensors)} GEMMs where its name stands for {len(linears)}.")
    return {
        f"{linear}.{role}": entry
        for owners, tensors in zip(linears, state.tensors, strict=True)
        for linear in owners
        for role, entry in tensors.items()
    }


def read_file(path: Path | str, model_dir: Path | str | None = None, **options: Any) -> ScalingCheckpoint:
    """Returns `import_states` of a .safetensors file. `options` are its arguments `names` and `skip`."""
    entries, _ = read_header(Path(path))
    states = Shards({name: entry for name, entry in entries.items() if name.endswith(KEY)})
    return import_states(states, model_dir, where=str(path), **options)


def holds_states(path: Path) -> bool:
    """Returns whether a .safetensors file has `_extra_state` tensors."""
    return any(name.endswith(f".{KEY}") for name in read_header(path)[0])


def export_module(checkpoint: ScalingCheckpoint, linears: Sequence[str]) -> Tensor:
    """Returns the `_extra_state`, uint8 [bytes], of a Transformer Engine module with one or two GEMMs, the `linears`.

    A missing gradient state gets its initial value. Raises ScalesError if a linear's input or weight has no history.
    """
    if len(linears) not in (1, 2):
        raise ScalesError(f"A module has one or two GEMMs, found {len(linears)} linears.")
    states = [{role: checkpoint.tensors.get(f"{linear}.{role}") for role in _SLOTS} for linear in linears]
    for linear, roles in zip(linears, states, strict=True):
        if any(roles[r] is None or roles[r].amax_history is None for r in ("input", "weight")):  # type: ignore[union-attr]
            raise ScalesError(f"{linear} has no delayed state of its input and weight; only those can be exported.")
    recipe = as_delayed(checkpoint.recipe) or DelayedScaling()
    value: dict[str, Any] = {}
    for part, slots in (("fwd", 3), ("bwd", 2)):
        scale, history = _columns(states, part, slots)
        value |= {f"scale_{part}": scale, f"scale_inv_{part}": scale.reciprocal(), f"amax_history_{part}": history}
    value["extra_fp8_variables"] = {
        "fp8_checkpoint": True,
        "num_gemms": len(linears),
        "fp8_max_fwd": fp8_max(recipe, "input"),
        "fp8_max_bwd": fp8_max(recipe, "grad_output"),
    }
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _columns(states: list[dict[str, TensorScale | None]], part: str, slots: int) -> tuple[Tensor, Tensor]:
    """Returns (scale [slots * g], amax_history [N, slots * g]). Unused slots have the scale 1 and no amax."""
    lengths = {len(e.amax_history) for roles in states for e in roles.values() if e and e.amax_history is not None}
    if len(lengths) > 1:
        raise ScalesError(f"A module's histories have one length, these have {sorted(lengths)}; export them apart.")
    scale, history = torch.ones(slots * len(states)), torch.zeros(lengths.pop(), slots * len(states))
    for gemm, roles in enumerate(states):
        for role, (role_part, _, slot) in _SLOTS.items():
            entry = roles[role]
            if role_part == part and entry is not None and entry.amax_history is not None:
                scale[gemm * slots + slot] = entry.scale
                history[:, gemm * slots + slot] = entry.amax_history
    return scale, history


def export_states(checkpoint: ScalingCheckpoint) -> dict[str, Tensor]:
    """Returns `P._extra_state` for every linear P, for a model whose nn.Linear are Transformer Engine's."""
    linears = sorted({key.rpartition(".")[0] for key in checkpoint.tensors if key.endswith((".input", ".weight"))})
    return {f"{linear}.{KEY}": export_module(checkpoint, [linear]) for linear in linears}
