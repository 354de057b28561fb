"""What a valid request may hold, by limits of this server and not of the protocol, and its rows of training data.

It is checked where a body is read (in a parser process if it is long), so that a large body does not delay the front.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8serve.errors import RequestError, shown
from fp8serve.model.storage.files import fsync, no_duplicates
from fp8serve.server.faults import Code, Fault


@dataclass(frozen=True)
class Sizes:
    """`prompts`, `messages` and `texts` (to encode) of one request, and tokens (`context`) of one prompt that is given
    as ids."""

    prompts: int
    messages: int
    context: int
    texts: int

    def check(self, body: Any) -> None:
        """Fault when a field of `body` holds more."""
        messages, prompt = getattr(body, "messages", None) or [], getattr(body, "prompt", None)
        if len(messages) > self.messages:
            raise _too_many(len(messages), "messages", self.messages, "messages")
        prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        if len(prompts) > self.prompts:
            raise _too_many(len(prompts), "prompts", self.prompts, "prompt")
        texts = getattr(body, "texts", None) or []
        if len(texts) > self.texts:
            raise _too_many(len(texts), "texts", self.texts, body.LISTED)
        cut = getattr(getattr(body, "parameters", None), "truncate", None)
        cut = body.most(self.context) if hasattr(body, "most") else getattr(body, "truncate_prompt_tokens", None) or cut
        for ids in (*prompts, *texts, getattr(body, "input_ids", None), getattr(body, "tokens", None)):
            if isinstance(ids, list) and min(len(ids), abs(cut or len(ids))) > self.context:
                raise too_long(len(ids), self.context)


def _too_many(count: int, what: str, limit: int, param: str) -> Fault:
    return Fault(Code.INVALID_PARAMETER, f"{count} {what} are more than this server's limit of {limit}.", param=param)


def too_long(tokens: int, context: int, least: str = "") -> Fault:
    """The fault for a prompt that leaves no room for an answer."""
    return Fault(
        Code.CONTEXT_LENGTH_EXCEEDED,
        f"The prompt has {least}{tokens} tokens, but this model's context holds {context}.",
        hint="Shorten the prompt.",
    )


ROWS = ("data", "validation_data")
"""Fields of a request that hold rows of training data."""


def check_keys(raw: bytes) -> None:
    """Fault for a body with rows in which an object has a key twice: one of the values would not be trained on."""
    try:
        json.loads(raw, object_pairs_hook=no_duplicates)
        return
    except (ValueError, RecursionError):
        pass
    try:
        body = json.loads(raw, object_pairs_hook=_Counted)
    except (ValueError, RecursionError):  # the reader of the body says what is not JSON
        return
    for name in ROWS:
        rows = body.get(name) if isinstance(body, dict) else None
        for number, row in enumerate(rows if isinstance(rows, list) else (), 1):
            for key in (item.repeated for item in _objects(row) if item.repeated is not None):
                message = f"Row {number} of {name} has the key {shown(key)} twice in one object; give it once."
                raise Fault(Code.INVALID_PARAMETER, message, param=name)


class _Counted(dict[str, Any]):
    """A JSON object. repeated: a key that its text has more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(key for key, _ in pairs)
        self.repeated = next((key for key, count in counts.items() if count > 1), None)


def _objects(value: Any) -> Iterator[_Counted]:
    """All objects in a JSON value."""
    if isinstance(value, _Counted):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(item)


def write_rows(path: Path, rows: Sequence[Any], most: int, row_bytes: int) -> None:
    """One JSON line for each row, on the disk when this returns.

    RequestError for a row, or a number of rows, that is too large; OSError when the disk refuses.
    """
    if len(rows) > most:
        raise RequestError(f"{len(rows)} rows are more than this server's limit of {most}.")
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, 1):
            line = json.dumps(row)
            if len(line) > row_bytes:
                raise RequestError(f"Row {number} is larger than this server's limit of {row_bytes} bytes.")
            file.write(line + "\n")
    fsync(path)
