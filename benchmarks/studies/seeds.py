"""Combines training studies of several seeds: how far a recipe ends from BF16, and how much of that is chance.

Two runs that round differently drift apart, so a single seed's distance is the recipe's cost plus chance. Over seeds,
the mean of the distances estimates the cost; its error is the sample's standard deviation / sqrt(seeds).
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer

from benchmarks.studies.training import LOSSES, smoothed
from fp8serve.commands.bench import Out, publish
from fp8serve.errors import JobError
from fp8serve.terminal import AsJson, print_json, print_table

KINDS = ("final", "running", "valid")
Result = Mapping[str, Any]


def read(files: Iterable[Path]) -> list[Result]:
    """Returns the studies, which must have one plan except for the seed. Raises JobError if they do not."""
    results = [_study(path) for path in files]
    plans = [{k: v for k, v in r["plan"].items() if k not in ("seed", "recipes", "resumed")} for r in results]
    if len(results) < 2 or any(plan != plans[0] for plan in plans):
        raise JobError("Seeds are compared over at least two studies with the same steps, batches and model.")
    if len({r["plan"]["seed"] for r in results}) < len(results):
        raise JobError("Two of the studies have the same seed.")
    return sorted(results, key=lambda r: r["plan"]["seed"])


def _study(path: Path) -> Result:
    try:
        study = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(f"{path} cannot be read as a study: {error}.") from None
    if not isinstance(study, dict) or study.get("study") != "training":
        raise JobError(f"{path} is not a result of the training study.")
    return study


def combine(results: Sequence[Result]) -> dict[str, Any]:
    """For each recipe after the first and each kind of loss: the distances from the first in percent, and their
    statistics."""
    first, *others = results[0]["runs"]
    common = [name for name in others if all(name in r["runs"] for r in results)]
    return {
        "seeds": [r["plan"]["seed"] for r in results],
        "baseline": first,
        "recipes": {
            name: {
                kind: _statistics([r["runs"][name][f"{kind}_difference_percent"] for r in results])
                for kind in KINDS
                if all(f"{kind}_difference_percent" in r["runs"][name] for r in results)
            }
            for name in common
        },
        "studies": [{**r["made"], "seed": r["plan"]["seed"]} for r in results],
    }


def _statistics(apart: list[float]) -> dict[str, Any]:
    deviation = stdev(apart)
    return {
        "apart": apart,
        "mean": fmean(apart),
        "deviation": deviation,
        "error": deviation / math.sqrt(len(apart)),
        "largest": max(map(abs, apart)),
    }


def chart(results: Sequence[Result]) -> str:
    """The distance of the running loss from the first recipe's over the steps: its mean over seeds and its scatter."""
    from fp8serve.charts import Panel, svg_file

    width = max(1, results[0]["plan"]["steps"] // 20)
    first, *others = results[0]["runs"]
    common = [name for name in others if all(name in r["curves"] for r in results)]
    runs = {name: [_distances(r["curves"], name, first, width) for r in results] for name in common}

    def over_seeds(figure: Callable[[Sequence[float]], float]) -> dict[str, list[tuple[float, float]]]:
        return {
            name: [(at[0][0], figure([y for _, y in at])) for at in zip(*curves, strict=True)]
            for name, curves in runs.items()
        }

    panels = [
        Panel(f"mean of {len(results)} seeds, %", over_seeds(fmean)),
        Panel("standard deviation, %", over_seeds(stdev)),
    ]
    return svg_file(f"Distance of the training loss from {first}, mean of {width} steps", panels, "step")


def _distances(curves: Mapping[str, Any], name: str, first: str, width: int) -> list[tuple[float, float]]:
    ours, base = (smoothed(curves[n]["train"], width) for n in (name, first))
    return [(x, 100 * (y / b - 1)) for (x, y), (_, b) in zip(ours, base, strict=True)]


def command(
    results: Annotated[list[Path], typer.Argument(help="training.json files that bench training wrote.")],
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Combine training studies of several seeds: how far each recipe ends from BF16, and the scatter of that distance.

    
    Examples:
      python -m benchmarks.studies seeds seed-0/training.json seed-1/training.json --out figures
    """
    studies = read(results)
    result = publish("seeds", combine(studies), out, lambda _: {"curves": chart(studies)})
    print_json(result) if json else _print(result)


def _print(result: Mapping[str, Any]) -> None:
    rows = [
        (name, LOSSES[kind], *(f"{apart:+.2f} %" for apart in f["apart"]), f"{f['mean']:+.2f} %",
         f"{f['deviation']:.2f} %", f"{f['error']:.2f} %")
        for name, kinds in result["recipes"].items() for kind, f in kinds.items()
    ]  # fmt: skip
    heading = ("recipe", "loss", *(f"seed {s}" for s in result["seeds"]), "mean", "deviation", "error of the mean")
    print_table(heading, rows)
