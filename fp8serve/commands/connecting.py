"""The common options of commands that talk to a server: its URL and the key; and a clean stop."""

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
    typer.Option("--model", metavar="NAME", help="Which of the server's models to use.", show_default="its first"),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(help="File that contains only the server's key.", show_default="FP8SERVE_API_KEY"),
]

AdapterDir = Annotated[
    Path | None,
    typer.Option("--adapter", metavar="DIR", help="Adapter (LoRA, DoRA) to answer with.", show_default="none"),
]


@contextmanager
def connected(server: str, key_file: Path | None) -> Iterator[Api]:
    """The server, inside a block that SIGTERM leaves."""
    with leaving_at_sigterm(), Api(server, find_key(None, key_file)) as api:
        yield api


@contextmanager
def leaving_at_sigterm() -> Iterator[None]:
    """SIGTERM leaves the block as ctrl-C does, so that requests and processes end with it."""
    usual = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def given_options(context: typer.Context, names: Iterable[str]) -> list[str]:
    """The parameters that were given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def refuse_options(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Wrong usage when one of these options was given."""
    if result := given_options(context, names):
        spelt = next(p.opts[0] for p in context.command.params if p.name == result[0])
        raise typer.BadParameter(f"{spelt} {why}")
