"""Complete one or more prompts with a local model.

\b
Examples:
  fp8serve generate ./llama-fp8 "Once upon a time"
  fp8serve generate ./llama-fp8 --temperature 0.8 --seed 1 --json "One" "Two"
  fp8serve generate ./llama-fp8 --adapter ./run/model "Once upon a time"
  fp8serve generate ./llama-fp8 --speculative-tokens 8 < article.txt
  fp8serve generate ./llama-fp8 --draft-model ./small-llama-fp8 "Once upon a time"
  echo "Once upon a time" | fp8serve generate ./llama-fp8 --recipe bf16
"""

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from fp8serve.commands.dataclass_options import OptionValues, with_options
from fp8serve.commands.server_options import AdapterDir
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError
from fp8serve.terminal import AsJson, Model, on_device, print_json


@with_options(max_new_tokens=64, temperature=0.0)
def command(
    sampling: OptionValues[SamplingParams],
    engine: OptionValues[EngineOptions],
    model: Model,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Prompts.", show_default="standard input")
    ] = None,
    adapter: AdapterDir = None,
    json: AsJson = False,
) -> None:
    from fp8serve.hub import find_model, resolve_draft

    directory, texts = find_model(model), prompts or [_from_stdin()]
    from fp8serve.engine.engine import Engine

    local_engine = Engine(directory, **on_device(resolve_draft(engine.values), directory))
    name = None if adapter is None else local_engine.load_adapter(adapter.name, adapter)["name"]
    completions = local_engine.generate(texts, adapter=name, **sampling.values)
    local_engine.save_prefixes()
    if local_engine.options.drafted_tokens:
        print(_speculation_summary(local_engine.stats()), file=sys.stderr)
    pairs = list(zip(texts, completions, strict=True))
    if json:
        fields = ("text", "token_ids", "finish_reason")
        print_json([{"prompt": prompt} | {field: getattr(c, field) for field in fields} for prompt, c in pairs])
    else:
        for prompt, completion in pairs:
            print(prompt + completion.text)


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
