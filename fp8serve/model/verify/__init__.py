"""Checks whether a checkpoint is valid, from its headers, scales and FP8 codes, without building a model.

`raw_checkpoint.py` reads a directory, a shard or a single file, which may be damaged. It uses only names, types and
shapes, so it need not know the architecture. Each row of `CHECKS` is a function from that checkpoint to its findings.

FP8 codes reveal wrong scales. Quantization by amax uses the largest code, 448, in every tensor, row or block. If all
codes are smaller, or many are 448, the weight was quantized with another scale. The root mean square of a trained
model's weights is between about 1e-6 and 3, which distinguishes a scale from its reciprocal.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from fp8serve.model.verify import four_bit, layout, values
from fp8serve.model.verify.raw_checkpoint import Finding, RawCheckpoint, read

__all__ = ["CHECKS", "Finding", "verify"]

Check = Callable[[RawCheckpoint], Iterable[Finding]]
Progress = Callable[[int, int], None]

CHECKS: tuple[Check, ...] = (
    layout.check_index_and_files,
    layout.check_unlisted_tensors,
    layout.check_two_layouts,
    layout.check_total_size,
    layout.check_unknown_scales,
    layout.check_repeated_scales,
    layout.check_missing_weight_scales,
    layout.check_unscaled_vectors,
    layout.check_orphaned_scales,
    layout.check_lone_cache_scales,
    layout.check_tied_weights,
    layout.check_scales_file,
    layout.check_fp8_without_config,
    layout.check_config_without_quantized_weights,
    layout.check_ignored_layers,
    layout.check_input_scales,
    layout.check_weight_blocks,
    layout.check_cache_scheme,
    values.check_scale_types,
    values.check_weight_types,
    values.check_empty_scales,
    values.check_weight_scale_shapes,
    values.check_input_scales_are_numbers,
    values.check_cache_scales_are_numbers,
    values.check_bad_scales,
    values.check_large_exponents,
    values.check_bad_codes,
    values.check_bad_weights,
    values.check_implausible_weight_scales,
    values.check_uneven_weight_scales,
    values.check_implausible_input_scales,
    values.check_underused_codes,
    values.check_clipped_codes,
    values.check_default_scales,
    four_bit.check_global_scales,
    four_bit.check_4bit_config,
    four_bit.check_int4_weights,
    four_bit.check_pre_quant_scales,
    four_bit.check_sizes_of_4bit_weights,
    four_bit.check_order_of_codes,
)


def verify(path: Path, on_progress: Progress = lambda completed, total: None) -> list[Finding]:
    """Returns the findings about the model directory or .safetensors file at `path`, errors first.

    If the format is not supported, the only finding says so. `on_progress` is called with the number of FP8 weights
    that were read, and their total. Raises ModelError if there is no checkpoint.
    """
    checkpoint = read(path)
    if checkpoint.format_error is not None:
        return [checkpoint.format_error]
    for completed, owner in enumerate(checkpoint.weights, 1):
        checkpoint.codes(owner)
        on_progress(completed, len(checkpoint.weights))
    findings = [*checkpoint.read_errors, *(finding for check in CHECKS for finding in check(checkpoint))]
    return sorted(findings, key=lambda finding: finding.severity != "error")
