"""Measure the engine in this process: time to load, prefill, and decode at several batch sizes.

\b
Examples:
  fp8serve bench engine ./llama-fp8
  fp8serve bench engine ./llama-fp8 --batch 1 --batch 8 --json
"""

from collections.abc import Mapping
from typing import Any

from fp8serve.bench.options import EngineLoad
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.commands.studies.publishing import Out, measured, publish, show
from fp8serve.terminal import AsJson, Model, print_table

STEP = ("fastest_ms", "p50_ms", "p90_ms", "p99_ms")


@with_options()
def command(model: Model, options: Chosen[EngineLoad], out: Out = None, json: AsJson = False) -> None:
    from fp8serve.hub import find_model

    directory, load = find_model(model), options()
    from fp8serve.bench.engine import measure

    figures = measured("Engine", lambda tell: measure(directory, tell, **vars(load)))
    show(publish("engine", figures, out), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    prefill, made = result["prefill"], result["model"]
    print(
        f"{made['model']}: loaded in {result['load_seconds']:.2f} s, first token after "
        f"{result['first_token_seconds']:.2f} s, weights packed in {result['packing_seconds']:.2f} s more; "
        f"{made['weight_bytes'] / 1e6:.0f} MB of weights, at most {result['peak_resident_mb']:.0f} MB resident"
    )
    print(f"prefill of {prefill['tokens']}: {prefill['tokens_per_second']:.0f} tokens/s, {prefill['ms']:.1f} ms\n")
    rows = [
        (d["batch"], f"{d['tokens_per_second']:.1f}", *(f"{d[k]:.2f}" for k in STEP))
        for d in result["decode"]
    ]  # fmt: skip
    print_table(("decode, batch", "tokens/s", "step ms: fastest", "p50", "p90", "p99"), rows)
