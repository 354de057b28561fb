"""Bounds of a tokenizer: the fewest tokens a text can have, and the most text and time that a token can cost.

The fewest tokens follow from a text's length alone, so that one too long for a context need not be tokenized.

Such a bound exists only if a token covers a bounded number of characters. It does not if a pre-tokenizer drops
whitespace, unknown characters fuse into one token, a normalizer strips, or an added token absorbs the spaces beside it.
So every part of the tokenizer is looked up in a list of parts that are known to keep characters, with the most
characters that it joins into one. With any other part there is no bound. Characters are code points: a byte-level
vocabulary writes one symbol for a byte, so an entry of k symbols covers at most k characters. Single characters that
such a vocabulary has no symbol for vanish without a token; they are not counted.

An engine decodes every token that it generates, between two steps of all its requests. So a decoder is checked once,
when the tokenizer is read, and its cost is certain from then on:
  * one token yields at most `MAX_TOKEN_CHARS` characters: the longest entry, times what each part of the decoder may
    make of one character;
  * a part that searches by a regular expression may not repeat, group or choose, because such a search can take any
    time;
  * a part may strip one character of the beginning of a text and no more: a stream does not know where the end is, has
    only the last tokens before a new one, and the library fails on texts shorter than what is to be stripped.
All tokenizers that we know of pass: their decoders join pieces, and replace the mark before a word by a space.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))

# The most code points that become one. Canonical composition joins at most four; the longest compatibility
# decomposition (U+FDFA) has eighteen.
_NORMALIZERS = {"NFC": 4, "NFD": 1, "NFKC": 18, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
MAX_TOKEN_CHARS = 16_384
_SEARCHES = re.compile(r"[*+?{(|]|\\[1-9kg]")  # what makes the time of a regular expression grow
_FACTORS = {"WordPiece": 2, "CTC": 2, "BPEDecoder": 2}  # they may put a space beside every character


@dataclass(frozen=True)
class TextBound:
    """A token covers at most `characters` characters of a text; characters in `lost` may leave no token."""

    characters: int
    lost: str = ""

    def fewest_tokens(self, text: str) -> int:
        """Every encoding of `text` has at least this many tokens."""
        return -(-(len(text) - sum(map(text.count, self.lost))) // self.characters)


def text_bound(backend: tokenizers.Tokenizer) -> TextBound | None:
    """None if no bound is certain."""
    steps, splits = _steps_of(backend.normalizer), _steps_of(backend.pre_tokenizer)
    shrinks = [_shrink(step) for step in steps]
    lost = _lost(backend, steps + splits)
    if None in shrinks or lost is None or (lost and steps) or not all(map(_keeps_all, splits)) or _swallows(backend):
        return None
    return TextBound(_longest(backend) * math.prod(shrink or 1 for shrink in shrinks), lost)


def _steps_of(component: Any) -> list[dict[str, Any]]:
    """The component's own description, sequences flattened; empty when there is none."""
    return [] if component is None else _flat(json.loads(component.__getstate__()))


def _flat(description: dict[str, Any]) -> list[dict[str, Any]]:
    parts = next((description[key] for key in ("normalizers", "pretokenizers", "decoders") if key in description), None)
    return [description] if parts is None else [step for part in parts for step in _flat(part)]


def _shrink(step: dict[str, Any]) -> int | None:
    """The most characters this normalizer makes into one; None: any number."""
    if step["type"] != "Replace":
        return _NORMALIZERS.get(step["type"])
    old, new = step["pattern"].get("String"), step["content"]
    return max(1, math.ceil(len(old) / len(new))) if old and new else None


def _keeps_all(step: dict[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in _KEEPING


def _lost(backend: tokenizers.Tokenizer, steps: list[dict[str, Any]]) -> str | None:
    """Characters that leave no token; None where any number of characters can vanish, or become one token."""
    model = backend.model
    if not isinstance(model, models.BPE):
        return None
    if any(step["type"] == "ByteLevel" for step in steps):
        return _lost_bytes(model)
    falls_back = model.byte_fallback and all(model.token_to_id(token) is not None for token in BYTE_TOKENS)
    return "" if falls_back else None


def _lost_bytes(model: models.BPE) -> str | None:
    """A character of several bytes leaves a token if its last byte, one of 64, has a symbol."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    known = {code: model.token_to_id(spell(chr(code))[0][0][-1]) is not None for code in range(0xC0)}
    if not all(known[code] for code in range(0x80, 0xC0)):
        return None
    return "".join(chr(code) for code in range(0x80) if not known[code])


def _swallows(backend: tokenizers.Tokenizer) -> bool:
    return any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())


def _longest(backend: tokenizers.Tokenizer) -> int:
    """Symbols of the longest entry. An added token may be looked for in the normalized text, in its normalized form."""
    entries = backend.get_vocab(with_added_tokens=True)
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    if backend.normalizer is not None:
        added += [backend.normalizer.normalize_str(text) for text in added]
    return max(map(len, [*entries, *added]), default=1)


def check_decoder(backend: tokenizers.Tokenizer, entries: list[str]) -> None:
    """ValueError: the decoder could yield too much text of one of `entries`, take too long, or fail."""
    longest = max(map(len, entries), default=0)
    own = backend.get_vocab(with_added_tokens=False)
    if len(set(own.values())) < len(own):
        raise ValueError("several entries of its vocabulary have one id, which then has no certain text")
    factor = math.prod(map(_factor, _steps_of(backend.decoder)))
    if longest * factor > MAX_TOKEN_CHARS:
        raise ValueError(
            f"its decoder could make {longest * factor} characters of one token, and {MAX_TOKEN_CHARS} are the most"
        )


def _factor(part: dict[str, Any]) -> int:
    """The most characters that this part makes of one. ValueError: its time is not bounded, or it may fail."""
    if part["type"] == "Strip" and (part["stop"] or part["start"] > 1):
        raise ValueError("its decoder strips more of a text than one character at the beginning")
    if part["type"] != "Replace":
        return _FACTORS.get(part["type"], 1)
    pattern, content = part["pattern"], part["content"]
    if "String" in pattern:
        return max(1, math.ceil(len(content) / max(1, len(pattern["String"]))))
    if _SEARCHES.search(pattern["Regex"]):
        raise ValueError("its decoder searches by a regular expression that can take any time")
    return 1 + len(content)  # it may match between two characters
