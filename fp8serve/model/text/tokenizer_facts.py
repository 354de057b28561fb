"""Describes a model's tokenizer as plain data for the server process, which never runs the tokenizer itself.

A tokenizer comes from an untrusted download: a text of five characters can take seconds, and its library can crash the
process. So only the engine process and the parser processes run it. `describe` starts the child process
`python -m fp8serve.model.text.tokenizer_facts` with limits (limited_process.py), which reads the tokenizer once and
returns what the server needs: the special tokens, the end-of-sequence tokens and a bound for the number of tokens.
"""

import json
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from fp8serve.errors import TokenizerError
from fp8serve.model.text.limited_process import JobResult, LimitedProcess, serve
from fp8serve.model.text.token_bounds import TokenLengthBound
from fp8serve.model.text.tokenizer import Tokenizer, truncate_ids
from fp8serve.processes import Head

MAX_COLUMN_BYTES = 1 << 28
MODULE = "fp8serve.model.text.tokenizer_facts"
CPU_SECONDS, MEMORY_BYTES = 30.0, 2 << 30
"""CPU time and memory to read a tokenizer: ten times what the largest published one needs."""


@dataclass
class TokenizerFacts:
    """Properties of a tokenizer and its chat template."""

    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    special_texts: frozenset[str]  # tokens that are omitted from decoded text unless a request asks for them
    added_ids: dict[str, int]  # ids of added tokens by their text
    special_token_counts: tuple[int, int]  # numbers of special tokens that are added to a text, and to a pair of texts
    template: str | None  # source of the chat template
    takes_tools: bool  # whether the chat template reads the variable `tools`
    bound: TokenLengthBound | None
    table: "TokenTable | None" = field(default=None, compare=False, repr=False)  # set when it is first needed

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "TokenizerFacts":
        return cls(
            tokenizer.eos_ids,
            tokenizer.special_ids,
            tokenizer.special_texts,
            tokenizer.added_ids,
            (tokenizer.special_count(is_pair=False), tokenizer.special_count(is_pair=True)),
            tokenizer.template_text,
            tokenizer.takes_tools,
            tokenizer.bound,
        )

    def to_json(self) -> bytes:
        plain = vars(self) | {"special_ids": sorted(self.special_ids), "special_texts": sorted(self.special_texts)}
        plain["bound"] = None if self.bound is None else [self.bound.characters, self.bound.dropped]
        del plain["table"]
        return json.dumps(plain).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "TokenizerFacts":
        plain: dict[str, Any] = json.loads(text)
        plain["bound"] = None if plain["bound"] is None else TokenLengthBound(*plain["bound"])
        kinds = {"eos_ids": tuple, "special_ids": frozenset, "special_texts": frozenset, "special_token_counts": tuple}
        return cls(**plain | {name: kind(plain[name]) for name, kind in kinds.items()})

    @property
    def texts(self) -> "TokenTable":
        """The table of token texts, which the caller must have set before."""
        assert self.table is not None
        return self.table

    def min_token_count(self, text: str) -> int:
        """Returns a lower bound of the number of tokens, which follows from the text's length; 0 if none is known."""
        return 0 if self.bound is None else self.bound.min_token_count(text)

    def truncate_ids(self, ids: list[int], limit: int) -> list[int]:
        """Truncates the ids of a text to `limit`, and preserves a special token at its end."""
        return truncate_ids(ids, limit, self.special_ids)


class TokenTable:
    """The text and the bytes of every token of a vocabulary; ids outside the vocabulary have empty ones.

    The table consists of three columns of bytes and the offsets at which their entries end, in memory as well as
    between processes. It needs a few megabytes and no parsing.
    """

    def __init__(self, serialized: bytes) -> None:
        self._columns, start = [], 8
        self.size = int.from_bytes(serialized[:8], "little")
        for _ in range(3):
            ends = array("I")
            ends.frombytes(serialized[start : start + 4 * self.size])
            start += 4 * self.size
            length = ends[-1] if ends else 0
            self._columns.append((ends, serialized[start : start + length]))
            start += length

    @staticmethod
    def serialize(tokenizer: Tokenizer, size: int) -> bytes:
        """Serializes the table of the ids below `size`. Raises TokenizerError if it is too large or decoding fails."""
        texts = _column(tokenizer.token_text(i).encode() for i in range(size))
        parts = (_column(tokenizer.token_bytes(i, first) for i in range(size)) for first in (False, True))
        return size.to_bytes(8, "little") + texts + b"".join(parts)

    def text(self, token_id: int) -> str:
        """Returns the text of a single token, also of a special one; see `Tokenizer.token_text`."""
        return self._entry(0, token_id).decode()

    def utf8(self, token_id: int, first: bool = False) -> bytes:
        """Returns the UTF-8 bytes that a token adds to a text; see `Tokenizer.token_bytes`."""
        return self._entry(2 if first else 1, token_id)

    def _entry(self, column: int, token_id: int) -> bytes:
        if not 0 <= token_id < self.size:
            return b""
        ends, content = self._columns[column]
        return content[ends[token_id - 1] if token_id else 0 : ends[token_id]]


def _column(entries: Iterable[bytes]) -> bytes:
    column, total = [], 0
    for entry in entries:
        column.append(entry)
        total += len(entry)
        if total > MAX_COLUMN_BYTES:
            raise TokenizerError("The texts of this model's tokens are too long for log-probabilities.")
    return array("I", accumulate(map(len, column))).tobytes() + b"".join(column)


def describe(directory: Path, cpu: float = CPU_SECONDS, memory: int = MEMORY_BYTES) -> TokenizerFacts:
    """Reads a directory's tokenizer in a child process. Raises ModelError if it is missing, damaged or too slow."""
    process = LimitedProcess(MODULE, cpu, memory)
    try:
        head = {"op": "describe", "directory": str(directory)}
        _, content = process.run_job(f"Reading {directory / 'tokenizer.json'}", head)
        return TokenizerFacts.from_json(content)
    finally:
        process.close()


def _describe(head: Head, body: bytes) -> JobResult:
    return {}, TokenizerFacts.from_tokenizer(Tokenizer.from_dir(Path(head["directory"]))).to_json()


def main() -> int:
    serve({"describe": _describe})
    return 0


if __name__ == "__main__":
    sys.exit(main())
