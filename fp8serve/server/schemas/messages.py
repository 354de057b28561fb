"""The turns of a conversation as OpenAI's clients write them, with the tools that a model may call."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.model.text.chat_rows import for_template
from fp8serve.server.schemas.bodies import Strict

MAX_CALLS = 128
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model is to think, as OpenAI's clients say it."""
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


NOT_TEXT = frozenset(
    {
        "image", "image_url", "input_image", "image_file", "input_audio", "audio", "audio_url", "video", "video_url",
        "file", "input_file", "document", "search_result", "container_upload",
    }
)  # fmt: skip
"""The types of parts that no model here reads, by any project's names."""


def only_text(content: Any) -> Any:
    """`content`; an error that names the first part which is no text."""
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in NOT_TEXT:
            raise PydanticCustomError(
                "not_text", "parts of the type {type} are not read here; send text", {"type": part["type"]}
            )
    return content


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """`arguments` is JSON text as a model wrote it, so it is not always valid. Various clients add the other fields."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str
    parsed_arguments: Any = None
    description: str | None = None
    provider_specific_fields: Any = None


class ToolCall(Strict):
    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # from a stream
    provider_specific_fields: Any = None


class Message(Strict):
    """One turn. `content` is a text or a list of text parts; an assistant that called tools may have none.

    An answer can be sent back as a client holds it, hence the fields that mean nothing to a model.
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
"""What the model is to write: a new message, the rest of the last one, or whatever follows the conversation."""


def ending_of(messages: Sequence[Message], add_prompt: bool | None, continue_last: bool | None) -> Ending:
    """The ending of a prompt by the two fields that vLLM has for it. PydanticCustomError: they contradict each other,
    or the last message cannot be continued.
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
_CALLED = {"__all__": {"id": True, "function": {"name", "arguments"}}}


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages in the form that chat templates understand."""
    fields: Any = dict.fromkeys(_TEMPLATE_FIELDS, True) | {"tool_calls": _CALLED}
    return for_template([message.model_dump(include=fields, exclude_none=True) for message in messages])


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
