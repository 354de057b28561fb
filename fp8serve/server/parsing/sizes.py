"""Checks the sizes of valid requests against this server's limits, and writes their rows of training data to files.

Long bodies are checked in a parser process, so that they do not delay the server.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8serve.errors import RequestError, shown
from fp8serve.model.storage.files import fsync, reject_duplicate_keys
from fp8serve.server.faults import Code, Fault


@dataclass(frozen=True)
class SizeLimits:
    """The largest numbers of prompts, messages and texts of one request, and of token ids of one prompt (`context`)."""

    prompts: int
    messages: int
    context: int
    texts: int

    def check(self, body: Any) -> None:
        """Raises Fault if a field of `body` exceeds a limit."""
        messages, prompt = getattr(body, "messages", None) or [], getattr(body, "prompt", None)
        if len(messages) > self.messages:
            raise _too_many(len(messages), "messages", self.messages, "messages")
        prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        if len(prompts) > self.prompts:
            raise _too_many(len(prompts), "prompts", self.prompts, "prompt")
        texts = getattr(body, "texts", None) or []
        if len(texts) > self.texts:
            raise _too_many(len(texts), "texts", self.texts, body.TEXTS_FIELD)
        truncate = getattr(getattr(body, "parameters", None), "truncate", None)
        truncate = getattr(body, "truncate_prompt_tokens", None) or truncate
        truncate = body.truncation_limit(self.context) if hasattr(body, "truncation_limit") else truncate
        for ids in (*prompts, *texts, getattr(body, "input_ids", None), getattr(body, "tokens", None)):
            if isinstance(ids, list) and min(len(ids), abs(truncate or len(ids))) > self.context:
                raise too_long(len(ids), self.context)


def _too_many(count: int, what: str, limit: int, param: str) -> Fault:
    return Fault(Code.INVALID_PARAMETER, f"{count} {what} are more than this server's limit of {limit}.", param=param)


def too_long(tokens: int, context: int, qualifier: str = "") -> Fault:
    """Returns the fault for a prompt that exceeds the context. See `check_fit` for `qualifier`."""
    message = f"The prompt has {qualifier}{tokens} tokens, but this model's context holds {context}."
    return Fault(Code.CONTEXT_LENGTH_EXCEEDED, message, hint="Shorten the prompt.")


ROWS = ("data", "validation_data")
"""Fields of a request that hold rows of training data."""


def check_keys(raw: bytes) -> None:
    """Raises Fault if an object in the rows has a key twice, because one of its values would be lost."""
    try:
        json.loads(raw, object_pairs_hook=reject_duplicate_keys)
        return
    except (ValueError, RecursionError):
        pass
    try:
        body = json.loads(raw, object_pairs_hook=_JsonObject)
    except (ValueError, RecursionError):  # validation reports invalid JSON
        return
    for name in ROWS:
        rows = body.get(name) if isinstance(body, dict) else None
        for number, row in enumerate(rows if isinstance(rows, list) else (), 1):
            for key in (item.repeated_key for item in _objects(row) if item.repeated_key is not None):
                message = f"Row {number} of {name} has the key {shown(key)} twice in one object; give it once."
                raise Fault(Code.INVALID_PARAMETER, message, param=name)


class _JsonObject(dict[str, Any]):
    """A JSON object. `repeated_key` is a key that occurs more than once in its text, or None."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(key for key, _ in pairs)
        self.repeated_key = next((key for key, count in counts.items() if count > 1), None)


def _objects(value: Any) -> Iterator[_JsonObject]:
    if isinstance(value, _JsonObject):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(item)


def write_rows(path: Path, rows: Sequence[Any], max_rows: int, row_bytes: int) -> None:
    """Writes a JSON line for each row and flushes the file to the disk.

    Raises RequestError if there are too many rows or a row is too large, and OSError if the disk fails.
    """
    if len(rows) > max_rows:
        raise RequestError(f"{len(rows)} rows are more than this server's limit of {max_rows}.")
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, 1):
            line = json.dumps(row)
            if len(line) > row_bytes:
                raise RequestError(f"Row {number} is larger than this server's limit of {row_bytes} bytes.")
            file.write(line + "\n")
    fsync(path)
