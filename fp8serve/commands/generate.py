"""Complete one or more prompts.

\b
Examples:
  fp8serve generate ./llama-fp8 "Once upon a time"
  fp8serve generate ./llama-fp8 --temperature 0.8 --seed 1 --json "One" "Two"
  fp8serve generate ./llama-fp8 --speculative-tokens 8 < article.txt
  echo "Once upon a time" | fp8serve generate ./llama-fp8 --recipe bf16
"""

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError
from fp8serve.terminal import AsJson, Model, print_json


@with_options(max_new_tokens=64, temperature=0.0)
def command(
    model: Model,
    sampling: Chosen[SamplingParams],
    engine: Chosen[EngineOptions],
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Read from standard input when none is given.")
    ] = None,
    json: AsJson = False,
) -> None:
    from fp8serve.hub import find_model

    directory, asked = find_model(model), prompts or [_from_stdin()]
    from fp8serve.engine.engine import Engine

    running = Engine(directory, **engine.values)
    done = running.generate(asked, **sampling.values)
    if running.options.speculative_tokens:
        print(_drafts(running.stats()), file=sys.stderr)
    if json:
        print_json([_as_dict(prompt, completion) for prompt, completion in zip(asked, done, strict=True)])
    else:
        for prompt, completion in zip(asked, done, strict=True):
            print(prompt + completion.text)


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
