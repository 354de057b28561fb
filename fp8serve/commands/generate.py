"""`fp8serve generate`: prompts in, text out, in this process and without a server."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.commands.serve import RecipeChoice
from fp8serve.errors import RequestError
from fp8serve.terminal import AsJson, print_json


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face-format directory, or a name on the hub.")],
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Read from standard input when none is given.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token every time.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from the likeliest tokens of this total probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many likeliest tokens; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling; the same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeat for several.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")] = False,
    recipe: Annotated[
        RecipeChoice, typer.Option(help="'stored': the scales in the directory; the others are made on the fly.")
    ] = "stored",
    scales: Annotated[
        Path | None, typer.Option(help="scales.safetensors to use instead of the directory's own.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: AsJson = False,
) -> None:
    """Complete one or more prompts.

    \b
    Examples:
      fp8serve generate ./llama-fp8 "Once upon a time"
      fp8serve generate ./llama-fp8 --temperature 0.8 --seed 1 --json "One" "Two"
      echo "Once upon a time" | fp8serve generate ./llama-fp8 --recipe bf16
    """
    from fp8serve.hub import find_model

    directory, asked = find_model(model), prompts or [_from_stdin()]
    from fp8serve.engine.engine import Engine

    engine = Engine(directory, recipe=recipe, scales=scales, device=device)
    done = engine.generate(
        asked,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
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


def _as_dict(prompt: str, completion: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
