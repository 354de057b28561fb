"""Complete one or more prompts with a model that is loaded here or served by a server.

\b
Examples:
  fp8serve generate ./llama-fp8 "Once upon a time"
  fp8serve generate ./llama-fp8 --temperature 0.8 --seed 1 --json "One" "Two"
  fp8serve generate ./llama-fp8 --adapter ./run/model "Once upon a time"
  fp8serve generate ./llama-fp8 --speculative-tokens 8 < article.txt
  fp8serve generate ./llama-fp8 --draft-model ./small-llama-fp8 "Once upon a time"
  echo "Once upon a time" | fp8serve generate ./llama-fp8 --recipe bf16
  fp8serve generate --server http://127.0.0.1:8000 "Once upon a time"
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.commands.connecting import (
    AdapterDir,
    KeyFile,
    OtherServer,
    Served,
    connected,
    given_options,
    refuse_options,
)
from fp8serve.commands.from_options import Chosen, shown_options, with_options
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError
from fp8serve.terminal import AsJson, print_json


@with_options(max_new_tokens=64, temperature=0.0)
def command(
    context: typer.Context,
    sampling: Chosen[SamplingParams],
    engine: Chosen[EngineOptions],
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Model to load, as for serve. With --server: the first prompt."),
    ] = None,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Read from standard input when none is given.")
    ] = None,
    server: OtherServer = None,
    served: Served = None,
    api_key_file: KeyFile = None,
    adapter: AdapterDir = None,
    json: AsJson = False,
) -> None:
    if server is not None:
        local = "adapter", *(o.name for o in shown_options(EngineOptions))
        refuse_options(context, local, "is for a MODEL that is loaded here")
        texts = ([] if model is None else [model]) + (prompts or [])
        chosen = given_options(context, (o.name for o in shown_options(SamplingParams)))
        values = {name: sampling.values[name] for name in {*chosen, "max_new_tokens", "temperature"}}
        sampling()  # its errors are reported here
        _show(_by_server(server, api_key_file, served, texts or [_from_stdin()], values), json)
        return
    refuse_options(context, ("served", "api_key_file"), "is for --server")
    if model is None:
        raise typer.BadParameter("give a MODEL to load, or the --server to ask")
    from fp8serve.hub import find_draft, find_model

    directory, texts = find_model(model), prompts or [_from_stdin()]
    from fp8serve.engine.engine import Engine

    running = Engine(directory, **find_draft(engine.values))
    name = None if adapter is None else running.load_adapter(adapter.name, adapter)["name"]
    done = running.generate(texts, adapter=name, **sampling.values)
    running.save_prefixes()
    if running.options.drafted_tokens:
        print(_drafts(running.stats()), file=sys.stderr)
    _show([_as_dict(prompt, completion) for prompt, completion in zip(texts, done, strict=True)], json)


def _by_server(
    server: str, key_file: Path | None, model: str | None, prompts: list[str], sampling: dict[str, Any]
) -> list[dict[str, Any]]:
    from fp8serve.client.answers import complete

    with connected(server, key_file) as api:
        return complete(api, model, prompts, sampling)


def _show(completions: list[dict[str, Any]], json: bool) -> None:
    if json:
        print_json(completions)
    else:
        for completion in completions:
            print(completion["prompt"] + completion["text"])


def _from_stdin() -> str:
    text = "" if sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
    if not text:
        raise RequestError("There is no prompt; give one as an argument or on standard input.")
    return text


def _drafts(stats: Mapping[str, Any]) -> str:
    drafted, accepted = stats["draft_tokens_total"], stats["accepted_draft_tokens_total"]
    share = f" ({accepted / drafted:.0%})" if drafted else ""
    return (
        f"speculation: {accepted} of {drafted} drafted tokens became part of an answer{share}; "
        f"{stats['generated_tokens_total']} tokens in {stats['steps_total']} steps"
    )


def _as_dict(prompt: str, completion: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
