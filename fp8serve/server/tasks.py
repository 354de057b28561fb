"""Ending asyncio tasks."""

import asyncio
import contextlib
from typing import Any


async def cancel(task: "asyncio.Future[Any]") -> None:
    """Cancels and waits until the task has really ended."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
