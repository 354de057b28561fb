"""The table of checks, and the one function that runs them."""

from collections.abc import Callable, Iterable
from pathlib import Path

from fp8serve.model.verify import layout, magnitudes, numbers, promises
from fp8serve.model.verify.finding import Finding
from fp8serve.model.verify.subject import Subject, read

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
    promises.fp8_without_config,
    promises.config_without_fp8,
    promises.ignored_layers,
    promises.input_scales,
    promises.weight_blocks,
    promises.cache_scheme,
    numbers.scale_types,
    numbers.weight_types,
    numbers.empty_scales,
    numbers.weight_scale_shapes,
    numbers.input_scales_are_numbers,
    numbers.cache_scales_are_numbers,
    numbers.bad_scales,
    numbers.bad_codes,
    numbers.bad_weights,
    magnitudes.reciprocal_weight_scales,
    magnitudes.implausible_weight_scales,
    magnitudes.uneven_weight_scales,
    magnitudes.reciprocal_input_scales,
    magnitudes.implausible_input_scales,
    magnitudes.underused_codes,
    magnitudes.clipped_codes,
    magnitudes.default_scales,
)


def verify(path: Path, advance: Advance = lambda done, total: None) -> list[Finding]:
    """What is wrong with the checkpoint at `path`, a model directory or a .safetensors file; errors come first.

    Of a format that is not read, one finding says so: its tensors are not judged. advance: told how many FP8 weights
    have been read. ModelError: there is nothing to look at.
    """
    subject = read(path)
    if (unread := subject.unread_format) is not None:
        return [unread]
    for done, owner in enumerate(subject.weights, 1):
        subject.codes(owner)
        advance(done, len(subject.weights))
    found = [*subject.trouble, *(finding for check in CHECKS for finding in check(subject))]
    return sorted(found, key=lambda finding: finding.severity != "error")
