"""The shapes of the answers of `/v1/messages`; `responses.py` has those of other routes."""

from typing import Literal

from fp8serve.server.schemas.responses import JsonObject, ResponseShape


class MessageText(ResponseShape):
    type: Literal["text"]
    text: str
    citations: None


class MessageThinking(ResponseShape):
    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(ResponseShape):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class MessageUsage(ResponseShape):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(ResponseShape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageThinking | MessageToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(ResponseShape):
    input_tokens: int
