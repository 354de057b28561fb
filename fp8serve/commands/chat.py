"""Chat in the terminal with a model that is loaded here or served by a server.

At a terminal, /help lists the commands; ctrl-C stops an answer, ctrl-D leaves. If standard input is not a terminal, its
text is one question, or one per line with --by-line, and only the answers go to standard output.

\b
Examples:
  fp8serve chat ./llama-fp8
  fp8serve chat ./llama-fp8 --adapter ./run/model
  fp8serve chat --server http://127.0.0.1:8000 --system "Answer in one sentence."
  fp8serve chat --server https://example.com/v1 --model NAME --api-key-file key.txt
  fp8serve chat ./llama-fp8 --temperature 0 < question.txt
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8serve.chat.models import ChatOptions
from fp8serve.commands.connecting import AdapterDir, KeyFile, OtherServer, Served, connected, refuse_options
from fp8serve.commands.from_options import Chosen, shown_options, with_options
from fp8serve.engine.options import EngineOptions
from fp8serve.errors import RequestError
from fp8serve.terminal import remark

if TYPE_CHECKING:
    from fp8serve.chat.models import ChatModel


@with_options()
def command(
    context: typer.Context,
    options: Chosen[ChatOptions],
    engine: Chosen[EngineOptions],
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Model to load, as for serve.", show_default="none: give --server"),
    ] = None,
    server: OtherServer = None,
    served: Served = None,
    api_key_file: KeyFile = None,
    adapter: AdapterDir = None,
    system: Annotated[str, typer.Option(help="System message: what the model is told first.")] = "",
    by_line: Annotated[bool, typer.Option("--by-line", help="Each line of standard input is a question.")] = False,
) -> None:
    if (model is None) == (server is None):
        raise typer.BadParameter("give either a MODEL to load, or the --server to ask")
    if server is None:
        refuse_options(context, ("served", "api_key_file"), "is for --server")
    else:
        local = "adapter", *(o.name for o in shown_options(EngineOptions))
        refuse_options(context, local, "is for a MODEL that is loaded here")
    from fp8serve.chat.session import Session, answer_lines

    talking = sys.stdin.isatty() and sys.stdout.isatty()
    if by_line and talking:
        raise typer.BadParameter("--by-line is for standard input that is no terminal")
    questions = [] if talking else _questions(by_line)
    sampling = options()
    with _model(model, server, served, api_key_file, engine, adapter, talking) as conversation:
        if talking:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - input() edits lines with it, and remembers them

            Session(conversation, sampling, system).run()
        else:
            answer_lines(conversation, sampling, system, questions)


@contextlib.contextmanager
def _model(
    model: str | None, server: str | None, served: str | None, key_file: Path | None, engine: Chosen[EngineOptions],
    adapter: Path | None, talking: bool,
) -> "Iterator[ChatModel]":  # fmt: skip
    """The model that answers."""
    from fp8serve.chat.models import LocalModel, RemoteModel

    if server is not None:
        with connected(server, key_file) as api:
            yield RemoteModel(api, served)
    else:
        from fp8serve.hub import find_draft, find_model

        directory, options = find_model(str(model)), find_draft(engine.values)
        if talking:
            remark(f"Loading {directory} ...")
        with LocalModel(directory, options, adapter) as local:
            yield local


def _questions(by_line: bool) -> list[str]:
    text = sys.stdin.buffer.read().decode(errors="replace")
    results = [line.strip() for line in (text.splitlines() if by_line else [text])]
    if not any(results):
        raise RequestError("There is no question on standard input.")
    return [question for question in results if question]
