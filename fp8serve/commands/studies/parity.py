"""Compare a server's log-probabilities over HTTP with training's, bit for bit, under every recipe and cache.

\b
Examples:
  fp8serve bench parity ./llama-fp8                # calibrated with --kv-cache
  fp8serve bench parity ./llama-fp8 --out figures
"""

from collections.abc import Mapping
from typing import Any

from fp8serve.commands.studies.publishing import Out, measured, publish, show
from fp8serve.terminal import AsJson, Model, print_table


def command(model: Model, out: Out = None, json: AsJson = False) -> None:
    from fp8serve.hub import find_model

    directory = find_model(model)
    from fp8serve.bench.parity import measure

    figures = measured("Parity", lambda tell: measure(directory, tell))
    show(publish("parity", figures, out), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    rows = [
        (row["recipe"], row["cache"], row["way"], f"{row['equal']} of {row['tokens']}", f"{row['worst']:.2g}")
        for row in result["rows"]
    ]
    print_table(("recipe", "KV cache", "token of", "equal", "worst difference, nats"), rows)
