"""The cost of leaving a `Monitor` on: training steps with and without it, taking turns in one process.

A step is a forward and a backward pass of a decoder under the delayed recipe, without an optimizer, which would only
make the monitor's share smaller. A round is `every` steps, so that each round with the monitor has one in which it
counts values, and `every` calls of `step()`, which read all states. Rounds with and without alternate. Other work on
the machine can only make a round slower, so the fastest rounds are compared. Because a fastest round is a single
number, the median of the differences between neighbouring rounds is given, too.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from fp8serve.bench.options import Shape
from fp8serve.bench.workload import parameters, random_batch, random_decoder
from fp8serve.fp8.monitor import Monitor
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.train.forward import Forward, PackedBatch, summed_loss

Tell = Callable[[str, int, int], None]  # (what, done, in all)


def measure(tell: Tell, *, shape: Shape, rows: int = 4, seq_len: int = 128, every: int = 16, rounds: int = 10) -> Any:
    """Milliseconds of a step with and without a monitor, in the fastest and the median round, and its share in percent.

    rows: sequences of `seq_len` tokens in a step. every: the monitor counts values at every `every`-th step.
    """
    decoder, batch = random_decoder(shape, seq_len), random_batch(shape, rows, seq_len)
    forward = Forward(decoder, DelayedScaling())
    _round(forward, batch, every)  # scales settle, memory is taken
    times: dict[str, list[float]] = {"without": [], "with": []}
    for i in range(rounds):
        times["without"].append(_round(forward, batch, every))
        with Monitor(forward.network, every=every) as monitor:
            times["with"].append(_round(forward, batch, every, monitor))
        tell("rounds", i + 1, rounds)
    counted = {"tokens": rows * seq_len, "linears": len(decoder.linear_names()), "every": every}
    return {**counted, "parameters": parameters(decoder), "rounds": rounds, **summary(times)}


def summary(times: Mapping[str, list[float]]) -> dict[str, float]:
    """From the rounds' seconds a step: fastest and median in ms, and the cost of the monitor in percent of a step."""
    without, with_monitor = times["without"], times["with"]
    added = median(b - a for a, b in zip(without, with_monitor, strict=True))
    return {
        "fastest_without_ms": 1e3 * min(without),
        "fastest_with_ms": 1e3 * min(with_monitor),
        "fastest_share_percent": 100 * (min(with_monitor) / min(without) - 1),
        "median_without_ms": 1e3 * median(without),
        "median_with_ms": 1e3 * median(with_monitor),
        "median_share_percent": 100 * added / median(without),
    }


def _round(forward: Forward, batch: PackedBatch, every: int, monitor: Monitor | None = None) -> float:
    """Seconds a step, over `every` steps."""
    began = time.perf_counter()
    for _ in range(every):
        loss, _ = summed_loss(forward.logits(batch), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        forward.network.zero_grad(set_to_none=True)
        if monitor is not None:
            monitor.step()
    return (time.perf_counter() - began) / every
