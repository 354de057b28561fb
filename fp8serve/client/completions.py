"""Streams chat completions of a server as pieces of text, reasoning and tool calls.

Servers have two names for reasoning, `reasoning_content` and `reasoning`. A tool call is streamed in fragments; the
first one holds the tool's name.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from fp8serve.client.api import Api
from fp8serve.errors import ServerError, shown

Kind = Literal["text", "reasoning", "tool"]


@dataclass(frozen=True)
class Piece:
    """A fragment of a chat completion. If `starts_call` is true, `text` is a tool's name, and the next pieces hold the
    arguments of the call."""

    kind: Kind
    text: str
    starts_call: bool = False


def chat_pieces(api: Api, body: dict[str, Any]) -> Iterator[Piece]:
    """Streams a request to /v1/chat/completions. Raises ServerError if the server refuses the request or the stream
    breaks off."""
    is_finished = False
    with closing(api.objects("/v1/chat/completions", {**body, "stream": True})) as events:  # type: ignore[type-var]
        for event in events:
            try:
                for choice in event.get("choices") or ():
                    is_finished = is_finished or choice.get("finish_reason") is not None
                    yield from _delta_pieces(choice.get("delta") or {})
            except (AttributeError, TypeError):
                raise ServerError(f"The server sent an event unknown to OpenAI's API: {shown(event)}.") from None
    if not is_finished:
        raise ServerError("The server closed the stream before the end of its response.")


def _delta_pieces(delta: dict[str, Any]) -> Iterator[Piece]:
    if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
        yield Piece("reasoning", str(reasoning))
    if text := delta.get("content") or delta.get("refusal"):
        yield Piece("text", str(text))
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        if name := function.get("name"):
            yield Piece("tool", str(name), starts_call=True)
        if arguments := function.get("arguments"):
            yield Piece("tool", str(arguments))
