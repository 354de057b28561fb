"""Messages in OpenAI's form as chat templates read them: text instead of parts, arguments as objects, and results with
the name of the function that was called.

Requests and training data both use this module, so a model is trained on the text that a request renders.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_WRITTEN = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content")


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages, which are valid, in the same order. Keys that are unknown here stay as they are."""
    calls = [call for message in messages for call in message.get("tool_calls") or () if call.get("id")]
    called = {call["id"]: call["function"]["name"] for call in calls}
    return [_message(message, called) for message in messages]


def text_of(content: Any) -> str:
    """A text, or the texts of a list of parts, joined; empty for None."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _message(message: Mapping[str, Any], called: Mapping[Any, str]) -> Message:
    """`developer` is OpenAI's newer word for `system`."""
    said: Message = {k: v for k, v in message.items() if k not in _WRITTEN}
    text, calls = text_of(message.get("content")), message.get("tool_calls")
    said |= {"role": "system" if message["role"] == "developer" else message["role"], "content": text}
    if calls:
        said |= {"content": text or None, "tool_calls": list(_calls(calls))}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        said["reasoning_content"] = reasoning
    if message["role"] == "tool":
        answered = message.get("tool_call_id")
        found = {"tool_call_id": answered, "name": message.get("name") or called.get(answered)}
        said |= {k: v for k, v in found.items() if v}
    return said


def _calls(calls: Iterable[Mapping[str, Any]]) -> Iterable[Message]:
    for call in calls:
        function = {"name": call["function"]["name"], "arguments": _object(call["function"]["arguments"])}
        yield ({"id": call["id"]} if call.get("id") else {}) | {"type": "function", "function": function}


def _object(arguments: Any) -> Any:
    """JSON text as an object; any other value stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
