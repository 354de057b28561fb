"""The bodies of Anthropic's `/v1/messages`.

Fields that do not change the response are accepted and ignored: `metadata`, `service_tier` and `cache_control` (prefix
caching is always enabled). The models read only text, so images and documents are refused.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.engine.sampling_params import INT32, MAX_STOP_STRINGS, StopString, Tokens
from fp8serve.server.schemas.bodies import Body, Strict
from fp8serve.server.schemas.compatibility_fields import MESSAGES, with_compatibility_fields
from fp8serve.server.schemas.messages import MAX_CALLS, MAX_TOOLS, ArgumentSchema, ClientToolOnly, ToolName, only_text

MAX_BLOCKS = 256
Id = Annotated[str, Field(min_length=1, max_length=256)]


class CacheControl(Strict):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Strict):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: Id
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, Any]
    caller: None = None
    toolset_name: None = None


TextBlocks = Annotated[Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS)] | str, BeforeValidator(only_text)]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: TextBlocks = ""
    is_error: bool | None = None
    toolset_name: None = None


class UserTurn(Strict):
    role: Literal["user"]
    content: Annotated[
        Annotated[
            list[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]],
            Field(min_length=1, max_length=MAX_BLOCKS),
        ]
        | str,
        BeforeValidator(only_text),
    ]


class AssistantTurn(Strict):
    role: Literal["assistant"]
    content: Annotated[
        Annotated[
            list[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]],
            Field(max_length=min(MAX_BLOCKS, MAX_CALLS)),
        ]
        | str,
        BeforeValidator(only_text),
    ]


class SystemTurn(Strict):
    role: Literal["system"]
    content: TextBlocks


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class ClientTool(Block):
    """A tool that the client runs. Tools that Anthropic runs have another `type`."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: ArgumentSchema
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # ignored, because arguments are always streamed token by token


class ToolChoice(Strict):
    """The tool choice. `name` is the tool that must be called, for the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _a_tool_has_a_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("name", "name is required for the type tool and not allowed for other types")
        return self


class Thinking(Strict):
    """The reasoning options. `budget_tokens` is accepted but ignored: `max_tokens` limits reasoning and content
    together."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonSchemaOutput(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonSchemaOutput | None = None


class Metadata(Strict):
    user_id: Annotated[str, Field(max_length=256)] | None = None


@with_compatibility_fields(MESSAGES)
class CountBody(Body):
    """The body of `POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: TextBlocks | None = None
    tools: Annotated[list[Annotated[ClientTool, ClientToolOnly]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _calls_have_results(self) -> Self:
        """Refuses tool calls in the last message. A last message with the assistant's text is continued."""
        last = self.messages[-1].content
        if isinstance(last, list) and any(isinstance(block, ToolUseBlock) for block in last):
            raise PydanticCustomError("messages", "messages ends with tool calls; send their results after them")
        return self


class MessagesBody(CountBody):
    """The body of `POST /v1/messages`. `temperature` has Anthropic's bounds."""

    max_tokens: Tokens
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
