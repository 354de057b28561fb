"""Texts that an answer must not contain: before each token, the tokens that would complete one of them are ruled out.

The text counts, not its division into tokens: a word is not written in other pieces either, nor inside a longer
one. A word can be completed in two ways. A token may contain it, which does not depend on the answer and is found once.
Or the answer so far ends with the beginning of the word, and a token begins with its rest: these tokens are adjacent in
the sorted vocabulary. A special token has no text; a bad word that is written like one forbids only that token.

Only generated text counts. The vocabulary is sorted when the first such request arrives, in up to half a second. No
torch.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
CACHED = 16  # lists of bad words
BORDER = b"\xff"  # in no text


class Texts(Protocol):
    """The part of `Tokenizer` that this module uses."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...


class Vocabulary:
    """The texts of a model's tokens, in their order as bytes."""

    def __init__(self, tokenizer: Texts, size: int, ends: frozenset[int]) -> None:
        special = tokenizer.special_ids | ends
        entries = ((tokenizer.token_bytes(i), i) for i in range(size) if i not in special)
        pairs = sorted(pair for pair in entries if pair[0])
        self._texts = [text for text, _ in pairs]
        self._ids = np.array([i for _, i in pairs], dtype=np.int64)
        self._joined = BORDER.join(self._texts)
        self._starts = list(accumulate((len(text) + 1 for text in self._texts), initial=0))
        self._special = {tokenizer.token_text(i): i for i in special}
        self._text_of = {i: text for text, i in pairs}

    def text(self, token_id: int) -> bytes:
        """Empty for a special token."""
        return self._text_of.get(token_id, b"")

    def beginning_with(self, start: bytes) -> Ids:
        """`start` is the end of some UTF-8."""
        after = start[:-1] + bytes([start[-1] + 1])
        return self._ids[bisect_left(self._texts, start) : bisect_left(self._texts, after)]

    def holding(self, word: str) -> Ids:
        """Tokens that contain `word`, or the special token that is written like it."""
        encoded, places = word.encode(), list[int]()
        at = self._joined.find(encoded)
        while at >= 0:
            places.append(bisect_right(self._starts, at) - 1)
            at = self._joined.find(encoded, self._starts[places[-1] + 1])
        special = [self._special[word]] if word in self._special else []
        return np.concatenate([self._ids[places], np.array(special, dtype=np.int64)])


class BadWords:
    """Some texts that must not be generated, for any number of answers."""

    def __init__(self, vocabulary: Vocabulary, words: tuple[str, ...]) -> None:
        self.vocabulary = vocabulary
        self.longest = max(len(word.encode()) for word in words)
        self._words = [word.encode() for word in words]
        self._always = np.unique(np.concatenate([vocabulary.holding(word) for word in words]))

    def after(self, tail: bytes) -> Ids:
        """The tokens that may not follow `tail`."""
        rests = {
            word[begun:]
            for word in self._words
            for begun in range(1, min(len(word), len(tail) + 1))
            if tail.endswith(word[:begun])
        }
        return np.concatenate([self._always, *map(self.vocabulary.beginning_with, rests)])


class Ban:
    """One request's bad words, and the end of its answer so far."""

    def __init__(self, words: BadWords) -> None:
        self._words, self._tail = words, b""

    def tokens(self) -> Ids:
        """The tokens that must not come next."""
        return self._words.after(self._tail)

    def accept(self, token_id: int) -> None:
        self._tail = (self._tail + self._words.vocabulary.text(token_id))[-self._words.longest :]


class Bans:
    """Makes bans for one model."""

    def __init__(self, tokenizer: Texts | None, vocab_size: int, ends: Iterable[int] = ()) -> None:
        """`ends`: the tokens that end an answer; they count as special even if the tokenizer does not say so."""
        self._tokenizer, self._size, self._ends = tokenizer, vocab_size, frozenset(ends)
        self._lists = lru_cache(maxsize=CACHED)(lambda words: BadWords(self._vocabulary, words))

    def ban(self, words: tuple[str, ...]) -> Ban | None:
        """None if nothing is forbidden; otherwise there must be a tokenizer."""
        return Ban(self._lists(words)) if words else None

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        assert self._tokenizer is not None  # EngineLimits.check
        return Vocabulary(self._tokenizer, self._size, self._ends)
