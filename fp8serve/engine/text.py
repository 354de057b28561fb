"""Decodes generated tokens incrementally and stops at stop strings. The returned text never contains an incomplete
character, or a part of a stop string that is excluded from the output.

Text is held back while it may be the beginning of a stop string. The first stop string to be completed ends the text;
if one character completes several, the longest counts. So the result does not depend on how the text is divided into
tokens. This module does not import torch.
"""

from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import TokenizerError
from fp8serve.model.text.token_streams import ByteStream, WindowStream


class TextStream:
    """The text of one request. `tokens` is the result of `Tokenizer.stream`, which returns complete characters only.
    After a stop string has set `stopped`, no more text is returned."""

    def __init__(self, tokens: ByteStream | WindowStream | None, params: SamplingParams) -> None:
        self._tokens = tokens
        self._stop = params.stop
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens_left = params.min_tokens  # unless it is negative, stop strings are ordinary text
        self._buffer = ""  # text that is held back
        self.stopped: str | None = None  # the stop string that ended the text
        self.failure: str | None = None  # a message, if the tokens cannot be decoded
        self.settled_chars = 0  # characters that the last token completed

    def push(self, token_id: int) -> str:
        """Appends a token and returns the text that can be released."""
        self._min_tokens_left -= 1
        delta = ""
        if self._tokens is not None and self.failure is None:
            try:
                delta = self._tokens.push(token_id)
            except TokenizerError as error:
                self.failure = str(error)
        self.settled_chars = len(delta)
        return self._release(delta) if self._stop else delta

    def end(self, token_id: int) -> str:
        """Returns the remaining text after `token_id`, a stop token or end-of-text, has ended the request."""
        self.settled_chars = 0
        return (self.push(token_id) if self._includes_stop else "") + self.flush()

    def flush(self) -> str:
        """Returns the remaining text after the request has ended for any other reason."""
        if self.stopped is not None:
            return ""
        text = self._release(self._flush_tokens())
        return text if self.stopped is not None else text + self._buffer

    def _flush_tokens(self) -> str:
        """Returns the tokenizer's remaining text. Returns no text without a tokenizer or after a failure."""
        if self._tokens is None or self.failure is not None:
            return ""
        try:
            return self._tokens.flush()
        except TokenizerError as error:
            self.failure = str(error)
            return ""

    def _release(self, delta: str) -> str:
        """Adds `delta` to the buffer and removes the text from it that can be released."""
        self._buffer += delta
        length = self._releasable() if self._stop and self._min_tokens_left < 0 else len(self._buffer)
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        return text

    def _releasable(self) -> int:
        """Returns how many characters of the buffer can be released. Sets `stopped` if a stop string is complete."""
        ends = [(start + len(stop), -len(stop), stop) for stop in self._stop if (start := self._buffer.find(stop)) >= 0]
        if ends:
            end, _, self.stopped = min(ends)
            return end if self._includes_stop else end - len(self.stopped)
        return len(self._buffer) - max(self._overlap(stop) for stop in self._stop)

    def _overlap(self, stop: str) -> int:
        """Returns the length of the longest suffix of the buffer that is a prefix of the stop string."""
        longest = min(len(self._buffer), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if self._buffer.endswith(stop[:n])), 0)
