"""Reads and writes peft's adapter_config.json, and the tensor names in adapter_model.safetensors.

The tensors determine which layers have an adapter, and its rank; adapter_config.json determines its scaling factor.
Unsupported features that change the result raise ModelError: biases, `modules_to_save`, other methods than LoRA and
DoRA, and initializations that change the base model's weights.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fp8serve.errors import ModelError, shown
from fp8serve.model.storage.files import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Part = Literal["lora_A", "lora_B", "lora_magnitude_vector"]
MAX_RANK = 4096

_PREFIX = "base_model.model."
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?")
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
# Unsupported fields, with the values at which they have no effect.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "modules_to_save": (None, []), "lora_bias": (False, None), "fan_in_fan_out": (False, None),
    "layer_replication": (None, []), "target_parameters": (None, []), "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []), "use_qalora": (False, None), "use_bdlora": (None, False),
    "arrow_config": (None,),
}  # fmt: skip
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True)
class PeftConfig:
    """The parts of adapter_config.json that determine the output of an adapter."""

    rank: int
    alpha: float
    rslora: bool = False  # B A is scaled by alpha / sqrt(r) instead of alpha / r
    dora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)  # `rank_pattern`, by the end of a linear's name
    alphas: Mapping[str, float] = field(default_factory=dict)  # `alpha_pattern`

    def rank_of(self, linear: str) -> int:
        return _look_up(self.ranks, linear, self.rank)  # type: ignore[no-any-return]

    def scaling(self, linear: str) -> float:
        """Returns the factor of B A for this linear."""
        rank = self.rank_of(linear)
        alpha = float(_look_up(self.alphas, linear, self.alpha))
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _look_up(values: Mapping[str, Any], linear: str, default: Any) -> Any:
    """Returns the first value whose key is the linear's name or the end of it, as peft does."""
    return next((v for name, v in values.items() if linear == name or linear.endswith(f".{name}")), default)


def read_config(directory: Path) -> PeftConfig:
    """Returns the configuration in `directory`. Raises ModelError if it is missing, damaged or not supported."""
    path = directory / CONFIG
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path} is of the method {shown(config.get('peft_type'))}; supported are LoRA and DoRA.")
    for name, neutral in _NEUTRAL_VALUES.items():
        if name in config and config[name] not in neutral:
            raise ModelError(f"{path} has {name}={shown(config[name])}, which is not supported; train without it.")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise ModelError(
            f"{path} has init_lora_weights={init}, which changes the base model's weights; convert the adapter to a "
            "plain LoRA with peft."
        )
    return PeftConfig(
        rank=_rank(path, "r", config.get("r")),
        alpha=_number(path, "lora_alpha", config.get("lora_alpha")),
        rslora=_boolean(path, "use_rslora", config),
        dora=_boolean(path, "use_dora", config),
        ranks={n: _rank(path, f"rank_pattern {n}", v) for n, v in _patterns(path, "rank_pattern", config).items()},
        alphas={n: _number(path, f"alpha_pattern {n}", v) for n, v in _patterns(path, "alpha_pattern", config).items()},
    )


def _rank(path: Path, name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise ModelError(f"{path}: {name} must be an integer from 1 to {MAX_RANK}, found {shown(value)}.")
    return int(value)


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise ModelError(f"{path}: {name} must be a number above 0 and up to 1000000, found {shown(value)}.")
    return float(value)


def _boolean(path: Path, name: str, config: Mapping[str, Any]) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise ModelError(f"{path}: {name} must be true or false, found {shown(value)}.")
    return value


def _patterns(path: Path, name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns values by module names. Regular expressions raise ModelError, because a hostile one may run forever."""
    values = config.get(name) or {}
    if not isinstance(values, dict) or not all(_PLAIN.fullmatch(key) for key in values):
        raise ModelError(
            f"{path}: {name} must map names of modules; patterns are not supported, found {shown(values)}."
        )
    return values


def make_config(
    base: str, config: PeftConfig, adapted: Sequence[str], linears: Sequence[str], dropout: float
) -> dict[str, Any]:
    """Returns adapter_config.json for an adapter of the linears `adapted`, a subset of the model's `linears`."""
    components = {name.rpartition(".")[2] for name in adapted}
    matches = {name for name in linears if name.rpartition(".")[2] in components}
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(config.alpha) if config.alpha.is_integer() else config.alpha,
        "lora_dropout": dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        # the last components of the names, or the full names if the components match other linears, too
        "target_modules": sorted(components if matches == set(adapted) else adapted),
        "task_type": "CAUSAL_LM",
        "use_dora": config.dora,
        "use_rslora": config.rslora,
    }


def tensor_name(linear: str, part: Part) -> str:
    """Returns the name of an adapter's tensor in adapter_model.safetensors."""
    suffix = "" if part == "lora_magnitude_vector" else ".weight"
    return f"{_PREFIX}{linear}.{part}{suffix}"


def parse_name(key: str) -> tuple[str, Part] | None:
    """Returns the linear and the part of a tensor name in adapter_model.safetensors, or None for other names."""
    match = _KEY.fullmatch(key)
    return None if match is None else (match[1], match[2])  # type: ignore[return-value]
