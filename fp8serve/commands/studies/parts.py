"""Train a small model with parts of current scaling left out, and compare where the runs end.

Trains with only the forward pass, the input gradients or the weight gradients in FP8, with gradients in E4M3, and under
the other recipes. Shows the distance from BF16, which is trained three times at rates that differ by 0.01 %.

\b
Examples:
  fp8serve bench parts --out parts
  fp8serve bench parts --out parts --seeds 6 --steps 1000
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.bench.options import PartsPlan
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.commands.studies.publishing import measured, publish, show
from fp8serve.terminal import AsJson, print_table


@with_options()
def command(
    out: Annotated[Path, typer.Option(help="Directory for the figures; continues with the next run if it exists.")],
    options: Chosen[PartsPlan],
    json: AsJson = False,
) -> None:
    plan = options()
    from fp8serve.bench import parts as bench

    figures = measured("Training", lambda tell: bench.study(out, plan, tell))
    show(publish("parts", figures, out), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    plan = result["plan"]
    print(f"{plan['steps']} steps of {plan['batch_size'] * plan['seq_len']} tokens, {plan['seeds']} seeds; from BF16\n")
    rows = [
        (name, *(_apart(found[kind]) for kind in ("own", "bf16", "running"))) for name, found in result["arms"].items()
    ]
    print_table(("arm", "final loss, its recipe", "final loss in BF16", "running loss"), rows)


def _apart(found: Mapping[str, Any]) -> str:
    error = "" if found["error"] is None else f" ± {found['error']:.2f}"
    return f"{found['mean']:+.2f}{error} %"
