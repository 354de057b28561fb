"""Train a small model whose activations jump at one step, under delayed scaling with and without a margin.

The learning rate of one step is 30 times as high, or one batch consists of random tokens. Shows which share of values
is cut off at the jump and how far the loss is from BF16's, for three histories and three margins, beside current
scaling.

\b
Examples:
  fp8serve bench jumps
  fp8serve bench jumps --seeds 5 --out figures
"""

from collections.abc import Mapping
from typing import Any

from fp8serve.bench.options import JumpsPlan
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.commands.studies.publishing import Out, measured, publish, show
from fp8serve.terminal import AsJson, print_table

ROLES = {"input": "inputs", "weight": "weights", "grad_output": "gradients"}
SPANS = {"jump": "at the jump", "soon": "10 steps after", "end": "at the end"}


@with_options()
def command(options: Chosen[JumpsPlan], out: Out = None, json: AsJson = False) -> None:
    plan = options()
    from fp8serve.bench import jumps as bench

    figures = measured("Training", lambda tell: bench.study(plan, tell))
    show(publish("jumps", figures, out, lambda result: {"loss": bench.chart(result)}), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    print("Cut off at the jump, and the loss's distance from that of BF16 (largest of a seed)\n")
    rows = [
        (r["jump"], r["arm"], f"{r['loss']:.3f}", *(f"{r['cut_off'][role]:.3f} %" for role in ROLES),
         f"{r['cut_off_steps']:.1f}", *(f"{r['apart'][s]:+.2f} % ({r['largest'][s]:.2f})" for s in SPANS))
        for r in result["rows"]
    ]  # fmt: skip
    heading = (f"{name} cut off" for name in ROLES.values())
    print_table(("jump", "arm", "loss", *heading, "steps", *SPANS.values()), rows)
