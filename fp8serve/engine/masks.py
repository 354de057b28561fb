"""Finds the tokens that may come next in answers of a given form, while the model computes the step.

A mask depends only on what was generated before the step, so its computation starts with the step, and it is read when
the logits are ready. One thread makes it beside the forward pass, row by row. On a CPU that thread takes time from the
model; the library's own pool of threads would take more of it for the same masks.

A mask is a ceiling for every logit, infinity or minus infinity, because torch takes the minimum of two tensors faster
than it fills by a mask. The library gives a bit for each token; a table maps each byte of them to eight FP32 ceilings.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance.numpy import fill_next_token_bitmask, get_bitmask_shape
from numpy.typing import NDArray

from fp8serve.engine.grammar import Matcher
from fp8serve.engine.sequence import Sequence

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
CEILINGS = np.where(_BITS, np.float32(np.inf), np.float32(-np.inf))
"""FP32 [256, 8]: the ceilings of eight tokens, by the byte whose bits say which of them may come."""


class Mask:
    """The mask of the `rows` of a step that have a form; `ceilings` waits until it is ready."""

    def __init__(self, rows: list[int], ceilings: Future[NDArray[np.float32]]) -> None:
        self.rows, self._ceilings = rows, ceilings

    def ceilings(self) -> NDArray[np.float32]:
        """FP32 [rows, vocab]: minus infinity for tokens that must not come, infinity for all others."""
        return self._ceilings.result()


class Masks:
    """Makes the masks of one engine's steps."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, seqs: list[Sequence]) -> Mask | None:
        """Starts the mask of a step; None if no row has a form. No token may be accepted before the mask is ready."""
        pairs = [(row, seq.constraint) for row, seq in enumerate(seqs) if seq.constraint is not None]
        if not pairs:
            return None
        return Mask([row for row, _ in pairs], self._thread.submit(self._find, [matcher for _, matcher in pairs]))

    def _find(self, matchers: list[Matcher]) -> NDArray[np.float32]:
        """[rows, vocab], in the form that the sampler applies directly: the step would wait for any conversion."""
        bits = np.empty(get_bitmask_shape(len(matchers), self._vocab_size), np.int32)
        for row, matcher in enumerate(matchers):
            fill_next_token_bitmask(matcher.parser, bits, row)
        return CEILINGS.take(bits.view(np.uint8), axis=0).reshape(len(matchers), -1)[:, : self._vocab_size]
