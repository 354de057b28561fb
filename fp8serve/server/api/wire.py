"""What both families of routes write alike."""

from typing import Any

LOWEST_LOGPROB = -9999.0
STREAM_RESPONSE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}, "application/json": {}}}}
"""For FastAPI's description of a route that answers as a whole or as a stream."""


def finite(logprob: float) -> float:
    """JSON has no minus infinity."""
    return max(logprob, LOWEST_LOGPROB)
