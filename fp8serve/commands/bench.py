"""`fp8serve bench`: studies that print figures together with the machine, the versions and the commit behind them."""

import json as json_text
import math
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.terminal import AsJson, print_json, print_table, progress

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure: numerics, training, speed.")


def _result(name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures under the heading of where they come from."""
    from fp8serve.bench.provenance import provenance

    return {"study": name, "made": provenance(shlex.join(["fp8serve", *sys.argv[1:]])), **figures}


def _write(out: Path, name: str, result: Mapping[str, Any], charts: Mapping[str, str]) -> None:
    """`name.json` and the charts as `name-*.svg` in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    text = json_text.dumps(_rounded(result), indent=1, allow_nan=False)
    text = re.sub(r"\[[-+\d.e,\s]*\]", lambda numbers: "".join(numbers[0].split()), text)  # a curve on one line
    (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    for chart, svg in charts.items():
        (out / f"{name}-{chart}.svg").write_text(svg, encoding="utf-8")


def _rounded(value: Any) -> Any:
    """To six significant digits; what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def publish(name: str, figures: Mapping[str, Any], out: Path | None) -> dict[str, Any]:
    """The figures with where they come from; written to `out`/`name`.json where that is wanted."""
    result = _result(name, figures)
    if out is not None:
        _write(out, name, result, {})
    return result


@app.command("numerics")
def numerics(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Hugging Face-format directory in high precision, or a name on the hub.",
            show_default="a small one, trained for the purpose",
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text or JSON-lines file; repeat for several.", show_default="passages that ship with fp8serve"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for numerics.json and the plots.")] = None,
    samples: Annotated[int, typer.Option(min=2, help="Sequences to calibrate on; an eighth more is measured.")] = 64,
    seq_len: Annotated[int, typer.Option(min=2, help="Longest sequence, in tokens.")] = 256,
    own_steps: Annotated[int, typer.Option(min=2, help="Training steps of the small model; unused with MODEL.")] = 200,
    json: AsJson = False,
) -> None:
    """Measure what FP8 costs: formats on one tensor, recipes on a model, delayed scaling after a spike.

    E4M3, E5M2 and INT8 on Gaussian values, outliers and activations; the noise of every linear under each recipe; the
    saturation and the recovery of delayed scaling when values get 100 times larger.

    \b
    Examples:
      fp8serve bench numerics
      fp8serve bench numerics ./llama --data held-out.jsonl --out figures
    """
    from fp8serve.hub import find_model

    directory = find_model(model) if model else None
    from fp8serve.bench import numerics as bench

    with progress("Measuring") as advance:
        figures = bench.study(
            directory, data, samples=samples, seq_len=seq_len, own_steps=own_steps,
            tell=lambda what, done, total: advance(done, total, what),
        )  # fmt: skip
    result = _result("numerics", figures)
    if out is not None:
        _write(out, "numerics", result, bench.charts(result))
    print_json(result) if json else _print_numerics(result)


def _db(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _print_numerics(result: Mapping[str, Any]) -> None:
    from fp8serve.bench.provenance import one_line

    print(one_line(result["made"]), "\n")
    print("One cast and back, SQNR in dB; of activations the median linear")
    casts = [
        (r["tensor"], r["granularity"], r["format"],
         *(_db(r.get(name)) for name in ("sqnr_db", "ordinary_sqnr_db", "worst_sqnr_db")))
        for r in result["casts"]
    ]  # fmt: skip
    print_table(("values", "scale per", "format", "all", "without outliers", "worst linear"), casts)
    print(f"\nEach linear's output, SQNR in dB: {result['model']}")
    recipes = [
        (name, _db(r["median_db"]), _db(r["worst_db"]), f"{r['perplexity']:.3f}", f"{r['perplexity_bf16']:.3f}",
         f"{100 * r['top1_agreement']:.1f} %")
        for name, r in result["recipes"].items()
    ]  # fmt: skip
    print_table(("recipe", "median linear", "worst linear", "perplexity", "in BF16", "same top token"), recipes)
    print("\nDelayed scaling, values 100 times larger at one step or from then on")
    spikes = [
        (s["scenario"], s["history"], s["margin"], f"{100 * s['spike_saturated']:.1f} %", _db(s["before_db"]),
         _db(s["spike_db"]), _db(s["worst_after_db"]), s["steps_to_recover"] if s["recovered"] else "never")
        for s in result["spikes"]["cases"]
    ]  # fmt: skip
    heading = ("spike", "history", "margin", "saturated", "before", "at the spike", "worst after", "steps to recover")
    print_table(heading, spikes)


@app.command("casts")
def casts(
    all_values: Annotated[
        bool, typer.Option("--all", help="All 2^32 values of FP32, which takes an hour, and not 2^24 of them.")
    ] = False,
    op: Annotated[
        list[str] | None, typer.Option(help="What to compare, as the table names it; repeat.", show_default="all")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Directory for casts.json.")] = None,
    json: AsJson = False,
) -> None:
    """Compare every kernel that casts with the reference, bit for bit: FP8 data and scales, on every kind of value.

    All BF16 and FP16 values, and FP32 values of every sign and exponent, at every instruction-set level this processor
    has. Exit status 1 where one bit differs.

    \b
    Examples:
      fp8serve bench casts
      fp8serve bench casts --all --op quantize --out figures
    """
    from fp8serve.bench import casts as bench

    with progress("Comparing") as advance:
        figures = bench.study(
            lambda what, done, total: advance(done, total, what),
            exhaustive=all_values, chosen=tuple(op or ()), device=device,
        )  # fmt: skip
    result = publish("casts", figures, out)
    print_json(result) if json else _print_casts(result)
    if any(found["differing"] for found in result["findings"]):
        raise typer.Exit(1)


def _print_casts(result: Mapping[str, Any]) -> None:
    from fp8serve.bench.provenance import one_line

    print(one_line(result["made"]), "\n")
    rows = [
        (f["probe"], f["level"], f["source"], f["target"], f"{f['values']:,}", f["differing"], f["first"] or "")
        for f in result["findings"]
    ]
    print_table(("op", "level", "from", "to", "values", "differing", "first"), rows)


@app.command("training")
def training(
    out: Annotated[
        Path, typer.Option(help="Directory for the runs, the figures and the plot; goes on if it is there.")
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(help="Recipe; repeat for several. The first is compared with.", show_default="all, bf16 first"),
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Optimizer steps of each run; an even number.")] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in a step.")] = 4,
    seq_len: Annotated[int, typer.Option(min=2, help="Longest row, in tokens.")] = 128,
    hidden_size: Annotated[int, typer.Option(min=64, help="Width of the model.")] = 384,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 6,
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 3e-4,
    warmup_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps in which it rises to that.", show_default="3 % of all")
    ] = None,
    final_lr: Annotated[float, typer.Option(min=0, max=1, help="Where it ends, as a part of the peak.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and of the order of rows.")] = 0,
    json: AsJson = False,
) -> None:
    """Train one model under every recipe from the same seed, and compare where they end.

    On text that every Python installation carries. One run is also resumed half-way and must end with the same bytes.

    \b
    Examples:
      fp8serve bench training --out study
      fp8serve bench training --out study --recipe bf16 --recipe delayed --steps 200
    """
    from fp8serve.bench import training as bench

    plan = bench.StudyPlan(
        recipes=tuple(recipe) if recipe else bench.StudyPlan.recipes,
        steps=steps, batch_size=batch_size, seq_len=seq_len, lr=lr, seed=seed,
        warmup_steps=warmup_steps, final_lr=final_lr,
        shape=bench.Shape.of(hidden_size, layers),
    )  # fmt: skip
    with progress("Training") as advance:
        figures = bench.study(out, plan, lambda name, step, total: advance(step, total, name))
    result = _result("training", figures)
    _write(out, "training", result, {"curves": bench.chart(result)})
    print_json(result) if json else _print_training(result)


def _print_training(result: Mapping[str, Any]) -> None:
    from fp8serve.bench.provenance import one_line

    plan, resumed = result["plan"], result["resumed"]
    print(one_line(result["made"]))
    print(
        f"{result['parameters']:,} parameters, {plan['steps']} steps of {plan['batch_size'] * plan['seq_len']} tokens, "
        f"seed {plan['seed']}; {result['text']['source']}, {result['text']['characters']:,} characters\n"
    )
    rows = [
        (name, *(cell for kind in _LOSSES for cell in (f"{r[kind + '_loss']:.4f}", _apart(r, kind))),
         f"{r['tokens_per_second']:.0f}")
        for name, r in result["runs"].items()
    ]  # fmt: skip
    heading = (column for title in _LOSSES.values() for column in (title, "apart"))
    print_table(("recipe", *heading, "tokens/s"), rows)
    if resumed:
        bytes_ = "the same bytes" if resumed["identical"] else f"other bytes in {', '.join(resumed['differing_files'])}"
        print(f"\n{resumed['recipe']} resumed from step {resumed['from_step']}: {bytes_} at the end")


_LOSSES = {"final": "final loss", "running": "running loss", "valid": "held-out loss"}


def _apart(run: Mapping[str, Any], kind: str) -> str:
    return f"{run[kind + '_difference_percent']:+.2f} %"


@app.command("seeds")
def seeds(
    results: Annotated[list[Path], typer.Argument(help="training.json files that bench training wrote.")],
    out: Annotated[Path | None, typer.Option(help="Directory for seeds.json and the plot.")] = None,
    json: AsJson = False,
) -> None:
    """Put training studies of several seeds together: how far each recipe ends from BF16, and the scatter of that.

    \b
    Examples:
      fp8serve bench seeds seed-0/training.json seed-1/training.json --out figures
    """
    from fp8serve.bench import seeds as bench

    found = bench.read(results)
    result = _result("seeds", bench.combine(found))
    if out is not None:
        _write(out, "seeds", result, {"curves": bench.chart(found)})
    print_json(result) if json else _print_seeds(result)


def _print_seeds(result: Mapping[str, Any]) -> None:
    rows = [
        (name, _LOSSES[kind], *(f"{apart:+.2f} %" for apart in f["apart"]), f"{f['mean']:+.2f} %",
         f"{f['deviation']:.2f} %", f"{f['error']:.2f} %")
        for name, kinds in result["recipes"].items() for kind, f in kinds.items()
    ]  # fmt: skip
    heading = ("recipe", "loss", *(f"seed {s}" for s in result["seeds"]), "mean", "deviation", "error of the mean")
    print_table(heading, rows)
