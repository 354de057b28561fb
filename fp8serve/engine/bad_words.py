"""Bad words: texts that a completion must not contain. Before each token is sampled, every token that would complete a
bad word is banned.

A bad word is banned as text: however it is divided into tokens, and also inside a longer word. A token can complete a
bad word in two ways:

* The token contains the whole bad word. These tokens are always banned, so they are looked up once.
* The completion so far ends with a prefix of the bad word, and the token begins with the remaining suffix. Such tokens
  are adjacent in the sorted vocabulary.

A special token has no text. A bad word that is spelled like a special token bans only that token. Bad words in the
prompt are ignored. The vocabulary is sorted at the first request with bad words, which takes up to half a second. This
module does not import torch.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fp8serve.model.text.tokenizer import Tokenizer

Ids = NDArray[np.int64]
MAX_CACHED_LISTS = 16  # lists of bad words whose lookup is cached
SEPARATOR = b"\xff"  # a byte that no UTF-8 text contains


class Vocabulary:
    """The texts of a model's tokens, sorted as bytes."""

    def __init__(self, tokenizer: "Tokenizer", size: int, eos_ids: frozenset[int]) -> None:
        special = tokenizer.special_ids | eos_ids
        entries = ((tokenizer.token_bytes(i), i) for i in range(size) if i not in special)
        pairs = sorted(pair for pair in entries if pair[0])
        self._texts = [text for text, _ in pairs]
        self._ids = np.array([i for _, i in pairs], dtype=np.int64)
        self._joined = SEPARATOR.join(self._texts)
        self._offsets = list(accumulate((len(text) + 1 for text in self._texts), initial=0))  # in self._joined
        self._special_ids = {tokenizer.token_text(i): i for i in special}
        self._text_by_id = {i: text for text, i in pairs}

    def text(self, token_id: int) -> bytes:
        """Returns the text of a token, which is empty for a special token."""
        return self._text_by_id.get(token_id, b"")

    def with_prefix(self, prefix: bytes) -> Ids:
        """Returns the tokens whose text begins with `prefix`, the end of a UTF-8 text. Its last byte is below 0xFF."""
        successor = prefix[:-1] + bytes([prefix[-1] + 1])
        return self._ids[bisect_left(self._texts, prefix) : bisect_left(self._texts, successor)]

    def containing(self, word: str) -> Ids:
        """Returns the tokens that contain `word`, and the special token that is spelled like `word` if there is one."""
        encoded, indices = word.encode(), list[int]()
        offset = self._joined.find(encoded)
        while offset >= 0:
            indices.append(bisect_right(self._offsets, offset) - 1)
            offset = self._joined.find(encoded, self._offsets[indices[-1] + 1])
        special = [self._special_ids[word]] if word in self._special_ids else []
        return np.concatenate([self._ids[indices], np.array(special, dtype=np.int64)])


class BadWords:
    """One list of bad words, which several requests may share."""

    def __init__(self, vocabulary: Vocabulary, words: tuple[str, ...]) -> None:
        self.vocabulary = vocabulary
        self.max_bytes = max(len(word.encode()) for word in words)
        self._words = [word.encode() for word in words]
        self._always_banned = np.unique(np.concatenate([vocabulary.containing(word) for word in words]))

    def banned_after(self, tail: bytes) -> Ids:
        """Returns the tokens that must not follow a completion that ends with `tail`."""
        suffixes = {
            word[split:]
            for word in self._words
            for split in range(1, min(len(word), len(tail) + 1))
            if tail.endswith(word[:split])
        }
        return np.concatenate([self._always_banned, *map(self.vocabulary.with_prefix, suffixes)])


class Ban:
    """The bad words of one request, with the end of its completion so far."""

    def __init__(self, words: BadWords) -> None:
        self._words, self._tail = words, b""

    def tokens(self) -> Ids:
        """Returns the tokens that must not come next."""
        return self._words.banned_after(self._tail)

    def accept(self, token_id: int) -> None:
        """Appends a sampled token to the completion."""
        self._tail = (self._tail + self._words.vocabulary.text(token_id))[-self._words.max_bytes :]


class Bans:
    """Creates the `Ban` of each request to one model. `eos_ids` count as special tokens, whatever the tokenizer
    says."""

    def __init__(self, tokenizer: "Tokenizer | None", vocab_size: int, eos_ids: Iterable[int] = ()) -> None:
        self._tokenizer, self._size, self._eos_ids = tokenizer, vocab_size, frozenset(eos_ids)
        self._lists = lru_cache(maxsize=MAX_CACHED_LISTS)(lambda words: BadWords(self._vocabulary, words))

    def ban(self, words: tuple[str, ...]) -> Ban | None:
        """Returns the ban of these bad words, or None if there are none. Any bad word requires a tokenizer."""
        return Ban(self._lists(words)) if words else None

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        assert self._tokenizer is not None  # EngineLimits.check refuses bad words without a tokenizer
        return Vocabulary(self._tokenizer, self._size, self._eos_ids)
