"""Tokenizes a text, or a pair of texts, for a model that embeds or scores, and truncates it.

The longer text of a pair is truncated first, as in sentence-transformers. If a prompt surrounds the pair, only the
document is truncated, because the prompt must stay complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fp8serve.model.text.tokenizer import Tokenizer

EncodedText = tuple[list[int], list[int]]  # token ids, and for each token 0 or 1: its text in the pair


@dataclass(frozen=True)
class TextRequest:
    """A text or a pair of texts, and how it is truncated.

    Args:
        first: The only text, or the first text of a pair.
        second: The second text of a pair, which is the document.
        max_tokens: The largest number of tokens in all, or None for no limit.
        max_document_tokens: The largest number of tokens of the document, which is the second or the only text.
        prompt_parts: The texts before a pair, between its texts and after it, if a prompt surrounds the pair.
        prefix: The beginning of the only text that is not a part of the document.
    """

    first: str
    second: str | None = None
    max_tokens: int | None = None
    max_document_tokens: int | None = None
    prompt_parts: Sequence[str] | None = None
    prefix: str = ""

    @property
    def is_truncated(self) -> bool:
        return self.max_tokens is not None or self.max_document_tokens is not None


def encode_text(tokenizer: Tokenizer, request: TextRequest) -> EncodedText:
    """Returns the token ids. They may exceed the context if nothing is truncated or the prompt alone is too long."""
    first, second = request.first, request.second
    if request.max_document_tokens is not None and second is None:
        prompt = tokenizer.encode(request.prefix, add_special_tokens=False) if request.prefix else []
        first = tokenizer.truncate_text(first, request.max_document_tokens + len(prompt))
    elif request.max_document_tokens is not None and second is not None:
        second = tokenizer.truncate_text(second, request.max_document_tokens)
    if second is None or request.prompt_parts is None:
        return tokenizer.encode_pair(first, second, request.max_tokens)
    before, between, after = request.prompt_parts
    ids = _encode_with_prompt(tokenizer, f"{before}{first}{between}", second, after, request.max_tokens)
    return ids, [0] * len(ids)


def _encode_with_prompt(
    tokenizer: Tokenizer, before: str, document: str, after: str, max_tokens: int | None
) -> list[int]:
    """Encodes `before`, as much of the document as fits, and `after`."""
    if max_tokens is None:
        return tokenizer.encode(f"{before}{document}{after}")
    room = max_tokens - len(tokenizer.encode(before + after))
    while room > 0:  # joined texts may have other tokens than their parts; one round is usually enough
        ids = tokenizer.encode(f"{before}{tokenizer.truncate_text(document, room)}{after}")
        if len(ids) <= max_tokens:
            return ids
        room -= len(ids) - max_tokens
    return tokenizer.encode(before + after)
