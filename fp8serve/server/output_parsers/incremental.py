"""Incremental parsing: a parser reads an output that arrives in pieces as if the whole text had arrived.

A parser is a generator. It takes text from a `TextBuffer`, yields the parts of the output that are certain, and yields
None when it needs more text. `IncrementalParser` drives a parser. How the text was divided does not change the joined
parts, so one parser serves streamed and complete responses. A tag is a text that separates parts, such as `<think>`.
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
    """Text that the model wrote while it was thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a call of the tool `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the JSON arguments of the last tool call."""

    text: str


Part = Content | Reasoning | ToolCallStart | Arguments
TextPart = Callable[[str], Part]
"""Content, Reasoning or Arguments."""


class TextBuffer:
    """The text that has arrived and that the parser has not consumed.

    `skipped_space` is the white space that the last `parse_until` dropped before a tag. `if_truncated` says how the
    text is returned if the output is truncated now: the type of the part, and the tags whose beginning is removed from
    the end of the text. It is None inside a tool call, where unconsumed text is dropped.
    """

    def __init__(self) -> None:
        self.text, self.ended, self.skipped_space = "", False, ""
        self.if_truncated: tuple[TextPart, Sequence[str]] | None = None

    def consume(self, length: int) -> str:
        head, self.text = self.text[:length], self.text[length:]
        return head


PartGenerator = Generator[Part | None, None, None]
Parser = Callable[[TextBuffer], PartGenerator]


class IncrementalParser:
    """Runs one parser on one output."""

    def __init__(self, parser: Parser) -> None:
        self._buffer = TextBuffer()
        self._generator = parser(self._buffer)

    def push(self, text: str) -> list[Part]:
        """Adds text and returns the parts that have become certain."""
        self._buffer.text += text
        return self._advance()

    def finish(self) -> list[Part]:
        """Returns the remaining parts of an output that the model ended."""
        self._buffer.ended = True
        return self._advance()

    def finish_truncated(self) -> list[Part]:
        """Returns the remaining part of a truncated output, without an incomplete tag or tool call."""
        if self._buffer.if_truncated is None:
            return []
        part_type, tags = self._buffer.if_truncated
        partial_tag = max((_partial_length(self._buffer.text, tag) for tag in tags), default=0)
        text = self._buffer.text[: len(self._buffer.text) - partial_tag]
        text = text.rstrip() if partial_tag else text
        return [part_type(text)] if text else []

    def _advance(self) -> list[Part]:
        parts: list[Part] = []
        for part in self._generator:
            if part is None:
                break
            parts.append(part)
        return parts


# -- building blocks of parsers ----------------------------------------------------------------------------------------


def parse_until(buffer: TextBuffer, part_type: TextPart, tags: Sequence[str]) -> Generator[Part | None, None, str]:
    """Yields text as `part_type` up to the first of `tags`; consumes and returns this tag, or returns "" at the end.

    White space before the tag is dropped. No tag may be a prefix of another tag.
    """
    while True:
        matches = [(at, tag) for tag in tags if (at := buffer.text.find(tag)) >= 0]
        if matches:
            at, tag = min(matches)
            text_before = buffer.consume(at + len(tag))[:at]
            text = text_before.rstrip()
            buffer.skipped_space = text_before[len(text) :]
            if text:
                yield part_type(text)
            return tag
        if length := len(buffer.text) if buffer.ended else _certain_length(buffer.text, tags):
            yield part_type(buffer.consume(length))
        if buffer.ended:
            return ""
        buffer.if_truncated = part_type, tags
        yield None
        buffer.if_truncated = None


def _certain_length(text: str, tags: Sequence[str]) -> int:
    """Returns the length of `text` without white space and a possible beginning of a tag at its end."""
    partial_tag = max((_partial_length(text, tag) for tag in tags), default=0)
    return len(text[: len(text) - partial_tag].rstrip()) if tags else len(text)


def _partial_length(text: str, tag: str) -> int:
    """Returns how many characters at the end of `text` may be the beginning of `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)


def skip(buffer: TextBuffer, pattern: str = r"\s*") -> Generator[None, None, str]:
    """Skips the characters that match `pattern`, a repeated character class. Returns the next character, or "" at the
    end."""
    run = re.compile(pattern)
    while True:
        match = run.match(buffer.text)
        buffer.consume(match.end() if match else 0)
        if buffer.text or buffer.ended:
            return buffer.text[:1]
        yield None


def accept(buffer: TextBuffer, tag: str) -> Generator[None, None, bool]:
    """Consumes `tag` if the text starts with it. Returns whether it does."""
    while not buffer.ended and len(buffer.text) < len(tag) and tag.startswith(buffer.text):
        yield None
    is_next = buffer.text.startswith(tag)
    buffer.consume(len(tag) if is_next else 0)
    return is_next


def read_until(buffer: TextBuffer, tags: Sequence[str]) -> Generator[None, None, tuple[str, str]]:
    """Consumes text up to and including the first of `tags`. Returns the text before the tag, and the tag, which is ""
    if the output ended without one."""
    while True:
        matches = [(at, tag) for tag in tags if (at := buffer.text.find(tag)) >= 0]
        if matches:
            at, tag = min(matches)
            return buffer.consume(at + len(tag))[:at], tag
        if buffer.ended:
            return buffer.consume(len(buffer.text)), ""
        yield None
