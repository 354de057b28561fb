"""docs/options.md, made from the commands and from the dataclasses that hold the options: `make options`."""

from collections.abc import Iterator
from dataclasses import MISSING
from typing import Any, get_args

from annotated_types import Ge, Gt, Le

from fp8serve.calibration.options import CalibrationOptions, EvaluationOptions
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.options import Option, options_of
from fp8serve.server.settings import ServerLimits
from fp8serve.train.config import TrainConfig

GUARD = 10**9  # bounds from here on only guard the machine
HEAD = """# Options

Made by `make options` from the dataclasses that hold the options and from the commands that take them. A default in
brackets describes what happens when the option is not set.
"""
CONCEPTS: dict[type, str] = {
    SamplingParams: "Keyword arguments of `Engine.generate`. `POST /generate` takes them as `parameters`, the OpenAI "
    "routes in their bodies; there `max_new_tokens` is `max_tokens`, and `temperature`, `top_p`, `stop` and `logprobs` "
    "have the bounds that OpenAI documents. The form of an answer is asked for as OpenAI (`response_format`), vLLM "
    "(`structured_outputs`, `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`) or llama.cpp "
    "(`grammar`) spell it; `prompt_logprobs` is `decoder_input_details` on `/generate`, and `echo` with `logprobs` of "
    "`/v1/completions` reports the same.",
    EngineOptions: "Keyword arguments of `Engine`.",
    TrainConfig: "The fields of a training job. `POST /finetune` takes those that are not the operator's, `lr` as "
    "`learning_rate`.",
    CalibrationOptions: "Keyword arguments of `calibrate`.",
    EvaluationOptions: "Keyword arguments of `evaluate`.",
    ServerLimits: "Limits that a server sets for requests: `fp8serve serve --limit NAME=VALUE` sets one, `GET /info` "
    "shows all as `limits`. Sizes are in bytes, times in seconds.",
}


def page() -> str:
    """The whole text."""
    commands = [_section(f"`{name}`", "", "option", _arguments(command)) for name, command in _commands()]
    concepts = [
        _section(f"`{kind.__name__}`", text, "field", map(_row, options_of(kind))) for kind, text in CONCEPTS.items()
    ]
    return "\n".join([HEAD, "## Commands\n", *commands, "## In Python and over HTTP\n", *concepts])


def _section(title: str, text: str, first: str, rows: Iterator[tuple[str, str, str]]) -> str:
    table = [(first, "default", "meaning"), ("---", "---", "---"), *rows]
    body = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in table)
    return f"### {title}\n\n{text}\n\n{body}\n" if text else f"### {title}\n\n{body}\n"


# -- commands ----------------------------------------------------------------------------------------------------------


def _commands() -> Iterator[tuple[str, Any]]:
    """Every command by its name, those of groups after their group's."""
    import typer

    from fp8serve.cli import app

    pending: list[tuple[str, Any]] = [("fp8serve", typer.main.get_command(app))]
    while pending:
        name, command = pending.pop(0)
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        else:
            pending += [(f"{name} {word}", found) for word, found in inner.items()]


def _arguments(command: Any) -> Iterator[tuple[str, str, str]]:
    for found in command.params:
        if found.name != "help":
            spelt = " / ".join([*found.opts, *found.secondary_opts]) if found.opts[0][0] == "-" else found.metavar
            yield f"`{spelt or found.name}`", _stated(found), found.help or ""


def _stated(found: Any) -> str:
    if found.required:
        return "must be given"
    if isinstance(found.show_default, str):
        return f"({found.show_default})"
    is_off = found.default is None or found.default is False or found.default == ""
    return "" if is_off or found.show_default is False else f"`{found.default}`"


# -- fields of dataclasses ---------------------------------------------------------------------------------------------


def _row(option: Option) -> tuple[str, str, str]:
    return f"`{option.name}`", _default(option), " ".join(filter(None, (option.about.text, _bounds(option))))


def _default(option: Option) -> str:
    if option.default is MISSING:
        return "must be given"
    if option.about.unset and option.default in (None, ()):
        return f"({option.about.unset})"
    return f"`{option.default}`"


WORDS: dict[type, tuple[str, str]] = {Ge: ("at least", "ge"), Gt: ("above", "gt"), Le: ("at most", "le")}


def _bounds(option: Option) -> str:
    """As in: At least 0, at most 100."""
    marks = [mark for mark in get_args(option.annotation)[1:] if isinstance(mark, tuple(WORDS))]
    said = [(words, getattr(mark, name)) for mark in marks for words, name in [WORDS[type(mark)]]]
    text = ", ".join(f"{words} {value:,}" for words, value in said if abs(value) < GUARD)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


if __name__ == "__main__":
    print(page(), end="")
