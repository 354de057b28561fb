"""Serve MODEL over HTTP until a signal ends it.

Routes: /generate, the OpenAI ones, /finetune, /health, /metrics, /docs, and a console at /.

\b
Examples:
  fp8serve serve ./llama-fp8
  fp8serve serve ./llama-fp8 --host 0.0.0.0 --api-key-file key.txt
  fp8serve serve ./llama-fp8 --api-keys keys.toml
  fp8serve serve ./llama-fp8 --train-on share
  fp8serve serve ./llama --recipe current --port 8080
  fp8serve serve ./llama-fp8 --served-model-name llama --served-model-name gpt-4o-mini
  fp8serve serve ./llama-fp8 --adapter tutor=./run/model
  fp8serve serve ./llama-fp8 --draft-model ./small-llama-fp8
  fp8serve serve ./llama-fp8 --model small=./minilm,recipe=bf16 --models-dir ./more
  fp8serve serve ./llama-fp8 --limit queue=2048 --limit streams=2048
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.commands.from_options import Chosen, pairs, with_options
from fp8serve.errors import MachineError, RequestError, os_reason, shown
from fp8serve.options import options_of
from fp8serve.processes import ends_at_signals
from fp8serve.server.named_models import NamedAdapter, NamedModel
from fp8serve.server.settings import KEY_VARIABLE, ServerLimits, Settings
from fp8serve.terminal import MODEL


@with_options()
def command(
    context: typer.Context,
    settings: Chosen[Settings],
    model: Annotated[str | None, MODEL] = None,
    fd: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Listen on this open socket, inherited from the parent process, instead of --host and --port.",
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that contains only the key.")] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Limit of the server, such as queue=1024 (docs/options.md, ServerLimits); repeat for several.",
            show_default=False,
        ),
    ] = None,
) -> None:
    if context.args:
        raise typer.BadParameter(
            f"{context.args[0]!r} belongs to no option; repeat an option for each of its values: "
            "--served-model-name A --served-model-name B."
        )
    with ends_at_signals():
        secret = find_key(settings.values.get("api_key"), api_key_file)
        models = models_of(model, settings.values) | adapters_of(settings.values)
        from fp8serve.server.launch import adopt, run

        listener = None if fd is None else adopt(fd)
        place = {} if listener is None else dict(zip(("host", "port"), listener.getsockname(), strict=False))
        run(settings(api_key=secret, limits=limits_of(limit or []), **models, **place), listener=listener)


def limits_of(arguments: Sequence[str]) -> ServerLimits:
    """The limits, with those of `--limit NAME=VALUE` in place of their defaults. RequestError for an unknown one."""
    result = pairs("--limit", arguments, such_as="queue=1024")
    names = [option.name for option in options_of(ServerLimits)]
    if unknown := next((name for name in result if name not in names), None):
        raise RequestError(f"--limit: there is no limit {shown(unknown)}; there are {', '.join(names)}.")
    return ServerLimits(**result)


def models_of(model: str | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that say what to serve: MODEL, or the first --model in its place, and the other models."""
    from fp8serve.hub import find_draft, find_model

    arguments = [NamedModel.parse(text) for text in values.get("models", ())]
    results = [
        replace(named, directory=find_model(str(named.directory)), options=find_draft(named.options))
        for named in arguments
    ]
    draft = {"draft_model": find_draft(values).get("draft_model")}
    if model is not None:
        return {"model": find_model(model), "models": tuple(results), **draft}
    if not results:
        raise typer.BadParameter("Say what to serve: MODEL, or --model NAME=DIR.")
    if values.get("served_model_name"):
        raise RequestError("--served-model-name is for MODEL, and --model has a name; leave one of them out.")
    first, *further = results
    return {
        **draft,
        **first.options,
        "model": first.directory,
        "served_model_name": (first.name,),
        "models": tuple(further),
    }


def adapters_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The setting for the adapters that are served with the default model."""
    return {"adapters": tuple(NamedAdapter.parse(text) for text in values.get("adapters", ()))}


def find_key(key: str | None, file: Path | None) -> str | None:
    """The key from the option, the file, or the environment, from which it is removed: the processes that this one
    starts need no secret. Raises RequestError or MachineError.
    """
    inherited = os.environ.pop(KEY_VARIABLE, None)
    if key is not None and file is not None:
        raise RequestError("Give --api-key or --api-key-file, not both.")
    if file is None:
        return inherited if key is None else key
    try:
        lines = file.read_text(encoding="utf-8").strip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MachineError(f"The key file {file} cannot be read: {os_reason(error)}.") from None
    if len(lines) != 1:
        raise MachineError(f"The key file {file} must hold one line, the key, and has {len(lines)}.")
    return lines[0]
