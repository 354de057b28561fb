"""The trace that a request belongs to, as its `traceparent` header says (W3C Trace Context, level 1).

    00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01    version, trace id, parent's span id, flags

A header that is not valid, or comes twice, is ignored, as the specification demands. A newer version of the header may
have more fields after these.
"""

import re
from typing import NamedTuple

from starlette.types import Scope

_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


class TraceContext(NamedTuple):
    """The caller's span. `trace_id` has 32 hexadecimal digits and `span_id` 16."""

    trace_id: str
    span_id: str


def trace_context(scope: Scope) -> TraceContext | None:
    """The trace context of the request; None if it has none."""
    found = [value for name, value in scope["headers"] if name == b"traceparent"]
    match = _HEADER.fullmatch(found[0].decode("latin-1").strip()) if len(found) == 1 else None
    if match is None:
        return None
    version, trace_id, span_id, _, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id)
