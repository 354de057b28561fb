"""`fp8serve bench`: studies that print figures together with the machine, the versions and the commit behind them."""

import json as json_lines
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.terminal import AsJson, print_json, print_table, progress

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure: numerics, training.")


def _result(name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures under the heading of where they come from."""
    from fp8serve.bench.provenance import provenance

    return {"study": name, "made": provenance(shlex.join(["fp8serve", *sys.argv[1:]])), **figures}


def _write(out: Path, name: str, result: Mapping[str, Any], charts: Mapping[str, str]) -> None:
    """`name.json` and the charts as `name-*.svg` in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    text = json_lines.dumps(result, indent=1, allow_nan=False)
    (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    for chart, svg in charts.items():
        (out / f"{name}-{chart}.svg").write_text(svg, encoding="utf-8")


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
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 1e-3,
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

    shape = bench.Shape(
        hidden_size=hidden_size, layers=layers, heads=hidden_size // 64, intermediate_size=_wide(hidden_size)
    )
    plan = bench.Plan(
        recipes=tuple(recipe) if recipe else bench.Plan.recipes,
        steps=steps, batch_size=batch_size, seq_len=seq_len, lr=lr, seed=seed, shape=shape,
    )  # fmt: skip
    with progress("Training") as advance:
        figures = bench.study(out, plan, lambda name, step, total: advance(step, total, name))
    result = _result("training", figures)
    _write(out, "training", result, {"curves": bench.chart(result)})
    print_json(result) if json else _print_training(result)


def _wide(hidden_size: int) -> int:
    """Width of the feed-forward layer: 8/3 of the model's, up to a multiple of 128."""
    return 128 * -(-hidden_size * 8 // (3 * 128))


def _print_training(result: Mapping[str, Any]) -> None:
    from fp8serve.bench.provenance import one_line

    plan, resumed = result["plan"], result["resumed"]
    print(one_line(result["made"]))
    print(
        f"{result['parameters']:,} parameters, {plan['steps']} steps of {plan['batch_size'] * plan['seq_len']} tokens, "
        f"seed {plan['seed']}; {result['text']['source']}, {result['text']['characters']:,} characters\n"
    )
    rows = [
        (name, f"{r['final_train_loss']:.4f}", f"{r['train_difference_percent']:+.2f} %", f"{r['final_valid_loss']:.4f}",
         f"{r['valid_difference_percent']:+.2f} %", f"{r['tokens_per_second']:.0f}")
        for name, r in result["runs"].items()
    ]  # fmt: skip
    print_table(("recipe", "final loss", "apart", "held-out loss", "apart", "tokens/s"), rows)
    if resumed:
        bytes_ = "the same bytes" if resumed["identical"] else f"other bytes in {', '.join(resumed['differing_files'])}"
        print(f"\n{resumed['recipe']} resumed from step {resumed['from_step']}: {bytes_} at the end")
