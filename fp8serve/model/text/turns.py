"""Which characters of a rendered conversation the assistant wrote. No torch here.

The assistant's words are never searched for, because a user may write the same ones. If the template has `{% generation
%}` blocks, these mark them. Otherwise the conversation is rendered twice, as it is and with a *stand-in* for every text
in its messages: private-use characters around a random number, so that no message can contain one and each identifies
its message. If replacing the stand-ins by their texts gives the first rendering, character by character, the places of
the texts in it are known; a text may be inside JSON, as the arguments of a call are. If the template trims texts, this
comparison fails, and it is repeated with the white space behind, before, and around texts left in place: what the
template does not trim belongs to the text. If the template treats some words specially (drops the text before
`</think>`), texts are split at the constants of the template's own source, which stay. A conversation for which no
comparison succeeds is refused.

A turn begins where the generation prompt ends, so it includes text that the template puts before the assistant's words,
such as Qwen3's empty reasoning. In a template without a generation prompt it begins at the turn's first word. It ends
with the text that the template writes after every turn, up to the first end-of-sequence token and without white space
after it: a server stops there, so nothing further is learnt. If the template ends the last turn otherwise than earlier
ones (gpt-oss: `<|return|>` and `<|end|>`), an earlier turn ends with the mark that ends other roles' messages. A turn
that calls tools must begin with exactly the generation prompt. Cost: three to ten renderings of a conversation, and
three or four more for a turn with calls.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from fp8serve.errors import RequestError
from fp8serve.model.text.chat import NOTHING, ChatTemplate, Message

Span = tuple[int, int]  # character positions [start, end)
MarkedText = tuple[str, list[Span]]  # a rendered conversation, and what the assistant wrote of it
_Render = Callable[..., str]  # ChatTemplate.render with its variables

_RETAINED = ("role", "type", "id", "tool_call_id")  # keys of a message whose values a template compares or checks
_DIGITS = "".join(
    chr(0xE100 + i) for i in range(16)
)  # private-use characters, which no template's upper(), strip() or title() changes


@dataclass(frozen=True)
class Markers:
    """Texts of the tokenizer that end or structure turns. end: those that end a sequence. special: all, including
    `end`."""

    end: frozenset[str] = frozenset()
    special: frozenset[str] = frozenset()


class Conversation(NamedTuple):
    """skip: numbers of messages whose spans are left out. variables: see `ChatTemplate.render`."""

    messages: list[Message]
    skip: Collection[int] = ()
    variables: Mapping[str, Any] = NOTHING


def assistant_spans(template: ChatTemplate, conversation: Conversation, markers: Markers) -> MarkedText:
    """The rendered conversation and the spans of it that the assistant wrote, in order and without overlap.

    RequestError when the template refuses the messages, or when it changes them so that the assistant's words cannot be
    told from the rest.
    """
    messages, skip, variables = conversation
    render: _Render = partial(template.render, variables=variables)
    if template.marks_generation:
        return _marked(template, render, messages, skip)
    view = _stand_in(template, render, messages)
    if view is None:
        raise RequestError(
            "The model's chat template changes what messages say, so what the assistant wrote cannot be told from the "
            "rest; put {% generation %} blocks into the template, or use rows of `prompt` and `completion`."
        )
    return view.text, list(_Turns(render, messages, markers, view).spans(skip))


# -- templates with generation blocks ----------------------------------------------------------------------------------


def _marked(template: ChatTemplate, render: _Render, messages: list[Message], skip: Collection[int]) -> MarkedText:
    text = render(messages, add_generation_prompt=False)
    mark = f"\ue000{secrets.token_hex(16)}\ue001"
    pieces = render(messages, add_generation_prompt=False, mark=mark).split(mark)
    if "".join(pieces) != text or len(pieces) % 2 == 0:
        raise RequestError("The model's chat template changes what its {% generation %} blocks wrote; mend it.")
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    spans = [(ends[i], ends[i + 1]) for i in range(1, len(pieces), 2)]
    return text, _without(_stand_in(template, render, messages), skip, text, spans) if skip else spans


def _without(view: "_View | None", skip: Collection[int], text: str, spans: list[Span]) -> list[Span]:
    """The spans without those of skipped messages, which stand-ins identify."""
    owners = [{p.owner for p in view.pieces if a <= p.start and p.end <= b} for a, b in spans] if view else []
    if view is None or view.text != text or any(len(o) != 1 for o in owners):
        raise RequestError(
            "It cannot be told which {% generation %} block of the chat template belongs to which message, so weight 0 "
            "cannot be honoured; leave the weights out, or split the conversation."
        )
    return [span for span, owner in zip(spans, owners, strict=True) if not owner <= set(skip)]


# -- stand-ins ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Text of message `owner`, at [start, end) of the rendering. number: its stand-in's, lead: the template's own
    constants before it."""

    owner: int
    number: str
    start: int
    end: int
    lead: str


@dataclass
class _View:
    """A rendering whose pieces are known. tail: the text after the last stand-in, dummies: the messages with stand-ins,
    pattern: the form of a stand-in."""

    text: str
    pieces: list[_Piece]
    tail: str
    dummies: list[Message]
    pattern: re.Pattern[str]


@dataclass
class _Writer:
    """Makes stand-ins; stores the message, the text and the text before it for each."""

    nonce: str = field(default_factory=lambda: _private(secrets.token_hex(8)))
    known: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(f"\ue000{self.nonce}([{_DIGITS}]{{8}})\ue001")

    def stand_in(self, owner: int, text: str, lead: str) -> str:
        self.known.append((owner, text, lead))
        return f"\ue000{self.nonce}{_private(f'{len(self.known) - 1:08x}')}\ue001"

    def whole(self, owner: int, text: str) -> str:
        return self.stand_in(owner, text, "")

    def trimmed(self, owner: int, text: str, strip: Callable[[str], str]) -> str:
        """A stand-in for what `strip` leaves of the text; the white space that it takes away stays outside."""
        core = strip(text)
        before, after = text.split(core, 1) if core else (text, "")
        return before + self.stand_in(owner, core, before) + after

    def cut(self, owner: int, text: str, constants: re.Pattern[str], trim: bool) -> str:
        """Stand-ins for the text between the constants; blank parts stay."""
        parts, lead = [], ""
        for part in constants.split(text):
            stays = not part.strip() or constants.fullmatch(part)
            core = "" if stays else part.strip() if trim else part
            before, after = part.split(core, 1) if core else (part, "")
            parts += [before, self.stand_in(owner, core, lead + before) if core else "", after]
            lead += part
        return "".join(parts)


def _private(digits: str) -> str:
    return "".join(_DIGITS[int(d, 16)] for d in digits)


def _stand_in(template: ChatTemplate, render: _Render, messages: list[Message]) -> _View | None:
    """The places of the texts of `messages`; None when they are not certain."""
    text = render(messages, add_generation_prompt=False)
    constants = _constants(template)
    trims = [partial(_Writer.trimmed, strip=strip) for strip in (str.rstrip, str.lstrip, str.strip)]
    cuts = [partial(_Writer.cut, constants=constants, trim=trim) for trim in (False, True)]
    ways: list[Callable[[_Writer, int, str], str]] = [_Writer.whole, *trims, *cuts]
    for way in ways:
        writer = _Writer()
        if (view := _view(render, messages, text, writer, partial(way, writer))) is not None:
            return view
    return None


def _constants(template: ChatTemplate) -> re.Pattern[str]:
    """The texts that the template may look for in a message: its constants other than plain words, longest first."""
    marks = {c.strip() for c in template.constants}
    constants = sorted((m for m in marks if len(m) > 1 and not m.replace("_", "").isalnum()), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, constants)) or '(?!)'})")


def _view(
    render: _Render, messages: list[Message], text: str, writer: _Writer, write: Callable[[int, str], str]
) -> _View | None:
    dummies = [{k: v if k in _RETAINED else _mapped(v, i, write) for k, v in m.items()} for i, m in enumerate(messages)]
    try:
        parts = writer.pattern.split(render(dummies, add_generation_prompt=False))
    except RequestError:
        return None
    if not text.startswith(parts[0]):
        return None
    pieces, position = [], len(parts[0])
    for number, literal in zip(parts[1::2], parts[2::2], strict=True):
        owner, core, lead = writer.known[_number(number)]
        written = next((w for w in _writings(core) if text.startswith(w + literal, position)), None)
        if written is None:
            return None
        pieces.append(_Piece(owner, number, position, position + len(written), lead))
        position += len(written) + len(literal)
    return _View(text, pieces, parts[-1], dummies, writer.pattern) if position == len(text) else None


def _writings(text: str) -> Iterator[str]:
    """The text as it is, inside a JSON string, and inside JSON that is itself a string of JSON."""
    for _ in range(3):
        yield text
        text = json.dumps(text, ensure_ascii=False)[1:-1]


def _number(digits: str) -> int:
    return int("".join(f"{_DIGITS.index(d):x}" for d in digits), 16)


def _mapped(value: Any, owner: int, write: Callable[[int, str], str]) -> Any:
    """`value` with every text in it replaced, except where `_RETAINED` says."""
    if isinstance(value, str):
        return write(owner, value)
    if isinstance(value, dict):
        return {k: v if k in _RETAINED else _mapped(v, owner, write) for k, v in value.items()}
    return [_mapped(v, owner, write) for v in value] if isinstance(value, list | tuple) else value


# -- turns -------------------------------------------------------------------------------------------------------------


class _Turns:
    """The assistant's turns in a view: from the generation prompt to the end-of-turn mark."""

    def __init__(self, render: _Render, messages: list[Message], markers: Markers, view: _View) -> None:
        self._render, self._messages, self._markers, self._view = render, messages, markers, view
        self._special = _any_of(markers.special | markers.end)
        self._end = _any_of(markers.end)
        self._assistants = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
        self._prompt = self._generation_prompt()
        self._closing = self._closing_tail()
        self._others_closing = self._closing_of_others()

    def spans(self, skip: Collection[int]) -> Iterator[Span]:
        for number in self._assistants:
            own = [k for k, piece in enumerate(self._view.pieces) if piece.owner == number]
            if number in skip:
                continue
            if own and self._messages[number].get("tool_calls"):
                own = self._without_repetitions(number, own)
            if not own or own != list(range(own[0], own[-1] + 1)):
                raise RequestError(
                    f"The model's chat template leaves message {number}, the assistant's, out or takes it apart; leave "
                    "the message out, give it weight 0, or put {% generation %} blocks into the template."
                )
            if self._messages[number].get("tool_calls"):
                yield self._around_calls(number, own[0], own[-1])
            else:
                yield self._start(own[0]), self._stop(own[-1])

    def _start(self, index: int) -> int:
        piece = self._view.pieces[index]
        begin = self._view.pieces[index - 1].end if index else 0
        literal = self._view.text[begin : piece.start]
        if self._prompt and self._prompt in literal:
            return begin + literal.rfind(self._prompt) + len(self._prompt)
        return piece.start - (len(piece.lead) if piece.lead.strip() and literal.endswith(piece.lead) else 0)

    def _stop(self, index: int) -> int:
        """The end of the text that follows both this turn and the last one, or the end of an end-of-sequence token."""
        after, stop = self._behind(index), self._view.pieces[index].end
        literal = after.lstrip()  # white space may be the message's own
        begin = stop + len(after) - len(literal)
        alike = self._alike(literal, self._closing.lstrip()).rstrip()
        if alike:
            end = self._end.search(alike)
            return begin + (end.end() if end else len(alike))
        first = self._special.search(literal)  # a turn that does not end like the last one
        if first and self._end.fullmatch(first[0]):
            return begin + first.end()
        mark = self._special.match(self._alike(literal, self._others_closing))
        return begin + mark.end() if mark else stop

    def _without_repetitions(self, number: int, own: list[int]) -> list[int]:
        """The pieces of message `number`, which calls tools, up to its end: gpt-oss repeats the name of a called
        function before the result."""
        dummies, calls = self._view.dummies[: number + 1], self._view.dummies[number]["tool_calls"]
        text = self._render(dummies, add_generation_prompt=False)
        fewer = [*dummies[:-1], dummies[-1] | {"tool_calls": calls[:1]}]
        if len(calls) > 1 and self._render(fewer, add_generation_prompt=False) == text:
            raise RequestError(
                f"The model's chat template writes only the first call of message {number}; give each call a message "
                "of its own."
            )
        written = self._view.pattern.findall(text)
        same = [i for i, k in enumerate(own) if written[-1:] == [self._view.pieces[k].number]]
        end = same[: written.count(written[-1])][-1] if same else len(own) - 1
        return own[: end + 1]

    def _around_calls(self, number: int, first: int, last: int) -> Span:
        """The text that message `number` adds to the conversation before it, up to an end-of-sequence token."""
        view = self._view
        begin = view.pieces[first - 1].end if first else 0
        prompt = self._prompt_before(number, view.text[begin : view.pieces[first].start])
        alike = self._alike(self._behind(last), self._tail(view.dummies[: number + 1])).rstrip()
        if prompt is None or not alike:
            raise RequestError(
                f"The model's chat template does not begin message {number}, which calls tools, with its generation "
                "prompt, so that a request would not continue as the row does; put {% generation %} blocks into the "
                "template, or use rows of `prompt` and `completion`."
            )
        end = self._end.search(alike)
        return begin + len(prompt), view.pieces[last].end + (end.end() if end else len(alike))

    def _prompt_before(self, number: int, before: str) -> str | None:
        """The part of `before`, which is between the last text and a turn, that prompts for message `number`."""
        prompt = self._tail(self._view.dummies[:number], add_generation_prompt=True)
        return prompt if before.startswith(prompt) else None

    def _behind(self, index: int) -> str:
        """The text between a piece and the next one."""
        pieces, text = self._view.pieces, self._view.text
        return text[pieces[index].end : pieces[index + 1].start if index + 1 < len(pieces) else len(text)]

    def _alike(self, one: str, two: str) -> str:
        """The common beginning of both, with whole special tokens."""
        pairs = enumerate(zip(one, two, strict=False))
        size = next((i for i, (a, b) in pairs if a != b), min(len(one), len(two)))
        for text in (one, two):
            size = min([size, *(m.start() for m in self._special.finditer(text) if m.start() < size < m.end())])
        return one[:size]

    def _generation_prompt(self) -> str:
        """The text that a request for an answer adds after the last text of the conversation."""
        try:
            prompt = self._tail(self._view.dummies, add_generation_prompt=True)
        except RequestError:  # some templates refuse to answer an assistant
            return ""
        return prompt[len(self._alike(prompt, self._view.tail)) :]

    def _closing_tail(self) -> str:
        """The end of the assistant's last turn without calls, in a conversation that ends with it."""
        last = next((i for i in reversed(self._assistants) if not self._messages[i].get("tool_calls")), None)
        if last is None:
            return ""
        return self._view.tail if last == len(self._messages) - 1 else self._tail(self._view.dummies[: last + 1])

    def _closing_of_others(self) -> str:
        """The text after the message before the assistant's first, in a conversation that ends there; white space
        before it is removed."""
        first = self._assistants[0] if self._assistants else 0
        try:
            return self._tail(self._view.dummies[:first]).lstrip() if first else ""
        except RequestError:  # some templates refuse a conversation without an answer
            return ""

    def _tail(self, dummies: list[Message], add_generation_prompt: bool = False) -> str:
        """The text that the template writes after the last text."""
        return self._view.pattern.split(self._render(dummies, add_generation_prompt))[-1]


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Matches the longest of `texts`, nothing when there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
