"""Reads examples from data files and tokenizes them with a loss mask.

Calibration uses the token ids, and fine-tuning also the loss mask. Both get the tokens that the server would get: a
prompt is tokenized as in a request, and a conversation is rendered with the same chat template. Only completions and
the assistant's turns have loss; all other tokens are context.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fp8serve.errors import DataError, Fp8ServeError, json_fault, json_kind, shown
from fp8serve.model.text.assistant_spans import Conversation, SpannedText
from fp8serve.model.text.chat_rows import for_template, has_loss, parse_messages, parse_tools, valid_unicode
from fp8serve.model.text.data_files import LIMITS, DataLimits, Rows, read_source, source_name
from fp8serve.model.text.tables import JSON_ROWS
from fp8serve.model.text.tokenizer import Tokenizer

T = TypeVar("T")

PASSAGE_CHARS = 2000  # paragraphs of a text file are joined up to about this length, some 500 tokens
MESSAGES_PER_BATCH = 128  # rendered at once in a child process


@dataclass(frozen=True)
class TextExample:
    """Plain text; every token has loss, also the end-of-sequence token."""

    text: str
    source: str = ""  # "file:line", for error messages


@dataclass(frozen=True)
class PromptExample:
    """A prompt and its completion; only the completion has loss."""

    prompt: str
    completion: str
    source: str = ""


@dataclass(frozen=True)
class ChatExample:
    """A conversation; only the assistant's turns have loss, except those with `"weight": 0`."""

    messages: tuple[Mapping[str, Any], ...]
    source: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()  # functions that the assistant may call, in the format of OpenAI's API


Example = TextExample | PromptExample | ChatExample


@dataclass(frozen=True)
class TokenizedExample:
    """Token ids and the loss mask: `loss_mask[i]` is True if predicting token i contributes to the loss."""

    ids: list[int]
    loss_mask: list[bool]


def read_examples(sources: Iterable[Path | str], limits: DataLimits = LIMITS) -> Iterator[Example]:
    """Yields the examples of all sources (data_files.py): one for each row, or for each passage of a text file.

    Iterating raises DataError if a source is missing, empty, too large or unsupported, or at an invalid row.
    """
    for where in sources:
        source, name = read_source(where, COLUMNS, limits), source_name(where)
        examples: Iterator[Example]
        if isinstance(source, Rows):
            examples = _parse_rows(source, name, parse_example)
        else:
            examples = _passages(source.paragraphs, name)
        yield from require_nonempty(examples, name)


def read_rows(
    where: Path | str,
    parse: Callable[[str | Mapping[str, Any], str], T],
    text_problem: str,
    columns: Collection[str] | None,
    limits: DataLimits = LIMITS,
) -> Iterator[T]:
    """Yields `parse(row, where)` for all rows of a source; `columns` are those of `read_source`.

    Iterating raises DataError if the source is missing, empty or too large, or at an invalid row. A text file raises it
    with the reason `text_problem`, which completes "… is prose, which".
    """
    source, name = read_source(where, columns, limits), source_name(where)
    if not isinstance(source, Rows):
        raise DataError(f"{name} is prose, which {text_problem}")
    yield from require_nonempty(_parse_rows(source, name, parse), name)


def _parse_rows(source: Rows, name: str, parse: Callable[[str | Mapping[str, Any], str], T]) -> Iterator[T]:
    return (parse(row, f"{name}:{number}") for number, row in source.rows)


def require_nonempty(examples: Iterator[T], name: str) -> Iterator[T]:
    """Yields the examples of the source `name`. Raises DataError if there are none."""
    is_empty = True
    for example in examples:
        is_empty = False
        yield example
    if is_empty:
        raise DataError(f"{name} holds no examples; it is empty.")


def _passages(paragraphs: Iterator[str], name: str) -> Iterator[TextExample]:
    """Joins consecutive short paragraphs to passages of about PASSAGE_CHARS; a paragraph is never split."""
    passage: list[str] = []
    for paragraph in paragraphs:
        if passage and sum(map(len, passage)) + len(paragraph) > PASSAGE_CHARS:
            yield TextExample("\n\n".join(passage), name)
            passage = []
        passage.append(paragraph)
    if passage:
        yield TextExample("\n\n".join(passage), name)


def parse_row(row: str | Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Decodes a JSON line to an object, and returns a row unchanged. Raises DataError if the line is no JSON object."""
    if not isinstance(row, str):
        return row
    try:
        value = JSON_ROWS.decode(row)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{where} is not valid JSON: {json_fault(e)}.") from None
    if not isinstance(value, dict):
        raise DataError(f"{where} is {json_kind(value)} where an object was expected.")
    return value


def parse_example(row: str | Mapping[str, Any], where: str = "example") -> Example:
    """Returns the example of a row or a JSON line: `text`, `prompt` and `completion`, or `messages` and maybe `tools`.

    Other columns are ignored, also a `prompt` in a row with `messages`, which contain it. A null value counts as
    missing. Raises DataError with `where` and the reason if the row is invalid.
    """
    row = parse_row(row, where)
    kinds = [k for k, columns in _COLUMNS.items() if any(row.get(c) is not None for c in columns)]
    if "messages" in kinds and row.get("completion") is None and "prompt" in kinds:
        kinds.remove("prompt")
    if len(kinds) != 1:
        null_column = next((column for column in COLUMNS if column in row), None)
        content = f"no value in `{null_column}`" if null_column else f"only {shown(sorted(row))}"
        content = f"both {' and '.join(kinds)}" if kinds else content
        raise DataError(f"{where} has {content}; give one of `text`, `prompt` and `completion`, or `messages`.")
    if kinds[0] == "messages":
        return ChatExample(parse_messages(row["messages"], where), where, parse_tools(row, where))
    if row.get("tools"):
        raise DataError(f"{where} has `tools` without `messages`; give the conversation in which they are called.")
    values = [_text(row, column, where) for column in _COLUMNS[kinds[0]]]
    return TextExample(values[0], where) if kinds[0] == "text" else PromptExample(values[0], values[1], where)


_COLUMNS = {"text": ("text",), "prompt": ("prompt", "completion"), "messages": ("messages",)}
COLUMNS = ("text", "prompt", "completion", "messages", "tools", "functions")
"""The columns of a row that are read."""


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        problem = "is missing" if value is None else f"is {json_kind(value)}, not text"
        raise DataError(f"{where}: `{column}` {problem}.")
    if not value and column != "prompt":
        raise DataError(f"{where}: `{column}` is empty.")
    return valid_unicode(value, f"{where}: `{column}`")


def tokenize(example: Example, tokenizer: Tokenizer, max_len: int | None = None) -> TokenizedExample:
    """Tokenizes an example and truncates it to `max_len` tokens. Raises DataError if it cannot be tokenized."""
    ((_, tokenized),) = tokenize_all([example], tokenizer, max_len)
    return tokenized


def tokenize_all(
    examples: Iterable[Example], tokenizer: Tokenizer, max_len: int | None = None
) -> Iterator[tuple[Example, TokenizedExample]]:
    """Yields each example and its tokens. Conversations are rendered in batches.

    If iterating over `examples` raises an error, it is raised after the tokens of all earlier examples.
    """
    for batch in _batches(examples):
        rendered = _render([e for e in batch if isinstance(e, ChatExample)], tokenizer)
        for example in batch:
            try:
                ids, mask = _tokenize(example, rendered, tokenizer, max_len)
            except Fp8ServeError as e:
                raise DataError(f"{example.source or 'The example'} cannot be tokenized: {e}") from None
            except RecursionError:
                where = example.source or "The example"
                raise DataError(f"{where} cannot be tokenized: it is nested too deeply.") from None
            yield example, TokenizedExample(ids[:max_len], mask[:max_len])


def _batches(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Groups consecutive examples with about MESSAGES_PER_BATCH messages in all."""
    batch: list[Example] = []
    size = 0
    try:
        for example in examples:
            batch.append(example)
            size += len(example.messages) if isinstance(example, ChatExample) else 1
            if size >= MESSAGES_PER_BATCH:
                yield batch
                batch, size = [], 0
    except DataError:
        yield batch
        raise
    yield batch


def _render(chats: Sequence[ChatExample], tokenizer: Tokenizer) -> Iterator[SpannedText]:
    for result in tokenizer.assistant_spans(list(map(_conversation, chats))):
        if isinstance(result, Fp8ServeError):
            raise result
        yield result


def _conversation(example: ChatExample) -> Conversation:
    messages = for_template([{k: v for k, v in m.items() if k != "weight"} for m in example.messages])
    skip = [i for i, m in enumerate(example.messages) if m["role"] == "assistant" and not has_loss(m)]
    return Conversation(messages, skip, {"tools": list(example.tools) or None})


def tokenize_chunks(example: Example, tokenizer: Tokenizer, max_len: int, max_chunks: int) -> list[TokenizedExample]:
    """Tokenizes an example and splits a text into consecutive chunks of `max_len` tokens, at most `max_chunks`. A
    prompt or a conversation is truncated to `max_len` tokens."""
    if not isinstance(example, TextExample):
        return [tokenize(example, tokenizer, max_len)]
    tokens = tokenize(example, tokenizer, max_len * max_chunks)
    starts = range(0, len(tokens.ids), max_len)
    return [TokenizedExample(tokens.ids[i : i + max_len], tokens.loss_mask[i : i + max_len]) for i in starts]


def _tokenize(
    example: Example, rendered: Iterator[SpannedText], tokenizer: Tokenizer, max_len: int | None
) -> tuple[list[int], list[bool]]:
    """Returns the ids and the loss mask; of a long example at least the first `max_len` ids."""
    if isinstance(example, TextExample):
        ids = tokenizer.encode_truncated(example.text, max_len)[0] + _eos(tokenizer)
        return ids, [True] * len(ids)
    if isinstance(example, PromptExample):
        return _tokenize_prompt(example, tokenizer, max_len)
    text, spans = next(rendered)
    ids, offsets = tokenizer.encode_truncated(text, max_len, add_special_tokens=False)
    return ids, [any(start < b and a < end for a, b in spans) for start, end in offsets]


def _eos(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]


def _tokenize_prompt(example: PromptExample, tokenizer: Tokenizer, max_len: int | None) -> tuple[list[int], list[bool]]:
    """Tokenizes prompt and completion together, or separately if a token would span both. The prompt's ids are
    always those of a request with this prompt."""
    prompt = tokenizer.encode_truncated(example.prompt, max_len)[0]
    if max_len is not None and len(prompt) > max_len:
        return prompt, [False] * len(prompt)
    joined = tokenizer.encode_truncated(example.prompt + example.completion, max_len)[0]
    if joined[: len(prompt)] != prompt:
        joined = prompt + tokenizer.encode_truncated(example.completion, max_len, add_special_tokens=False)[0]
    ids = joined + _eos(tokenizer)
    return ids, [i >= len(prompt) for i in range(len(ids))]
