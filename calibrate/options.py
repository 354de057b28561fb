"""The options of calibration and evaluation. This module does not import torch, so that `--help` is fast."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from annotated_types import Ge, Gt, Le, Len

from fp8serve.errors import DataError, RecipeError, shown
from fp8serve.fp8.amax_rules import RuleName
from fp8serve.fp8.recipe import HeadDtype, Recipe, RecipeChoice, ServedName, from_name
from fp8serve.model.formats import FileFormat
from fp8serve.model.text.data_files import DATA, STDIN
from fp8serve.options import AUTO, DEVICE_HELP, About, check, known_fields

SHIPPED = "passages that ship with fp8serve"
HEAL_RATE = 3e-5
CPU_BATCH, GPU_BATCH = 4, 32
"""Sequences in a batch by default. On a GPU a small batch takes as long as its kernel launches, whatever its size."""
Files = tuple[str, ...]
Patterns = tuple[str, ...]
Rounding = Literal["nearest", "gptq"]


@dataclass(frozen=True)
class SampleOptions:
    """The samples to read, and the device. Raises DataError for a value that cannot be used."""

    data: Annotated[Files | None, About(f"{DATA} '-': standard input.", unset=SHIPPED, metavar="PATH")] = None
    samples: Annotated[int, Ge(1), About("Sequences to read.")] = 128
    seq_len: Annotated[int, Ge(2), About("Longest sequence, in tokens.")] = 512
    batch_size: Annotated[
        int | None, Ge(1), About("Sequences in a batch.", unset=f"{CPU_BATCH}; on a GPU {GPU_BATCH}")
    ] = None
    seed: Annotated[int, About("Seed for selecting samples.")] = 0
    device: Annotated[str, Len(1), About(DEVICE_HELP)] = AUTO

    def __post_init__(self) -> None:
        check(self, DataError)
        if self._from_stdin > 1:
            raise DataError("Standard input ('-') can be read only once; use it for data or for holdout.")

    def on_device(self, model_dir: Path, processes: int = 1) -> Self:
        """Returns the options with the device that "auto" stands for; for several processes it is the CPU."""
        from fp8serve.model.device import resolve_device  # here, so that `--help` is fast

        is_distributed = processes > 1 and self.device == AUTO
        return replace(self, device="cpu" if is_distributed else resolve_device(self.device, model_dir))

    @property
    def sequences_per_batch(self) -> int:
        """The option `batch_size`, or the default of the device."""
        return self.batch_size or (CPU_BATCH if self.device.startswith("cpu") else GPU_BATCH)

    @property
    def reads_stdin(self) -> bool:
        return self._from_stdin > 0

    @property
    def _from_stdin(self) -> int:
        """How many of the files are standard input."""
        return [*(self.data or ()), *(getattr(self, "holdout", None) or ())].count(STDIN)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Creates the options from keyword arguments, in which files may be one path or several.

        Raises DataError for a value that cannot be used, and RequestError for an unknown option.
        """
        values = known_fields(cls, options)
        return cls(**values | {name: _files(values[name]) for name in ("data", "holdout") if name in values})


def _files(value: Any) -> Any:
    if isinstance(value, str | Path):
        return (str(value),)
    return tuple(map(str, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class CalibrationOptions(SampleOptions):
    """The options of a calibration."""

    holdout: Annotated[
        Files | None, About("File to measure quality on, never calibrated on.", unset=SHIPPED, metavar="PATH")
    ] = None
    kv_cache: Annotated[bool, About("Also compute scales for an FP8 KV cache.")] = False
    gradients: Annotated[bool, About("Also observe gradients, for training.")] = False
    all_experts: Annotated[bool, About("While observing, send every token through every expert of a mixture.")] = False
    format: Annotated[FileFormat, About("Format of the quantized weights; docs/formats.md lists its readers.")] = (
        "compressed-tensors"
    )
    rounding: Annotated[
        Rounding,
        About("How weights are rounded; 'gptq' lets a layer's errors compensate for each other and takes longer."),
    ] = "nearest"
    smoothing: Annotated[
        float | None,
        Ge(0),
        Le(1),
        About(
            "Move the size of large input channels into the weights if that reduces the error; 1: all of it.",
            unset="off",
            metavar="ALPHA",
        ),
    ] = None
    skip: Annotated[
        Patterns | None, About("Linear layer that stays in BF16; a name or '*'.", unset="none", metavar="PATTERN")
    ] = None
    only: Annotated[
        Patterns | None,
        About("Linear layer that becomes FP8; all others stay in BF16.", unset="all", metavar="PATTERN"),
    ] = None
    target_kl: Annotated[
        float | None, Gt(0), About("Leave layers in BF16 until the KL divergence is this small.", metavar="NATS")
    ] = None
    target_cosine: Annotated[
        float | None, Gt(0), Le(1), About("Leave layers of an encoder in BF16 until the median cosine is this large.")
    ] = None
    heal: Annotated[int, Ge(0), About("Steps of training on the samples towards the output in high precision.")] = 0
    heal_rate: Annotated[
        float | None, Gt(0), Le(1), About("Largest learning rate of these steps.", unset=f"{HEAL_RATE:g}")
    ] = None
    share_scales: Annotated[
        bool,
        About("Give linear layers that read the same input one weight scale; a GPU multiplies them faster (delayed)."),
    ] = False
    generated_samples: Annotated[
        int, Ge(0), Le(64), About("Held-out prompts that both models continue for the report.")
    ] = 4
    scales_only: Annotated[bool, About("Write scales.safetensors and no weights.")] = False
    max_shard_size: Annotated[str, About("Largest file of weights, such as 2GB or 500MiB.", metavar="SIZE")] = "5GiB"
    resume: Annotated[bool, About("Continue an interrupted calibration of the same output.")] = False

    @property
    def max_shard_bytes(self) -> int:
        """`max_shard_size` in bytes. Raises DataError if it is not a size."""
        from pydantic import ByteSize, TypeAdapter, ValidationError

        try:
            return max(1, int(TypeAdapter(ByteSize).validate_python(self.max_shard_size)))
        except ValidationError:
            raise DataError(
                f"max_shard_size must be a number of bytes with a unit, such as 2GB, not {shown(self.max_shard_size)}."
            ) from None


# The flags of options that have another name than the option, and the recipes that have options beside or instead of
# `delayed`.
_FLAGS = {"amax_history_len": "--history-len", "amax_compute_algo": "--algo"}
_RECIPES = {
    "weight_granularity": ("delayed", "w8a16"),
    "power_2_scale": ("delayed", "w8a16"),
    "four_over_six": ("nvfp4-w4a16",),
}


@dataclass(frozen=True)
class ScalingOptions:
    """The options of the recipe to calibrate for."""

    name: Annotated[
        ServedName, About("How tensors are scaled; w8a16, nvfp4-w4a16, mxfp4-w4a16: weights only.", flag="--recipe")
    ] = "delayed"
    amax_history_len: Annotated[
        int | None, Ge(1), About("Length of the amax history (delayed).", unset="1024", flag="--history-len")
    ] = None
    amax_compute_algo: Annotated[
        RuleName | None, About("How an amax history is reduced to one amax (delayed).", unset="max", flag="--algo")
    ] = None
    margin: Annotated[int | None, Ge(0), About("Powers of two left free below the maximum (delayed).", unset="0")] = (
        None
    )
    weight_granularity: Annotated[
        Literal["tensor", "row"] | None,
        About("Part of a weight that shares a scale (delayed, w8a16).", unset="tensor; for w8a16 row"),
    ] = None
    power_2_scale: Annotated[bool, About("Round scales down to powers of two (delayed, w8a16).")] = False
    four_over_six: Annotated[
        bool,
        About("Let the largest element of a block become 4 instead of 6 where that is more accurate (nvfp4-w4a16)."),
    ] = False

    def __post_init__(self) -> None:
        check(self, RecipeError)

    @property
    def recipe(self) -> Recipe:
        """The recipe with these options. Raises RecipeError for an option that this recipe does not have."""
        options = {name: value for name, value in vars(self).items() if name != "name" and value not in (None, False)}
        if wrong := [name for name in options if self.name not in _RECIPES.get(name, ("delayed",))]:
            flag = _FLAGS.get(wrong[0], "--" + wrong[0].replace("_", "-"))
            raise RecipeError(f"{flag} is not an option of the recipe {self.name!r}; leave it out.")
        return cast(Recipe, from_name(self.name, **options))  # only "bf16" gives None


@dataclass(frozen=True)
class EvaluationOptions(SampleOptions):
    """The options of an evaluation."""

    recipe: Annotated[RecipeChoice, About("How MODEL runs; 'stored': the scales in its directory.")] = "stored"
    scales: Annotated[str | None, About("scales.safetensors to use.", unset="the directory's own", metavar="PATH")] = (
        None
    )
    head_dtype: Annotated[HeadDtype, About("Precision of the matrix for logits; fp8: cast as serve does.")] = "bf16"
