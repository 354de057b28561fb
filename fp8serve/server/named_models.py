"""Parses models and adapters with names, from the command line and from the route that loads a model.

NAME=DIR[,OPTION=VALUE...]        small=./minilm        coder=./coder-fp8,max_model_len=4096,tool_parser=hermes
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from fp8serve.engine.options import EngineOptions
from fp8serve.errors import RequestError, shown
from fp8serve.fp8.recipe import RecipeChoice
from fp8serve.options import AUTO, check
from fp8serve.server.output_parsers.output_format import OutputFormat, ReasoningFormat, ToolFormat

NAME = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}"
_OPTION = re.compile(r",(?=[a-z_-]+=)")


@dataclass(frozen=True)
class ParserOptions:
    """How tool calls and reasoning of one model are parsed."""

    tool_parser: ToolFormat = "auto"
    reasoning_parser: ReasoningFormat = "auto"

    def __post_init__(self) -> None:
        check(self, RequestError)


@dataclass(frozen=True)
class NamedModel:
    """A model's name, its directory, and the fields of `EngineOptions` and `ParserOptions` that are not at their
    defaults."""

    name: str
    directory: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.name)
        names = [f.name for kind in (EngineOptions, ParserOptions) for f in fields(kind)]
        if unknown := sorted(set(self.options) - set(names)):
            raise RequestError(f"{self.name}: unknown option {shown(unknown[0])}; the options are {', '.join(names)}.")
        recipe = self.options.get("recipe", "stored")
        if recipe not in get_args(RecipeChoice) and not str(recipe).lstrip().startswith("{"):
            recipes = ", ".join(get_args(RecipeChoice))
            raise RequestError(f"{self.name}: unknown recipe {shown(recipe)}; the recipes are {recipes}.")
        try:
            self.engine_options("cpu"), self.output_format
        except RequestError as error:
            raise RequestError(f"{self.name}: {error}") from None

    @classmethod
    def parse(cls, text: str) -> "NamedModel":
        """Parses NAME=DIR[,OPTION=VALUE...]. Raises RequestError for other texts and unknown options."""
        model, *options = _OPTION.split(text)
        name, equals, directory = model.partition("=")
        if not (equals and name and directory):
            raise RequestError(f"--model must be NAME=DIR, such as small=./minilm, not {shown(text)}.")
        pairs = (option.partition("=") for option in options)
        return cls(name, Path(directory), {key.replace("-", "_"): _json_or_text(value) for key, _, value in pairs})

    def engine_options(self, device: str) -> EngineOptions:
        """Returns the options of the model's engine. `device` is used unless the options contain another device."""
        options = _select(EngineOptions, self.options)
        return EngineOptions(
            **options | {"device": device if options.get("device", AUTO) == AUTO else options["device"]}
        )

    @property
    def output_format(self) -> OutputFormat:
        """How tool calls and reasoning are parsed, with "auto" where nothing was chosen."""
        parsers = ParserOptions(**_select(ParserOptions, self.options))
        return OutputFormat(parsers.tool_parser, parsers.reasoning_parser)


@dataclass(frozen=True)
class NamedAdapter:
    """A name and the directory of an adapter."""

    name: str
    directory: Path

    @classmethod
    def parse(cls, text: str) -> "NamedAdapter":
        """Parses NAME=DIR. Raises RequestError for other texts."""
        name, equals, directory = text.partition("=")
        if not (equals and name and directory):
            raise RequestError(f"--adapter must be NAME=DIR, such as tutor=./run/model, not {shown(text)}.")
        check_name(name)
        return cls(name, Path(directory))


def check_name(name: str) -> None:
    """Raises RequestError if a model cannot have this name."""
    if not re.fullmatch(NAME, name):
        raise RequestError(
            f"A model's name has 1 to 128 letters, digits and . _ : / @ + -, and starts with a letter or digit, "
            f"unlike {shown(name)}."
        )
    if name == "base" or name.startswith(("ft:", "ftjob-")):
        raise RequestError(f"{shown(name)} is reserved for fine-tuned models; choose another name.")


def models_below(root: Path | None) -> dict[str, Path]:
    """Returns the model directories below `root`, by their paths relative to `root`. Blocks."""
    directories = _directories_with("config.json", root)
    return {name: path for name, path in directories.items() if any(path.glob("*.safetensors"))}


def adapters_below(root: Path | None) -> dict[str, tuple[str, Path]]:
    """Returns name and directory of each adapter below `root`, by relative and by absolute path. Blocks."""
    directories = _directories_with("adapter_config.json", root)
    by_name = {name: (name, path) for name, path in directories.items()}
    return by_name | {str(path.absolute()): (name, path) for name, path in directories.items()}


def _directories_with(file: str, root: Path | None) -> dict[str, Path]:
    """Returns the visible directories up to two levels below `root` that contain `file`, by their relative paths."""
    if root is None:
        return {}
    parents = (path.parent for pattern in (f"*/{file}", f"*/*/{file}") for path in root.glob(pattern))
    named = {path.relative_to(root).as_posix(): path for path in parents}
    return {name: path for name, path in named.items() if not any(part.startswith(".") for part in name.split("/"))}


def _select(kind: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in options.items() if name in names}


def _json_or_text(value: str) -> Any:
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    return value if isinstance(parsed, dict) else parsed  # recipes in JSON stay text
