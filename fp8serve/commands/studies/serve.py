"""A server under load: time to first token and between tokens, as clients see them.

Works with any server that has OpenAI's /v1/completions with streaming and ignore_eos.

\b
Examples:
  fp8serve bench serve ./llama-fp8
  fp8serve bench serve --url http://127.0.0.1:8000 --concurrency 16
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from fp8serve.bench.options import Load
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.commands.studies.engine import STEP
from fp8serve.commands.studies.publishing import Out, measured, publish, show
from fp8serve.terminal import AsJson, print_table


@with_options()
def command(
    options: Chosen[Load],
    model: Annotated[
        str | None, typer.Argument(help="Model to start a server for.", show_default="none: give --url")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A server that runs, ours or another's.")] = None,
    out: Out = None,
    json: AsJson = False,
) -> None:
    if (model is None) == (url is None):
        raise typer.BadParameter("give either a MODEL to start a server for, or the --url of one that runs")
    from fp8serve.bench.serve import measure

    load = options()
    asked = {name: value for name, value in asdict(load).items() if name not in ("vocab", "api_key")}
    with nullcontext(url) if url is not None else _started(str(model)) as place:
        figures = measured("Serve", lambda tell: {"load": asked, **measure(place, load, tell)})
    show(publish("serve", figures, out), json, _print)


@contextmanager
def _started(model: str) -> Iterator[str]:
    """The URL of a server of ours for `model`, while the block runs."""
    from fp8serve.hub import find_model
    from fp8serve.running import RunningServer

    with TemporaryDirectory(prefix="fp8serve-bench-") as folder:
        options = ["--data-dir", str(Path(folder) / "data")]
        with RunningServer(find_model(model), options, log=Path(folder) / "log") as server:
            yield server.url


def _print(result: Mapping[str, Any]) -> None:
    load = result["load"]
    print(
        f"{result['served_model']}: {load['requests']} requests, {load['concurrency']} at a time, {load['prompt']} "
        f"tokens in and {load['new']} out: {result['generated_tokens_per_second']:.1f} tokens/s\n"
    )
    names = {"first token": "time_to_first_token", "between tokens": "between_tokens", "whole answer": "whole_answer"}
    rows = [(name, *(f"{result[key][p]:.1f}" for p in STEP[1:])) for name, key in names.items()]
    print_table(("ms", "p50", "p90", "p99"), rows)
