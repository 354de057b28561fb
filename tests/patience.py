"""Waiting for what must come, on a machine of any speed: only a hang takes as long as PATIENCE."""

import asyncio
import inspect
import time
from collections.abc import Callable

PATIENCE = 600.0
"""Seconds. Less than pytest's own limit (pyproject.toml), so that the test itself says what did not come."""


def until(condition: Callable[[], object], what: str = "what this test waits for") -> None:
    """Return once `condition()` holds. AssertionError when it does not within PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {PATIENCE:.0f} s"
        time.sleep(0.02)


async def eventually(condition: Callable[[], object], what: str = "what this test waits for") -> None:
    """`until` on an event loop, which goes on meanwhile. What `condition()` returns is awaited where it can be."""
    end = time.monotonic() + PATIENCE
    while not (await held if inspect.isawaitable(held := condition()) else held):
        assert time.monotonic() < end, f"{what} did not come within {PATIENCE:.0f} s"
        await asyncio.sleep(0.01)
