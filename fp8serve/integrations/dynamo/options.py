"""The command line of a worker: options of fp8serve, and Dynamo's own with their environment variables.

Dynamo's options are added by Dynamo, so that its documentation and its operator apply. Those that concern another kind
of worker are refused.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn, get_args, get_origin

from dynamo.common.backend import WorkerConfig
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.utils.runtime import parse_endpoint

from fp8serve.engine.options import EngineOptions
from fp8serve.errors import RequestError, one_line
from fp8serve.hub import find_model, resolve_draft
from fp8serve.options import Option, options_of
from fp8serve.server.settings import Settings

OPTIONS = {f.name for f in fields(EngineOptions)} - {"max_lora_rank"} | {
    "served_model_name", "drain_seconds", "heartbeat_seconds", "step_seconds", "load_seconds", "request_seconds",
    "metrics_per_layer",
}  # fmt: skip
"""The options of a server that a worker has, too. A worker has no adapters."""
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "connector": ([],),
    "fpm_trace": (False,),
    "dyn_structural_tag": (None, False),
    "dyn_enable_structural_tag": (None, False),
    "dump_config_to": (None,),
    "multimodal_embedding_cache_capacity_gb": (0,),
    "multimodal_embedding_cache_publisher": (False,),
    "output_modalities": (["text"],),
    "media_output_http_url": (None,),
}
"""Options of Dynamo that have no effect here, with the values that ask for none."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message[:1].upper()}{message[1:]} (--help lists the options).")


def parse(arguments: Sequence[str] | None) -> tuple[Settings, WorkerConfig]:
    """Returns the settings and the configuration of a worker. `arguments` are by default those of this process. Raises
    the errors of Settings, and RequestError for an option that is unknown or that a worker cannot obey."""
    description = "Serve MODEL as a worker of NVIDIA Dynamo (docs/dynamo.md)."
    parser = _Parser("python -m fp8serve.integrations.dynamo", description=description, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="Directory of the model, GGUF file, or name on the hub.")
    group = parser.add_argument_group("fp8serve's options", argument_default=argparse.SUPPRESS)
    for option in options_of(Settings):
        if option.name in OPTIONS:
            group.add_argument(_flag(option), dest=option.name, **_properties(option))
    DynamoRuntimeArgGroup().add_arguments(parser)
    given = vars(parser.parse_args(arguments))
    values = {name: given.pop(name) for name in OPTIONS & given.keys()}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    settings = Settings(model=find_model(given.pop("model")), **{**values, **resolve_draft(values)}).on_device()
    return settings, _worker_config(settings, argparse.Namespace(**given))


def _flag(option: Option) -> str:
    return (option.about.flag or "--" + option.name.replace("_", "-")).partition("/")[0]


def _properties(option: Option) -> dict[str, Any]:
    """Returns how argparse reads an option. Settings checks its value."""
    kinds = [option.value_type, *get_args(option.value_type)]
    text = f"{option.about.text.removesuffix('.')} (default: {option.about.unset or option.default})."
    properties: dict[str, Any] = {"help": text.replace("%", "%%")}
    if bool in kinds:
        return properties | {"action": argparse.BooleanOptionalAction}
    if any(get_origin(kind) is tuple for kind in kinds):
        return properties | {"action": "append", "metavar": "NAME"}
    return properties | {"type": next((kind for kind in (int, float) if kind in kinds), str)}


def _worker_config(settings: Settings, arguments: argparse.Namespace) -> WorkerConfig:
    config = DynamoRuntimeConfig.from_cli_args(arguments)
    for name, harmless in REFUSED.items():
        if (value := getattr(config, name, harmless[0])) not in harmless:
            flag = "--" + name.replace("_", "-")
            raise RequestError(f"{flag} ({value}) has no effect on a worker of fp8serve; leave it out.")
    place = {}
    try:
        config.validate()
        if config.endpoint is not None:
            place = dict(zip(("namespace", "component", "endpoint"), parse_endpoint(config.endpoint), strict=True))
    except ValueError as error:
        raise RequestError(f"{one_line(error)}.") from None
    name = settings.model_name
    return WorkerConfig.from_runtime_config(config, str(settings.model), name, structural_tag=None, **place)
