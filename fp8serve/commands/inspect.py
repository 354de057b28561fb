"""Show every scale in a checkpoint, or the differences between two checkpoints.

Shows for each scale its tensor, direction, shape, values, origin, and its amax history as a row of bars. A scale that
cannot be served is marked with "!" and the reason. The exit status is 1 if the model cannot be served with its stored
scales, or only with a BF16 cache. No weights are read.

With a second checkpoint it shows the configuration keys, weights and scales that differ, largest changes first, and
those that only one checkpoint has. Scales that differ by more than a factor of 2 are marked with "!".

\b
Examples:
  fp8serve inspect ./llama-fp8
  fp8serve inspect ./llama-fp8/scales.safetensors --json
  fp8serve inspect ./llama ./llama-fp8                   # what FP8 changed
  fp8serve inspect ./llama-fp8 ./llama-fine-tuned
  fp8serve inspect ./llama-fp8 --report llama.html       # the report of its calibration
  fp8serve inspect te.safetensors                        # with _extra_state tensors of Transformer Engine
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8serve.errors import RequestError, ScalesError
from fp8serve.terminal import AsJson, ReportFile, check_report, print_json, print_table, progress, write_report

if TYPE_CHECKING:
    from fp8serve.comparison import Comparison, ScaleChange, WeightChange

CACHE_SUFFIXES = (".k", ".v", ".kv")  # of the names of tensors with KV cache scales
MAX_ROWS = 20  # of a table of changes; --json lists all
LARGE_RATIO = 2.0  # of two scales of a tensor


def command(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="Model (directory or name), scales.safetensors, or Transformer Engine state."
        ),
    ],
    other: Annotated[str | None, typer.Argument(metavar="OTHER", help="Checkpoint to compare PATH with.")] = None,
    report_file: ReportFile = None,
    json: AsJson = False,
) -> None:
    from fp8serve.hub import find_checkpoint

    if other is None:
        _show(find_checkpoint(path), report_file, json)
    elif report_file is not None:
        raise RequestError("--report needs a single checkpoint; leave OTHER out.")
    else:
        _compare(find_checkpoint(path), find_checkpoint(other), json)


# -- one checkpoint --------------------------------------------------------------------------------------------------


def _show(path: Path, report_file: Path | None, json: bool) -> None:
    from fp8serve.inspection import inspect

    _write_calibration_report(path, report_file)
    report = inspect(path)
    print_json(report) if json else _print(report)
    if report["problem"]:
        raise ScalesError(f"{path} cannot be served: {report['problem']}.")
    ignored = CACHE_SUFFIXES if report["cache_problem"] else ()
    unusable = [s for s in report["scales"] if s["problem"] and not s["tensor"].endswith(ignored)]
    if unusable:
        others = _count(len(unusable) - 1, "other scale")
        more = f", and {others} cannot be served either" if len(unusable) > 1 else ""
        raise ScalesError(f"{path} cannot be served: {unusable[0]['tensor']} {unusable[0]['problem']}{more}.")
    if report["cache_problem"]:
        raise ScalesError(f"{path} can be served with a BF16 cache only: {report['cache_problem']}")


def _write_calibration_report(path: Path, report_file: Path | None) -> None:
    if report_file is None:
        return
    check_report(report_file)
    from fp8serve.calibration.reports.page import html_report
    from fp8serve.calibration.result import read_report

    report = read_report(path)
    write_report(report_file, lambda: html_report(report))


def _print(report: dict[str, Any]) -> None:
    from fp8serve.charts import text_sparkline
    from fp8serve.model.config.model_config import COMPUTED_BY

    print(f"{report['path']}: {report['holds']}, {len(report['scales'])} scale tensors")
    if report["computed_by"] is not None:
        print(COMPUTED_BY[report["computed_by"]])
    for note in report["notes"]:
        print(note)
    rows = [
        (
            f"! {s['tensor']}" if s["problem"] else s["tensor"],
            s["direction"],
            s["shape"] or "[]",
            _values(s["smallest"], s["largest"]),
            s["origin"],
            s["problem"] or text_sparkline(s["history"] or []),
        )
        for s in report["scales"]
    ]
    if rows:
        print_table(("tensor", "direction", "shape", "value", "from", "amax history"), rows)


def _values(low: float, high: float) -> str:
    return f"{low:.6g}" if low == high else f"{low:.6g} .. {high:.6g}"


# -- two checkpoints -------------------------------------------------------------------------------------------------


def _compare(a: Path, b: Path, json: bool) -> None:
    from fp8serve.comparison import compare

    with progress("Comparing") as advance:
        comparison = compare(a, b, advance)
    print_json(comparison.to_json()) if json else _print_comparison(comparison)


def _print_comparison(comparison: "Comparison") -> None:
    print(f"A: {comparison.a}\nB: {comparison.b}")
    print(f"Configuration: {_count(len(comparison.config), 'key')} with different values.")
    _print_rows(("key", "A", "B"), [(key, _shown(a), _shown(b)) for key, (a, b) in comparison.config.items()])
    print(f"Weights: {comparison.same_weights} the same, {len(comparison.weights)} different.")
    _print_rows(
        ("weight", "A", "B", "differing", "largest change", "SQNR"), [_weight_row(w) for w in comparison.weights]
    )
    large = sum(_is_large(s) for s in comparison.scales)
    suffix = f", {large} of them by more than a factor of {LARGE_RATIO:g}" if large else ""
    print(f"Scales: {comparison.same_scales} the same, {len(comparison.scales)} different{suffix}.")
    _print_rows(("scale of", "A", "B", "B / A"), [_scale_row(s) for s in comparison.scales])
    for label, names in (("A", comparison.only_in_a), ("B", comparison.only_in_b)):
        if names:
            print(
                f"Only in {label}: {_count(len(names), 'tensor')}, {', '.join(names[:3])}{', ...' * (len(names) > 3)}"
            )


def _print_rows(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    if rows:
        print_table(columns, rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        print(f"... and {len(rows) - MAX_ROWS} more; --json lists all.")


def _weight_row(change: "WeightChange") -> tuple[str, ...]:
    differing = "-" if change.differing is None else f"{100 * change.differing:.3g} %"
    largest = "-" if change.largest is None else f"{change.largest:.4g}"
    return (
        change.tensor,
        change.a,
        change.b,
        differing,
        largest,
        "-" if change.sqnr_db is None else f"{change.sqnr_db:.1f} dB",
    )


def _scale_row(change: "ScaleChange") -> tuple[str, ...]:
    ratio = "-" if change.ratio is None else f"{change.ratio:.4g}"
    return f"! {change.tensor}" if _is_large(change) else change.tensor, _values(*change.a), _values(*change.b), ratio


def _is_large(change: "ScaleChange") -> bool:
    return change.ratio is None or not 1 / LARGE_RATIO <= change.ratio <= LARGE_RATIO


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _shown(value: Any) -> str:
    from fp8serve.errors import shown

    return "-" if value is None else shown(value)
