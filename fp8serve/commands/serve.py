"""Serve MODEL over HTTP until a signal ends it.

Routes: /generate, the OpenAI ones, /finetune, /health, /metrics, /docs, and a console at /.

\b
Examples:
  fp8serve serve ./llama-fp8
  fp8serve serve ./llama-fp8 --host 0.0.0.0 --api-key-file key.txt
  fp8serve serve ./llama-fp8 --api-keys keys.toml
  fp8serve serve ./llama-fp8 --train-on share
  fp8serve serve ./llama --recipe current --port 8080
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.errors import MachineError, RequestError
from fp8serve.server.settings import KEY_VARIABLE, Settings
from fp8serve.terminal import Model


@with_options()
def command(
    model: Model,
    settings: Chosen[Settings],
    fd: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Listen on this open socket, inherited from the parent process, instead of --host and --port.",
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the key, and nothing else.")] = None,
) -> None:
    from fp8serve.hub import find_model

    secret = find_key(settings.values.get("api_key"), api_key_file)
    directory = find_model(model)
    from fp8serve.server.launch import adopt, run

    listener = None if fd is None else adopt(fd)
    place = {} if listener is None else dict(zip(("host", "port"), listener.getsockname(), strict=False))
    run(settings(model=directory, api_key=secret, **place), listener=listener)


def find_key(key: str | None, file: Path | None) -> str | None:
    """The key of the option, of the file, or of the environment, from which it is removed: the processes that this one
    starts need no secret. Raises RequestError or MachineError.
    """
    inherited = os.environ.pop(KEY_VARIABLE, None)
    if key is not None and file is not None:
        raise RequestError("Give --api-key or --api-key-file, not both.")
    if file is None:
        return inherited if key is None else key
    try:
        lines = file.read_text(encoding="utf-8").strip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MachineError(f"The key file {file} cannot be read: {error}.") from None
    if len(lines) != 1:
        raise MachineError(f"The key file {file} must hold one line, the key, and has {len(lines)}.")
    return lines[0]
