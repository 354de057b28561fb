"""Options that a calibration or an evaluation refuses before a weight is read, and the lengths of sequences."""

from pathlib import Path

import torch

from fp8serve.calibration.options import CalibrationOptions
from fp8serve.calibration.techniques.precision import Target
from fp8serve.errors import DataError, MachineError, ModelError, RecipeError
from fp8serve.fp8.recipe import Recipe, delayed, name_of, to_json, trains
from fp8serve.fp8.selfcheck import prepare_device
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.formats.quantization_config import quantization_files
from fp8serve.model.storage.files import check_absent, check_writable
from fp8serve.model.stored import matrices_note, open_checkpoint

ENCODER_OPTIONS = ("data", "holdout", "samples", "seq_len", "batch_size", "seed", "device", "format", "max_shard_size",
                   "rounding", "skip", "only", "target_cosine")  # fmt: skip


def check_settings(
    out: Path, recipe: Recipe | None, settings: CalibrationOptions, processes: int = 1, *, is_encoder: bool = False
) -> Recipe:
    """The recipe. ModelError, DataError, RecipeError, MachineError: an option cannot be used, or not together with
    another."""
    check_absent(out)
    _ = settings.max_shard_bytes  # DataError when it is not a size
    if recipe is None:
        raise RecipeError(
            "The recipe 'bf16' has no scales, so there is nothing to calibrate; serve the model as it is."
        )
    to_json(recipe)  # RecipeError when it holds a function, which no file can carry
    quantization_files(settings.format, recipe, settings.kv_cache)  # ModelError when the format cannot express it
    if recipe.override_linear_precision[0]:
        raise RecipeError("The recipe keeps the forward pass in high precision, so there is nothing to calibrate.")
    if processes > 1 and settings.reads_stdin:
        raise DataError("Standard input ('-') cannot be read by several processes; give them a file.")
    if settings.target_cosine is not None and not is_encoder:
        raise RecipeError("target_cosine is for encoders, and this is a language model; use target_kl.")
    _check_scales(recipe, settings)
    _check_weights(recipe, settings)
    check_device(settings.device)
    return recipe


def check_encoder_options(options: CalibrationOptions) -> None:
    """RecipeError: an option other than its default that has no meaning for a model that embeds."""
    defaults = CalibrationOptions.of({})
    for name, value in vars(options).items():
        if name not in ENCODER_OPTIONS and value != getattr(defaults, name):
            raise RecipeError(f"{name} is for models that write text, and this one embeds or classifies; leave it out.")


def check_room(source: Path, out: Path) -> None:
    """MachineError: the disk of `out` has less room than one byte for each weight of `source`."""
    check_writable(out, open_checkpoint(source).num_weights)


def quantized_notes(source: Path, *, scales_only: bool = False) -> tuple[str, ...]:
    """Sentences for the owner of a model that is quantized already; empty for other models.

    Such a model is not refused: its inputs or its cache may have no scales yet.
    """
    checkpoint = open_checkpoint(source)
    if checkpoint.quantization is None:
        return ()
    return (
        f"{source} is quantized already: high precision means the widened weights of this model, and what its first "
        "quantization lost is not measured; calibrate the original model if you have it.",
        *(() if scales_only else matrices_note(checkpoint, rewritten=True)),
    )


def check_model(config: ModelConfig, settings: CalibrationOptions) -> None:
    """ModelError: a model with a head of labels is measured in another way (job.py).

    RecipeError: smoothing must know what each layer reads, which only transformers knows for this model.
    """
    if config.head is not None:
        raise ModelError("The model has a head of labels and no next tokens; use calibrate_encoder.")
    if settings.smoothing is not None and config.computed_by is not None:
        raise RecipeError(
            f"Smoothing changes a layer together with the norm before it, and {config.architecture} has no family that "
            "says which; leave it out."
        )


def _check_scales(recipe: Recipe, settings: CalibrationOptions) -> None:
    if settings.input_scales != "history" and delayed(recipe) is None:
        raise RecipeError(f"The recipe {name_of(recipe)!r} stores no scales of inputs; leave out input_scales.")
    if settings.gradients and delayed(recipe) is None:
        raise RecipeError(
            f"The recipe {name_of(recipe)!r} scales gradients by content; leave out gradient calibration."
        )
    if settings.scales_only and not (settings.kv_cache or delayed(recipe) is not None):
        raise RecipeError(
            f"The recipe {name_of(recipe)!r} stores no scales, so there is nothing to write on their own."
        )


def _check_weights(recipe: Recipe, settings: CalibrationOptions) -> None:
    """Refuses combinations of options that change weights or leave some unchanged."""
    if settings.scales_only and (settings.skip or settings.only or Target.of(settings)):
        raise RecipeError("scales_only writes no weights, so none can stay in high precision.")
    if settings.scales_only and settings.rounding != "nearest":
        raise RecipeError("scales_only writes no weights, so their rounding must be 'nearest'.")
    if settings.scales_only and settings.smoothing is not None:
        raise RecipeError("scales_only writes no weights, and smoothing changes them; leave out one of the two.")
    if settings.heal and (settings.scales_only or settings.input_scales != "history"):
        raise RecipeError("Healing changes weights and lets scales follow them; leave out scales_only, input_scales.")
    if settings.heal_rate is not None and not settings.heal:
        raise RecipeError("heal_rate is the learning rate of healing, which is off; give heal, or leave out heal_rate.")
    if settings.heal and not trains(recipe):
        raise RecipeError(f"Nothing trains under the recipe {name_of(recipe)!r}, so it cannot heal.")


def check_device(device: str) -> str:
    """`device` if this torch can compute on it ("cpu", "cuda", "cuda:1"); else MachineError."""
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise MachineError(f"The device {device!r} does not exist; use cpu or cuda.") from None
    if parsed.type not in ("cpu", "cuda"):
        raise MachineError(f"The device {device!r} is not supported; use cpu or cuda.")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise MachineError(f"The device {device!r} was asked for, but this torch sees no such GPU; use --device cpu.")
    prepare_device(parsed)
    return device


def fitting(seq_len: int, *models: ModelConfig) -> tuple[int, tuple[str, ...]]:
    """(`seq_len`, or less where one of `models` has a shorter context; a sentence about it when it is less)."""
    longest = min(config.max_position_embeddings for config in models)
    if seq_len <= longest:
        return seq_len, ()
    bound = f"{longest} tokens, the model's trained context"
    return longest, (f"Sequences were cut to {bound}, instead of the {seq_len} asked for.",)


def shortfall(requested: int, seq_len: int, samples: int, tokens: int) -> tuple[str, ...]:
    """A sentence where `requested` samples of `seq_len` tokens became fewer, or have less than half of the tokens."""
    if samples == requested and 2 * tokens >= requested * seq_len:
        return ()
    why = "there is no more text" if samples < requested else "short documents are not joined"
    goal, gave = f"{requested:,} samples of {seq_len:,} tokens", f"{samples:,} samples with {tokens:,} tokens"
    return (f"{goal} were asked for; the data gave {gave}, because {why}.",)
