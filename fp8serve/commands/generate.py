"""Complete one or more prompts with a local model or with a model of a server.

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
from typing import Annotated, Any

import typer

from fp8serve.commands.dataclass_options import OptionValues, shown_options, with_options
from fp8serve.commands.server_options import (
    AdapterDir,
    KeyFile,
    OtherServer,
    Served,
    connected,
    options_on_command_line,
    refuse_options,
)
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError
from fp8serve.terminal import AsJson, on_device, print_json


@with_options(max_new_tokens=64, temperature=0.0)
def command(
    context: typer.Context,
    sampling: OptionValues[SamplingParams],
    engine: OptionValues[EngineOptions],
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Model to load (directory or name). With --server: the first prompt."),
    ] = None,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Prompts.", show_default="standard input")
    ] = None,
    server: OtherServer = None,
    served: Served = None,
    api_key_file: KeyFile = None,
    adapter: AdapterDir = None,
    json: AsJson = False,
) -> None:
    if server is not None:
        local = "adapter", *(o.name for o in shown_options(EngineOptions))
        refuse_options(context, local, "is for a local MODEL, not for --server")
        texts = ([] if model is None else [model]) + (prompts or [])
        explicit = options_on_command_line(context, (o.name for o in shown_options(SamplingParams)))
        values = {name: sampling.values[name] for name in {*explicit, "max_new_tokens", "temperature"}}
        sampling()  # checks the values before a request is sent
        texts = texts or [_from_stdin()]
        from fp8serve.client.completions import complete

        with connected(server, api_key_file) as api:
            _print(complete(api, served, texts, values), json)
        return
    refuse_options(context, ("served", "api_key_file"), "is for --server")
    if model is None:
        raise typer.BadParameter("give a MODEL to load, or a --server")
    from fp8serve.hub import find_model, resolve_draft

    directory, texts = find_model(model), prompts or [_from_stdin()]
    from fp8serve.engine.engine import Engine

    local_engine = Engine(directory, **on_device(resolve_draft(engine.values), directory))
    name = None if adapter is None else local_engine.load_adapter(adapter.name, adapter)["name"]
    completions = local_engine.generate(texts, adapter=name, **sampling.values)
    local_engine.save_prefixes()
    if local_engine.options.drafted_tokens:
        print(_speculation_summary(local_engine.stats()), file=sys.stderr)
    _print([_to_dict(prompt, completion) for prompt, completion in zip(texts, completions, strict=True)], json)


def _print(completions: list[dict[str, Any]], json: bool) -> None:
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


def _speculation_summary(stats: Mapping[str, Any]) -> str:
    drafted, accepted = stats["draft_tokens_total"], stats["accepted_draft_tokens_total"]
    share = f" ({accepted / drafted:.0%})" if drafted else ""
    return (
        f"speculation: {accepted} of {drafted} draft tokens were accepted{share}; "
        f"{stats['generated_tokens_total']} tokens in {stats['steps_total']} steps"
    )


def _to_dict(prompt: str, completion: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
