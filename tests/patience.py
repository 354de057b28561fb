"""Waiting for what must come, on a machine of any speed: only a hang takes as long as PATIENCE."""

import time
from collections.abc import Callable

PATIENCE = 240.0
"""Seconds. Less than pytest's own limit (pyproject.toml), so that the test itself says what did not come."""


def until(condition: Callable[[], object], what: str = "what this test waits for") -> None:
    """Return once `condition()` holds. AssertionError when it does not within PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {PATIENCE:.0f} s"
        time.sleep(0.02)
