"""Measure what every method of calibration costs MODEL, and what it saves.

Each method's directory is made below --out, or found there. All are compared with MODEL in BF16 on held-out documents;
the intervals contain 95 % of the results from resampled documents. Peers are measured on the same documents in the same
way.

\b
Examples:
  fp8serve bench quality smollm2 --out quality
  fp8serve bench quality smollm2 --out quality --method static --peer "llm-compressor=./their-fp8"
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.bench.options import QualityOptions
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.commands.studies.publishing import measured, publish, show
from fp8serve.terminal import AsJson, Model, print_table


@with_options()
def command(
    model: Model,
    out: Annotated[
        Path, typer.Option(help="Directory for the models, the figures and the picture; continues if it exists.")
    ],
    options: Chosen[QualityOptions],
    json: AsJson = False,
) -> None:
    from fp8serve.hub import find_model

    directory, asked = find_model(model), options()
    from fp8serve.bench import quality as bench
    from fp8serve.bench.quality_chart import chart

    figures = measured("Quality", lambda tell: bench.study(directory, out, asked, tell))
    peers = [peer.partition("=")[0] for peer in asked.peers]
    show(publish("quality", figures, out, lambda result: {"methods": chart(result, peers)}), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    text = result["text"]
    print(f"{result['model']}, {text['documents']} held-out documents, {text['tokens']:,} tokens\n")
    rows = [
        (row["name"], *(_interval(row["figures"].get(kind), shown) for kind, shown in KINDS.items()),
         f"{row['bytes'] / 1e6:.1f}", "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.1f}")
        for row in result["rows"]
    ]  # fmt: skip
    print_table(("model", "KL, nats", "perplexity, %", "same top token", "weights, MB", "tokens/s"), rows)


KINDS = {"kl": "{:.4f}", "perplexity_percent": "{:+.2f}", "top1": "{:.3f}"}


def _interval(found: Mapping[str, float] | None, shown: str) -> str:
    if found is None:
        return ""
    value, low, high = (shown.format(found[k]) for k in ("value", "low", "high"))
    return f"{value} ({low} to {high})"
