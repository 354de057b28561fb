"""Chat in the terminal with a local model or with a model of a server.

/help lists the commands of a chat, ctrl-C stops an answer, and ctrl-D ends the chat. If standard input is not a
terminal, its text is the question, and only the answer is printed.

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
from fp8serve.commands.dataclass_options import OptionValues, shown_options, with_options
from fp8serve.commands.server_options import AdapterDir, KeyFile, OtherServer, Served, connected, refuse_options
from fp8serve.engine.options import EngineOptions
from fp8serve.errors import RequestError
from fp8serve.terminal import on_device, remark

if TYPE_CHECKING:
    from fp8serve.chat.models import ChatModel


@with_options()
def command(
    context: typer.Context,
    options: OptionValues[ChatOptions],
    engine: OptionValues[EngineOptions],
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Model to load, as for serve.", show_default="none: give --server"),
    ] = None,
    server: OtherServer = None,
    served: Served = None,
    api_key_file: KeyFile = None,
    adapter: AdapterDir = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
) -> None:
    if (model is None) == (server is None):
        raise typer.BadParameter("give either a MODEL to load, or a --server")
    if server is None:
        refuse_options(context, ("served", "api_key_file"), "is for --server")
    else:
        local = "adapter", *(o.name for o in shown_options(EngineOptions))
        refuse_options(context, local, "is for a local MODEL, not for --server")
    from fp8serve.chat.session import Session, print_answer

    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    question = "" if is_interactive else _question()
    sampling = options()
    with _open_model(model, server, served, api_key_file, engine, adapter, is_interactive) as chat_model:
        if is_interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() line editing and a history

            Session(chat_model, sampling, system).run()
        else:
            print_answer(chat_model, sampling, system, question)


@contextlib.contextmanager
def _open_model(
    model: str | None, server: str | None, served: str | None, key_file: Path | None,
    engine: OptionValues[EngineOptions], adapter: Path | None, is_interactive: bool,
) -> "Iterator[ChatModel]":  # fmt: skip
    from fp8serve.chat.models import LocalModel, RemoteModel

    if server is not None:
        with connected(server, key_file) as api:
            yield RemoteModel(api, served)
    else:
        from fp8serve.hub import find_model, resolve_draft

        directory = find_model(str(model))
        options = on_device(resolve_draft(engine.values), directory)
        if is_interactive:
            remark(f"Loading {directory} ...")
        with LocalModel(directory, options, adapter) as local:
            yield local


def _question() -> str:
    question = sys.stdin.buffer.read().decode(errors="replace").strip()
    if not question:
        raise RequestError("There is no question on standard input.")
    return question
