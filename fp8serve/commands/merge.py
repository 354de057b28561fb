"""Merge the adapter ADAPTER into MODEL and write the result as a new model.

ADAPTER is a directory that `finetune --lora-rank` or PEFT wrote. The sums of FP8 weights and the adapter are rounded to
FP8 with the existing scales; a scale grows only where a sum would exceed its range. Weights of 4 bits are cast again.
If rounding loses too much of the adapter, the command fails and writes nothing. The result needs no calibration.

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
    from fp8serve.model.adapter_merge import RoundingLoss

MAX_LISTED = 5  # layers with the largest losses


def command(
    model: Model,
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Directory with adapter_config.json.")],
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist yet.")],
    max_lost: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Maximum fraction of the changed elements that rounding may set back to their old value."
        ),
    ] = 0.5,
    json: AsJson = False,
) -> None:
    from fp8serve.hub import find_model
    from fp8serve.model.adapter_merge import merge, total_loss

    losses = merge(find_model(model), adapter, out, max_lost)
    total = total_loss(losses)
    if json:
        layers = {name: _loss_fields(loss) for name, loss in losses.items()}
        print_json({"out": str(out), **_loss_fields(total), "layers": layers})
        return
    print(f"Wrote {out}. In all {len(losses)} layers with an adapter: {_loss_text(total)}.")
    worst = sorted(losses.items(), key=lambda item: item[1].lost_share, reverse=True)[:MAX_LISTED]
    for name, loss in worst:
        print(f"  {name}: {_loss_text(loss)}")


def _loss_fields(loss: "RoundingLoss") -> dict[str, Any]:
    return asdict(loss) | {"lost_share": loss.lost_share, "error": loss.error}


def _loss_text(loss: "RoundingLoss") -> str:
    rescaled = f", {loss.rescaled} scales grew" if loss.rescaled else ""
    share = f"{loss.lost_share:.1%} of {loss.changed} changed elements set back by rounding"
    return f"{share}, relative error {loss.error:.3f}{rescaled}"
