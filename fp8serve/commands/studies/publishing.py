"""What a study prints and writes: its figures, with the machine, the versions and the commit behind them."""

import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.terminal import print_json, progress

Tell = Callable[[str, int, int], None]  # (what, done, in all)
Print = Callable[[Mapping[str, Any]], None]
Chart = Callable[[Mapping[str, Any]], Mapping[str, str]]  # SVG by name
Out = Annotated[
    Path | None, typer.Option(help="Directory for the figures as JSON, and the plots.", show_default="nowhere")
]


def no_charts(result: Mapping[str, Any]) -> Mapping[str, str]:
    return {}


def measured(title: str, measure: Callable[[Tell], Mapping[str, Any]]) -> Mapping[str, Any]:
    """The figures of `measure`, which moves a bar."""
    with progress(title) as advance:
        return measure(lambda what, done, total: advance(done, total, what))


def publish(name: str, figures: Mapping[str, Any], out: Path | None, chart: Chart = no_charts) -> dict[str, Any]:
    """The figures with their origin; written to `out`/`name`.json, with the charts beside it."""
    from fp8serve.bench.provenance import provenance

    result = {"study": name, "made": provenance(shlex.join(["fp8serve", *sys.argv[1:]])), **figures}
    if out is not None:
        _write(out, name, result, chart(result))
    return result


def show(result: Mapping[str, Any], as_json: bool, print_tables: Print) -> None:
    """The result as JSON, or as one line on its origin and tables."""
    from fp8serve.bench.provenance import one_line

    if as_json:
        print_json(result)
    else:
        print(one_line(result["made"]), "\n")
        print_tables(result)


def _write(out: Path, name: str, result: Mapping[str, Any], charts: Mapping[str, str]) -> None:
    """`name.json` and the charts as `name-*.svg` in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_rounded(result), indent=1, allow_nan=False)
    text = re.sub(r"\[[-+\d.e,\s]*\]", lambda numbers: "".join(numbers[0].split()), text)  # a curve on one line
    (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    for chart, svg in charts.items():
        (out / f"{name}-{chart}.svg").write_text(svg, encoding="utf-8")


def _rounded(value: Any) -> Any:
    """To six significant digits; values that are not finite become null."""
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
