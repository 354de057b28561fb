"""Reads text that arrives in pieces as if it were all there.

A reader is a generator. It takes text from a `Feed`, yields the parts of the answer that are certain, and yields None
when it needs more than has arrived. `Incremental` drives one: its joined output is the same however the text was
divided, so the same code reads streamed answers and whole ones.
"""

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the tool `name` begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of the arguments of the call that began last."""

    text: str


Part = Content | Reasoning | Call | Arguments
Text = Callable[[str], Part]
"""Content, Reasoning or Arguments."""


class Feed:
    """The text that has arrived but is not read yet. `space`: the white space that the last `until` left out.
    `unread`: the part that the text is if the answer is cut off here, and the marks that may be forming at its end;
    None inside a call, whose unread text is no part of the answer.
    """

    def __init__(self) -> None:
        self.text, self.ended, self.space = "", False, ""
        self.unread: tuple[Text, Sequence[str]] | None = None

    def take(self, length: int) -> str:
        head, self.text = self.text[:length], self.text[length:]
        return head


Reading = Generator[Part | None, None, None]
Reader = Callable[[Feed], Reading]


class Incremental:
    """One reader at work on one answer."""

    def __init__(self, reader: Reader) -> None:
        self._feed = Feed()
        self._reading = reader(self._feed)

    def push(self, text: str) -> list[Part]:
        """The parts that `text` makes certain."""
        self._feed.text += text
        return self._advance()

    def end(self) -> list[Part]:
        """The rest, when no more text comes."""
        self._feed.ended = True
        return self._advance()

    def cut_off(self) -> list[Part]:
        """The rest of an answer that does not end by itself: without the mark or the call that had begun."""
        if self._feed.unread is None:
            return []
        part, marks = self._feed.unread
        forming = max((_overlap(self._feed.text, mark) for mark in marks), default=0)
        text = self._feed.text[: len(self._feed.text) - forming]
        text = text.rstrip() if forming else text
        return [part(text)] if text else []

    def _advance(self) -> list[Part]:
        parts: list[Part] = []
        for part in self._reading:
            if part is None:
                break
            parts.append(part)
        return parts


# -- what readers are made of ------------------------------------------------------------------------------------------


def until(feed: Feed, part: Text, marks: Sequence[str]) -> Generator[Part | None, None, str]:
    """Yields text as `part` until one of `marks`, which is taken and returned; "" when the text ends without one.

    White space before a mark is left out. No mark may be the beginning of another.
    """
    while True:
        matches = [(at, mark) for mark in marks if (at := feed.text.find(mark)) >= 0]
        if matches:
            at, mark = min(matches)
            before = feed.take(at + len(mark))[:at]
            text = before.rstrip()
            feed.space = before[len(text) :]
            if text:
                yield part(text)
            return mark
        if sure := len(feed.text) if feed.ended else _certain(feed.text, marks):
            yield part(feed.take(sure))
        if feed.ended:
            return ""
        feed.unread = part, marks
        yield None
        feed.unread = None


def _certain(text: str, marks: Sequence[str]) -> int:
    """How much of `text` comes before any mark that may be forming at its end, and before the white space there."""
    overlap = max((_overlap(text, mark) for mark in marks), default=0)
    return len(text[: len(text) - overlap].rstrip()) if marks else len(text)


def _overlap(text: str, mark: str) -> int:
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def skip(feed: Feed, pattern: str = r"\s*") -> Generator[None, None, str]:
    """Skips the characters that match `pattern`, a set of single characters; returns the next one, or "" at the end."""
    run = re.compile(pattern)
    while True:
        match = run.match(feed.text)
        feed.take(match.end() if match else 0)
        if feed.text or feed.ended:
            return feed.text[:1]
        yield None


def accept(feed: Feed, mark: str) -> Generator[None, None, bool]:
    """Takes `mark` if it is next."""
    while not feed.ended and len(feed.text) < len(mark) and mark.startswith(feed.text):
        yield None
    is_next = feed.text.startswith(mark)
    feed.take(len(mark) if is_next else 0)
    return is_next


def collect(feed: Feed, marks: Sequence[str]) -> Generator[None, None, tuple[str, str]]:
    """All text before one of `marks`, and the mark, which is taken; "" for the mark when the text ends without one."""
    while True:
        matches = [(at, mark) for mark in marks if (at := feed.text.find(mark)) >= 0]
        if matches:
            at, mark = min(matches)
            return feed.take(at + len(mark))[:at], mark
        if feed.ended:
            return feed.take(len(feed.text)), ""
        yield None
