"""The messages from the engine process to the server: JSON objects, and one binary frame for the tokens of a step.

    message   kind (uint8), length of the payload in bytes (uint32), payload
    JSON      an object with the field "event"
    TOKENS    count (uint32), then `count` stream numbers, `count` token ids, and `count` lengths of text in bytes (all
              uint32), then the texts, in UTF-8, without separators

All numbers are little-endian. The client numbers its requests (`stream`), and JSON messages about a request have its
number, too. A frame has the outputs that are nothing but one more token and its text (PlainToken in sequence.py); the
client knows all their other fields from earlier outputs. Each takes 12 bytes and the text, where JSON takes about 120.
All other outputs are JSON. Nothing is unpickled, and a payload that does not match its
lengths raises MessageError. This module does not import torch.
"""

import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MAX_MESSAGE_BYTES = 2**26  # worker.py splits longer messages
_HEADER = struct.Struct("<BI")
_COUNT = struct.Struct("<I")
_JSON, _TOKENS = 1, 2

JsonMessage = dict[str, Any]


class MessageError(ValueError):
    """The bytes are not a message of this module."""


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """One more token, and the text that it released, for each of some streams. A stream may occur several times."""

    streams: Sequence[int]
    token_ids: Sequence[int]
    texts: Sequence[str]


def encode_json(event: str, fields: dict[str, Any]) -> bytes:
    """Encodes a JSON message."""
    payload = json.dumps({"event": event, **fields}, separators=(",", ":")).encode()
    return _HEADER.pack(_JSON, len(payload)) + payload


def encode_tokens(streams: Sequence[int], token_ids: Sequence[int], texts: Sequence[str]) -> bytes:
    """Encodes a frame with one token and its text for each of the given streams."""
    count, text = len(streams), "".join(texts)
    lengths = map(len, texts if text.isascii() else map(str.encode, texts))
    payload = struct.pack(f"<{3 * count + 1}I", count, *streams, *token_ids, *lengths) + text.encode()
    return _HEADER.pack(_TOKENS, len(payload)) + payload


class MessageReader:
    """Divides the bytes of a connection into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def is_complete(self) -> bool:
        """Whether the bytes so far end with a complete message."""
        return not self._buffer

    def feed(self, data: bytes) -> Iterator[tuple[JsonMessage | TokenFrame, int]]:
        """Adds bytes that were received. Yields each message that is complete, and its size. Raises MessageError, or
        ValueError or RecursionError for invalid JSON."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._buffer)
            if kind not in (_JSON, _TOKENS) or length > MAX_MESSAGE_BYTES:
                raise MessageError(f"A message of kind {kind} with {length} bytes is not known.")
            if len(self._buffer) < _HEADER.size + length:
                return
            payload = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
            del self._buffer[: _HEADER.size + length]
            yield _decode_json(payload) if kind == _JSON else _decode_tokens(payload), length


def _decode_json(payload: bytes) -> JsonMessage:
    message = json.loads(payload)
    if not isinstance(message, dict):
        raise MessageError("A JSON message is not an object.")
    return message


def _decode_tokens(payload: bytes) -> TokenFrame:
    if len(payload) < _COUNT.size:
        raise MessageError("A frame has no count.")
    (count,) = _COUNT.unpack_from(payload)
    start = _COUNT.size * (1 + 3 * count)
    if len(payload) < start:
        raise MessageError(f"A frame of {count} tokens has only {len(payload)} bytes.")
    numbers = struct.unpack_from(f"<{3 * count}I", payload, _COUNT.size)
    lengths = numbers[2 * count :]
    if len(payload) != start + sum(lengths):
        raise MessageError(f"The texts of a frame have {sum(lengths)} bytes, and {len(payload) - start} were sent.")
    data = payload[start:]
    ends = list(itertools.accumulate(lengths, initial=0))
    if data.isascii():
        text = data.decode()
        texts = [text[start:end] for start, end in itertools.pairwise(ends)]
    else:
        texts = [data[start:end].decode() for start, end in itertools.pairwise(ends)]
    return TokenFrame(numbers[:count], numbers[count : 2 * count], texts)
