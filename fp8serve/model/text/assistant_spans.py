"""Finds the spans of a rendered conversation that the assistant wrote, from which the loss mask follows.

Searching for the assistant's texts would be wrong, because a user may write the same text. If the template has
`{% generation %}` blocks, these are the spans. Otherwise the conversation is rendered twice: unchanged, and with a
unique *placeholder* instead of every text in its messages. A placeholder consists of private-use characters and a
random number, so that no message contains it. If replacing the placeholders by their texts yields the first rendering,
the positions of all texts are known. A text may be rendered inside JSON, as the arguments of a tool call are.

A template may modify texts; then the comparison fails and is repeated with other placeholders. First, white space
after, before, or around a text stays outside its placeholder, for templates that trim texts. Then texts are split at
the string constants of the template, which stay outside, for templates that search for a tag such as `</think>`. If no
comparison succeeds, the conversation raises RequestError.

A turn begins at the end of the generation prompt, so it includes text that the template inserts before the assistant's
text, such as Qwen3's empty reasoning. Without a generation prompt it begins with the assistant's text. A turn includes
the text that the template writes after every turn, up to the first end-of-sequence token, at which the server stops. If
the template ends the last turn differently from earlier ones (gpt-oss: `<|return|>` and `<|end|>`), an earlier turn
ends with the special token that ends the messages of other roles. A turn with tool calls must begin with exactly the
generation prompt.

A conversation needs three to ten renderings, and each turn with tool calls three or four more.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from fp8serve.errors import RequestError
from fp8serve.model.text.chat import NO_VARIABLES, ChatTemplate, Message

Span = tuple[int, int]  # character positions [start, end)
SpannedText = tuple[str, list[Span]]  # a rendered conversation and the spans that the assistant wrote
_Render = Callable[..., str]  # ChatTemplate.render with its variables

_UNCHANGED_KEYS = ("role", "type", "id", "tool_call_id")  # keys of a message whose values a template may compare
# digits of numbers in placeholders: private-use characters, which upper(), strip() and title() of a template preserve
_DIGITS = "".join(chr(0xE100 + i) for i in range(16))


@dataclass(frozen=True)
class SpecialTokens:
    """The texts of the tokenizer's special tokens."""

    end: frozenset[str] = frozenset()  # end-of-sequence tokens
    all: frozenset[str] = frozenset()  # all special tokens


class Conversation(NamedTuple):
    """A conversation to render; `skip` has the indices of assistant messages without loss."""

    messages: list[Message]
    skip: Collection[int] = ()
    variables: Mapping[str, Any] = NO_VARIABLES  # see `ChatTemplate.render`


def assistant_spans(template: ChatTemplate, conversation: Conversation, tokens: SpecialTokens) -> SpannedText:
    """Returns the rendered conversation and the spans that the assistant wrote, in order and without overlap.

    Raises RequestError if the template refuses the messages, or modifies them so that the spans cannot be found.
    """
    messages, skip, variables = conversation
    render: _Render = partial(template.render, variables=variables)
    if template.marks_generation:
        return _block_spans(template, render, messages, skip)
    rendering = _locate_texts(template, render, messages)
    if rendering is None:
        raise RequestError(
            "The model's chat template modifies the texts of messages, so the assistant's tokens cannot be found; "
            "put {% generation %} blocks into the template, or use rows of `prompt` and `completion`."
        )
    return rendering.text, list(_TurnFinder(render, messages, tokens, rendering).spans(skip))


# -- templates with generation blocks ----------------------------------------------------------------------------------


def _block_spans(
    template: ChatTemplate, render: _Render, messages: list[Message], skip: Collection[int]
) -> SpannedText:
    text = render(messages, add_generation_prompt=False)
    delimiter = f"\ue000{secrets.token_hex(16)}\ue001"
    parts = render(messages, add_generation_prompt=False, delimiter=delimiter).split(delimiter)
    if "".join(parts) != text or len(parts) % 2 == 0:
        raise RequestError("The model's chat template modifies the text of its {% generation %} blocks; correct it.")
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    spans = [(ends[i], ends[i + 1]) for i in range(1, len(parts), 2)]
    return text, _drop_skipped(_locate_texts(template, render, messages), skip, text, spans) if skip else spans


def _drop_skipped(rendering: "_Rendering | None", skip: Collection[int], text: str, spans: list[Span]) -> list[Span]:
    """Removes the spans of skipped messages; the located texts inside a span determine its message."""
    texts = rendering.texts if rendering else []
    messages = [{t.message for t in texts if start <= t.start and t.end <= end} for start, end in spans]
    if rendering is None or rendering.text != text or any(len(indices) != 1 for indices in messages):
        raise RequestError(
            "The {% generation %} blocks of the chat template cannot be assigned to messages, so weight 0 cannot be "
            "applied; remove the weights, or split the conversation."
        )
    return [span for span, indices in zip(spans, messages, strict=True) if not indices <= set(skip)]


# -- placeholders ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Text:
    """A located text: a message's text, or a part of it, at [start, end) of the rendered conversation."""

    message: int  # index of its message
    placeholder: str  # number of its placeholder
    start: int
    end: int
    prefix: str  # the part of the message's text before it, which has no placeholder


@dataclass
class _Rendering:
    """A rendered conversation whose texts were located."""

    text: str
    texts: list[_Text]
    tail: str  # the text after the last located one
    probes: list[Message]  # the messages with placeholders
    pattern: re.Pattern[str]  # matches a placeholder


@dataclass
class _Placeholders:
    """Creates placeholders and records (index of the message, text, prefix) of each."""

    nonce: str = field(default_factory=lambda: _private(secrets.token_hex(8)))
    texts: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(f"\ue000{self.nonce}([{_DIGITS}]{{8}})\ue001")

    def create(self, message: int, text: str, prefix: str) -> str:
        self.texts.append((message, text, prefix))
        return f"\ue000{self.nonce}{_private(f'{len(self.texts) - 1:08x}')}\ue001"

    def replace_text(self, message: int, text: str) -> str:
        return self.create(message, text, "")

    def replace_stripped(self, message: int, text: str, strip: Callable[[str], str]) -> str:
        """Replaces the text without the white space that `strip` removes; the white space stays outside."""
        core = strip(text)
        before, after = text.split(core, 1) if core else (text, "")
        return before + self.create(message, core, before) + after

    def replace_between(self, message: int, text: str, constants: re.Pattern[str], trim: bool) -> str:
        """Replaces the texts between constants of the template; constants and blank texts stay outside."""
        parts, prefix = [], ""
        for part in constants.split(text):
            is_unchanged = not part.strip() or constants.fullmatch(part)
            core = "" if is_unchanged else part.strip() if trim else part
            before, after = part.split(core, 1) if core else (part, "")
            parts += [before, self.create(message, core, prefix + before) if core else "", after]
            prefix += part
        return "".join(parts)


_Method = Callable[[_Placeholders, int, str], str]  # replaces a text of a message by a text with placeholders


def _private(digits: str) -> str:
    return "".join(_DIGITS[int(d, 16)] for d in digits)


def _locate_texts(template: ChatTemplate, render: _Render, messages: list[Message]) -> _Rendering | None:
    """Returns the rendered conversation with the positions of all texts, or None if no comparison succeeds."""
    text = render(messages, add_generation_prompt=False)
    # what the template may search for in messages: string constants that are no plain words
    texts = {c.strip() for c in template.constants}
    searched = sorted((t for t in texts if len(t) > 1 and not t.replace("_", "").isalnum()), key=len, reverse=True)
    constants = re.compile(f"({'|'.join(map(re.escape, searched)) or '(?!)'})")
    strips = (str.rstrip, str.lstrip, str.strip)
    methods: list[_Method] = [
        _Placeholders.replace_text,
        *(partial(_Placeholders.replace_stripped, strip=strip) for strip in strips),
        *(partial(_Placeholders.replace_between, constants=constants, trim=trim) for trim in (False, True)),
    ]
    return next((r for method in methods if (r := _compare(render, messages, text, method)) is not None), None)


def _compare(render: _Render, messages: list[Message], text: str, method: _Method) -> _Rendering | None:
    """Renders the messages with placeholders and locates their texts in `text`. Returns None if that fails."""
    placeholders = _Placeholders()
    probes = [_replace_texts(message, i, partial(method, placeholders)) for i, message in enumerate(messages)]
    try:
        parts = placeholders.pattern.split(render(probes, add_generation_prompt=False))
    except RequestError:
        return None
    if not text.startswith(parts[0]):
        return None
    texts, position = [], len(parts[0])
    for digits, literal in zip(parts[1::2], parts[2::2], strict=True):
        message, original, prefix = placeholders.texts[int("".join(f"{_DIGITS.index(d):x}" for d in digits), 16)]
        rendered = next((e for e in _json_escapes(original) if text.startswith(e + literal, position)), None)
        if rendered is None:
            return None
        texts.append(_Text(message, digits, position, position + len(rendered), prefix))
        position += len(rendered) + len(literal)
    return _Rendering(text, texts, parts[-1], probes, placeholders.pattern) if position == len(text) else None


def _json_escapes(text: str) -> Iterator[str]:
    """Yields the text unchanged, as in a JSON string, and as in a JSON string inside another JSON string."""
    for _ in range(3):
        yield text
        text = json.dumps(text, ensure_ascii=False)[1:-1]


def _replace_texts(value: Any, message: int, replace: Callable[[int, str], str]) -> Any:
    """Replaces every text in `value` except those under _UNCHANGED_KEYS."""
    if isinstance(value, str):
        return replace(message, value)
    if isinstance(value, dict):
        return {k: v if k in _UNCHANGED_KEYS else _replace_texts(v, message, replace) for k, v in value.items()}
    return [_replace_texts(v, message, replace) for v in value] if isinstance(value, list | tuple) else value


# -- turns -------------------------------------------------------------------------------------------------------------


class _TurnFinder:
    """Finds the assistant's turns in a rendered conversation, from the generation prompt to the end-of-turn token."""

    def __init__(self, render: _Render, messages: list[Message], tokens: SpecialTokens, rendering: _Rendering) -> None:
        self._render, self._messages, self._rendering = render, messages, rendering
        self._special = _any_of(tokens.all | tokens.end)
        self._end = _any_of(tokens.end)
        self._assistants = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
        self._prompt = self._generation_prompt()
        self._turn_ending = self._last_turn_ending()
        self._other_ending = self._other_role_ending()

    def spans(self, skip: Collection[int]) -> Iterator[Span]:
        """Yields the span of each assistant message that is not in `skip`."""
        for message in self._assistants:
            indices = [i for i, text in enumerate(self._rendering.texts) if text.message == message]
            if message in skip:
                continue
            if indices and self._messages[message].get("tool_calls"):
                indices = self._without_repetitions(message, indices)
            if not indices or indices != list(range(indices[0], indices[-1] + 1)):
                raise RequestError(
                    f"The model's chat template omits message {message}, the assistant's, or splits it; remove the "
                    "message, give it weight 0, or put {% generation %} blocks into the template."
                )
            if self._messages[message].get("tool_calls"):
                yield self._tool_call_span(message, indices[0], indices[-1])
            else:
                yield self._start(indices[0]), self._stop(indices[-1])

    def _start(self, index: int) -> int:
        """Returns the start of a turn whose first text is number `index`."""
        text = self._rendering.texts[index]
        begin = self._rendering.texts[index - 1].end if index else 0
        literal = self._rendering.text[begin : text.start]
        if self._prompt and self._prompt in literal:
            return begin + literal.rfind(self._prompt) + len(self._prompt)
        return text.start - (len(text.prefix) if text.prefix.strip() and literal.endswith(text.prefix) else 0)

    def _stop(self, index: int) -> int:
        """Returns the end of a turn whose last text is number `index`. The turn includes the text that the template
        writes after both this turn and the last one, up to an end-of-sequence token."""
        following, stop = self._following_text(index), self._rendering.texts[index].end
        literal = following.lstrip()  # white space may belong to the message
        begin = stop + len(following) - len(literal)
        ending = self._common_prefix(literal, self._turn_ending.lstrip()).rstrip()
        if ending:
            end = self._end.search(ending)
            return begin + (end.end() if end else len(ending))
        token = self._special.search(literal)  # this turn does not end like the last one
        if token and self._end.fullmatch(token[0]):
            return begin + token.end()
        token = self._special.match(self._common_prefix(literal, self._other_ending))
        return begin + token.end() if token else stop

    def _without_repetitions(self, message: int, indices: list[int]) -> list[int]:
        """Removes texts that the template repeats after the end of a message with tool calls. gpt-oss repeats the
        name of a called function before its result."""
        probes, calls = self._rendering.probes[: message + 1], self._rendering.probes[message]["tool_calls"]
        text = self._render(probes, add_generation_prompt=False)
        with_one_call = [*probes[:-1], probes[-1] | {"tool_calls": calls[:1]}]
        if len(calls) > 1 and self._render(with_one_call, add_generation_prompt=False) == text:
            raise RequestError(
                f"The model's chat template renders only the first call of message {message}; give each call a message "
                "of its own."
            )
        placeholders = self._rendering.pattern.findall(text)
        matches = [i for i, k in enumerate(indices) if placeholders[-1:] == [self._rendering.texts[k].placeholder]]
        last = matches[: placeholders.count(placeholders[-1])][-1] if matches else len(indices) - 1
        return indices[: last + 1]

    def _tool_call_span(self, message: int, first: int, last: int) -> Span:
        """Returns the span that a message with tool calls adds to the conversation, up to an end-of-sequence token.
        Its texts are the numbers `first` to `last`."""
        rendering = self._rendering
        begin = rendering.texts[first - 1].end if first else 0
        prompt = self._tail(rendering.probes[:message], add_generation_prompt=True)
        has_prompt = rendering.text[begin : rendering.texts[first].start].startswith(prompt)
        tail = self._tail(rendering.probes[: message + 1])
        ending = self._common_prefix(self._following_text(last), tail).rstrip()
        if not has_prompt or not ending:
            raise RequestError(
                f"The model's chat template does not begin message {message}, which calls tools, with its generation "
                "prompt, so the loss mask would not match what the server generates; put {% generation %} blocks into "
                "the template, or use rows of `prompt` and `completion`."
            )
        end = self._end.search(ending)
        return begin + len(prompt), rendering.texts[last].end + (end.end() if end else len(ending))

    def _following_text(self, index: int) -> str:
        """Returns the template's text between the text number `index` and the next one."""
        texts, text = self._rendering.texts, self._rendering.text
        return text[texts[index].end : texts[index + 1].start if index + 1 < len(texts) else len(text)]

    def _common_prefix(self, a: str, b: str) -> str:
        """Returns the longest common prefix of two texts that does not end inside a special token."""
        pairs = enumerate(zip(a, b, strict=False))
        size = next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
        for text in (a, b):
            size = min([size, *(m.start() for m in self._special.finditer(text) if m.start() < size < m.end())])
        return a[:size]

    def _generation_prompt(self) -> str:
        try:
            prompt = self._tail(self._rendering.probes, add_generation_prompt=True)
        except RequestError:  # some templates refuse a generation prompt after an assistant's message
            return ""
        return prompt[len(self._common_prefix(prompt, self._rendering.tail)) :]

    def _last_turn_ending(self) -> str:
        """Returns the template's text after the assistant's last turn without calls, as if that turn ended the
        conversation."""
        last = next((i for i in reversed(self._assistants) if not self._messages[i].get("tool_calls")), None)
        if last is None:
            return ""
        is_last_message = last == len(self._messages) - 1
        return self._rendering.tail if is_last_message else self._tail(self._rendering.probes[: last + 1])

    def _other_role_ending(self) -> str:
        """Returns the template's text after the message before the assistant's first, without leading white space."""
        first = self._assistants[0] if self._assistants else 0
        try:
            return self._tail(self._rendering.probes[:first]).lstrip() if first else ""
        except RequestError:  # some templates refuse a conversation without an assistant
            return ""

    def _tail(self, probes: list[Message], add_generation_prompt: bool = False) -> str:
        """Returns the template's text after the last placeholder."""
        return self._rendering.pattern.split(self._render(probes, add_generation_prompt))[-1]


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Returns a pattern that matches the longest of `texts`, and nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
