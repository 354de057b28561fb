"""The bodies of `/v1/messages`, strictly, as Anthropic documents them.

Fields that change nothing about an answer are accepted (`metadata`, `service_tier`, `cache_control`: equal beginnings
of prompts are always computed once). The models read only text: images and documents are refused by name.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.engine.sampling_params import INT32, MAX_STOP_STRINGS, StopString, Tokens
from fp8serve.server.schemas.bodies import Body, Strict
from fp8serve.server.schemas.foreign_fields import MESSAGES, with_foreign_fields
from fp8serve.server.schemas.messages import MAX_CALLS, MAX_TOOLS, ArgumentSchema, NoServerTool, ToolName, only_text

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
    """A tool that the client runs; those that Anthropic's servers run have another `type`."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: ArgumentSchema
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as the model writes them


class Choice(Strict):
    """`name`: of the tool that must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _a_tool_has_a_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("name", "name is given with the type tool, and with no other")
        return self


class Thinking(Strict):
    """`budget_tokens` is accepted but has no effect: `max_tokens` bounds thinking and answer together."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class AnswerSchema(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnswerSchema | None = None


class Metadata(Strict):
    user_id: Annotated[str, Field(max_length=256)] | None = None


@with_foreign_fields(MESSAGES)
class CountBody(Body):
    """`POST /v1/messages/count_tokens`: a conversation."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: TextBlocks | None = None
    tools: Annotated[list[Annotated[ClientTool, NoServerTool]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _calls_have_results(self) -> Self:
        """The assistant's text may come last, and is continued then."""
        last = self.messages[-1].content
        if isinstance(last, list) and any(isinstance(block, ToolUseBlock) for block in last):
            raise PydanticCustomError("messages", "the last of messages calls tools; send their results after it")
        return self


class MessagesBody(CountBody):
    """`POST /v1/messages`. `temperature` has the bounds that Anthropic documents."""

    max_tokens: Tokens
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def text_of(content: Sequence[TextBlock] | str) -> str:
    """The text of blocks, which are parts of one text."""
    return content if isinstance(content, str) else "".join(block.text for block in content)
