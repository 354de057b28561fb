"""What a conversation in training data may hold: messages of text, calls of tools and their results, as OpenAI's
fine-tuning files and data sets on the hub spell them.

Refused by name is whatever a prompt cannot hold, and whatever would be learnt, or not learnt, against the intention of
the data: a role that no request has, an answer that is empty, arguments of a call that are not JSON, a result whose
call is missing, a flag of another program that says what to learn. A message that is not learnt (weight 0, or the
context of a pair) may hold a broken call, because a model may learn to correct one. Other keys of a message are data
that a template may read; values of theirs that JSON cannot hold are left out.

`for_template` gives messages as chat templates read them: text instead of parts, arguments as objects, and results with
the name of the function that was called. Requests and training data both use it, so a model is trained on the text that
a request renders.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fp8serve.errors import DataError, json_fault, json_kind, shown
from fp8serve.model.text.tables import JSON_ROWS

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Those that a request may have."""
FOREIGN_FLAGS = ("train", "training", "trainable")
"""Keys by which other programs say whether a message is learnt."""
MAX_BITS = 14_000  # of a whole number; Python writes none of more than 4300 digits
MAX_DEPTH = 200  # of lists and objects in each other; a limit of Python's own would depend on who else runs
REASONING = ("reasoning", "reasoning_content", "thinking")
_READ = ("role", "content", "tool_calls", "tool_call_id", "name", "weight", *REASONING)
_ID = re.compile(r"[\w.:-]{1,256}", re.ASCII)
NO_ARGUMENTS = {"type": "object", "properties": {}}
_WRITTEN = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content")


def messages_of(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """The messages of a row to learn from: a list, or JSON text of one. DataError names `where` and what is wrong."""
    messages = conversation_of(value, where)
    learnt = [i for i, m in enumerate(messages) if m["role"] == "assistant" and is_learnt(m)]
    if not learnt:
        weightless = any(m["role"] == "assistant" for m in messages)
        what = "every message of the assistant has weight 0" if weightless else "no message is the assistant's"
        raise DataError(f"{where}: {what}, so there is nothing to learn.")
    for i in learnt:
        _check_answer(messages[i], f"{where}: message {i}")
    return messages


def is_learnt(message: Mapping[str, Any]) -> bool:
    """Whether the weight of an assistant's message is 1, which it is without one."""
    return message.get("weight") in (1, None)


def conversation_of(value: Any, where: str, column: str = "messages") -> tuple[Mapping[str, Any], ...]:
    """As `messages_of`, whoever speaks, and whatever the assistant's calls hold."""
    messages = from_json(value, f"{where}: `{column}`")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: `{column}` is not a list of messages.")
    calls: set[str] = set()
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: message {i} has no `role`.")
        try:
            _check_message(message, f"{where}: message {i}")
        except RecursionError:
            raise DataError(f"{where}: message {i} is nested too deeply.") from None
        _check_result(message, calls, f"{where}: message {i}")
        calls |= {call["id"] for call in message.get("tool_calls") or () if call.get("id")}
    return tuple(_without_foreign_values(message) for message in messages)


def tools_of(row: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    """The tools of a row as chat templates read them: a list of functions, bare or inside `{"type": "function"}`, or
    JSON text of one. DataError as above."""
    if row.get("functions"):
        raise DataError(f"{where} has `functions`, OpenAI's older form; give them as `tools`.")
    tools = from_json(row.get("tools") or [], f"{where}: `tools`")
    if not isinstance(tools, list):
        raise DataError(f"{where}: `tools` is {json_kind(tools)}, not a list.")
    return tuple(_tool(tool, f"{where}: tool {i}") for i, tool in enumerate(tools))


def valid_unicode(value: str, what: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{what} holds half of a surrogate pair, which is not valid Unicode.") from None
    return value


def from_json(value: Any, what: str) -> Any:
    """Columns of CSV and Parquet files often hold lists as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return JSON_ROWS.decode(value)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{what} is text that is not valid JSON: {json_fault(e)}.") from None


def _check_message(message: Mapping[str, Any], where: str) -> None:
    calls, role = message.get("tool_calls"), message["role"]
    if role not in ROLES:
        raise DataError(f"{where} has the role {shown(role)}; roles are {', '.join(ROLES[:-1])} and {ROLES[-1]}.")
    if message.get("function_call"):
        raise DataError(f"{where} has `function_call`, OpenAI's older form; give it as `tool_calls`.")
    if calls and role != "assistant":
        raise DataError(f"{where} has `tool_calls`, but its role is {role}; only an assistant calls tools.")
    reasoning: list[Any] = [message[key] for key in REASONING if message.get(key) is not None]
    if other := [value for value in reasoning if not isinstance(value, str)]:
        raise DataError(f"{where}: its reasoning is {shown(other[0])}, which is not text.")
    if not isinstance(message.get("name") or "", str):
        raise DataError(f"{where}: its `name` is {shown(message['name'])}, which is not text.")
    texts = [*_texts(message.get("content"), bool(calls), where), *_texts_of_calls(calls, where), *reasoning]
    _check_id(message.get("tool_call_id"), f"{where}: `tool_call_id`")
    if message.get("weight") not in (0, 1, None):
        raise DataError(f"{where} has weight {shown(message['weight'])}, which is neither 0 nor 1.")
    if foreign := [flag for flag in FOREIGN_FLAGS if message.get(flag) is not None]:
        raise DataError(f'{where} has `{foreign[0]}`, which is not read; write "weight": 0 for what is not learnt.')
    valid_unicode("".join(texts), where)


def _check_result(message: Mapping[str, Any], calls: set[str], where: str) -> None:
    """calls: ids of the calls before the message; empty if they have none, or are written in the text."""
    answered = message.get("tool_call_id") if message["role"] == "tool" else None
    if answered is not None and calls and answered not in calls:
        raise DataError(f"{where} is the result of the call {shown(answered)}, which no message before it makes.")


def _check_answer(message: Mapping[str, Any], where: str) -> None:
    """Of an assistant's message that is learnt."""
    calls = message.get("tool_calls") or ()
    texts = [*_texts(message.get("content"), True, where), *(message.get(key) for key in REASONING)]
    if not calls and not any(texts):
        raise DataError(f"{where}, the assistant's, is empty; leave it out, or give it weight 0.")
    for i, call in enumerate(calls):
        what, arguments = f"{where}: `arguments` of call {i}", call["function"]["arguments"]
        if isinstance(arguments, str):  # nothing, too, means no arguments
            _check_arguments(from_json(arguments or "{}", what), what)


def _check_arguments(arguments: Any, what: str) -> None:
    """They are an object of JSON values."""
    if not isinstance(arguments, dict):
        raise DataError(f"{what} are {shown(arguments)}, which is not an object.")
    if (foreign := foreign_value(arguments)) is not None:
        raise DataError(f"{what} hold {foreign}, which is not a JSON value.")


def foreign_value(value: Any, depth: int = 0) -> str | None:
    """A value in `value` that JSON cannot hold, in words; None if there is none. depth: of `value` in a larger one."""
    if value is None or isinstance(value, str):
        return None
    if isinstance(value, int):
        return None if value.bit_length() <= MAX_BITS else f"a number of {value.bit_length()} bits"
    if isinstance(value, float):
        return None if math.isfinite(value) else shown(value)
    if not isinstance(value, dict | list | tuple):
        return f"{shown(value)}, a Python {type(value).__name__}"
    if depth == MAX_DEPTH:
        return "values that are nested too deeply"
    if isinstance(value, dict):
        if (name := next((key for key in value if not isinstance(key, str)), None)) is not None:
            return shown(name)
        value = value.values()
    return next((foreign for item in value if (foreign := foreign_value(item, depth + 1)) is not None), None)


def _without_foreign_values(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message without values that JSON cannot hold, under keys that are not read here."""
    if all(key in _READ for key in message):
        return message
    return {key: value for key, value in message.items() if key in _READ or foreign_value(value) is None}


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
        kind = f"of the type {shown(part.get('type'))}" if is_object else f"that is {json_kind(part)}"
        raise DataError(f"{where} has a part {kind} in `content`; only text is read.")
    return text


def _texts_of_calls(calls: Any, where: str) -> Iterator[str]:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise DataError(f"{where}: `tool_calls` is {json_kind(calls)}, not a list.")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            raise DataError(f"{where}: call {i} has no `function` with a `name`.")
        if call.get("type") not in (None, "function"):
            raise DataError(f"{where}: call {i} has the type {shown(call['type'])}; only functions can be called.")
        if not isinstance(function.get("arguments"), str | dict):
            raise DataError(f"{where}: call {i} has no `arguments`, which are an object or JSON text of one.")
        if isinstance(function["arguments"], dict):  # whoever learns them: templates write them as JSON
            _check_arguments(function["arguments"], f"{where}: `arguments` of call {i}")
        _check_id(call.get("id"), f"{where}: the `id` of call {i}")
        yield function["name"] + json.dumps(function["arguments"], ensure_ascii=False)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _check_id(value: Any, what: str) -> None:
    """Ids are not replaced by stand-ins (turns.py), so they must not look like a part of a template."""
    if value is not None and not (isinstance(value, str) and _ID.fullmatch(value)):
        raise DataError(f"{what} is {shown(value)}; an id has up to 256 letters, digits, and . : _ -.")


def _tool(tool: Any, where: str) -> Mapping[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not _is_name(function.get("name")):
        raise DataError(f"{where} has no `function` with a `name`.")
    if not isinstance(function.get("description") or "", str):
        raise DataError(f"{where}: its `description` is {shown(function['description'])}, which is not text.")
    if not isinstance(function.get("parameters") or {}, dict) or foreign_value(function.get("parameters")) is not None:
        raise DataError(f"{where}: its `parameters` are {shown(function['parameters'])}, which is not a JSON schema.")
    described = {"name": function["name"], "description": function.get("description") or ""}
    return {"type": "function", "function": described | {"parameters": function.get("parameters") or NO_ARGUMENTS}}


Message = dict[str, Any]


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
    result: Message = {k: v for k, v in message.items() if k not in _WRITTEN}
    text, calls = text_of(message.get("content")), message.get("tool_calls")
    result |= {"role": "system" if message["role"] == "developer" else message["role"], "content": text}
    if calls:
        result |= {"content": text or None, "tool_calls": list(_calls(calls))}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        result["reasoning_content"] = reasoning
    if message["role"] == "tool":
        answered = message.get("tool_call_id")
        fields = {"tool_call_id": answered, "name": message.get("name") or called.get(answered)}
        result |= {k: v for k, v in fields.items() if v}
    return result


def _calls(calls: Iterable[Mapping[str, Any]]) -> Iterable[Message]:
    for call in calls:
        function = {"name": call["function"]["name"], "arguments": _object(call["function"]["arguments"])}
        yield ({"id": call["id"]} if call.get("id") else {}) | {"type": "function", "function": function}


def _object(arguments: Any) -> Any:
    """JSON text as an object; any other value stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
