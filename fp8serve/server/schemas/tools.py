"""The tools of a request, and which of them a model may call, as OpenAI's clients write it."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from fp8serve.server.schemas.bodies import Strict
from fp8serve.server.schemas.messages import ToolName

MAX_TOOLS = 128
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


def _an_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise PydanticCustomError("arguments", 'arguments must be an object: "type": "object"')
    return schema


ArgumentSchema = Annotated[dict[str, Any], AfterValidator(_an_object)]
"""The JSON schema of a tool's arguments."""


_OF_CLIENTS = frozenset({"function", "custom"})
_TYPE = re.compile(r"[a-z][a-z0-9_]{0,63}")


def _no_server_tool(tool: Any) -> Any:
    """`tool`; an error that names its type, if a vendor defines what it does, and usually runs it."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind not in _OF_CLIENTS and _TYPE.fullmatch(kind):
        raise PydanticCustomError(
            "server_tool",
            "tools of the type {type} are not offered here; send a function with a schema of its arguments",
            {"type": kind},
        )
    return tool


NoServerTool = BeforeValidator(_no_server_tool)
"""For the tools of all protocols. A server that runs no tools cannot take those that OpenAI or Anthropic run."""


class Function(Strict):
    """`parameters` is the JSON schema of the arguments. `strict`: a call always has valid arguments, if
    the model's form of calls has an opening mark.
    """

    name: ToolName
    description: str | None = None
    parameters: ArgumentSchema | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The schema of the arguments; a function that declares no parameters has none."""
        return self.parameters or NO_ARGUMENTS | {"additionalProperties": False}


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """The tool in the form that chat templates understand."""
        said = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": said | {"parameters": self.function.parameters or NO_ARGUMENTS}}


def plain_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """For the variable `tools` of a template, which asks whether there are any."""
    return [tool.plain() for tool in tools] if tools else None


class FunctionName(Strict):
    name: ToolName


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class Allowed(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Strict):
    """Only these tools of a request: the model is not shown the others."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


Tools = Annotated[list[Annotated[Tool, NoServerTool]], Field(max_length=MAX_TOOLS)]
Word = Literal["none", "auto", "required"]


def form_of_choice(choice: Any) -> str | None:
    """The tag of the form of a `tool_choice`; None: it has no allowed form."""
    if isinstance(choice, str):
        return "word" if choice in get_args(Word) else None
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return kind if kind in ("function", "allowed_tools") else None


def choice_of(named: str, allowed: str) -> Discriminator:
    """The forms by their tags; the two objects are spelt as in the arguments."""
    return Discriminator(
        form_of_choice,
        custom_error_type="tool_choice",
        custom_error_message=f'must be "none", "auto" or "required", {named} or {allowed}',
    )


ToolChoice = Annotated[
    Annotated[Word, Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    choice_of(
        '{"type": "function", "function": {"name": ...}}',
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
    ),
]


def named_by(choice: ToolChoice | None) -> set[str] | None:
    """The tools that a choice names; None if it names none."""
    if isinstance(choice, NamedTool):
        return {choice.function.name}
    return {tool.function.name for tool in choice.allowed_tools.tools} if isinstance(choice, AllowedTools) else None


def must_call(choice: ToolChoice | None) -> bool:
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)
