"""adapter_config.json and the names of tensors in adapter_model.safetensors, as peft spells them.

The tensors tell which layers have an adapter and of which rank; the file gives the factor of their products. Features
that would change the result and are not supported are refused by name: biases, modules saved whole, other methods, and
initializations that moved part of the base's weights into the adapter.
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
# Fields that are accepted only with these values, which have no effect.
_UNUSED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "modules_to_save": (None, []), "lora_bias": (False, None), "fan_in_fan_out": (False, None),
    "layer_replication": (None, []), "target_parameters": (None, []), "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []), "use_qalora": (False, None), "use_bdlora": (None, False),
    "arrow_config": (None,),
}  # fmt: skip
_MOVING = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True)
class PeftConfig:
    """How an adapter's tensors are multiplied. rslora: by alpha / sqrt(r) instead of alpha / r."""

    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    def rank_of(self, linear: str) -> int:
        return _by_name(self.ranks, linear, self.rank)  # type: ignore[no-any-return]

    def scaling(self, linear: str) -> float:
        """The factor of B A for this linear."""
        rank = self.rank_of(linear)
        alpha = float(_by_name(self.alphas, linear, self.alpha))
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _by_name(values: Mapping[str, Any], linear: str, usual: Any) -> Any:
    """The value under the linear's name or a suffix of it, as peft looks it up: the first match."""
    return next((v for name, v in values.items() if linear == name or linear.endswith(f".{name}")), usual)


def read_config(directory: Path) -> PeftConfig:
    """The adapter_config.json of `directory`. ModelError: there is none, or it needs a feature that is not
    supported."""
    path = directory / CONFIG
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path} is of the method {shown(config.get('peft_type'))}; adapters here are LoRA and DoRA.")
    for name, silent in _UNUSED.items():
        if name in config and config[name] not in silent:
            raise ModelError(f"{path} has {name}={shown(config[name])}, which is not supported; train without it.")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_MOVING):
        raise ModelError(
            f"{path} began with {start}, which changes the base's weights; convert it to a plain LoRA with peft."
        )
    return PeftConfig(
        rank=_rank(path, "r", config.get("r")),
        alpha=_number(path, "lora_alpha", config.get("lora_alpha")),
        rslora=_switch(path, "use_rslora", config),
        dora=_switch(path, "use_dora", config),
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


def _switch(path: Path, name: str, config: Mapping[str, Any]) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise ModelError(f"{path}: {name} must be true or false, found {shown(value)}.")
    return value


def _patterns(path: Path, name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Values by the names of modules. Regular expressions are not run: a hostile one may take forever."""
    values = config.get(name) or {}
    if not isinstance(values, dict) or not all(_PLAIN.fullmatch(key) for key in values):
        raise ModelError(
            f"{path}: {name} must map names of modules; patterns are not supported, found {shown(values)}."
        )
    return values


def written_config(
    base: str, config: PeftConfig, adapted: Sequence[str], linears: Sequence[str], dropout: float
) -> dict[str, Any]:
    """adapter_config.json for an adapter of the linears `adapted` among all `linears` of the model."""
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
        "target_modules": _targets(adapted, linears),
        "task_type": "CAUSAL_LM",
        "use_dora": config.dora,
        "use_rslora": config.rslora,
    }


def _targets(adapted: Sequence[str], linears: Sequence[str]) -> list[str]:
    """The last components of the names if these match no other linear, else the names."""
    last = {name.rpartition(".")[2] for name in adapted}
    fitting = {name for name in linears if name.rpartition(".")[2] in last}
    return sorted(last if fitting == set(adapted) else adapted)


def key_of(linear: str, part: Part) -> str:
    """The name in the file."""
    suffix = "" if part == "lora_magnitude_vector" else ".weight"
    return f"{_PREFIX}{linear}.{part}{suffix}"


def place_of(key: str) -> tuple[str, Part] | None:
    """(linear, part) of a name in the file; None for a name that is neither."""
    match = _KEY.fullmatch(key)
    return None if match is None else (match[1], match[2])  # type: ignore[return-value]
