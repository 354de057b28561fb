"""Measure a server under load, with the figures of vllm bench serve.

Works with every server that has OpenAI's /v1/completions or /v1/chat/completions and streams. Without --request-rate
and --max-concurrency, all requests are sent at once.

\b
Examples:
  fp8serve bench serve ./llama-fp8 --max-concurrency 8
  fp8serve bench serve --server http://127.0.0.1:8000 --request-rate 2 --num-prompts 200
  fp8serve bench serve ./llama-fp8 --dataset sharegpt --dataset-path sharegpt.json --api chat
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from fp8serve.bench.options import Load
from fp8serve.commands.connecting import KeyFile, OtherServer, Served, leaving_at_sigterm, refuse_given
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.commands.serve import find_key
from fp8serve.commands.studies.publishing import Out, measured, publish, show
from fp8serve.terminal import AsJson, print_table, printable

COLUMNS = ("mean", "median", "p90", "p99")
NAMES = {
    "first token (TTFT)": "ttft_ms", "each further token (TPOT)": "tpot_ms",
    "between events (ITL)": "itl_ms", "whole answer (E2EL)": "e2el_ms",
}  # fmt: skip


@with_options()
def command(
    context: typer.Context,
    options: Chosen[Load],
    model: Annotated[
        str | None, typer.Argument(help="Model to start a server for.", show_default="none: give --server")
    ] = None,
    server: OtherServer = None,
    served: Served = None,
    api_key_file: KeyFile = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory whose tokenizer counts ShareGPT's tokens.", show_default="MODEL")
    ] = None,
    out: Out = None,
    json: AsJson = False,
) -> None:
    if (model is None) == (server is None):
        raise typer.BadParameter("give either a MODEL to start a server for, or the --server that runs")
    if server is None:
        refuse_given(context, ("served", "api_key_file"), "is for --server")
    load = options()
    with leaving_at_sigterm(), _place(model, server, api_key_file) as (url, key, directory):
        from fp8serve.bench.serve import measure

        figures = measured(
            "Serve",
            lambda tell: {
                "load": asdict(load),
                **measure(url, load, tell, key=key, model=served, tokenizer=tokenizer or directory),
            },
        )
    show(publish("serve", figures, out), json, _print)


@contextmanager
def _place(
    model: str | None, server: str | None, key_file: Path | None
) -> Iterator[tuple[str, str | None, Path | None]]:
    """The URL, the key and the model directory of the measured server: `server`, or a new one for `model`."""
    if server is not None:
        yield server, find_key(None, key_file), None
        return
    from fp8serve.hub import find_model
    from fp8serve.running import RunningServer

    directory = find_model(str(model))
    with TemporaryDirectory(prefix="fp8serve-bench-") as folder:
        options = ["--data-dir", str(Path(folder) / "data")]
        with RunningServer(directory, options, log=Path(folder) / "log") as running:
            yield running.url, None, directory


def _print(result: Mapping[str, Any]) -> None:
    print(
        f"{printable(result['served_model'])}: {result['completed']} requests answered, {result['failed']} failed, in "
        f"{result['duration_seconds']:.1f} s; {result['input_tokens']} tokens in, {result['output_tokens']} out"
    )
    for error in result["errors"]:
        print(f"failed: {printable(error)}")
    print(
        f"{result['request_throughput']:.2f} requests/s, {result['output_throughput']:.1f} output tokens/s, "
        f"{result['total_token_throughput']:.1f} tokens/s in all\n"
    )
    rows = [(name, *(f"{result[key][column]:.1f}" for column in COLUMNS)) for name, key in NAMES.items()]
    print_table(("ms", *COLUMNS), rows)
