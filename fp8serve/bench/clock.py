"""Timing on a machine that is never completely idle: candidates take turns, and the fastest call of each counts.

Other work can only make a call slower, so the minimum is the cost of the code; and because candidates alternate within
one process, a slow minute affects all of them. Where a person waits (latencies), percentiles are given, never the mean.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence

Call = Callable[[], object]


def fastest(candidates: Mapping[str, Call], seconds: float) -> dict[str, float]:
    """Seconds of the fastest call of each, taking turns for about `seconds` in all and at least three rounds."""
    found = dict.fromkeys(candidates, math.inf)
    for call in candidates.values():
        call()
    began, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - began < seconds:
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            found[name] = min(found[name], time.perf_counter() - start)
        rounds += 1
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed; NaN when there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def latencies(values: Sequence[float]) -> dict[str, float]:
    """Milliseconds at the 50th, 90th and 99th percentile of `values` in seconds."""
    return {f"p{round(100 * share)}_ms": 1e3 * percentile(values, share) for share in (0.5, 0.9, 0.99)}
