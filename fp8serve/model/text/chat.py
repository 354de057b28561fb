"""Chat templates: Jinja from the model's directory, run in jinja's sandbox.

A template is a program that came with a download. `ImmutableSandboxedEnvironment` keeps it from Python's internals, but
not from running for an hour or building a string of a gigabyte, and jinja computes constant expressions while it
compiles. So a `ChatTemplate` is made and rendered only in a process with limits of processor time and memory: a parser
process of the server, or the one that a `LimitedTemplate` has (limited_template.py). Helpers are those Hugging Face
templates expect: `raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop controls, and `{% generation
%}` blocks, which mark what an assistant wrote (turns.py reads them).

`strftime_now` gives the time of the machine, as transformers does, unless the template was compiled with a date: a
training run keeps the date of its first day, so that it renders the same text when it is resumed on another.

Templates accept an assistant's calls in different forms. Transformers gives arguments as objects, and null for the
content beside calls that has no text. Templates of DeepSeek join arguments to text, so arguments must be text; those of
Qwen 3 search the content for marks, so the content must be text. No template declares its form: if it refuses a
conversation, the next form is tried (`spellings`).

For a template that knows no tools, the conversation is rewritten in the form that Hermes and Qwen models are trained
on (`with_tools`). The system message describes the tools. Earlier calls are written in the form that the model is asked
to use, `<tool_call>{...}</tool_call>`. Their results come in a user turn, in plain words, because a model that was not
trained on `<tool_response>` repeats it instead of using it.
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
NOTHING: Mapping[str, Any] = MappingProxyType({})

END_OF_BEGUN = "<end-of-begun-message>"
"""Stands in the place at which a message is to be continued."""
MAX_CHARS = 16 * 1024 * 1024
"""Of a rendered conversation; a tokenizer needs 200 bytes for each."""

DESCRIPTION = """# Tools

These functions may help you to answer. Each line between the tags is the JSON description of one:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments between these tags, and wait for its result:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""

_mark: ContextVar[str] = ContextVar("mark", default="")  # put around generation blocks on request


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: renders its body, between marks when spans are asked for."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads a class attribute

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_wrap"), [], [], body).set_lineno(line)

    def _wrap(self, caller: Callable[[], str]) -> str:
        return f"{_mark.get()}{caller()}{_mark.get()}"


class ChatTemplate:
    """A compiled template and the special tokens that it may write.

    today: what `strftime_now` takes for the date; None for the machine's clock. ModelError when `source` is not a
    template. `marks_generation`: whether it has `{% generation %}` blocks. `constants`: the texts written in it, which
    it may look for in a message. `takes_tools`: whether it reads the variable `tools`; `knows_calls`: whether it writes
    an assistant's calls.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], today: date | None = None) -> None:
        self.source = source
        self._special_tokens = special_tokens
        environment = _environment(today)
        try:
            parsed = environment.parse(source)
            blocks = parsed.find_all(nodes.ExtensionAttribute)
            self.marks_generation = any(b.identifier == _Generation.identifier for b in blocks)
            self.takes_tools = any(name.name == "tools" for name in parsed.find_all(nodes.Name))
            self.knows_calls = "tool_calls" in source
            self.constants = frozenset(c.value for c in parsed.find_all(nodes.Const) if isinstance(c.value, str))
            self._template = environment.from_string(parsed)
        except MemoryError:
            raise
        except Exception as e:  # Python's compiler refuses some of what jinja accepts
            raise ModelError(f"The model's chat template does not compile: {one_line(e)}.") from None

    def render(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        mark: str = "",
        variables: Mapping[str, Any] = NOTHING,
    ) -> str:
        """The text of the conversation, with `mark` before and after what a generation block wrote. `variables` are
        further ones, such as `enable_thinking`, or `tools`, as OpenAI's API describes them (None: there are none now):
        for a template that knows no tools the conversation is rewritten (`with_tools`).

        RequestError: the template refuses the messages. ModelError: it writes too much.
        """
        context = {"tools": None, "documents": None} | plain(dict(variables))
        if "tools" in variables and not self.takes_tools:
            messages, context["tools"] = with_tools(messages, context["tools"], self.knows_calls), None
        context |= {"add_generation_prompt": add_generation_prompt}
        token = _mark.set(mark)
        try:
            return self._first_accepted([_plain_message(message) for message in messages], context)
        finally:
            _mark.reset(token)

    def render_begun(self, messages: list[Message], variables: Mapping[str, Any] = NOTHING) -> str:
        """The text up to the end of the last message, for a model that continues it, as transformers cuts it: white
        space at the end stays if the template keeps it. `variables` and errors: see `render`.
        """
        *earlier, last = messages
        begun = last.get("content") or ""
        text = self.render([*earlier, last | {"content": f"{begun}{END_OF_BEGUN} "}], False, variables=variables)
        before, end, after = text.rpartition(END_OF_BEGUN)
        if not end:
            raise RequestError("The model's chat template leaves out the message that is to be continued.")
        return before if after.startswith(" ") else before.rstrip()

    def _first_accepted(self, messages: list[Message], context: dict[str, Any]) -> str:
        """The text of the first form that the template accepts; if none, the error is that of the first form."""
        complaint = ""
        for spelt in spellings(messages):
            try:
                return _bounded(self._template.generate(self._special_tokens | context | {"messages": spelt}))
            except (Fp8ServeError, MemoryError):
                raise
            except Exception as e:  # a template may call what raises an error of any class
                complaint = complaint or one_line(e)
        raise RequestError(f"The model's chat template refuses these messages: {complaint}.")


def _bounded(pieces: Iterator[str]) -> str:
    parts, length = [], 0
    for piece in pieces:
        parts.append(piece)
        length += len(piece)
        if length > MAX_CHARS:
            raise ModelError("The model's chat template writes too much.")
    return "".join(parts)


def _plain_message(message: Message) -> Message:
    """The message without null values, except the content beside calls: some templates test whether it is null."""
    fields = {k: v for k, v in message.items() if v is not None or (k == "content" and message.get("tool_calls"))}
    return {k: plain(v) for k, v in fields.items()}


def plain(value: Any) -> Any:
    """The value with lists for tuples and text for keys. Only JSON's types reach a template, because it could call an
    object's methods; RequestError for others."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    raise RequestError(f"A chat message holds a {type(value).__name__}, which is not a JSON value.")


def _environment(today: date | None) -> ImmutableSandboxedEnvironment:
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals |= {"raise_exception": _raise_exception, "strftime_now": _clock(today)}
    return sandbox


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _clock(today: date | None) -> Callable[[str], str]:
    """`strftime_now`: the machine's time, or noon of `today`."""
    fixed = None if today is None else datetime.combine(today, time(12))

    def strftime_now(layout: str) -> str:
        return (fixed or datetime.now()).strftime(layout)

    return strftime_now


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
    return (
        message | {"tool_calls": [_arguments_as_text(call) for call in calls]} if isinstance(calls, list) else message
    )


def _arguments_as_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    return call | {"function": function | {"arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}}


def with_tools(messages: list[Message], tools: list[dict[str, Any]] | None, knows_calls: bool = False) -> list[Message]:
    """The conversation in messages of only system, user and assistant. `tools`: as OpenAI's API describes them.

    `knows_calls`: calls and results can be written as they are.
    """
    if knows_calls:
        return _describe_tools(messages, tools) if tools else messages
    rewritten: list[Message] = []
    for is_result, group in groupby(messages, key=lambda message: message.get("role") == "tool"):
        if is_result:
            rewritten.append({"role": "user", "content": "\n".join(_result(message) for message in group)})
        else:
            rewritten += [_calls_as_text(message) if message.get("tool_calls") else message for message in group]
    return _describe_tools(rewritten, tools) if tools else rewritten


def _describe_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """The messages with the tools after the text of the system message."""
    text = DESCRIPTION.format(tools="\n".join(_json(tool) for tool in tools))
    if messages and messages[0].get("role") == "system":
        first = messages[0] | {"content": f"{messages[0].get('content') or ''}\n\n{text}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _calls_as_text(message: Message) -> Message:
    """An assistant's turn, with its calls as text."""
    calls = (call["function"] for call in message["tool_calls"])
    written = [f"<tool_call>\n{_json({k: call[k] for k in ('name', 'arguments')})}\n</tool_call>" for call in calls]
    return {"role": "assistant", "content": "\n".join([*filter(None, [message.get("content")]), *written])}


def _result(message: Message) -> str:
    return f"{message.get('name') or 'The function'} returned:\n{message.get('content') or ''}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
