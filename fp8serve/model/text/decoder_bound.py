"""What a tokenizer's decoder may do, so that the text of a token is of a known size and costs a known time.

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
from typing import Any

import tokenizers

MAX_TOKEN_CHARS = 16_384
_SEARCHES = re.compile(r"[*+?{(|]|\\[1-9kg]")  # what makes the time of a regular expression grow
_FACTORS = {"WordPiece": 2, "CTC": 2, "BPEDecoder": 2}  # they may put a space beside every character


def check_decoder(backend: tokenizers.Tokenizer, entries: list[str]) -> None:
    """ValueError: the decoder could yield too much text of one of `entries`, take too long, or fail."""
    longest = max(map(len, entries), default=0)
    own = backend.get_vocab(with_added_tokens=False)
    if len(set(own.values())) < len(own):
        raise ValueError("several entries of its vocabulary have one id, which then has no certain text")
    factor = math.prod(map(_factor, _parts(backend)))
    if longest * factor > MAX_TOKEN_CHARS:
        raise ValueError(
            f"its decoder could make {longest * factor} characters of one token, and {MAX_TOKEN_CHARS} are the most"
        )


def _parts(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder's own description, sequences flattened."""
    return [] if backend.decoder is None else _flat(json.loads(backend.decoder.__getstate__()))


def _flat(description: dict[str, Any]) -> list[dict[str, Any]]:
    if description["type"] != "Sequence":
        return [description]
    return [part for inner in description["decoders"] for part in _flat(inner)]


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
