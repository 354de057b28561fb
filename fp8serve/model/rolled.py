"""Writes a served directory with the current scales of its inputs: `python -m fp8serve.model.rolled SOURCE OUT MOVED`.

The server runs it in a separate process, so that neither requests nor the engine wait while weights are copied. MOVED
holds the engine's scales of inputs and their histories; everything else comes from SOURCE, and from the file that
--scales names if the server was started with one. FP8 weights stay as they are; weights in high precision are rounded
as serving rounded them. The last line of output reports an error as JSON.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fp8serve import __version__
from fp8serve.errors import Fp8ServeError, ModelError
from fp8serve.fp8.recipe import DelayedScaling, Recipe, delayed
from fp8serve.model.export import write_calibrated
from fp8serve.model.formats.scales import FILE_NAME, ScalingCheckpoint, load_scales, read_scales
from fp8serve.model.rewriting import (
    fitted,
    format_of,
    layout,
    recipe_of,
    state_of,
    stored_linears,
    stored_matrices,
)
from fp8serve.model.storage.files import present
from fp8serve.model.storage.opening import real_path
from fp8serve.model.stored import Checkpoint, StoredLinear, check_agreement, open_checkpoint


def write_rolled(source: Path, out: Path, moved: ScalingCheckpoint, scales: Path | None = None) -> None:
    """Write `source` with the scales of inputs that `moved` holds to `out`, whole or not at all.

    ModelError, ScalesError: `out` is taken; no format says how the weights are scaled. MachineError: the place cannot
    be written.
    """
    checkpoint = open_checkpoint(source)
    format = format_of(source)
    if not checkpoint.fp8_linears:
        state = _with(moved, _of_file(checkpoint, scales))
        high_precision = [name for name in checkpoint.linears if f"{name}.input" not in state.tensors]
        return write_calibrated(out, source, state, high_precision=high_precision, format=format)
    stored = stored_linears(checkpoint)
    recipe = recipe_of(checkpoint, stored, format)
    has_file = scales is not None or present(source / FILE_NAME)
    base = _of_file(checkpoint, scales) if has_file else _of_weights(moved, checkpoint, stored, recipe)
    state = _with(moved, base)
    if state.recipe is None or layout(state.recipe) != layout(recipe):
        raise ModelError(
            f"The weights of {source} are served with other scales than they are stored with; write them first: "
            "fp8serve calibrate."
        )
    weight = recipe.specs.linear["weight"]
    quantized = {name: (linear.weight_q, fitted(linear, weight)) for name, linear in stored.items()}
    high_precision, matrices = checkpoint.high_precision_linears, stored_matrices(checkpoint)
    return write_calibrated(
        out, source, state, quantized=quantized, matrices=matrices, high_precision=high_precision, format=format
    )


def _with(moved: ScalingCheckpoint, base: ScalingCheckpoint) -> ScalingCheckpoint:
    tensors = base.tensors | moved.tensors
    return replace(base, tensors=tensors, created_by=f"fp8serve {__version__} serve --roll-history")


def _of_weights(
    moved: ScalingCheckpoint, checkpoint: Checkpoint, stored: Mapping[str, StoredLinear], recipe: Recipe
) -> ScalingCheckpoint:
    """The scales stored with the weights; they had no histories, and the engine began new ones."""
    rules = delayed(moved.recipe)
    if rules is not None and isinstance(recipe, DelayedScaling):
        recipe = replace(recipe, amax_history_len=rules.amax_history_len)
    return state_of(checkpoint, dict(stored), recipe)


def _of_file(checkpoint: Checkpoint, scales: Path | None) -> ScalingCheckpoint:
    path = checkpoint.path / FILE_NAME if scales is None else real_path(scales)
    state = load_scales(path, checkpoint.path)
    if scales is None:
        check_agreement(checkpoint, state, str(path))
    return state


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fp8serve.model.rolled", description=__doc__)
    for name in ("source", "out", "moved"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--scales", type=Path)
    arguments = parser.parse_args()
    try:
        write_rolled(arguments.source, arguments.out, read_scales(arguments.moved), arguments.scales)
    except Fp8ServeError as problem:
        print(json.dumps({"error": type(problem).__name__, "message": str(problem)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
