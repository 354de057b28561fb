"""Refuses options that cannot be used, before any weight is read, and limits the lengths of sequences."""

from pathlib import Path

import torch

from fp8serve.calibration.options import CalibrationOptions
from fp8serve.errors import DataError, MachineError, ModelError, RecipeError
from fp8serve.fp8.recipe import Recipe, as_delayed, can_train, name_of, to_json
from fp8serve.fp8.selfcheck import prepare_device
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.formats.quantization_config import quantization_files
from fp8serve.model.storage.files import check_absent
from fp8serve.model.stored_checkpoint import matrices_notes, open_checkpoint

ENCODER_OPTIONS = ("data", "holdout", "samples", "seq_len", "batch_size", "seed", "device", "format", "max_shard_size",
                   "rounding", "skip", "only", "target_cosine")  # fmt: skip


def check_settings(
    out: Path, recipe: Recipe | None, settings: CalibrationOptions, processes: int = 1, *, is_encoder: bool = False
) -> Recipe:
    """Checks the options of a calibration and returns its recipe.

    Raises ModelError, DataError, RecipeError or MachineError if an option cannot be used, alone or with other options.
    """
    check_absent(out)
    _ = settings.max_shard_bytes  # raises DataError if it is not a size
    if recipe is None:
        raise RecipeError(
            "The recipe 'bf16' has no scales, so there is nothing to calibrate; serve the model as it is."
        )
    to_json(recipe)  # raises RecipeError if the recipe has a function, which cannot be stored
    # raises ModelError if the format lacks the recipe
    quantization_files(settings.format, recipe, settings.kv_cache, has_input_scales=True)
    if recipe.override_linear_precision[0]:
        raise RecipeError("The recipe keeps the forward pass in high precision, so there is nothing to calibrate.")
    if processes > 1 and settings.reads_stdin:
        raise DataError("Standard input ('-') cannot be read by several processes; give them a file.")
    if settings.target_cosine is not None and not is_encoder:
        raise RecipeError("target_cosine is for encoders, but this is a language model; use target_kl.")
    _check_scales(recipe, settings)
    _check_weights(recipe, settings)
    check_device(settings.device)
    return recipe


def check_encoder_options(options: CalibrationOptions) -> None:
    """Raises RecipeError if an option of generative models is set."""
    defaults = CalibrationOptions.of({})
    for name, value in vars(options).items():
        if name not in ENCODER_OPTIONS and value != getattr(defaults, name):
            raise RecipeError(f"{name} is for models that generate text; leave it out for a model that embeds.")


def quantized_notes(source: Path, *, scales_only: bool = False) -> tuple[str, ...]:
    """Returns notes for the report if the model is quantized already, or else an empty tuple.

    Such a model is not refused, because its inputs or its KV cache may have no scales yet.
    """
    checkpoint = open_checkpoint(source)
    if checkpoint.quantization is None:
        return ()
    return (
        f"{source} is quantized already. The reference in high precision is this model, dequantized, so the error of "
        "its first quantization is not measured; calibrate the original model if you have it.",
        *(() if scales_only else matrices_notes(checkpoint, rewritten=True)),
    )


def check_model(config: ModelConfig, settings: CalibrationOptions) -> None:
    """Raises ModelError for a classifier, and RecipeError for smoothing with the transformers backend.

    Smoothing must know which layers read which norms. The transformers backend does not provide this.
    """
    if config.head is not None:
        raise ModelError("The model classifies texts and does not generate text; use calibrate_encoder.")
    if settings.smoothing is not None and config.computed_by is not None:
        raise RecipeError(
            f"Smoothing needs a model family, which says which norm a layer reads, and {config.architecture} has none; "
            "leave it out."
        )


def _check_scales(recipe: Recipe, settings: CalibrationOptions) -> None:
    if settings.share_scales and recipe.specs.linear["weight"].source != "delayed":
        raise RecipeError("share_scales needs one stored scale for each weight (delayed, per tensor); leave it out.")
    if settings.gradients and as_delayed(recipe) is None:
        raise RecipeError(f"The recipe {name_of(recipe)!r} stores no scales for gradients; leave out gradients.")
    if settings.scales_only and not (settings.kv_cache or as_delayed(recipe) is not None):
        raise RecipeError(
            f"The recipe {name_of(recipe)!r} stores no scales, so scales_only has nothing to write; leave it out."
        )


def _check_weights(recipe: Recipe, settings: CalibrationOptions) -> None:
    """Raises RecipeError for options that change or exclude weights and cannot be combined."""
    if settings.scales_only and (settings.skip or settings.only or settings.target_kl is not None):
        raise RecipeError(
            "scales_only writes no weights, so it cannot choose which stay in high precision; leave out skip, only and "
            "target_kl."
        )
    if settings.scales_only and settings.rounding != "nearest":
        raise RecipeError("scales_only writes no weights, so their rounding must be 'nearest'.")
    if settings.scales_only and settings.smoothing is not None:
        raise RecipeError("scales_only writes no weights, but smoothing changes weights; leave out one of the two.")
    if settings.heal and settings.scales_only:
        raise RecipeError("Healing changes weights and their scales; leave out scales_only.")
    if settings.heal_rate is not None and not settings.heal:
        raise RecipeError("heal_rate is the learning rate of healing, which is off; give heal, or leave out heal_rate.")
    if settings.heal and not can_train(recipe):
        raise RecipeError(f"The recipe {name_of(recipe)!r} does not support training; leave out heal.")


def check_device(device: str) -> str:
    """Returns `device` ("cpu", "cuda", "cuda:1"). Raises MachineError if torch cannot use the device."""
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise MachineError(f"The device {device!r} does not exist; use cpu or cuda.") from None
    if parsed.type not in ("cpu", "cuda"):
        raise MachineError(f"The device {device!r} is not supported; use cpu or cuda.")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise MachineError(f"The device {device!r} was requested, but torch finds no such GPU; use --device cpu.")
    prepare_device(parsed)
    return device


def limit_seq_len(seq_len: int, *models: ModelConfig) -> tuple[int, tuple[str, ...]]:
    """Returns `seq_len` or the shortest context of `models`, if that is shorter, with a note about the limit."""
    context = min(config.max_position_embeddings for config in models)
    if seq_len <= context:
        return seq_len, ()
    return context, (f"Sequences were cut to the model's context of {context} tokens instead of {seq_len} tokens.",)


def missing_samples_note(requested: int, seq_len: int, samples: int, tokens: int) -> tuple[str, ...]:
    """Returns a note if there are fewer samples than `requested`, or less than half of the requested tokens."""
    if samples == requested and 2 * tokens >= requested * seq_len:
        return ()
    reason = "there is no more text" if samples < requested else "short documents are not joined"
    return (
        f"The data gave {samples:,} samples with {tokens:,} tokens instead of {requested:,} samples of {seq_len:,} "
        f"tokens, because {reason}.",
    )
