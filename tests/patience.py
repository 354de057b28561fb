"""Waiting for a condition on a machine of any speed: only a hang reaches the limit PATIENCE."""

import asyncio
import inspect
import time
from collections.abc import Callable

PATIENCE = 600.0
"""Seconds. Less than pytest's own limit (pyproject.toml), so that the test itself says what it waited for."""


def until(condition: Callable[[], object], what: str = "what this test waits for") -> None:
    """Returns once `condition()` is true. Raises AssertionError, which names `what`, after PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {PATIENCE:.0f} s"
        time.sleep(0.02)


async def eventually(condition: Callable[[], object], what: str = "what this test waits for") -> None:
    """`until` for coroutines: other tasks run meanwhile. If `condition()` returns an awaitable, it is awaited."""
    end = time.monotonic() + PATIENCE
    while not (await result if inspect.isawaitable(result := condition()) else result):
        assert time.monotonic() < end, f"{what} did not come within {PATIENCE:.0f} s"
        await asyncio.sleep(0.01)
