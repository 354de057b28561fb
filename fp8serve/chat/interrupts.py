"""Ctrl-C while the engine computes: a step is finished first, because half a step would leave the engine
inconsistent."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def held_interrupts() -> Iterator[Callable[[], bool]]:
    """While the block runs, the first SIGINT only makes the function true; a second one has its usual effect."""
    seen: list[int] = []
    usual = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, usual)
