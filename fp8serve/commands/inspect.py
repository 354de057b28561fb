"""Show every scale in a checkpoint.

What it scales, in which direction, its shape and values, where it came from, and its amax history as a row of bars.
A scale that cannot be served is marked with "!" and the reason, and the exit status is 1; so it is for a model that
cannot be loaded, whose scales are shown all the same.

\b
Examples:
  fp8serve inspect ./llama-fp8
  fp8serve inspect ./llama-fp8/scales.safetensors --json
  fp8serve inspect te.safetensors                        # with _extra_state tensors of Transformer Engine
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.errors import ScalesError
from fp8serve.terminal import AsJson, print_json, print_table


def command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="Model directory or GGUF file, scales.safetensors, or Transformer Engine state."
        ),
    ],
    json: AsJson = False,
) -> None:
    from fp8serve.hub import find_model
    from fp8serve.inspection import inspect
    from fp8serve.model.gguf.reader import is_gguf

    report = inspect(find_model(str(path)) if is_gguf(path) else path)
    print_json(report) if json else _print(report)
    wrong = [s for s in report["scales"] if s["problem"]]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ScalesError(f"{path} cannot be served: {wrong[0]['tensor']}{more} {wrong[0]['problem']}.")
    if report["problem"]:
        raise ScalesError(f"{path} cannot be served: {report['problem']}.")


def _print(report: dict[str, Any]) -> None:
    from fp8serve.inspection import sparkline

    print(f"{report['path']}: {report['holds']}, {len(report['scales'])} scale tensors")
    for note in report["notes"]:
        print(note)
    rows = [
        (
            f"! {s['tensor']}" if s["problem"] else s["tensor"],
            s["direction"],
            s["shape"] or "[]",
            _values(s),
            s["origin"],
            s["problem"] or sparkline(s["history"] or []),
        )
        for s in report["scales"]
    ]
    if rows:
        print_table(("tensor", "direction", "shape", "value", "from", "amax history"), rows)


def _values(scale: dict[str, Any]) -> str:
    low, high = scale["smallest"], scale["largest"]
    return f"{low:.6g}" if low == high else f"{low:.6g} .. {high:.6g}"
