"""Reports the progress of a long run stage by stage, and measures the seconds of each stage."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Progress = Callable[[str, int, int], None]  # (stage, done, total)
T = TypeVar("T")


class Stages:
    """Measures the seconds of each stage and calls `progress`, if given, before the stage and after each step."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Runs the body of the `with` statement as a stage of one step."""
        for _ in self.steps(name, [None]):
            yield

    def steps(self, name: str, items: Sequence[T]) -> Iterator[T]:
        """Yields the items of a stage and reports one step after each."""
        started = time.perf_counter()
        self._report(name, 0, len(items))
        for completed, item in enumerate(items, 1):
            yield item
            self._report(name, completed, len(items))
        elapsed = self.seconds.get(name, 0.0) + time.perf_counter() - started  # one stage may run several times
        self.seconds[name] = round(elapsed, 3)

    def total(self) -> float:
        """Returns the seconds since this object was created."""
        return round(time.perf_counter() - self._started, 3)

    def _report(self, name: str, completed: int, total: int) -> None:
        if self._progress is not None:
            self._progress(name, completed, total)
