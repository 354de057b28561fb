"""Chat templates: Jinja from the model's directory, run in a sandbox with a budget.

A template is a program that came with a download. `ImmutableSandboxedEnvironment` keeps it from Python's internals, but
not from running for an hour or building a string of a gigabyte. Every render therefore has a budget: each call and
look-up costs one, `range(n)` costs n, and every string made by an operator, a filter, a method, a macro or a block
costs its length. Results that may be much larger than what they are made of (padding, formats, repetition, joined,
replaced and indented text, products of whole numbers) are paid for before they are made, and `lipsum`, which no chat
needs, does not exist. Helpers
are those Hugging Face templates expect: `raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop
controls, and `{% generation %}` blocks, which mark what an assistant wrote (`model.turns` reads them).

`strftime_now` gives the time of the machine, as transformers does, unless the template was compiled with a date: a
training run keeps the date of its first day, so that it renders the same text when it is resumed on another.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import date, datetime, time
from functools import wraps
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS as DEFAULT_FILTERS
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fp8serve.errors import ModelError, RequestError, one_line
from fp8serve.model.text.call_spellings import spellings
from fp8serve.model.text.tool_prompt import with_tools

Message = dict[str, Any]
NOTHING: Mapping[str, Any] = MappingProxyType({})

REFUSALS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError)
"""Raised by a template that does not accept a conversation."""
COMPILE_ERRORS = (jinja2.TemplateError, RecursionError, SyntaxError, ValueError)
"""Raised for a source that is no template. Jinja lets two of Python's through: SyntaxError where it generates invalid
Python, as for loops nested 25 deep, and ValueError for a literal of more than 4,300 digits."""
END_OF_BEGUN = "<end-of-begun-message>"
"""Stands in the place at which a message is to be continued."""
MAX_STEPS = 50_000_000
MAX_CHARS = 16 * 1024 * 1024

_steps: ContextVar[list[int]] = ContextVar("steps")  # one counter per render, so threads do not share a budget
_mark: ContextVar[str] = ContextVar("mark", default="")  # put around generation blocks on request


class _TooMuchError(Exception):
    """The template spent its budget."""


def _spend(amount: int) -> None:
    counter = _steps.get(None)
    if counter is not None:
        counter[0] += max(amount, 0)
        if counter[0] > MAX_STEPS:
            raise _TooMuchError


class _CodeGenerator(CodeGenerator):
    """Sends `a ~ b` through the environment's `concat`, which is priced."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802 - jinja names it so
        self.write("concat((")
        for argument in node.nodes:
            self.write("str(")
            self.visit(argument, frame)
            self.write("), ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a price on everything that can be repeated or grow."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, today: date | None = None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters |= {"tojson": _tojson, "join": _join}
        self.filters.update({name: _priced(name, function) for name, function in self.filters.items()})
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _clock(today), "range": _range}

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The function with which jinja joins the output of blocks and macros."""
        text = "".join(pieces)
        _spend(len(text))
        return text

    def getattr(self, obj: Any, attribute: str) -> Any:
        _spend(1)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _spend(1)
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        name, text = getattr(obj, "__name__", ""), getattr(obj, "__self__", None)
        if name.startswith("format"):  # "{:>999999}".format(1): the width is in the text
            _spend(_widths(text))
        if isinstance(text, str) and name == "join" and args:
            args = (_paid_pieces(args[0], text), *args[1:])
        if isinstance(text, str) and name in ("replace", "expandtabs"):
            _spend(_SIZES[name](text, *args, **kwargs))
        _spend(1 + _price(args) + _price(tuple(kwargs.values())))
        return _paid(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _spend(_result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)


def _priced(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, priced by the widths in its arguments and the text that it makes."""
    takes_context = hasattr(filter_, "jinja_pass_arg")

    @wraps(filter_)  # keeps jinja's mark of filters that take the environment as first argument
    def filtered(*args: Any, **kwargs: Any) -> Any:
        _spend(_price(args) + _price(tuple(kwargs.values())))
        if filter_ is DEFAULT_FILTERS["format"]:
            _spend(_widths(args[0]))
        if name in _SIZES:
            _spend(_SIZES[name](*args[takes_context:], **kwargs))
        return _paid(filter_(*args, **kwargs))

    return filtered


def _paid(value: Any) -> Any:
    if isinstance(value, str):
        _spend(len(value))
    return value


def _price(values: tuple[Any, ...]) -> int:
    """The price of a call (`range`, `center`, `indent`): large numbers in its arguments bound its output."""
    return sum(abs(v) for v in values if isinstance(v, int) and not isinstance(v, bool) and abs(v) > 1000)


def _replaced_size(text: Any, old: Any = "", new: Any = "", *_: Any, **named: Any) -> int:
    """Characters of a text in which all `old` are replaced."""
    whole, old, new = str(text), str(named.get("old", old)), str(named.get("new", new))
    return len(whole) + whole.count(old) * len(new)


def _indented_size(text: Any, width: Any = 4, *_: Any, **named: Any) -> int:
    """Characters of a text whose lines are indented."""
    whole, width = str(text), named.get("width", width)
    return len(whole) + (whole.count("\n") + 1) * (abs(width) if isinstance(width, int) else len(str(width)))


def _wrapped_size(text: Any, width: Any = 79, _long: Any = True, wrapstring: Any = None, *_: Any, **named: Any) -> int:
    """A bound for the characters of a text that is wrapped: two lines are longer than `width`."""
    whole, width, mark = str(text), named.get("width", width), str(named.get("wrapstring", wrapstring) or "")
    lines = 2 * len(whole) // max(1, width if isinstance(width, int) else 1) + whole.count("\n") + 1
    return len(whole) + lines * len(mark)


def _tabbed_size(text: str, tabsize: Any = 8) -> int:
    return len(text) + text.count("\t") * (abs(tabsize) if isinstance(tabsize, int) else 0)


_SIZES: dict[str, Callable[..., int]] = {
    "replace": _replaced_size,
    "indent": _indented_size,
    "wordwrap": _wrapped_size,
    "expandtabs": _tabbed_size,
}
"""What filters and methods of these names make, at most, of their arguments."""


def _paid_pieces(items: Any, separator: str) -> list[Any]:
    """The items to join, each paid for with a separator before they are."""
    pieces = []
    for item in items:
        _spend(len(separator) + (len(item) if isinstance(item, str) else 1))
        pieces.append(item)
    return pieces


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Any, d: Any = "", attribute: Any = None) -> str:
    """Jinja's filter, as it is without the escaping of HTML."""
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return str(d).join(_paid_pieces(map(str, items), str(d)))


def _widths(text: Any) -> int:
    """The numbers in a format string, any of which may be the width of a field."""
    return sum(int(n[:12]) for n in re.findall(r"[0-9]+", text)) if isinstance(text, str) else 0


def _result_size(operator: str, left: Any, right: Any) -> int:
    """A bound for the size of `left operator right`, if that is not plain arithmetic."""
    if operator == "%":
        return _widths(left) + _price(right if isinstance(right, tuple) else (right,)) if isinstance(left, str) else 1
    if operator == "**":
        if not (isinstance(left, int) and isinstance(right, int)):
            return 1
        bits = int(abs(left).bit_length() * abs(right))
        return bits + _multiplication(bits, bits)
    if operator == "+":
        return sum(len(side) for side in (left, right) if hasattr(side, "__len__"))
    if isinstance(left, int) and isinstance(right, int):
        return _multiplication(left.bit_length(), right.bit_length())
    sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
    return len(sized) * times if hasattr(sized, "__len__") and isinstance(times, int) else 1


def _multiplication(bits: int, others: int) -> int:
    """The price of a product of whole numbers of so many bits: that of its words of 64 bits."""
    return 1 + bits * others // 4096


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
        environment = _Environment(today)
        with _budget():  # jinja computes constant expressions while it compiles
            try:
                parsed = environment.parse(source)
                blocks = parsed.find_all(nodes.ExtensionAttribute)
                self.marks_generation = any(b.identifier == _Generation.identifier for b in blocks)
                self.takes_tools = any(name.name == "tools" for name in parsed.find_all(nodes.Name))
                self.knows_calls = "tool_calls" in source
                self.constants = frozenset(c.value for c in parsed.find_all(nodes.Const) if isinstance(c.value, str))
                self._template = environment.from_string(parsed)
            except COMPILE_ERRORS as e:
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
        for a template that knows no tools the conversation is rewritten (tool_prompt.py).

        RequestError: the template refuses the messages. ModelError: it runs away.
        """
        given = {"tools": None, "documents": None} | _plain(dict(variables))
        if "tools" in variables and not self.takes_tools:
            messages, given["tools"] = with_tools(messages, given["tools"], self.knows_calls), None
        plain = [_plain_message(message) for message in messages]
        given |= {"add_generation_prompt": add_generation_prompt}
        token = _mark.set(mark)
        try:
            with _budget():
                return self._first_accepted(plain, given)
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

    def _first_accepted(self, messages: list[Message], given: dict[str, Any]) -> str:
        """The text of the first form that the template accepts; if none, the error is that of the first form."""
        complaint = ""
        for spelt in spellings(messages):
            try:
                return _bounded(self._template.generate(self._special_tokens | given | {"messages": spelt}))
            except REFUSALS as e:
                complaint = complaint or one_line(e)
        raise RequestError(f"The model's chat template refuses these messages: {complaint}.")


@contextmanager
def _budget() -> Iterator[None]:
    """A fresh budget inside the block; ModelError when it is spent."""
    token = _steps.set([0])
    try:
        yield
    except _TooMuchError:
        raise ModelError("The model's chat template runs too long or writes too much.") from None
    finally:
        _steps.reset(token)


def _bounded(pieces: Iterator[str]) -> str:
    parts, length = [], 0
    for piece in pieces:
        parts.append(piece)
        length += len(piece)
        if length > MAX_CHARS:
            raise _TooMuchError
    return "".join(parts)


def _plain_message(message: Message) -> Message:
    """The message without null values, except the content beside calls: some templates test whether it is null."""
    kept = {k: v for k, v in message.items() if v is not None or (k == "content" and message.get("tool_calls"))}
    return {k: _plain(v) for k, v in kept.items()}


def _plain(value: Any) -> Any:
    """Only JSON's types reach a template, because it could call an object's methods."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    raise RequestError(f"A chat message holds a {type(value).__name__}, which is not a JSON value.")


def _range(*args: int) -> range:
    result = range(*args)
    _spend(len(result))
    return result


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
