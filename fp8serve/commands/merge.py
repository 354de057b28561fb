"""Merge the adapter ADAPTER into MODEL and write the result as a new model.

ADAPTER is a directory that `finetune --lora-rank` or peft wrote. FP8 weights are rounded to FP8 again, with their
existing scales; if the rounding loses too much of the adapter, nothing is written. The result needs no calibration.

\b
Examples:
  fp8serve merge ./llama ./run/model --out ./llama-tuned
  fp8serve merge ./llama-fp8 ./run/model --out ./llama-tuned-fp8 --max-lost 0.8
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8serve.terminal import AsJson, Model, print_json

if TYPE_CHECKING:
    from fp8serve.model.merging import Loss

MAX_LISTED = 5


def command(
    model: Model,
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Directory with adapter_config.json.")],
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist yet.")],
    max_lost: Annotated[
        float, typer.Option(min=0, max=1, help="Largest share of the changed elements that rounding may restore.")
    ] = 0.5,
    json: AsJson = False,
) -> None:
    from fp8serve.hub import find_model
    from fp8serve.model.merging import merge

    losses = merge(find_model(model), adapter, out, max_lost)
    total = losses.total
    if json:
        layers = {name: _figures(loss) for name, loss in losses.layers.items()}
        print_json({"out": str(out), **_figures(total), "layers": layers})
        return
    print(f"Wrote {out}. All {len(losses.layers)} layers with an adapter: {_loss_text(total)}.")
    worst = sorted(losses.layers.items(), key=lambda item: item[1].lost_share, reverse=True)[:MAX_LISTED]
    for name, loss in worst:
        print(f"  {name}: {_loss_text(loss)}")


def _figures(loss: "Loss") -> dict[str, Any]:
    return asdict(loss) | {"lost_share": loss.lost_share, "error": loss.error}


def _loss_text(loss: "Loss") -> str:
    grown = f", {loss.rescaled} scales grew" if loss.rescaled else ""
    return f"{loss.lost_share:.1%} of {loss.changed} changes rounded back, relative error {loss.error:.3f}{grown}"
