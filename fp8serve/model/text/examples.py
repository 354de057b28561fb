"""User data: turns files into examples, and examples into token ids with a mask of those to learn.

Shared by calibration (which reads the ids) and fine-tuning (which also reads the mask), so that both see the same
tokens as serving does: a prompt is tokenized exactly as a request would be, a conversation goes through the same chat
template. Only completions and the assistant's turns are learnt; the rest is context. No torch here.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fp8serve.errors import DataError, Fp8ServeError, json_fault, json_kind, shown
from fp8serve.model.text.chat_rows import for_template, is_learnt, messages_of, tools_of, valid_unicode
from fp8serve.model.text.data_files import LIMITS, DataLimits, Rows, read_source, source_name
from fp8serve.model.text.tables import JSON_ROWS
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.model.text.turns import Conversation, MarkedText

T = TypeVar("T")

PASSAGE_CHARS = 2000  # paragraphs of a text file are joined up to about this: some 500 tokens
TOGETHER = 128  # messages that are rendered at once, in another process


@dataclass(frozen=True)
class TextExample:
    """Plain text; every token is learnt, the end-of-sequence token too."""

    text: str
    source: str = ""  # "file:line", for error messages


@dataclass(frozen=True)
class PromptExample:
    """A prompt and its completion; only the completion is learnt."""

    prompt: str
    completion: str
    source: str = ""


@dataclass(frozen=True)
class ChatExample:
    """A conversation; only the assistant's turns are learnt (not those with `"weight": 0`)."""

    messages: tuple[Mapping[str, Any], ...]
    source: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()  # functions that the assistant may call, as OpenAI's API describes them


Example = TextExample | PromptExample | ChatExample


@dataclass(frozen=True)
class TokenizedExample:
    """`loss_mask[i]` says whether token i is one to be predicted; both lists have the same length."""

    ids: list[int]
    loss_mask: list[bool]


def read_examples(sources: Iterable[Path | str], limits: DataLimits = LIMITS) -> Iterator[Example]:
    """All examples of all sources (data_files.py), in order: passages of whole paragraphs for text, else one per row.

    DataError while iterating: a source is missing, empty, too large, of another kind, or has a broken line, which is
    named by its number.
    """
    for where in sources:
        source, name = read_source(where, COLUMNS, limits), source_name(where)
        examples: Iterator[Example]
        examples = (
            _examples(source, name, example_of) if isinstance(source, Rows) else _passages(source.paragraphs, name)
        )
        yield from some(examples, name)


def read_rows(
    where: Path | str,
    make: Callable[[str | Mapping[str, Any], str], T],
    prose: str,
    columns: Collection[str] | None,
    limits: DataLimits = LIMITS,
) -> Iterator[T]:
    """`make(row, where)` of all rows of a source (data_files.py, also for `columns`), in order.

    DataError while iterating: the source is missing, empty, too large, has a broken row, or is prose: `prose` says why
    that is of no use.
    """
    source, name = read_source(where, columns, limits), source_name(where)
    if not isinstance(source, Rows):
        raise DataError(f"{name} is prose, which {prose}")
    yield from some(_examples(source, name, make), name)


def _examples(source: Rows, name: str, make: Callable[[str | Mapping[str, Any], str], T]) -> Iterator[T]:
    return (make(row, f"{name}:{number}") for number, row in source.rows)


def some(examples: Iterator[T], name: str) -> Iterator[T]:
    """All of them, which are those of the source `name`; DataError if there is none."""
    empty = True
    for example in examples:
        empty = False
        yield example
    if empty:
        raise DataError(f"{name} holds no examples; it is empty.")


def _passages(paragraphs: Iterator[str], name: str) -> Iterator[TextExample]:
    """Consecutive paragraphs together while they are short; a paragraph is never split."""
    passage: list[str] = []
    for paragraph in paragraphs:
        if passage and sum(map(len, passage)) + len(paragraph) > PASSAGE_CHARS:
            yield TextExample("\n\n".join(passage), name)
            passage = []
        passage.append(paragraph)
    if passage:
        yield TextExample("\n\n".join(passage), name)


def example_of(row: str | Mapping[str, Any], where: str) -> Example:
    """The example of a row, or of a line of JSON; DataError names `where` and what is wrong."""
    return example_from(object_of(row, where), where)


def object_of(row: str | Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A row, or the object that a line of JSON is; DataError names `where` and what is wrong."""
    if not isinstance(row, str):
        return row
    try:
        value = JSON_ROWS.decode(row)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{where} is not valid JSON: {json_fault(e)}.") from None
    if not isinstance(value, dict):
        raise DataError(f"{where} is {json_kind(value)} where an object was expected.")
    return value


def example_from(row: Mapping[str, Any], where: str = "example") -> Example:
    """One row: exactly one of `text`, `prompt` + `completion`, `messages` with or without `tools`; further columns are
    ignored, so is a `prompt` beside `messages`, which hold it, and null is no value.

    DataError names `where` and what is wrong.
    """
    kinds = [k for k, columns in _COLUMNS.items() if any(row.get(c) is not None for c in columns)]
    if "messages" in kinds and row.get("completion") is None and "prompt" in kinds:
        kinds.remove("prompt")
    if len(kinds) != 1:
        empty = next((column for column in COLUMNS if column in row), None)
        present = f"no value in `{empty}`" if empty else f"only {shown(sorted(row))}"
        present = f"both {' and '.join(kinds)}" if kinds else present
        raise DataError(f"{where} has {present}; give one of `text`, `prompt` and `completion`, or `messages`.")
    if kinds[0] == "messages":
        return ChatExample(messages_of(row["messages"], where), where, tools_of(row, where))
    if row.get("tools"):
        raise DataError(f"{where} has `tools` without `messages`; give the conversation in which they are called.")
    values = [_text(row, column, where) for column in _COLUMNS[kinds[0]]]
    return TextExample(values[0], where) if kinds[0] == "text" else PromptExample(values[0], values[1], where)


_COLUMNS = {"text": ("text",), "prompt": ("prompt", "completion"), "messages": ("messages",)}
COLUMNS = ("text", "prompt", "completion", "messages", "tools", "functions")
"""Those of a row that are read."""


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        problem = "is missing" if value is None else f"is {json_kind(value)}, not text"
        raise DataError(f"{where}: `{column}` {problem}.")
    if not value and column != "prompt":
        raise DataError(f"{where}: `{column}` is empty.")
    return valid_unicode(value, f"{where}: `{column}`")


def tokenize(example: Example, tokenizer: Tokenizer, max_len: int | None = None) -> TokenizedExample:
    """Ids and mask of one example, cut to its first `max_len` tokens. DataError when it cannot be tokenized."""
    ((_, tokenized),) = tokenize_all([example], tokenizer, max_len)
    return tokenized


def tokenize_all(
    examples: Iterable[Example], tokenizer: Tokenizer, max_len: int | None = None
) -> Iterator[tuple[Example, TokenizedExample]]:
    """As `tokenize`, for each in order; several conversations are rendered together. Errors of `examples` are raised
    after what comes before them."""
    for group in _groups(examples):
        rendered = _rendered([e for e in group if isinstance(e, ChatExample)], tokenizer)
        for example in group:
            try:
                ids, mask = _tokenize(example, rendered, tokenizer, max_len)
            except Fp8ServeError as e:
                raise DataError(f"{example.source or 'The example'} cannot be tokenized: {e}") from None
            except RecursionError:
                where = example.source or "The example"
                raise DataError(f"{where} cannot be tokenized: it is nested too deeply.") from None
            yield example, TokenizedExample(ids[:max_len], mask[:max_len])


def _groups(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Of conversations with about `TOGETHER` messages."""
    group: list[Example] = []
    size = 0
    try:
        for example in examples:
            group.append(example)
            size += len(example.messages) if isinstance(example, ChatExample) else 1
            if size >= TOGETHER:
                yield group
                group, size = [], 0
    except DataError:
        yield group
        raise
    yield group


def _rendered(chats: Sequence[ChatExample], tokenizer: Tokenizer) -> Iterator[MarkedText]:
    for result in tokenizer.assistant_spans(list(map(_conversation, chats))):
        if isinstance(result, Fp8ServeError):
            raise result
        yield result


def _conversation(example: ChatExample) -> Conversation:
    messages = for_template([{k: v for k, v in m.items() if k != "weight"} for m in example.messages])
    skip = [i for i, m in enumerate(example.messages) if m["role"] == "assistant" and not is_learnt(m)]
    return Conversation(messages, skip, {"tools": list(example.tools) or None})


def tokenize_pieces(example: Example, tokenizer: Tokenizer, max_len: int, pieces: int) -> list[TokenizedExample]:
    """As `tokenize`, but a text longer than `max_len` becomes consecutive pieces, at most so many."""
    if not isinstance(example, TextExample):
        return [tokenize(example, tokenizer, max_len)]
    whole = tokenize(example, tokenizer, max_len * pieces)
    starts = range(0, len(whole.ids), max_len)
    return [TokenizedExample(whole.ids[i : i + max_len], whole.loss_mask[i : i + max_len]) for i in starts]


def _tokenize(
    example: Example, rendered: Iterator[MarkedText], tokenizer: Tokenizer, most: int | None
) -> tuple[list[int], list[bool]]:
    """At least the first `most` ids, or all."""
    if isinstance(example, TextExample):
        ids = tokenizer.encode_beginning(example.text, most)[0] + _eos(tokenizer)
        return ids, [True] * len(ids)
    if isinstance(example, PromptExample):
        return _tokenize_prompt(example, tokenizer, most)
    text, spans = next(rendered)
    ids, offsets = tokenizer.encode_beginning(text, most, add_special_tokens=False)
    return ids, [any(start < b and a < end for a, b in spans) for start, end in offsets]


def _eos(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]


def _tokenize_prompt(example: PromptExample, tokenizer: Tokenizer, most: int | None) -> tuple[list[int], list[bool]]:
    """The prompt's ids are those that a request would have. If tokenizing prompt and completion together would fuse
    them into one token, they are tokenized apart."""
    prompt = tokenizer.encode_beginning(example.prompt, most)[0]
    if most is not None and len(prompt) > most:
        return prompt, [False] * len(prompt)
    joined = tokenizer.encode_beginning(example.prompt + example.completion, most)[0]
    if joined[: len(prompt)] != prompt:
        joined = prompt + tokenizer.encode_beginning(example.completion, most, add_special_tokens=False)[0]
    ids = joined + _eos(tokenizer)
    return ids, [i >= len(prompt) for i in range(len(ids))]
