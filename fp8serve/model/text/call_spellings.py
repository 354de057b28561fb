"""The forms in which different chat templates accept an assistant's calls.

Transformers gives templates arguments as objects, and null for the content beside calls that has no text. Templates of
DeepSeek join arguments to text, so arguments must be text; those of Qwen 3 search the content for marks, so the content
must be text. No template declares its form: if it refuses a conversation, the next form is tried.
"""

import json
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]


def spellings(messages: list[Message]) -> Iterator[list[Message]]:
    """The conversation as it is and, if it holds calls, in three other forms."""
    yield messages
    if any(message.get("tool_calls") for message in messages):
        yield [_with_text(message) for message in messages]
        as_text = [_with_arguments_as_text(message) for message in messages]
        yield as_text
        yield [_with_text(message) for message in as_text]


def _with_text(message: Message) -> Message:
    return message | {"content": message.get("content") or ""} if message.get("tool_calls") else message


def _with_arguments_as_text(message: Message) -> Message:
    calls = message.get("tool_calls")
    return message | {"tool_calls": [_spelt(call) for call in calls]} if isinstance(calls, list) else message


def _spelt(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    return call | {"function": function | {"arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}}
