"""What a server's front knows of a model's tokenizer, which itself runs only in other processes.

A tokenizer is a stranger's program: a text of five characters can cost it seconds, and its library can fail in ways
that end a process. So a process with limits reads it (`describe`) and describes it once, and only the engine and
the parser processes run it. What a front needs beside texts and ids is plain data: which ids are special, which end a
sequence, how many tokens a text has at least, and, for log-probabilities, the text of every token. No torch here.

`python -m fp8serve.model.text.tokenizer_facts` is that process; limited_process.py says how to communicate with it.
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
from fp8serve.model.text.limited_process import Answer, LimitedProcess, serve
from fp8serve.model.text.text_bound import TextBound
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.processes import Head

MAX_TABLE_BYTES = 1 << 28  # of one column
MODULE = "fp8serve.model.text.tokenizer_facts"
READING_SECONDS, READING_MEMORY = 30.0, 2 << 30
"""Processor time and memory to read a tokenizer: ten times what the largest published one takes."""


@dataclass
class TokenizerFacts:
    """special_texts: tokens that are left out of text unless they are requested. added_ids: by their text. around: how
    many tokens the tokenizer puts around a text, and around and between a pair of texts. template: the source of the
    chat template. takes_tools: whether that has a place for tools. table: the texts of all tokens, once they were
    needed.
    """

    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    special_texts: frozenset[str]
    added_ids: dict[str, int]
    around: tuple[int, int]
    template: str | None
    takes_tools: bool
    bound: TextBound | None
    table: "TokenTable | None" = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenizerFacts":
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
        plain["bound"] = None if self.bound is None else [self.bound.characters, self.bound.lost]
        del plain["table"]
        return json.dumps(plain).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "TokenizerFacts":
        plain: dict[str, Any] = json.loads(text)
        plain["bound"] = None if plain["bound"] is None else TextBound(*plain["bound"])
        kinds = {"eos_ids": tuple, "special_ids": frozenset, "special_texts": frozenset, "around": tuple}
        return cls(**plain | {name: kind(plain[name]) for name, kind in kinds.items()})

    @property
    def texts(self) -> "TokenTable":
        """The table, for a caller that has seen to it that there is one."""
        assert self.table is not None
        return self.table

    def fewest_tokens(self, text: str) -> int:
        """A lower bound for the number of tokens of `text`, from its length alone; 0 if there is none."""
        return 0 if self.bound is None else self.bound.fewest_tokens(text)

    def first_of(self, ids: list[int], most: int) -> list[int]:
        """The first `most`; the end is cut off, except for the special token with which a text ends."""
        if len(ids) <= most:
            return ids
        return ids[: most - 1] + ids[-1:] if ids[-1] in self.special_ids else ids[:most]


class TokenTable:
    """`Tokenizer.token_text` and `Tokenizer.token_bytes` of all ids below a number; ids outside have no text.

    In memory, and between processes, it is three columns of bytes with the ends of their entries: a few megabytes, and
    nothing is parsed.
    """

    def __init__(self, written: bytes) -> None:
        self._columns, start = [], 8
        self.size = int.from_bytes(written[:8], "little")
        for _ in range(3):
            ends = array("I")
            ends.frombytes(written[start : start + 4 * self.size])
            start += 4 * self.size
            length = ends[-1] if ends else 0
            self._columns.append((ends, written[start : start + length]))
            start += length

    @staticmethod
    def written(tokenizer: Tokenizer, size: int) -> bytes:
        """The table of the first `size` ids. TokenizerError: it is too large, or a token cannot be decoded."""
        texts = _column(tokenizer.token_text(i).encode() for i in range(size))
        parts = (_column(tokenizer.token_bytes(i, first) for i in range(size)) for first in (False, True))
        return size.to_bytes(8, "little") + texts + b"".join(parts)

    def text(self, token_id: int) -> str:
        """One token on its own, specials included, as shown beside log-probabilities."""
        return self._entry(0, token_id).decode()

    def utf8(self, token_id: int, first: bool = False) -> bytes:
        """The UTF-8 bytes that one token adds to a text; see `Tokenizer.token_bytes`."""
        return self._entry(2 if first else 1, token_id)

    def _entry(self, column: int, token_id: int) -> bytes:
        if not 0 <= token_id < self.size:
            return b""
        ends, content = self._columns[column]
        return content[ends[token_id - 1] if token_id else 0 : ends[token_id]]


def _column(entries: Iterable[bytes]) -> bytes:
    held, total = [], 0
    for entry in entries:
        held.append(entry)
        total += len(entry)
        if total > MAX_TABLE_BYTES:
            raise TokenizerError("The texts of this model's tokens are too long for log-probabilities.")
    return array("I", accumulate(map(len, held))).tobytes() + b"".join(held)


def describe(directory: Path, cpu: float = READING_SECONDS, memory: int = READING_MEMORY) -> TokenizerFacts:
    """The facts about a directory's tokenizer, read under limits. ModelError: it has none, or one that is of no use."""
    process = LimitedProcess(MODULE, cpu, memory)
    try:
        head = {"op": "describe", "directory": str(directory)}
        _, written = process.perform(f"Reading {directory / 'tokenizer.json'}", head)
        return TokenizerFacts.from_json(written)
    finally:
        process.close()


def _describe(head: Head, body: bytes) -> Answer:
    return {}, TokenizerFacts.of(Tokenizer.from_dir(Path(head["directory"]))).to_json()


def main() -> int:
    serve({"describe": _describe})
    return 0


if __name__ == "__main__":
    sys.exit(main())
