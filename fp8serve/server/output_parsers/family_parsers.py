"""A parser for each way in which families of models write tool calls and reasoning. All other text is content.

| format | syntax |
|---|---|
| hermes | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen, Hermes, SmolLM, Granite 4 |
| llama3 | `{"name": ..., "parameters": {...}}` or `[f(x=1)]` as the whole output, or after `<|python_tag|>` |
| mistral | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` |
| granite | `<|tool_call|>[{"name": ..., "arguments": {...}}]`: Granite 3, Phi-4 mini |
| deepseek | a name and JSON between DeepSeek's own special tokens: V3, V3.1, R1 |
| qwen3-coder | `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` |
| gpt-oss | messages of a header, which names a channel, and a body (the harmony format) |
"""

import json
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from fp8serve.server.output_parsers.incremental import (
    Arguments,
    Content,
    Parser,
    Part,
    PartGenerator,
    Reasoning,
    TextBuffer,
    ToolCallStart,
    accept,
    parse_until,
    read_until,
    skip,
)
from fp8serve.server.output_parsers.json_calls import json_calls, parse_json_arguments, pythonic_calls

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each tool that a request declares, by the tool's name."""


def hermes(buffer: TextBuffer, tools: ToolSchemas) -> PartGenerator:
    while (yield from parse_until(buffer, Content, ("<tool_call>",))):
        if (yield from json_calls(buffer, "<tool_call>", "</tool_call>")):
            yield from skip(buffer)


PYTHON_TAG = "<|python_tag|>"


def llama3(buffer: TextBuffer, tools: ToolSchemas) -> PartGenerator:
    """Parses calls that may have no tag. JSON or Python is a call only if its name is that of a declared tool."""
    yield from skip(buffer)
    has_tag = yield from accept(buffer, PYTHON_TAG)
    first = yield from skip(buffer)
    while True:
        opening = PYTHON_TAG if has_tag else ""
        buffer.if_truncated = None if has_tag else (Content, ())  # without the tag this may be a response in JSON
        if first == "{":
            yield from json_calls(buffer, opening, names=tools)
        elif first == "[":
            yield from pythonic_calls(buffer, opening, tools)
        elif has_tag:
            yield Content(PYTHON_TAG)
        buffer.if_truncated = None
        if not (yield from parse_until(buffer, Content, (PYTHON_TAG,))):
            return
        has_tag, first = True, (yield from skip(buffer))


def mistral(buffer: TextBuffer, tools: ToolSchemas) -> PartGenerator:
    tag = "[TOOL_CALLS]"
    while (yield from parse_until(buffer, Content, (tag,))):
        if (yield from skip(buffer)) in ("[", "{"):
            yield from json_calls(buffer, tag)
        else:
            yield from _mistral_call(buffer, tag)
        yield from skip(buffer)


def _mistral_call(buffer: TextBuffer, opening: str) -> PartGenerator:
    """Parses a call whose name and arguments are not one JSON object."""
    header, tag = yield from read_until(buffer, ("[ARGS]", "{", opening))
    if tag not in ("[ARGS]", "{") or not header.strip():
        buffer.text = (tag if tag == opening else "") + buffer.text
        yield Content(opening + header + ("" if tag == opening else tag))
        return
    yield ToolCallStart(header.partition("[CALL_ID]")[0].strip())
    buffer.text = ("{" if tag == "{" else "") + buffer.text
    yield from skip(buffer)
    yield from parse_json_arguments(buffer, opening)


def granite(buffer: TextBuffer, tools: ToolSchemas) -> PartGenerator:
    opening, closing = "<|tool_call|>", "<|/tool_call|>"
    while (yield from parse_until(buffer, Content, (opening,))):
        if (yield from json_calls(buffer, opening, closing)):
            yield from skip(buffer)


CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def deepseek(buffer: TextBuffer, tools: ToolSchemas) -> PartGenerator:
    while (yield from parse_until(buffer, Content, (CALLS,))):
        yield from skip(buffer)
        while (yield from accept(buffer, CALL)):
            yield from _deepseek_call(buffer)
            yield from skip(buffer)
        yield from accept(buffer, CALLS_END)
        yield from skip(buffer)


def _deepseek_call(buffer: TextBuffer) -> PartGenerator:
    """Parses one call. V3 and R1 write `function`, the separator, a name, and JSON in a Markdown code block. V3.1
    writes a name, the separator, and JSON."""
    header, tag = yield from read_until(buffer, (SEPARATOR, CALL_END))
    if tag != SEPARATOR:
        yield Content(CALL + header + tag)
        return
    name = header.strip()
    if name == "function":
        name = (yield from read_until(buffer, ("\n", CALL_END)))[0].strip()
        yield from skip(buffer)
        yield from accept(buffer, "```json")
    yield ToolCallStart(name)
    yield from skip(buffer)
    if (yield from parse_json_arguments(buffer, CALL_END)):
        yield from read_until(buffer, (CALL_END,))


def qwen3_coder(buffer: TextBuffer, tools: ToolSchemas) -> PartGenerator:
    """Parses calls. The model may leave out the `<tool_call>` tags around a function."""
    while tag := (yield from parse_until(buffer, Content, ("<tool_call>", "<function="))):
        space = buffer.skipped_space
        if tag == "<tool_call>":
            yield from skip(buffer)
            if not (yield from accept(buffer, "<function=")):
                yield Content(space + tag)
                continue
        yield from _xml_call(buffer, tools)
        yield from skip(buffer)
        yield from accept(buffer, "</tool_call>")
        yield from skip(buffer)


def _xml_call(buffer: TextBuffer, tools: ToolSchemas) -> PartGenerator:
    """Parses a function from its name on. Each parameter is yielded when it is complete."""
    name, tag = yield from read_until(buffer, (">",))
    if not tag:
        yield Content("<function=" + name)
        return
    yield ToolCallStart(name.strip())
    types = _parameter_types(tools.get(name.strip(), {}))
    delimiter = "{"
    while True:
        yield from skip(buffer)
        if not (yield from accept(buffer, "<parameter=")):
            break
        key, _ = yield from read_until(buffer, (">",))
        text = yield from _xml_value(buffer)
        member = f"{json.dumps(key.strip(), ensure_ascii=False)}: {_parameter_json(text, types.get(key.strip()))}"
        yield Arguments(delimiter + member)
        delimiter = ", "
    yield Arguments("{}" if delimiter == "{" else "}")
    yield from accept(buffer, "</function>")


def _xml_value(buffer: TextBuffer) -> Generator[Part | None, None, str]:
    """Returns a parameter's text without the line breaks that the format adds. The model may leave out the closing tag
    of the parameter."""
    tags = ("</parameter>", "<parameter=", "</function>")
    text, tag = yield from read_until(buffer, tags)
    if tag in tags[1:]:
        buffer.text = tag + buffer.text
    return text.removeprefix("\n").removesuffix("\n")


def _parameter_types(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: parameter.get("type") for name, parameter in properties.items() if isinstance(parameter, dict)}


def _parameter_json(text: str, json_type: Any) -> str:
    """Returns a parameter as JSON: a string if its schema says so or if the text is not JSON, else the text itself."""
    literal = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    if json_type == "string" or not _is_json(literal):
        return json.dumps(text, ensure_ascii=False)
    return literal


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda _: 1 / 0)
    except (ValueError, RecursionError, ArithmeticError):
        return False
    return True


# -- gpt-oss -----------------------------------------------------------------------------------------------------------

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


def harmony(buffer: TextBuffer) -> PartGenerator:
    """Parses messages. A message is a header with a channel and an optional recipient, then a body.

        <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
        <|message|>{...}<|call|>

    A message to a function is a call, a message in the channel `analysis` is reasoning, and any other is content. The
    first header has no `<|start|>assistant`, because the prompt ends with it.
    """
    tag = " to=" if (yield from accept(buffer, " to=")) else ""
    while True:
        if tag not in (START, CHANNEL, " to="):
            tag = yield from parse_until(buffer, Content, (START, CHANNEL))
            if not tag:
                return
        header, end = yield from read_until(buffer, (MESSAGE,))
        header = tag + header
        if not end:
            yield Content(header)
            return
        if recipient := _RECIPIENT.search(header):
            yield ToolCallStart(recipient[1])
        part_type = Arguments if recipient else Reasoning if "analysis" in header else Content
        tag = yield from parse_until(buffer, part_type, (*ENDS, START, CHANNEL))


# -- reasoning ---------------------------------------------------------------------------------------------------------


def tagged_reasoning(openings: Sequence[str], closings: Sequence[str], is_open: bool = False) -> Parser:
    """Returns a parser of outputs that begin with reasoning between one of `openings` and one of `closings`. `is_open`
    says that the prompt ends with an opening tag.

    Without an opening tag everything is content. Without a closing tag everything is reasoning. White space around
    reasoning is dropped.
    """

    def parse(buffer: TextBuffer) -> PartGenerator:
        if (yield from _accept_any(buffer, openings)) or is_open:
            yield from skip(buffer)
            yield from parse_until(buffer, Reasoning, closings)
            yield from skip(buffer)
        yield from parse_until(buffer, Content, ())

    return parse


def _accept_any(buffer: TextBuffer, tags: Sequence[str]) -> Generator[None, None, bool]:
    """Consumes one of `tags`, and white space before it, if the text starts with them. Returns whether it does."""
    buffer.if_truncated = Content, ()
    while not buffer.ended and any(
        len(buffer.text.lstrip()) < len(tag) and tag.startswith(buffer.text.lstrip()) for tag in tags
    ):
        yield None
    buffer.if_truncated = None
    for tag in tags:
        if buffer.text.lstrip().startswith(tag):
            buffer.text = buffer.text.lstrip()[len(tag) :]
            return True
    return False
