"""Computes a lower bound of a text's number of tokens, and checks that a tokenizer's decoder has a bounded cost.

The lower bound follows from the text's length, so that a text that is too long for the context is not tokenized. It
exists only if a token covers a bounded number of characters. That is not so if a pre-tokenizer removes white space,
unknown characters fuse into one token, a normalizer strips, or an added token absorbs adjacent spaces. This module
therefore has a list of normalizers and pre-tokenizers that remove no characters, with the number of characters that
each may join into one. A tokenizer with any other component has no bound. Characters are code points; an entry of k
symbols in a byte-level vocabulary covers at most k characters. A character without a symbol in such a vocabulary is
removed without a token and is not counted.

The engine decodes every generated token between two steps, so an expensive decoder would delay all requests.
`check_decoder` raises an error unless
  * one token yields at most MAX_TOKEN_CHARS characters: the length of the longest entry, times the expansion factor of
    each component of the decoder;
  * regular expressions have no repetition, group or alternative, so that a search takes linear time;
  * components strip at most one character, at the beginning of a text. A stream only decodes the last tokens, so it
    cannot strip the end, and tokenizers fails on a text that is shorter than what it strips.
All published tokenizers that we know of pass: their decoders join pieces and replace a word's prefix by a space.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))

# The most code points that a normalizer joins into one. Canonical composition joins at most four; the longest
# compatibility decomposition (U+FDFA) has eighteen.
_NORMALIZERS = {"NFC": 4, "NFD": 1, "NFKC": 18, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_LOSSLESS_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
MAX_TOKEN_CHARS = 16_384
_NONLINEAR_REGEX = re.compile(r"[*+?{(|]|\\[1-9kg]")  # syntax with which a search may take more than linear time
_EXPANSION_FACTORS = {"WordPiece": 2, "CTC": 2, "BPEDecoder": 2}  # these may add a space to every character


@dataclass(frozen=True)
class TokenLengthBound:
    """A token covers at most `characters` characters of a text; characters in `dropped` may have no token."""

    characters: int
    dropped: str = ""

    def min_token_count(self, text: str) -> int:
        """Returns a lower bound of the number of tokens of `text`."""
        return -(-(len(text) - sum(map(text.count, self.dropped))) // self.characters)


def token_length_bound(backend: tokenizers.Tokenizer) -> TokenLengthBound | None:
    """Returns the bound of the tokenizer, or None if it has a component for which no bound is known."""
    normalizers, splitters = _components(backend.normalizer), _components(backend.pre_tokenizer)
    ratios = [_compression_ratio(normalizer) for normalizer in normalizers]
    dropped = _dropped_characters(backend, normalizers + splitters)
    absorbs_spaces = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    is_lossless = all(map(_is_lossless, splitters)) and not absorbs_spaces
    if None in ratios or dropped is None or (dropped and normalizers) or not is_lossless:
        return None
    return TokenLengthBound(_longest_entry(backend) * math.prod(ratio or 1 for ratio in ratios), dropped)


def _components(component: Any) -> list[dict[str, Any]]:
    """Returns the descriptions of a component's parts, with nested sequences flattened; empty for None."""
    return [] if component is None else _flatten(json.loads(component.__getstate__()))


def _flatten(description: dict[str, Any]) -> list[dict[str, Any]]:
    parts = next((description[key] for key in ("normalizers", "pretokenizers", "decoders") if key in description), None)
    return [description] if parts is None else [leaf for part in parts for leaf in _flatten(part)]


def _compression_ratio(normalizer: dict[str, Any]) -> int | None:
    """Returns the most characters that the normalizer joins into one, or None if there is no limit."""
    if normalizer["type"] != "Replace":
        return _NORMALIZERS.get(normalizer["type"])
    old, new = normalizer["pattern"].get("String"), normalizer["content"]
    return max(1, math.ceil(len(old) / len(new))) if old and new else None


def _is_lossless(splitter: dict[str, Any]) -> bool:
    if splitter["type"] in ("Split", "Punctuation"):
        return bool(splitter["behavior"] != "Removed")
    return splitter["type"] in _LOSSLESS_PRE_TOKENIZERS


def _dropped_characters(backend: tokenizers.Tokenizer, components: list[dict[str, Any]]) -> str | None:
    """Returns the characters without a token. Returns None if all can be dropped, or if one token can cover any
    number of them."""
    model = backend.model
    if not isinstance(model, models.BPE):
        return None
    if any(component["type"] == "ByteLevel" for component in components):
        return _characters_without_symbol(model)
    falls_back = model.byte_fallback and all(model.token_to_id(token) is not None for token in BYTE_TOKENS)
    return "" if falls_back else None


def _characters_without_symbol(model: models.BPE) -> str | None:
    """Returns the ASCII characters without a symbol in a byte-level vocabulary; None if a continuation byte has none.

    The last byte of any other character is one of 64 continuation bytes; if all of them have a symbol, the character
    has a token.
    """
    symbol_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    has_symbol = {code: model.token_to_id(symbol_of(chr(code))[0][0][-1]) is not None for code in range(0xC0)}
    if not all(has_symbol[code] for code in range(0x80, 0xC0)):
        return None
    return "".join(chr(code) for code in range(0x80) if not has_symbol[code])


def _longest_entry(backend: tokenizers.Tokenizer) -> int:
    """Returns the length of the longest entry; tokenizers also matches added tokens in their normalized spelling."""
    entries = backend.get_vocab(with_added_tokens=True)
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    if backend.normalizer is not None:
        added += [backend.normalizer.normalize_str(text) for text in added]
    return max(map(len, [*entries, *added]), default=1)


def check_decoder(backend: tokenizers.Tokenizer, entries: list[str]) -> None:
    """Raises ValueError if decoding a token of `entries` could yield too much text, take too long, or fail."""
    longest = max(map(len, entries), default=0)
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if len(set(vocabulary.values())) < len(vocabulary):
        raise ValueError("several entries of its vocabulary have the same id, so the text of this id is ambiguous")
    factor = math.prod(map(_expansion_factor, _components(backend.decoder)))
    if longest * factor > MAX_TOKEN_CHARS:
        raise ValueError(
            f"its decoder could yield {longest * factor} characters for one token, and the limit is {MAX_TOKEN_CHARS}"
        )


def _expansion_factor(decoder: dict[str, Any]) -> int:
    """Returns the most characters that the decoder yields for one. Raises ValueError if it may be slow or fail."""
    if decoder["type"] == "Strip" and (decoder["stop"] or decoder["start"] > 1):
        raise ValueError("its decoder strips more than one character at the beginning of a text")
    if decoder["type"] != "Replace":
        return _EXPANSION_FACTORS.get(decoder["type"], 1)
    pattern, content = decoder["pattern"], decoder["content"]
    if "String" in pattern:
        return max(1, math.ceil(len(content) / max(1, len(pattern["String"]))))
    if _NONLINEAR_REGEX.search(pattern["Regex"]):
        raise ValueError("its decoder has a regular expression whose search may take unbounded time")
    return 1 + len(content)  # an empty match inserts `content` beside every character
