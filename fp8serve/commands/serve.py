"""Serve MODEL over HTTP.

The routes are /generate, OpenAI's routes, /finetune, /health, /metrics, /docs, and a console at /. With --train-on
share, fine-tune jobs run on the device that serves. SIGTERM and ctrl-C end the server.

\b
Examples:
  fp8serve serve ./llama-fp8
  fp8serve serve ./llama-fp8 --host 0.0.0.0 --api-key-file key.txt
  fp8serve serve ./llama-fp8 --api-keys keys.toml
  fp8serve serve ./llama-fp8 --train-on share
  fp8serve serve ./llama --recipe current --port 8080
  fp8serve serve ./llama-fp8 --served-model-name llama --served-model-name gpt-4o-mini
  fp8serve serve ./llama-fp8 --adapter tutor=./run/model
  fp8serve serve ./llama-fp8 --tensor-parallel 2
  fp8serve serve ./llama-fp8 --draft-model ./small-llama-fp8
  fp8serve serve ./llama-fp8 --model small=./minilm,recipe=bf16 --models-dir ./more
  fp8serve serve ./llama-fp8 --limit queue=2048 --limit streams=2048
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fp8serve.commands.dataclass_options import OptionValues, parse_assignments, with_options
from fp8serve.errors import MachineError, RequestError, os_reason, shown
from fp8serve.options import options_of
from fp8serve.processes import ends_at_signals
from fp8serve.server.named_models import NamedAdapter, NamedModel
from fp8serve.server.settings import KEY_VARIABLE, ServerLimits, Settings
from fp8serve.terminal import MODEL


@with_options()
def command(
    context: typer.Context,
    settings: OptionValues[Settings],
    model: Annotated[str | None, MODEL] = None,
    fd: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Listen on this file descriptor, an inherited socket, instead of --host and --port.",
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that contains only the key.")] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Server limit such as queue=1024 (docs/options.md, ServerLimits); repeat for several.",
            show_default=False,
        ),
    ] = None,
) -> None:
    if context.args:
        raise typer.BadParameter(
            f"the argument {context.args[0]!r} belongs to no option; repeat an option for each of its values: "
            "--served-model-name A --served-model-name B."
        )
    with ends_at_signals():
        secret = find_key(settings.values.get("api_key"), api_key_file)
        models = models_of(model, settings.values)
        models["adapters"] = tuple(NamedAdapter.parse(text) for text in settings.values.get("adapters", ()))
        from fp8serve.server.launch import adopt, run

        listener = None if fd is None else adopt(fd)
        address = {} if listener is None else dict(zip(("host", "port"), listener.getsockname(), strict=False))
        complete = settings(api_key=secret, limits=limits_of(limit or []), **models, **address)
        if complete.tensor_parallel > 1 and int(os.environ.get("RANK", "0")) > 0:
            follow_server(complete)
        run(complete, listener=listener)


def follow_server(settings: Settings) -> NoReturn:
    """Runs a rank other than 0 of the engine whose server runs on rank 0; torchrun has started both."""
    from fp8serve.engine.defaults import worker_options
    from fp8serve.engine.engine import Engine

    Engine(settings.model, **asdict(worker_options(settings.engine, settings.model)))
    raise AssertionError("an engine on a rank other than 0 does not return")


def limits_of(arguments: Sequence[str]) -> ServerLimits:
    """Returns the limits with the values of `--limit NAME=VALUE`. Raises RequestError for an unknown name."""
    limits = parse_assignments("--limit", arguments, example="queue=1024")
    names = [option.name for option in options_of(ServerLimits)]
    if unknown := next((name for name in limits if name not in names), None):
        raise RequestError(f"--limit: unknown limit {shown(unknown)}; the limits are {', '.join(names)}.")
    return ServerLimits(**limits)


def models_of(model: str | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the served models. If MODEL is missing, the first --model is the default model."""
    from fp8serve.hub import find_model, resolve_draft

    arguments = [NamedModel.parse(text) for text in values.get("models", ())]
    models = [
        replace(named, directory=find_model(str(named.directory)), options=resolve_draft(named.options))
        for named in arguments
    ]
    draft = {"draft_model": resolve_draft(values).get("draft_model")}
    if model is not None:
        return {"model": find_model(model), "models": tuple(models), **draft}
    if not models:
        raise typer.BadParameter("give a MODEL, or --model NAME=DIR")
    if values.get("served_model_name"):
        raise RequestError(
            "--served-model-name gives MODEL a name, and there is no MODEL: each --model NAME=DIR has its name already."
        )
    first, *others = models
    return {
        **draft,
        **first.options,
        "model": first.directory,
        "served_model_name": (first.name,),
        "models": tuple(others),
    }


def find_key(key: str | None, file: Path | None) -> str | None:
    """Returns the key from the option, the file, or the environment, or None. Raises RequestError or MachineError.

    The key is removed from the environment, because child processes need no secret.
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
        raise MachineError(f"The key file {file} must have one line, which is the key, and has {len(lines)}.")
    return lines[0]
