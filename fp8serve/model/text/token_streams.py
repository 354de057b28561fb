"""Decodes the tokens of one output, one after another. The returned texts concatenate to the text of all tokens.

The texts of single tokens cannot simply be concatenated: a character may span several tokens, and SentencePiece
vocabularies drop a leading space at the beginning of a text only. A stream withholds text that later tokens may change:
  * with byte-level BPE, a U+FFFD at the end, which may be the beginning of a character;
  * with byte fallback (`<0xE4>` tokens), a run of byte tokens, which the library decodes as a whole.

With byte-level BPE, which most vocabularies are, the text is the UTF-8 text of all bytes of the tokens. `ByteStream`
decodes them itself, in a sixth of the time that `WindowStream` needs with the library, and returns the same texts.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8serve.model.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_WINDOW, _SHORT_WINDOW = 256, 8  # tokens of a window before and after it is shortened


class ByteStream:
    """Decodes a byte-level vocabulary. `bytes_of` returns the bytes of a token; `hidden_ids` have no text."""

    def __init__(self, bytes_of: Callable[[int], bytes], hidden_ids: Collection[int]) -> None:
        self._bytes_of, self._hidden_ids = bytes_of, hidden_ids
        self._incomplete = b""  # the beginning of a character
        self._withheld = ""  # a final U+FFFD that no later byte changes, withheld because `WindowStream` withholds it

    def push(self, token_id: int) -> str:
        """Adds a token and returns the new text that no later token can change, which may be empty."""
        if token_id in self._hidden_ids:
            return ""
        data = self._incomplete + self._bytes_of(token_id)
        text, length = utf_8_decode(data, "replace", False)
        self._incomplete = data[length:]
        if self._incomplete[:1] == b"\xed" and self._incomplete[1:] >= b"\xa0":  # a surrogate, which is never valid
            text, self._incomplete = text + 2 * _REPLACEMENT, b""
        text, self._withheld = self._withheld + text, ""
        if text.endswith(_REPLACEMENT) and not self._incomplete:
            text, self._withheld = text[:-1], _REPLACEMENT
        return text

    def flush(self) -> str:
        """Returns the withheld text at the end of the output and resets the decoder."""
        text = self._withheld + utf_8_decode(self._incomplete, "replace", True)[0]
        self._incomplete, self._withheld = b"", ""
        return text


class WindowStream:
    """Decodes with any tokenizer. For every new token, it decodes a window of tokens, which begins with those of the
    last returned text."""

    def __init__(self, tokenizer: "Tokenizer", skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special_tokens
        self._window: list[int] = []  # begins with the tokens of the last returned text, as context
        self._context = 0  # number of context tokens in the window
        self._returned = 0  # number of characters of the window's text that were returned

    def push(self, token_id: int) -> str:
        """Adds a token and returns the new text that no later token can change, which may be empty."""
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_byte_token(token_id):
            return ""
        text = self._text()
        is_incomplete = text.endswith(_REPLACEMENT)
        new_text = text[self._returned : len(text) - 1] if is_incomplete else text[self._returned :]
        self._returned += len(new_text)
        if new_text and not is_incomplete:
            del self._window[: self._context]  # the tokens of `new_text` are the next context
            self._context = len(self._window)
            self._returned = len(self._text())
        elif len(self._window) > _MAX_WINDOW:
            self._shorten_window(text)
        return new_text

    def flush(self) -> str:
        """Returns the withheld text at the end of the output and resets the decoder."""
        withheld = self._text()[self._returned :] if self._window else ""
        self._window, self._context, self._returned = [], 0, 0
        return withheld

    def _shorten_window(self, text: str) -> None:
        """Drops all but the last tokens of the window if they decode to the end of `text`. Without this, the window
        would grow with every token that is empty or only a part of a character."""
        last_tokens = self._window[-_SHORT_WINDOW:]
        suffix, withheld = self._tokenizer.decode(last_tokens, self._skip_special), len(text) - self._returned
        if text.endswith(suffix) and withheld <= len(suffix):
            self._window, self._context, self._returned = last_tokens, 0, len(suffix) - withheld

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special)


def _byte_symbols() -> dict[str, int]:
    """Returns the byte for each printable character that represents a byte in a byte-level BPE vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(unprintable)}


_BYTE_SYMBOLS = _byte_symbols()


def byte_level_bytes(piece: str) -> bytes:
    """Returns the bytes of a vocabulary entry; an entry with a character that represents no byte is an added token."""
    if all(symbol in _BYTE_SYMBOLS for symbol in piece):
        return bytes(_BYTE_SYMBOLS[symbol] for symbol in piece)
    return piece.encode()
