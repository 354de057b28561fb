"""How a model that embeds or scores reads a text, or a pair of texts, and how much of it is read at most.

The longer text of a pair is cut first, as in sentence-transformers. Within a prompt that judges a pair, the document is
cut, because the prompt must stay whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fp8serve.model.text.tokenizer import Tokenizer

EncodedText = tuple[list[int], list[int]]  # ids, and 0 or 1 for each: its text in a pair


@dataclass(frozen=True)
class TextRequest:
    """most: tokens to read in all; None: no limit. document: tokens of the second text, or of the only one, before
    that. before: the beginning of the only text that does not count as document. around: the texts before a pair,
    between its texts and after them."""

    first: str
    second: str | None = None
    most: int | None = None
    document: int | None = None
    around: Sequence[str] | None = None
    before: str = ""

    @property
    def is_cut(self) -> bool:
        return self.most is not None or self.document is not None


def read_text(tokenizer: Tokenizer, request: TextRequest) -> EncodedText:
    """The ids. They may be more than the model reads, if nothing is to be cut or a prompt leaves no room."""
    first, second = request.first, request.second
    if request.document is not None and second is None:
        prompt = tokenizer.encode(request.before, add_special_tokens=False) if request.before else []
        first = tokenizer.beginning(first, request.document + len(prompt))
    elif request.document is not None and second is not None:
        second = tokenizer.beginning(second, request.document)
    if second is None or request.around is None:
        return tokenizer.encode_pair(first, second, request.most)
    before, between, behind = request.around
    ids = _judged(tokenizer, f"{before}{first}{between}", second, behind, request.most)
    return ids, [0] * len(ids)


def _judged(tokenizer: Tokenizer, before: str, document: str, behind: str, most: int | None) -> list[int]:
    """`before`, as much of the document as fits, and `behind`."""
    if most is None:
        return tokenizer.encode(f"{before}{document}{behind}")
    room = most - len(tokenizer.encode(before + behind))
    while room > 0:  # tokens may differ where texts meet; rarely more than one round
        ids = tokenizer.encode(f"{before}{tokenizer.beginning(document, room)}{behind}")
        if len(ids) <= most:
            return ids
        room -= len(ids) - most
    return tokenizer.encode(before + behind)
