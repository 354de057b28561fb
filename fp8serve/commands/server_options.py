"""The options of commands that connect to a server, and the connection, which SIGTERM closes."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fp8serve.client.api import Api
from fp8serve.commands.serve import find_key

URL = "http://127.0.0.1:8000"
Server = Annotated[str, typer.Option(metavar="URL", help="The server; /v1 may be left out.")]
OtherServer = Annotated[
    str | None, typer.Option("--server", metavar="URL", help="A server with OpenAI's routes, instead of MODEL.")
]
Served = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Name of one of the server's models.", show_default="its first"),
]
KeyFile = Annotated[
    Path | None, typer.Option(help="File that contains only the server's key.", show_default="FP8SERVE_API_KEY")
]

AdapterDir = Annotated[
    Path | None,
    typer.Option("--adapter", metavar="DIR", help="Adapter (LoRA, DoRA) to answer with.", show_default="none"),
]


@contextmanager
def connected(server: str, key_file: Path | None) -> Iterator[Api]:
    """Yields the API of the server. SIGTERM ends the block."""
    with exit_on_sigterm(), Api(server, find_key(None, key_file)) as api:
        yield api


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit in the block, so that its requests and child processes end, as after ctrl-C."""

    def exit_process(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    previous_handler = signal.signal(signal.SIGTERM, exit_process)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def options_on_command_line(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Returns those of the parameters `names` that the user gave on the command line."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def refuse_options(context: typer.Context, names: Iterable[str], reason: str) -> None:
    """Raises BadParameter if the user gave one of the options `names`. Its message is the flag and `reason`."""
    if refused := options_on_command_line(context, names):
        flag = next(p.opts[0] for p in context.command.params if p.name == refused[0])
        raise typer.BadParameter(f"{flag} {reason}")
