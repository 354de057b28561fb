"""Turns tokens into text that may be shown: no half characters, and no stop string however it is split over tokens.

Text is held back while it could be the beginning of a stop string. The stop string that ends the text is the one that
is completed first (the longest, if several are completed by the same character), so the result does not depend on where
the borders between tokens lie. No torch.
"""

from collections.abc import Callable
from typing import Protocol

from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import TokenizerError


class Decoding(Protocol):
    """What `Tokenizer.stream()` returns: whole characters only."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """The text of one request. After `stopped` is set, nothing more comes out."""

    def __init__(self, decoding: Decoding | None, params: SamplingParams) -> None:
        self._decoding = decoding
        self._stop = params.stop
        self._shows_end = params.include_stop_str_in_output
        self._unarmed = params.min_tokens  # tokens during which a stop string is ordinary text
        self._held = ""
        self.stopped: str | None = None
        self.failure: str | None = None  # the sentence that says why the tokens cannot be decoded
        self.settled = 0  # characters that the last token made certain

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes certain."""
        self._unarmed -= 1
        delta = self._decoded(lambda decoding: decoding.push(token_id))
        self.settled = len(delta)
        return self._pass(delta)

    def end(self, token_id: int) -> str:
        """The rest of the text, when `token_id` ends the request."""
        self.settled = 0
        return (self.push(token_id) if self._shows_end else "") + self.flush()

    def flush(self) -> str:
        """The rest of the text, when the request ends for another reason than a stop string."""
        if self.stopped is not None:
            return ""
        text = self._pass(self._decoded(lambda decoding: decoding.flush()))
        return text if self.stopped is not None else text + self._held

    def _decoded(self, step: Callable[[Decoding], str]) -> str:
        """What the decoder gives out; nothing more once it has failed."""
        if self._decoding is None or self.failure is not None:
            return ""
        try:
            return step(self._decoding)
        except TokenizerError as error:
            self.failure = str(error)
            return ""

    def _pass(self, delta: str) -> str:
        self._held += delta
        keep = self._search() if self._stop and self._unarmed < 0 else len(self._held)
        text, self._held = self._held[:keep], self._held[keep:]
        return text

    def _search(self) -> int:
        """How much of the text held back is certain; sets `stopped` when a stop string is complete."""
        ends = [(start + len(stop), -len(stop), stop) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        if ends:
            end, _, self.stopped = min(ends)
            return end if self._shows_end else end - len(self.stopped)
        return len(self._held) - max(self._overlap(stop) for stop in self._stop)

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the text held back with which a stop string begins."""
        longest = min(len(self._held), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
