"""The messages and tools of OpenAI's chat completions."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.model.text.chat_rows import for_template
from fp8serve.server.schemas.bodies import Strict

MAX_CALLS = 128
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""OpenAI's values of the reasoning effort."""
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


NON_TEXT_TYPES = frozenset(
    {
        "image", "image_url", "input_image", "image_file", "input_audio", "audio", "audio_url", "video", "video_url",
        "file", "input_file", "document", "search_result", "container_upload",
    }
)  # fmt: skip
"""The types of content parts other than text, in all supported APIs. The models of this server read only text."""


def only_text(content: Any) -> Any:
    """Returns `content`. Raises PydanticCustomError that names the type of the first part that is not text."""
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in NON_TEXT_TYPES:
            raise PydanticCustomError(
                "not_text", "content parts of the type {type} are not supported; send text", {"type": part["type"]}
            )
    return content


class TextPart(Strict):
    type: Literal["text"]
    text: str


class HasText(Protocol):
    """A text part of any API."""

    text: str


def text_of(content: Sequence[HasText] | str) -> str:
    """Returns the joined text of parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ToolCallFunction(Strict):
    """A function call. `arguments` is the text of the model, which may be invalid JSON. Clients add the other
    fields."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str
    parsed_arguments: Any = None
    description: str | None = None
    provider_specific_fields: Any = None


class ToolCall(Strict):
    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: ToolCallFunction
    index: int | None = None  # clients copy it from a stream
    provider_specific_fields: Any = None


class Message(Strict):
    """A message. `content` is a text or a list of text parts; it may be null for an assistant message with tool calls.

    Clients send back messages of responses as they received them, so fields that the model does not see are accepted.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[list[TextPart], Field(min_length=1, max_length=256)] | str | None, BeforeValidator(only_text)
    ] = None
    name: Annotated[str, Field(max_length=64)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None
    provider_specific_fields: Any = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content", "content is missing; only an assistant's may be null")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "tool_calls belong to an assistant")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise PydanticCustomError("tool_call_id", "a message of the role tool, and no other, has a tool_call_id")
        return self


Ending = Literal["prompted", "continued", "plain"]
"""How the rendered prompt ends: with a generation prompt, inside the last message, or after the last message."""


def prompt_ending(messages: Sequence[Message], add_prompt: bool | None, continue_last: bool | None) -> Ending:
    """Returns the ending that vLLM's `add_generation_prompt` and `continue_final_message` select. Raises
    PydanticCustomError if they contradict each other or the last message cannot be continued.
    """
    if not continue_last:
        return "plain" if add_prompt is False else "prompted"
    if add_prompt:
        raise PydanticCustomError(
            "continue_final_message", "give either add_generation_prompt or continue_final_message, not both"
        )
    if not messages or messages[-1].role != "assistant" or messages[-1].tool_calls:
        raise PydanticCustomError(
            "continue_final_message", "continue_final_message needs a text of the assistant as the last of messages"
        )
    return "continued"


_TEMPLATE_FIELDS = {"role", "content", "name", "tool_call_id", "reasoning", "reasoning_content"}
_TOOL_CALL_FIELDS = {"__all__": {"id": True, "function": {"name", "arguments"}}}


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns the messages as dictionaries for a chat template."""
    fields: Any = dict.fromkeys(_TEMPLATE_FIELDS, True) | {"tool_calls": _TOOL_CALL_FIELDS}
    return for_template([message.model_dump(include=fields, exclude_none=True) for message in messages])


MAX_TOOLS = 128
EMPTY_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


def _check_is_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise PydanticCustomError("arguments", 'arguments must be an object: "type": "object"')
    return schema


ArgumentSchema = Annotated[dict[str, Any], AfterValidator(_check_is_object)]
"""The JSON schema of a tool's arguments."""
_CLIENT_TOOL_TYPES = frozenset({"function", "custom"})
_TOOL_TYPE = re.compile(r"[a-z][a-z0-9_]{0,63}")


def _check_is_client_tool(tool: Any) -> Any:
    """Returns `tool`. Raises PydanticCustomError that names its type if OpenAI or Anthropic define this tool."""
    type_ = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(type_, str) and type_ not in _CLIENT_TOOL_TYPES and _TOOL_TYPE.fullmatch(type_):
        raise PydanticCustomError(
            "server_tool",
            "tools of the type {type} are not supported; send a function with a schema of its arguments",
            {"type": type_},
        )
    return tool


ClientToolOnly = BeforeValidator(_check_is_client_tool)
"""A validator for tools of all APIs. This server runs no tools, so it refuses those that OpenAI or Anthropic run."""


class Function(Strict):
    """A function that the client runs. `parameters` is the JSON schema of the arguments. `strict` enforces this schema
    if the model's calls begin with a tag.
    """

    name: ToolName
    description: str | None = None
    parameters: ArgumentSchema | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The schema of the arguments. A function without parameters allows no arguments."""
        return self.parameters or EMPTY_SCHEMA | {"additionalProperties": False}


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Returns the tool as a dictionary for a chat template."""
        function, parameters = self.function, self.function.parameters or EMPTY_SCHEMA
        fields = {"name": function.name, "description": function.description or "", "parameters": parameters}
        return {"type": "function", "function": fields}


def plain_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Returns the variable `tools` of a chat template. It is None without tools, because templates test for it."""
    return [tool.plain() for tool in tools] if tools else None


class FunctionName(Strict):
    name: ToolName


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedToolList(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Strict):
    """A choice of some tools of the request. The prompt contains only these tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


Tools = Annotated[list[Annotated[Tool, ClientToolOnly]], Field(max_length=MAX_TOOLS)]
ToolChoiceMode = Literal["none", "auto", "required"]


def tool_choice_tag(choice: Any) -> str | None:
    """Returns the tag of the union member that `tool_choice` is, or None if its type is unknown."""
    if isinstance(choice, str):
        return "mode" if choice in get_args(ToolChoiceMode) else None
    type_ = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return type_ if type_ in ("function", "allowed_tools") else None


def tool_choice_discriminator(function: str, allowed_tools: str) -> Discriminator:
    """Returns the discriminator of `tool_choice`. The arguments are examples of the two objects for the error
    message."""
    return Discriminator(
        tool_choice_tag,
        custom_error_type="tool_choice",
        custom_error_message=f'must be "none", "auto" or "required", {function} or {allowed_tools}',
    )


ToolChoice = Annotated[
    Annotated[ToolChoiceMode, Tag("mode")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    tool_choice_discriminator(
        '{"type": "function", "function": {"name": ...}}',
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
    ),
]


def named_tools(choice: ToolChoice | None) -> set[str] | None:
    """Returns the names of the tools in a choice, or None for a mode."""
    if isinstance(choice, NamedTool):
        return {choice.function.name}
    return {tool.function.name for tool in choice.allowed_tools.tools} if isinstance(choice, AllowedTools) else None


def requires_call(choice: ToolChoice | None) -> bool:
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)
