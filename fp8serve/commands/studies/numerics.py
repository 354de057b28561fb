"""Measure what FP8 costs: formats on one tensor, recipes on a model, delayed scaling after a spike.

Measures E4M3, E5M2 and INT8 on Gaussian values, outliers and activations; the noise of every linear under each recipe;
and the saturation and recovery of delayed scaling when values get 100 times larger.

\b
Examples:
  fp8serve bench numerics
  fp8serve bench numerics ./llama --data held-out.jsonl --out figures
"""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from fp8serve.bench.options import NumericsOptions
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.commands.studies.publishing import Out, measured, publish, show
from fp8serve.terminal import AsJson, print_table


@with_options()
def command(
    options: Chosen[NumericsOptions],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Hugging Face-format directory in high precision, GGUF file, smollm2, or a name on the hub.",
            show_default="a small one, trained for the purpose",
        ),
    ] = None,
    out: Out = None,
    json: AsJson = False,
) -> None:
    from fp8serve.hub import find_model

    asked, directory = options(), find_model(model) if model else None
    from fp8serve.bench import numerics as bench

    figures = measured("Measuring", lambda tell: bench.study(directory, tell=tell, **vars(asked)))
    show(publish("numerics", figures, out, bench.charts), json, _print)


def _db(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _print(result: Mapping[str, Any]) -> None:
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
