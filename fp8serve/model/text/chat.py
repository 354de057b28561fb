"""Renders conversations with a model's chat template in jinja's sandbox.

A chat template is a program from an untrusted download. jinja's sandbox protects Python's internals, but a template can
run for an hour or build a string of a gigabyte, even while jinja compiles it. So a `ChatTemplate` is only created in a
process with limits of CPU time and memory: a parser process of the server, or the child process of a `LimitedTemplate`.
Templates get the helpers of transformers: `raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop
controls, and `{% generation %}` blocks, from which assistant_spans.py computes loss masks.

`strftime_now` returns the machine's time, as in transformers, or the date with which the template was compiled. A
training run uses the date on which it started, so that a resumed run renders the same text.

Templates differ in the format of tool calls. transformers passes arguments as objects, and null as the content of a
message that only has calls. DeepSeek's templates concatenate arguments, so they need text; Qwen 3's search the content,
so it must not be null. A template does not say which format it needs, so `message_formats` yields several, and the
first one that the template accepts is used.

If a template does not support tools, `with_tools` rewrites the conversation. The system message describes the tools,
calls are written as `<tool_call>{...}</tool_call>`, as Hermes and Qwen models are trained, and results become user
messages in plain words: a model that was not trained on `<tool_response>` repeats this tag instead of using the result.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import date, datetime, time
from itertools import groupby
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fp8serve.errors import Fp8ServeError, ModelError, RequestError, one_line

Message = dict[str, Any]
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})

CONTINUATION_MARKER = "<end-of-begun-message>"
"""A text that is appended to the message to be continued, to find its end in the rendered conversation."""
MAX_CHARS = 16 * 1024 * 1024
"""Characters of a rendered conversation; a tokenizer needs 200 bytes for each."""

TOOLS_PROMPT = """# Tools

These functions may help you to answer. Each line between the tags is the JSON description of one:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments between these tags, and wait for its result:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""

_delimiter: ContextVar[str] = ContextVar("delimiter", default="")  # rendered around generation blocks


class _Generation(Extension):
    """The block `{% generation %}...{% endgeneration %}`, which renders its body between two delimiters."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads a class attribute

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_wrap"), [], [], body).set_lineno(line)

    def _wrap(self, caller: Callable[[], str]) -> str:
        return f"{_delimiter.get()}{caller()}{_delimiter.get()}"


class ChatTemplate:
    """A compiled chat template.

    `special_tokens` are variables of the template, such as `bos_token`, and `today` is the date of `strftime_now`, or
    None for the machine's clock. Raises ModelError if `source` is not a template.

    Attributes:
        marks_generation: whether the template has `{% generation %}` blocks
        takes_tools: whether the template reads the variable `tools`
        writes_tool_calls: whether the template renders an assistant's tool calls
        constants: string constants in the template, which it may search for in messages
    """

    def __init__(self, source: str, special_tokens: dict[str, str], today: date | None = None) -> None:
        self.source = source
        self._special_tokens = special_tokens
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _clock(today)}
        try:
            parsed = environment.parse(source)
            blocks = parsed.find_all(nodes.ExtensionAttribute)
            self.marks_generation = any(b.identifier == _Generation.identifier for b in blocks)
            self.takes_tools = any(name.name == "tools" for name in parsed.find_all(nodes.Name))
            self.writes_tool_calls = "tool_calls" in source
            self.constants = frozenset(c.value for c in parsed.find_all(nodes.Const) if isinstance(c.value, str))
            self._template = environment.from_string(parsed)
        except MemoryError:
            raise
        except Exception as e:  # Python's compiler may reject what jinja accepts
            raise ModelError(f"The model's chat template does not compile: {one_line(e)}.") from None

    def render(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        delimiter: str = "",
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """Renders the conversation, with `delimiter` before and after the text of each generation block.

        `variables` are further variables of the template, such as `enable_thinking`, or `tools` in the format of
        OpenAI's API. Raises RequestError if the template refuses the messages, and ModelError if it writes too much.
        """
        context = {"tools": None, "documents": None} | to_json_value(dict(variables))
        if "tools" in variables and not self.takes_tools:
            messages, context["tools"] = with_tools(messages, context["tools"], self.writes_tool_calls), None
        context |= {"add_generation_prompt": add_generation_prompt}
        token = _delimiter.set(delimiter)
        try:
            return self._render_first_accepted([_without_nulls(message) for message in messages], context)
        finally:
            _delimiter.reset(token)

    def render_to_continue(self, messages: list[Message], variables: Mapping[str, Any] = NO_VARIABLES) -> str:
        """Renders the conversation up to the end of the last message, which the model continues.

        White space at its end stays if the template preserves it, as with transformers' `continue_final_message`.
        Variables and errors are those of `render`.
        """
        *earlier, last = messages
        content = f"{last.get('content') or ''}{CONTINUATION_MARKER} "
        rendered = self.render([*earlier, last | {"content": content}], False, variables=variables)
        text, marker, suffix = rendered.rpartition(CONTINUATION_MARKER)
        if not marker:
            raise RequestError("The model's chat template does not render the message that the model would continue.")
        return text if suffix.startswith(" ") else text.rstrip()

    def _render_first_accepted(self, messages: list[Message], context: dict[str, Any]) -> str:
        """Renders the messages in the first format that the template accepts, or raises the error for the first
        format."""
        reason = ""
        for formatted in message_formats(messages):
            try:
                return _join(self._template.generate(self._special_tokens | context | {"messages": formatted}))
            except (Fp8ServeError, MemoryError):
                raise
            except Exception as e:  # templates can raise errors of any class
                reason = reason or one_line(e)
        raise RequestError(f"The model's chat template refuses these messages: {reason}.")


def _join(pieces: Iterator[str]) -> str:
    """Joins the pieces. Raises ModelError if they have more than MAX_CHARS characters."""
    parts, length = [], 0
    for piece in pieces:
        parts.append(piece)
        length += len(piece)
        if length > MAX_CHARS:
            raise ModelError("The model's chat template writes too much.")
    return "".join(parts)


def _without_nulls(message: Message) -> Message:
    """Removes null values from a message, except the content beside tool calls, which some templates test for null."""
    fields = {k: v for k, v in message.items() if v is not None or (k == "content" and message.get("tool_calls"))}
    return {k: to_json_value(v) for k, v in fields.items()}


def to_json_value(value: Any) -> Any:
    """Converts tuples to lists and keys to text. Raises RequestError for other types than those of JSON. A template
    could call the methods of other objects."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {str(k): to_json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(v) for v in value]
    raise RequestError(f"A chat message holds a {type(value).__name__}, which is not a JSON value.")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _clock(today: date | None) -> Callable[[str], str]:
    """Returns the function `strftime_now`, which formats the machine's time or noon of `today`."""
    fixed = None if today is None else datetime.combine(today, time(12))

    def strftime_now(layout: str) -> str:
        return (fixed or datetime.now()).strftime(layout)

    return strftime_now


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def message_formats(messages: list[Message]) -> Iterator[list[Message]]:
    """Yields the conversation unchanged and, if it has tool calls, with text for null content or for arguments."""
    yield messages
    if any(message.get("tool_calls") for message in messages):
        yield [_with_text_content(message) for message in messages]
        with_text_arguments = [_with_arguments_as_text(message) for message in messages]
        yield with_text_arguments
        yield [_with_text_content(message) for message in with_text_arguments]


def _with_text_content(message: Message) -> Message:
    return message | {"content": message.get("content") or ""} if message.get("tool_calls") else message


def _with_arguments_as_text(message: Message) -> Message:
    calls = message.get("tool_calls")
    return (
        message | {"tool_calls": [_arguments_as_text(call) for call in calls]} if isinstance(calls, list) else message
    )


def _arguments_as_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    return call | {"function": function | {"arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}}


def with_tools(
    messages: list[Message], tools: list[dict[str, Any]] | None, writes_calls: bool = False
) -> list[Message]:
    """Rewrites a conversation for a template without tools, so that only system, user and assistant have messages.

    `tools` have the format of OpenAI's API. If `writes_calls`, the template renders calls and results itself, and only
    the description of the tools is added.
    """
    if writes_calls:
        return _describe_tools(messages, tools) if tools else messages
    rewritten: list[Message] = []
    for is_result, group in groupby(messages, key=lambda message: message.get("role") == "tool"):
        if is_result:
            results = (f"{m.get('name') or 'The function'} returned:\n{m.get('content') or ''}" for m in group)
            rewritten.append({"role": "user", "content": "\n".join(results)})
        else:
            rewritten += [_calls_as_text(message) if message.get("tool_calls") else message for message in group]
    return _describe_tools(rewritten, tools) if tools else rewritten


def _describe_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """Appends the description of the tools to the system message, or inserts a system message with it."""
    text = TOOLS_PROMPT.format(tools="\n".join(_json(tool) for tool in tools))
    if messages and messages[0].get("role") == "system":
        first = messages[0] | {"content": f"{messages[0].get('content') or ''}\n\n{text}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _calls_as_text(message: Message) -> Message:
    """Returns an assistant's message with its tool calls as text."""
    calls = (call["function"] for call in message["tool_calls"])
    texts = [f"<tool_call>\n{_json({k: call[k] for k in ('name', 'arguments')})}\n</tool_call>" for call in calls]
    return {"role": "assistant", "content": "\n".join([*filter(None, [message.get("content")]), *texts])}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
