"""Which tokens may come next in answers of a given form, found while the model computes the step.

A mask depends only on what was generated before the step, so its computation starts with the step, and it is read when
the logits are there. The library fills the masks of all rows in one call without Python's lock: on a CPU that takes
about 50 microseconds a row of JSON, in a thread beside the forward pass.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from fp8serve.engine.grammar import Matcher
from fp8serve.engine.sequence import Sequence


class Mask:
    """The mask of the `rows` of a step that have a form; `forbidden` waits until it is ready."""

    def __init__(self, rows: list[int], forbidden: Future[NDArray[np.bool_]]) -> None:
        self.rows, self._forbidden = rows, forbidden

    def forbidden(self) -> NDArray[np.bool_]:
        """[rows, vocab]: True for tokens that must not come."""
        return self._forbidden.result()


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
        return Mask([row for row, _ in pairs], self._thread.submit(self._fill, [matcher for _, matcher in pairs]))

    def _fill(self, matchers: list[Matcher]) -> NDArray[np.bool_]:
        """[rows, vocab], in the form that the sampler applies directly: the step would wait for any conversion."""
        bits = allocate_token_bitmask(len(matchers), self._vocab_size)
        fill_next_token_bitmask_par(self._executor, [(m.parser, row) for row, m in enumerate(matchers)], bits)
        packed = np.invert(bits, out=bits).view(np.uint8)
        return np.unpackbits(packed, axis=1, count=self._vocab_size, bitorder="little").view(np.bool_)

    @cached_property
    def _executor(self) -> LLExecutor:
        """Its threads are started with the first mask."""
        return LLExecutor()
