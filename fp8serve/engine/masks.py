"""Finds the tokens that may come next in answers of a given form, while the model computes the step.

A mask depends only on what was generated before the step, so its computation starts with the step, and it is read when
the logits are ready. One thread makes it beside the forward pass, row by row. On a CPU that thread takes time from the
model; the library's own pool of threads would take more of it for the same masks.

A mask is the library's bit for each token, which an op reads as it is (fp8/ops/sampling.py).
"""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance.numpy import fill_next_token_bitmask, get_bitmask_shape
from numpy.typing import NDArray

from fp8serve.engine.grammar import Matcher
from fp8serve.engine.sequence import Sequence


class Mask:
    """The mask of the `rows` of a step that have a form; `allowed` waits until it is ready."""

    def __init__(self, rows: list[int], allowed: Future[NDArray[np.int32]]) -> None:
        self.rows, self._allowed = rows, allowed

    def allowed(self) -> NDArray[np.int32]:
        """[rows, ceil(vocab / 32)]: a bit for each token, set where it may come; the lowest bit of a word first."""
        return self._allowed.result()


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

    def _find(self, matchers: list[Matcher]) -> NDArray[np.int32]:
        bits = np.empty(get_bitmask_shape(len(matchers), self._vocab_size), np.int32)
        for row, matcher in enumerate(matchers):
            fill_next_token_bitmask(matcher.parser, bits, row)
        return bits
