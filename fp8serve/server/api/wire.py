"""What all families of routes write in the same way: the base of answer models, and numbers that JSON can hold."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, with_config

JsonObject = dict[str, Any]
LOWEST_LOGPROB = -9999.0
EVENTS = "text/event-stream"
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            EVENTS: {
                "schema": {
                    "type": "object",
                    "description": "Of each event of the stream.",
                    "required": ["data"],
                    "properties": {name: {"type": "string"} for name in ("data", "event", "id")},
                }
            }
        }
    }
}
"""The description of a stream of events, for `responses` of a route that can answer with one."""


class Answer(BaseModel):
    """The base of every object in an answer. Objects are closed: a field that its class lacks is an error."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), json_schema_serialization_defaults_required=True)


closed = with_config(extra="forbid")
"""Closes a TypedDict, the form of objects of which an answer has thousands: checking one makes no instance."""


class CachedTokens(Answer):
    cached_tokens: int


def absent() -> Any:
    """The default of a field that is left out of the answer while it is None."""
    return Field(None, exclude_if=lambda value: value is None)


def finite(logprob: float) -> float:
    """A finite number for one that may be minus infinity, which JSON does not have."""
    return max(logprob, LOWEST_LOGPROB)
