"""Notices a training loop that runs inside one `autocast`, where delayed scales would never be updated.

Delayed states are updated when the outermost context ends (autocast.py), so that any number of forward passes can be
one step. A whole loop inside one context therefore trains with the scales it began with: 1, on a fresh model, at which
most gradients are below E5M2's smallest number. It looks like training that does not learn. In a loop, unlike in
accumulation, one optimizer steps twice with FP8 layers running in between; a hook of torch reports the steps. Different
optimizers that step once each, such as a generator's and a discriminator's, are not a loop.
"""

import threading
import warnings
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class LoopWatch:
    """Watches one outermost context of one thread, from the first amax that is staged in it until `close`."""

    def __init__(self) -> None:
        self._staged = 0
        self._staged_at_step: WeakKeyDictionary[Optimizer, int] | None = None  # of optimizers that stepped

    def staged(self) -> None:
        """Note that a forward pass staged an amax."""
        if self._staged == 0:
            _LOCAL.watch = self
        self._staged += 1

    def close(self) -> None:
        """Stop watching."""
        if _LOCAL.watch is self:
            _LOCAL.watch = None

    def stepped(self, optimizer: Optimizer) -> None:
        """Warn if this is the optimizer's second step, with something staged in between."""
        if self._staged_at_step is None:
            self._staged_at_step = WeakKeyDictionary()
        if self._staged_at_step.get(optimizer, self._staged) < self._staged:
            warnings.warn(
                f"{type(optimizer).__name__} stepped twice inside one autocast, which updates delayed scales only when "
                "the outermost context ends; open the context anew for every step, around the forward pass.",
                stacklevel=5,
            )
        self._staged_at_step[optimizer] = self._staged


class _Local(threading.local):
    """Per thread: the watcher of its outermost context."""

    watch: LoopWatch | None = None


_LOCAL = _Local()


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    if _LOCAL.watch is not None:
        _LOCAL.watch.stepped(optimizer)


# Registered once per process: other threads must not change torch's hooks while torch iterates over them.
register_optimizer_step_post_hook(_stepped)
