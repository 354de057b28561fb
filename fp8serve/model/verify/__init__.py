"""Checks whether a checkpoint is what it says it is, from headers, scales and FP8 codes; no model is built.

`subject.py` reads a directory, a shard or a single file, however damaged, by names, types and shapes alone, so that an
architecture need not be known. Each check is a function from that subject to its findings, and a row of `CHECKS`.

Codes say much about their scale. Quantizing by amax uses the largest code, 448, in every tensor, row or block; so codes
that stay small, or pile up at 448, were made with another scale. The dequantized weights of every trained model have a
mean size between about 1e-6 and 3, which distinguishes a scale from its reciprocal.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from fp8serve.model.verify import layout, numbers
from fp8serve.model.verify.subject import Finding, Subject, read

__all__ = ["CHECKS", "Finding", "verify"]

Check = Callable[[Subject], Iterable[Finding]]
Advance = Callable[[int, int], None]

CHECKS: tuple[Check, ...] = (
    layout.index_and_files,
    layout.unlisted_tensors,
    layout.two_layouts,
    layout.total_size,
    layout.unknown_scales,
    layout.repeated_scales,
    layout.missing_weight_scales,
    layout.unscaled_vectors,
    layout.orphaned_scales,
    layout.lone_cache_scales,
    layout.tied_weights,
    layout.side_car,
    layout.fp8_without_config,
    layout.config_without_fp8,
    layout.ignored_layers,
    layout.input_scales,
    layout.weight_blocks,
    layout.cache_scheme,
    numbers.scale_types,
    numbers.weight_types,
    numbers.empty_scales,
    numbers.weight_scale_shapes,
    numbers.input_scales_are_numbers,
    numbers.cache_scales_are_numbers,
    numbers.bad_scales,
    numbers.bad_codes,
    numbers.bad_weights,
    numbers.reciprocal_weight_scales,
    numbers.implausible_weight_scales,
    numbers.uneven_weight_scales,
    numbers.reciprocal_input_scales,
    numbers.implausible_input_scales,
    numbers.underused_codes,
    numbers.clipped_codes,
    numbers.default_scales,
)


def verify(path: Path, advance: Advance = lambda done, total: None) -> list[Finding]:
    """What is wrong with the checkpoint at `path`, a model directory or a .safetensors file; errors come first.

    Of a format that is not read, one finding says so: its tensors are not judged. advance: called with the number of
    FP8 weights that have been read. ModelError: there is nothing to look at.
    """
    subject = read(path)
    if (unread := subject.unread_format) is not None:
        return [unread]
    for done, owner in enumerate(subject.weights, 1):
        subject.codes(owner)
        advance(done, len(subject.weights))
    findings = [*subject.trouble, *(finding for check in CHECKS for finding in check(subject))]
    return sorted(findings, key=lambda finding: finding.severity != "error")
