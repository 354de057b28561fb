"""The body of OpenAI's `/v1/responses`, whose conversations are lists of items.

This server stores no responses, so `store` is ignored and fields that refer to stored ones (`previous_response_id`,
`conversation`, references to items) are refused. Fields that do not change the response accept all documented values.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from fp8serve.engine.sampling_params import Tokens
from fp8serve.server.schemas.bodies import Body, Metadata, Strict
from fp8serve.server.schemas.compatibility_fields import RESPONSES, STORAGE, refused, with_compatibility_fields
from fp8serve.server.schemas.messages import (
    MAX_TOOLS,
    ArgumentSchema,
    ClientToolOnly,
    Effort,
    ToolChoiceMode,
    ToolName,
    only_text,
    tool_choice_discriminator,
)
from fp8serve.server.schemas.response_format import JsonObjectFormat, TextFormat

MAX_PARTS = 256
Id = Annotated[str, Field(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(Strict):
    """A text part. The model sees only `text`."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


TextParts = Annotated[
    Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)] | str, BeforeValidator(only_text)
]


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: TextParts
    id: Id | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Strict):
    type: Literal["function_call"]
    call_id: Id
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str
    id: Id | None = None
    status: Status | None = None
    caller: None = None
    namespace: None = None
    parsed_arguments: Any = None


class FunctionCallOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: Id
    output: TextParts
    id: Id | None = None
    status: Status | None = None


class ReasoningPart(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    id: Id | None = None
    summary: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: None = None
    status: Status | None = None


def _item_type(item: Any) -> Any:
    """Returns the type of an item. A message may omit its type."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="item",
        custom_error_message="type must be message, function_call, function_call_output or reasoning",
    ),
]


class FunctionTool(Strict):
    """A tool that the client runs. Tools that OpenAI runs have another `type`."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: ArgumentSchema | None = None
    strict: bool | None = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: ToolName


class AllowedFunctions(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


FunctionChoice = Annotated[
    Annotated[ToolChoiceMode, Tag("mode")]
    | Annotated[NamedFunction, Tag("function")]
    | Annotated[AllowedFunctions, Tag("allowed_tools")],
    tool_choice_discriminator(
        '{"type": "function", "name": ...}', '{"type": "allowed_tools", "mode": ..., "tools": [...]}'
    ),
]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    name: Annotated[str, Field(max_length=64)]
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


@with_compatibility_fields([refused("OpenAI", "verbosity", "Ask for it in instructions.", "medium")])
class TextOptions(Strict):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


@with_compatibility_fields(
    [
        refused("OpenAI", "context", "The chat template decides which reasoning the model sees.", "auto"),
        refused("OpenAI", "mode", "Send effort.", "standard"),
    ]
)
class ReasoningOptions(Strict):
    """The reasoning options. `effort` is passed to the chat template. Reasoning is never summarized."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Strict):
    include_obfuscation: bool | None = None


def _refuse_stored_response(name: str | None) -> str | None:
    if name is not None:
        raise PydanticCustomError("not_stored", "this server stores no responses; send the whole conversation as input")
    return name


@with_compatibility_fields(RESPONSES, STORAGE)
class ResponsesBody(Body):
    """The body of `POST /v1/responses`. Without `max_output_tokens`, the output may fill the context."""

    model: str | None = None
    input: Annotated[list[Item], Field(min_length=1, fail_fast=True)] | str
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    tools: Annotated[list[Annotated[FunctionTool, ClientToolOnly]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # reasoning is never encrypted here
    previous_response_id: Annotated[str | None, AfterValidator(_refuse_stored_response)] = None
    metadata: Metadata | None = None
    user: str | None = None

    @property
    def messages(self) -> list[Any]:
        """The items, which count as messages for the limits of the server."""
        return self.input if isinstance(self.input, list) else [self.input]
