"""The stage and progress of a long run, and the time of each stage. The caller decides how they are shown."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Progress = Callable[[str, int, int], None]  # (stage, done, total)
T = TypeVar("T")


class Stages:
    """Times stages and reports steps; without a `progress` function it only times."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage that is one step."""
        for _ in self.steps(name, [None]):
            yield

    def steps(self, name: str, items: Sequence[T]) -> Iterator[T]:
        """The items of a stage, reported after each has been worked on."""
        started = time.perf_counter()
        self._report(name, 0, len(items))
        for done, item in enumerate(items, 1):
            yield item
            self._report(name, done, len(items))
        spent = self.seconds.get(name, 0.0) + time.perf_counter() - started  # a stage may come more than once
        self.seconds[name] = round(spent, 3)

    def total(self) -> float:
        """Seconds since this object was made."""
        return round(time.perf_counter() - self._started, 3)

    def _report(self, name: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(name, done, total)
