"""What a conversation in training data may hold: messages of text, calls of tools and their results, as OpenAI's
fine-tuning files and data sets on the hub spell them. Anything that a prompt cannot hold is refused by name.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fp8serve.errors import DataError, one_line, shown

_ID = re.compile(r"[\w.:-]{1,256}", re.ASCII)
NO_ARGUMENTS = {"type": "object", "properties": {}}


def messages_of(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """The messages of a row to learn from: a list, or JSON text of one. DataError names `where` and what is wrong."""
    messages = conversation_of(value, where)
    if not any(m["role"] == "assistant" and m.get("weight", 1) for m in messages):
        raise DataError(f"{where}: no message is the assistant's, so there is nothing to learn.")
    return messages


def conversation_of(value: Any, where: str, column: str = "messages") -> tuple[Mapping[str, Any], ...]:
    """As `messages_of`, whoever speaks."""
    messages = _from_json(value, f"{where}: `{column}`")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: `{column}` is not a list of messages.")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: message {i} has no `role`.")
        _check_message(message, f"{where}: message {i}")
    return tuple(messages)


def tools_of(row: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    """The tools of a row as chat templates read them: a list of functions, bare or inside `{"type": "function"}`, or
    JSON text of one. DataError as above."""
    if row.get("functions"):
        raise DataError(f"{where} has `functions`, OpenAI's older form; give them as `tools`.")
    tools = _from_json(row.get("tools") or [], f"{where}: `tools`")
    if not isinstance(tools, list):
        raise DataError(f"{where}: `tools` is a {type(tools).__name__}, not a list.")
    return tuple(_tool(tool, f"{where}: tool {i}") for i, tool in enumerate(tools))


def valid_unicode(value: str, what: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{what} holds half of a surrogate pair, which is not valid Unicode.") from None
    return value


def _from_json(value: Any, what: str) -> Any:
    """Columns of CSV and Parquet files often hold lists as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{what} is text that is not valid JSON: {one_line(e)}.") from None


def _check_message(message: Mapping[str, Any], where: str) -> None:
    calls = message.get("tool_calls")
    if message.get("function_call"):
        raise DataError(f"{where} has `function_call`, OpenAI's older form; give it as `tool_calls`.")
    if calls and message["role"] != "assistant":
        raise DataError(f"{where} has `tool_calls`, but its role is {message['role']}; only an assistant calls tools.")
    texts = [message["role"], *_texts(message.get("content"), bool(calls), where), *_texts_of_calls(calls, where)]
    _check_id(message.get("tool_call_id"), f"{where}: `tool_call_id`")
    if message.get("weight", 1) not in (0, 1):
        raise DataError(f"{where} has weight {shown(message['weight'])}, which is neither 0 nor 1.")
    valid_unicode("".join(texts), where)


def _texts(content: Any, may_be_empty: bool, where: str) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list) and content:
        yield from (_text_of(part, where) for part in content)
    elif content is not None or not may_be_empty:
        raise DataError(f"{where} has no text in `content`.")


def _text_of(part: Any, where: str) -> str:
    is_object = isinstance(part, dict)
    text = part.get("text") if is_object and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if is_object else type(part).__name__
        raise DataError(f"{where} has a part of the type {shown(kind)} in `content`; only text is read.")
    return text


def _texts_of_calls(calls: Any, where: str) -> Iterator[str]:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise DataError(f"{where}: `tool_calls` is a {type(calls).__name__}, not a list.")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}: call {i} has no `function` with a `name`.")
        if not isinstance(function.get("arguments"), str | dict):
            raise DataError(f"{where}: call {i} has no `arguments`, which are an object or JSON text of one.")
        _check_id(call.get("id"), f"{where}: the `id` of call {i}")
        yield function["name"] + json.dumps(function["arguments"], ensure_ascii=False)


def _check_id(value: Any, what: str) -> None:
    """Ids are not replaced by stand-ins (turns.py), so they must not look like a part of a template."""
    if value is not None and not (isinstance(value, str) and _ID.fullmatch(value)):
        raise DataError(f"{what} is {shown(value)}; an id has up to 256 letters, digits, and . : _ -.")


def _tool(tool: Any, where: str) -> Mapping[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where} has no `function` with a `name`.")
    said = {"name": function["name"], "description": function.get("description") or ""}
    return {"type": "function", "function": said | {"parameters": function.get("parameters") or NO_ARGUMENTS}}
