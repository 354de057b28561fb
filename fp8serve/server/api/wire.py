"""What all families of routes write in the same way."""

from typing import Any

LOWEST_LOGPROB = -9999.0
STREAM_RESPONSE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}, "application/json": {}}}}
"""For FastAPI's description of a route that answers as a whole or as a stream."""


def finite(logprob: float) -> float:
    """A finite number for one that may be minus infinity, which JSON does not have."""
    return max(logprob, LOWEST_LOGPROB)
