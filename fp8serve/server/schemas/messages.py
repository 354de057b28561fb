"""The turns of a conversation as OpenAI writes them: texts, calls of tools, and their results."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
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


_SAID = {"role", "content", "name", "tool_call_id", "reasoning", "reasoning_content"}
_CALLED = {"__all__": {"id": True, "function": {"name", "arguments"}}}


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages in the form that chat templates understand."""
    said: Any = dict.fromkeys(_SAID, True) | {"tool_calls": _CALLED}
    return for_template([message.model_dump(include=said, exclude_none=True) for message in messages])
