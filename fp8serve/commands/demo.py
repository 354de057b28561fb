"""Do the whole job on a small model, offline.

Trains it in FP8, calibrates, serves, generates over HTTP, fine-tunes over HTTP, and generates again. Needs no
network and no GPU: the text is the language reference that every Python installation carries. About two minutes
on two CPU cores.

\b
Examples:
  fp8serve demo
  fp8serve demo --keep ./demo && fp8serve serve ./demo/calibrated
"""

from pathlib import Path
from typing import Annotated

import typer

from fp8serve.terminal import AsJson, print_json, remark


def command(
    keep: Annotated[
        Path | None, typer.Option(help="Leave the models, the data and the server's files in this directory.")
    ] = None,
    json: AsJson = False,
) -> None:
    from fp8serve.demo import Demo

    result = (Demo(keep, say=remark) if json else Demo(keep)).run()
    if json:
        print_json(result)
