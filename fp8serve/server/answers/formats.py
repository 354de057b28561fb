"""How families of models write tool calls and reasoning: a reader for each. Text that is not a call remains content.

| format | as the model writes it |
|---|---|
| hermes | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen, Hermes, SmolLM, Granite 4 |
| llama3 | `{"name": ..., "parameters": {...}}` or `[f(x=1)]`, and nothing else; `<|python_tag|>` may be before it |
| mistral | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` |
| granite | `<|tool_call|>[{"name": ..., "arguments": {...}}]`: Granite 3, Phi-4 mini |
| deepseek | marks of its own, around a name and JSON: V3, V3.1, R1 |
| qwen3-coder | `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` |
| gpt-oss | channels, in messages of a header and a body |
"""

import json
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from fp8serve.server.answers.feed import (
    Arguments,
    Call,
    Content,
    Feed,
    Part,
    Reader,
    Reading,
    Reasoning,
    accept,
    collect,
    skip,
    until,
)
from fp8serve.server.answers.json_calls import json_calls, pythonic_calls, value

Tools = Mapping[str, Mapping[str, Any]]
"""The names of the tools that a request declares, and the JSON schema of each one's arguments."""


def hermes(feed: Feed, tools: Tools) -> Reading:
    while (yield from until(feed, Content, ("<tool_call>",))):
        if (yield from json_calls(feed, "<tool_call>", "</tool_call>")):
            yield from skip(feed)


PYTHON_TAG = "<|python_tag|>"


def llama3(feed: Feed, tools: Tools) -> Reading:
    """Reads calls that have no mark: only a declared name makes a call."""
    first = yield from skip(feed)
    marked = yield from accept(feed, PYTHON_TAG)
    first = yield from skip(feed)
    while True:
        opening = PYTHON_TAG if marked else ""
        feed.unread = None if marked else (Content, ())  # it may be an answer in JSON
        if first == "{":
            yield from json_calls(feed, opening, names=tools)
        elif first == "[":
            yield from pythonic_calls(feed, opening, tools)
        elif marked:
            yield Content(PYTHON_TAG)
        feed.unread = None
        if not (yield from until(feed, Content, (PYTHON_TAG,))):
            return
        marked, first = True, (yield from skip(feed))


def mistral(feed: Feed, tools: Tools) -> Reading:
    mark = "[TOOL_CALLS]"
    while (yield from until(feed, Content, (mark,))):
        if (yield from skip(feed)) in ("[", "{"):
            yield from json_calls(feed, mark)
        else:
            yield from _mistral_call(feed, mark)
        yield from skip(feed)


def _mistral_call(feed: Feed, mark: str) -> Reading:
    head, end = yield from collect(feed, ("[ARGS]", "{", mark))
    if end not in ("[ARGS]", "{") or not head.strip():
        feed.text = (end if end == mark else "") + feed.text
        yield Content(mark + head + ("" if end == mark else end))
        return
    yield Call(head.partition("[CALL_ID]")[0].strip())
    feed.text = ("{" if end == "{" else "") + feed.text
    yield from skip(feed)
    yield from value(feed, mark)


def granite(feed: Feed, tools: Tools) -> Reading:
    mark, closing = "<|tool_call|>", "<|/tool_call|>"
    while (yield from until(feed, Content, (mark,))):
        if (yield from json_calls(feed, mark, closing)):
            yield from skip(feed)


CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def deepseek(feed: Feed, tools: Tools) -> Reading:
    while (yield from until(feed, Content, (CALLS,))):
        yield from skip(feed)
        while (yield from accept(feed, CALL)):
            yield from _deepseek_call(feed)
            yield from skip(feed)
        yield from accept(feed, CALLS_END)
        yield from skip(feed)


def _deepseek_call(feed: Feed) -> Reading:
    """V3 and R1: `function`, the separator, a name, and JSON in a fence. V3.1: a name, the separator, and JSON."""
    head, end = yield from collect(feed, (SEPARATOR, CALL_END))
    if end != SEPARATOR:
        yield Content(CALL + head + end)
        return
    name = head.strip()
    if name == "function":
        name = (yield from collect(feed, ("\n", CALL_END)))[0].strip()
        yield from skip(feed)
        yield from accept(feed, "```json")
    yield Call(name)
    yield from skip(feed)
    if (yield from value(feed, CALL_END)):
        yield from collect(feed, (CALL_END,))


def qwen3_coder(feed: Feed, tools: Tools) -> Reading:
    """`<tool_call>` around a function may be missing."""
    while mark := (yield from until(feed, Content, ("<tool_call>", "<function="))):
        space = feed.space
        if mark == "<tool_call>":
            yield from skip(feed)
            if not (yield from accept(feed, "<function=")):
                yield Content(space + mark)
                continue
        yield from _xml_call(feed, tools)
        yield from skip(feed)
        yield from accept(feed, "</tool_call>")
        yield from skip(feed)


def _xml_call(feed: Feed, tools: Tools) -> Reading:
    """A function's parameters, each yielded when it is complete."""
    name, end = yield from collect(feed, (">",))
    if not end:
        yield Content("<function=" + name)
        return
    yield Call(name.strip())
    types = _types(tools.get(name.strip(), {}))
    joint = "{"
    while True:
        yield from skip(feed)
        if not (yield from accept(feed, "<parameter=")):
            break
        key, _ = yield from collect(feed, (">",))
        text = yield from _xml_value(feed)
        yield Arguments(f"{joint}{json.dumps(key.strip(), ensure_ascii=False)}: {_typed(text, types.get(key.strip()))}")
        joint = ", "
    yield Arguments("{}" if joint == "{" else "}")
    yield from accept(feed, "</function>")


def _xml_value(feed: Feed) -> Generator[Part | None, None, str]:
    """A parameter's text: without the line breaks that the format puts around it. Its end mark is sometimes missing."""
    marks = ("</parameter>", "<parameter=", "</function>")
    text, end = yield from collect(feed, marks)
    if end in marks[1:]:
        feed.text = end + feed.text
    return text.removeprefix("\n").removesuffix("\n")


def _types(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: about.get("type") for name, about in properties.items() if isinstance(about, dict)}


def _typed(text: str, kind: Any) -> str:
    """The JSON text of a parameter; it is a string if its schema says so, or if it is not JSON."""
    literal = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    if kind == "string" or not _is_json(literal):
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


def harmony(feed: Feed) -> Reading:
    """Messages: a header that names a channel and perhaps a recipient, then a body.

        <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
        <|message|>{...}<|call|>

    The channel `analysis` is reasoning, a message addressed to a function is a call, and everything else is content.
    The prompt ends with `<|start|>assistant`, so the first header is without it.
    """
    mark = " to=" if (yield from accept(feed, " to=")) else ""
    while True:
        if mark not in (START, CHANNEL, " to="):
            mark = yield from until(feed, Content, (START, CHANNEL))
            if not mark:
                return
        head, end = yield from collect(feed, (MESSAGE,))
        head = mark + head
        if not end:
            yield Content(head)
            return
        if recipient := _RECIPIENT.search(head):
            yield Call(recipient[1])
        part = Arguments if recipient else Reasoning if "analysis" in head else Content
        mark = yield from until(feed, part, (*ENDS, START, CHANNEL))


# -- reasoning ---------------------------------------------------------------------------------------------------------


def between(openings: Sequence[str], closings: Sequence[str], opened: bool = False) -> Reader:
    """A reader of reasoning that begins with one of `openings`. `opened`: the prompt ends with one.

    Without an opening everything is content; without a closing everything is reasoning. White space around reasoning is
    left out.
    """

    def read(feed: Feed) -> Reading:
        if (yield from _begins(feed, openings)) or opened:
            yield from skip(feed)
            yield from until(feed, Reasoning, closings)
            yield from skip(feed)
        yield from until(feed, Content, ())

    return read


def _begins(feed: Feed, openings: Sequence[str]) -> Generator[None, None, bool]:
    """Takes one of `openings`, and the white space before it, if it is next."""
    feed.unread = Content, ()
    while not feed.ended and any(
        len(feed.text.lstrip()) < len(o) and o.startswith(feed.text.lstrip()) for o in openings
    ):
        yield None
    feed.unread = None
    for opening in openings:
        if feed.text.lstrip().startswith(opening):
            feed.text = feed.text.lstrip()[len(opening) :]
            return True
    return False
