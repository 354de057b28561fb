"""`fp8serve bench`: studies that print figures together with the machine, the versions and the commit behind them."""

from typing import Any

import typer

from fp8serve.commands.studies import (
    accumulation,
    casts,
    engine,
    jumps,
    monitor,
    numerics,
    ops,
    parity,
    parts,
    quality,
    seeds,
    serve,
    speculation,
    step,
    training,
)

COMMANDS: dict[str, Any] = {
    "numerics": numerics, "casts": casts, "training": training, "seeds": seeds, "ops": ops, "engine": engine,
    "serve": serve, "step": step, "monitor": monitor, "quality": quality,
    "accumulation": accumulation, "parts": parts, "jumps": jumps,
    "speculation": speculation, "parity": parity,
}  # fmt: skip
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure: numerics, quality, training, speed.")
for name, module in COMMANDS.items():
    app.command(name, help=module.__doc__)(module.command)
