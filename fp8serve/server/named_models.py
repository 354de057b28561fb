"""Models and adapters by name, as the command line and the route that loads one write them.

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
from fp8serve.options import check
from fp8serve.server.answers.choice import AnswerFormat, ReasoningFormat, ToolFormat

NAME = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}"
_OPTION = re.compile(r",(?=[a-z_-]+=)")


@dataclass(frozen=True)
class Readers:
    """How answers are read, as far as it was given for one model."""

    tool_parser: ToolFormat = "auto"
    reasoning_parser: ReasoningFormat = "auto"

    def __post_init__(self) -> None:
        check(self, RequestError)


@dataclass(frozen=True)
class NamedModel:
    """A name, a directory, and the options that differ from the defaults of `EngineOptions` and `Readers`."""

    name: str
    directory: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.name)
        known = [f.name for kind in (EngineOptions, Readers) for f in fields(kind)]
        if unknown := sorted(set(self.options) - set(known)):
            raise RequestError(f"{self.name}: there is no option {shown(unknown[0])}; there are {', '.join(known)}.")
        recipe = self.options.get("recipe", "stored")
        if recipe not in get_args(RecipeChoice) and not str(recipe).lstrip().startswith("{"):
            recipes = ", ".join(get_args(RecipeChoice))
            raise RequestError(f"{self.name}: there is no recipe {shown(recipe)}; there are {recipes}.")
        try:
            self.engine("cpu"), self.answers
        except RequestError as error:
            raise RequestError(f"{self.name}: {error}") from None

    @classmethod
    def parse(cls, text: str) -> "NamedModel":
        """Raises RequestError for anything but NAME=DIR[,OPTION=VALUE...], and for unknown options."""
        model, *options = _OPTION.split(text)
        name, equals, directory = model.partition("=")
        if not (equals and name and directory):
            raise RequestError(f"--model wants NAME=DIR, such as small=./minilm, not {shown(text)}.")
        pairs = (option.partition("=") for option in options)
        return cls(name, Path(directory), {key.replace("-", "_"): _json_or_text(value) for key, _, value in pairs})

    def engine(self, device: str) -> EngineOptions:
        """The options of its engine; on `device` unless it names its own."""
        return EngineOptions(**{"device": device, **_of(EngineOptions, self.options)})

    @property
    def answers(self) -> AnswerFormat:
        """How its answers are read, as far as it was given."""
        readers = Readers(**_of(Readers, self.options))
        return AnswerFormat(readers.tool_parser, readers.reasoning_parser)


@dataclass(frozen=True)
class NamedAdapter:
    """A name and the directory of an adapter."""

    name: str
    directory: Path

    @classmethod
    def parse(cls, text: str) -> "NamedAdapter":
        """Raises RequestError for anything but NAME=DIR."""
        name, equals, directory = text.partition("=")
        if not (equals and name and directory):
            raise RequestError(f"--adapter wants NAME=DIR, such as tutor=./run/model, not {shown(text)}.")
        check_name(name)
        return cls(name, Path(directory))


def check_name(name: str) -> None:
    """Raises RequestError for a name that no model can have."""
    if not re.fullmatch(NAME, name):
        raise RequestError(
            f"A model's name has 1 to 128 letters, digits and . _ : / @ + -, and begins with one of the first two, "
            f"unlike {shown(name)}."
        )
    if name == "base" or name.startswith(("ft:", "ftjob-")):
        raise RequestError(f"{shown(name)} is a name of fine-tunes; choose another for the model.")


def models_below(root: Path | None) -> dict[str, Path]:
    """The directories below `root` that hold a model, by their names there. Blocks."""
    holding = _directories_with("config.json", root)
    return {name: path for name, path in holding.items() if any(path.glob("*.safetensors"))}


def adapters_below(root: Path | None) -> dict[str, tuple[str, Path]]:
    """The directories below `root` that hold an adapter, by their names there and as whole paths: name and directory.
    Blocks."""
    holding = _directories_with("adapter_config.json", root)
    by_name = {name: (name, path) for name, path in holding.items()}
    return by_name | {str(path.absolute()): (name, path) for name, path in holding.items()}


def _directories_with(file: str, root: Path | None) -> dict[str, Path]:
    """The directories below `root`, two deep and none hidden, with a file of this name."""
    if root is None:
        return {}
    directories = (path.parent for pattern in (f"*/{file}", f"*/*/{file}") for path in root.glob(pattern))
    named = {path.relative_to(root).as_posix(): path for path in directories}
    return {name: path for name, path in named.items() if not any(part.startswith(".") for part in name.split("/"))}


def _of(kind: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in options.items() if name in names}


def _json_or_text(value: str) -> Any:
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    return value if isinstance(parsed, dict) else parsed  # a recipe in JSON is given as text
