"""Validates conversations in training data: text messages, tool calls and tool results in OpenAI's format.

A conversation raises DataError if a request could not contain it, or if its loss mask would not be what its author
intended: for an unknown role, an empty answer, arguments that are not JSON, a result without its call, or a loss-mask
flag of another program. A message without loss (weight 0, or the context of a preference pair) may contain a malformed
call, because a model may learn to correct it. Unknown keys of a message are passed to the chat template, except those
with values that JSON cannot represent.

`for_template` converts messages to the format of chat templates. Requests and training data both use it, so a model is
trained on the text that a request renders.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fp8serve.errors import DataError, json_fault, json_kind, shown
from fp8serve.model.text.tables import JSON_ROWS

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that a request may have."""
FOREIGN_FLAGS = ("train", "training", "trainable")
"""Keys with which other programs put a message into the loss mask."""
MAX_INTEGER_BITS = 14_000  # Python converts no integer of more than 4300 digits to text
MAX_DEPTH = 200  # nesting of lists and objects; Python's recursion limit would depend on the caller's stack
REASONING_KEYS = ("reasoning", "reasoning_content", "thinking")
_KNOWN_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "weight", *REASONING_KEYS)
_ID = re.compile(r"[\w.:-]{1,256}", re.ASCII)
NO_PARAMETERS = {"type": "object", "properties": {}}
_CONVERTED_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content")


def parse_messages(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Returns the messages of a training row, which is a list or its JSON text.

    Raises DataError, with `where` and the reason, if a message is invalid or no message of the assistant has loss.
    """
    messages = parse_conversation(value, where)
    with_loss = [i for i, m in enumerate(messages) if m["role"] == "assistant" and has_loss(m)]
    if not with_loss:
        has_assistant = any(m["role"] == "assistant" for m in messages)
        problem = "every message of the assistant has weight 0" if has_assistant else "no message is the assistant's"
        raise DataError(f"{where}: {problem}, so there is nothing to learn.")
    for i in with_loss:
        _check_answer(messages[i], f"{where}: message {i}")
    return messages


def has_loss(message: Mapping[str, Any]) -> bool:
    """Whether an assistant's message has weight 1, which is the default."""
    return message.get("weight") in (1, None)


def parse_conversation(value: Any, where: str, column: str = "messages") -> tuple[Mapping[str, Any], ...]:
    """Returns the messages of a conversation that needs no message with loss; see `parse_messages`."""
    messages = decode_json(value, f"{where}: `{column}`")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: `{column}` is not a list of messages.")
    calls: set[str] = set()  # the ids of earlier calls
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: message {i} has no `role`.")
        try:
            _check_message(message, f"{where}: message {i}")
        except RecursionError:
            raise DataError(f"{where}: message {i} is nested too deeply.") from None
        call_id = message.get("tool_call_id") if message["role"] == "tool" else None
        if call_id is not None and calls and call_id not in calls:
            raise DataError(
                f"{where}: message {i} is the result of the call {shown(call_id)}, but no earlier message has a call "
                "with this id."
            )
        calls |= {call["id"] for call in message.get("tool_calls") or () if call.get("id")}
    return tuple(_without_non_json_values(message) for message in messages)


def parse_tools(row: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    """Returns the tools of a row in the format of chat templates. Raises DataError if one is invalid.

    A row has a list of functions, or its JSON text; a function may be inside `{"type": "function"}`.
    """
    if row.get("functions"):
        raise DataError(f"{where} has `functions`, OpenAI's older format; give them as `tools`.")
    tools = decode_json(row.get("tools") or [], f"{where}: `tools`")
    if not isinstance(tools, list):
        raise DataError(f"{where}: `tools` is {json_kind(tools)}, not a list.")
    return tuple(_tool(tool, f"{where}: tool {i}") for i, tool in enumerate(tools))


def valid_unicode(value: str, subject: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{subject} holds half of a surrogate pair, which is not valid Unicode.") from None
    return value


def decode_json(value: Any, subject: str) -> Any:
    """Decodes JSON text, as CSV and Parquet files may store lists, and returns other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return JSON_ROWS.decode(value)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{subject} is text that is not valid JSON: {json_fault(e)}.") from None


def _check_message(message: Mapping[str, Any], where: str) -> None:
    calls, role = message.get("tool_calls"), message["role"]
    if role not in ROLES:
        raise DataError(f"{where} has the role {shown(role)}; roles are {', '.join(ROLES[:-1])} and {ROLES[-1]}.")
    if message.get("function_call"):
        raise DataError(f"{where} has `function_call`, OpenAI's older format; give it as `tool_calls`.")
    if calls and role != "assistant":
        raise DataError(f"{where} has `tool_calls`, but its role is {role}; only an assistant calls tools.")
    reasoning: list[Any] = [message[key] for key in REASONING_KEYS if message.get(key) is not None]
    if not_text := [value for value in reasoning if not isinstance(value, str)]:
        raise DataError(f"{where}: its reasoning must be text, not {shown(not_text[0])}.")
    if not isinstance(message.get("name") or "", str):
        raise DataError(f"{where}: its `name` must be text, not {shown(message['name'])}.")
    texts = [*_texts(message.get("content"), bool(calls), where), *_texts_of_calls(calls, where), *reasoning]
    _check_id(message.get("tool_call_id"), f"{where}: `tool_call_id`")
    if message.get("weight") not in (0, 1, None):
        raise DataError(f"{where}: `weight` must be 0 or 1, not {shown(message['weight'])}.")
    if foreign := [flag for flag in FOREIGN_FLAGS if message.get(flag) is not None]:
        raise DataError(
            f'{where} has `{foreign[0]}`, which is not supported; write "weight": 0 for a message without loss.'
        )
    valid_unicode("".join(texts), where)


def _check_answer(message: Mapping[str, Any], where: str) -> None:
    """Raises DataError if an assistant's message with loss is empty, or has a call whose arguments are not JSON."""
    calls = message.get("tool_calls") or ()
    texts = [*_texts(message.get("content"), True, where), *(message.get(key) for key in REASONING_KEYS)]
    if not calls and not any(texts):
        raise DataError(f"{where} is an empty assistant message; remove it, or give it weight 0.")
    for i, call in enumerate(calls):
        subject, arguments = f"{where}: `arguments` of call {i}", call["function"]["arguments"]
        if isinstance(arguments, str):  # empty text means no arguments
            _check_arguments(decode_json(arguments or "{}", subject), subject)


def _check_arguments(arguments: Any, subject: str) -> None:
    if not isinstance(arguments, dict):
        raise DataError(f"{subject} must be an object, not {shown(arguments)}.")
    if (description := non_json_value(arguments)) is not None:
        raise DataError(f"{subject} contain {description}, which JSON cannot represent.")


def non_json_value(value: Any, depth: int = 0) -> str | None:
    """Describes the first value in `value` that JSON cannot represent, or returns None if there is none. `depth` is
    the nesting depth of `value` in the outermost value."""
    if value is None or isinstance(value, str):
        return None
    if isinstance(value, int):
        return None if value.bit_length() <= MAX_INTEGER_BITS else f"a number of {value.bit_length()} bits"
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
    return next((text for item in value if (text := non_json_value(item, depth + 1)) is not None), None)


def _without_non_json_values(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Removes unknown keys with values that JSON cannot represent."""
    if all(key in _KNOWN_KEYS for key in message):
        return message
    return {key: value for key, value in message.items() if key in _KNOWN_KEYS or non_json_value(value) is None}


def _texts(content: Any, may_be_empty: bool, where: str) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list) and content:
        yield from (_part_text(part, where) for part in content)
    elif content is not None or not may_be_empty:
        raise DataError(f"{where} has no text in `content`.")


def _part_text(part: Any, where: str) -> str:
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
            raise DataError(f"{where}: call {i} has no `arguments`, which are an object or its JSON text.")
        if isinstance(function["arguments"], dict):  # templates render them as JSON, with or without loss
            _check_arguments(function["arguments"], f"{where}: `arguments` of call {i}")
        _check_id(call.get("id"), f"{where}: the `id` of call {i}")
        yield function["name"] + json.dumps(function["arguments"], ensure_ascii=False)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _check_id(value: Any, subject: str) -> None:
    """Raises DataError for an invalid id. assistant_spans.py needs ids that do not look like text of a template."""
    if value is not None and not (isinstance(value, str) and _ID.fullmatch(value)):
        raise DataError(f"{subject} is {shown(value)}; an id has up to 256 letters, digits, and . : _ -.")


def _tool(tool: Any, where: str) -> Mapping[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not _is_name(function.get("name")):
        raise DataError(f"{where} has no `function` with a `name`.")
    if not isinstance(function.get("description") or "", str):
        raise DataError(f"{where}: its `description` must be text, not {shown(function['description'])}.")
    if not isinstance(function.get("parameters") or {}, dict) or non_json_value(function.get("parameters")) is not None:
        raise DataError(f"{where}: its `parameters` are {shown(function['parameters'])}, which is not a JSON schema.")
    parameters = function.get("parameters") or NO_PARAMETERS
    fields = {"name": function["name"], "description": function.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": fields}


Message = dict[str, Any]


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Converts valid messages to the format of chat templates.

    Text replaces lists of parts, arguments become objects, and results get the name of the called function. The role
    `developer` becomes `system`. Unknown keys are unchanged.
    """
    calls = [call for message in messages for call in message.get("tool_calls") or () if call.get("id")]
    function_names = {call["id"]: call["function"]["name"] for call in calls}
    return [_convert_message(message, function_names) for message in messages]


def text_of(content: Any) -> str:
    """Returns a message's content as one text: that of its parts if it is a list, and an empty one if it is None."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _convert_message(message: Mapping[str, Any], function_names: Mapping[Any, str]) -> Message:
    result: Message = {k: v for k, v in message.items() if k not in _CONVERTED_KEYS}
    text, calls = text_of(message.get("content")), message.get("tool_calls")
    result |= {"role": "system" if message["role"] == "developer" else message["role"], "content": text}
    if calls:
        result |= {"content": text or None, "tool_calls": list(_convert_calls(calls))}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        result["reasoning_content"] = reasoning
    if message["role"] == "tool":
        call_id = message.get("tool_call_id")
        fields = {"tool_call_id": call_id, "name": message.get("name") or function_names.get(call_id)}
        result |= {k: v for k, v in fields.items() if v}
    return result


def _convert_calls(calls: Iterable[Mapping[str, Any]]) -> Iterable[Message]:
    for call in calls:
        function = {"name": call["function"]["name"], "arguments": _decode_arguments(call["function"]["arguments"])}
        yield ({"id": call["id"]} if call.get("id") else {}) | {"type": "function", "function": function}


def _decode_arguments(arguments: Any) -> Any:
    """Returns the object of a JSON text; any other value is returned unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
