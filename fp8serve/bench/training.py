"""Training steps on a decoder with random weights: under a recipe and in BF16, and with a `Monitor` and without.

A whole step is what the trainer does for a batch: forward and backward pass, gradient norm and clipping, AdamW on the
FP32 masters. BF16 runs the same decoder with its weights cast to BF16, so the two differ in the linears alone. The
kinds take turns in one process. The machine's speed drifts, and other work can only make a step slower, so the fastest
steps are compared, and the median of the ratios of neighbouring steps.

The monitor is measured over forward and backward passes under the delayed recipe, without an optimizer, which would
only make its share smaller. A round is `every` steps, so that each round with the monitor has one in which it counts
values, and `every` calls of `step()`, which read all states. Rounds with and without alternate; the fastest rounds are
compared, and, because a fastest round is a single number, the median of the differences between neighbouring rounds.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from fp8serve.bench.options import Shape
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.monitor import Monitor
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.config.decoder import parse_config
from fp8serve.model.network.decoder import Decoder
from fp8serve.train.config import TrainConfig
from fp8serve.train.forward import Forward, PackedBatch, summed_loss
from fp8serve.train.optimizer import Optimizer
from fp8serve.train.scratch import llama_config

Report = Callable[[str, int, int], None]  # (what, done, in all)
BASELINE = "bf16"


def random_decoder(shape: Shape, context: int) -> Decoder:
    """FP32 masters, linears converted for FP8, tied embeddings; for sequences of at most `context` tokens."""
    torch.manual_seed(0)
    config = llama_config(context=context, **asdict(shape))
    decoder = Decoder(parse_config(config), dtype=torch.float32)
    convert(decoder)
    return decoder


def random_batch(shape: Shape, rows: int, seq_len: int) -> PackedBatch:
    """`rows` sequences of `seq_len` random tokens; every one predicts the next."""
    tokens = torch.randint(shape.vocab_size, (rows * seq_len,), generator=torch.Generator().manual_seed(0))
    every = torch.arange(rows * seq_len)
    return PackedBatch(tokens, every % seq_len, [seq_len] * rows, every, tokens.roll(-1))


def parameters(decoder: Decoder) -> int:
    return sum(p.numel() for p in decoder.parameters())


def measure_steps(
    report: Report, *, shape: Shape, recipes: Sequence[str], rows: int = 4, seq_len: int = 128, rounds: int = 10
) -> Any:
    """Milliseconds of a step under each recipe and in BF16, and how many times as fast as BF16 that is.

    rows: sequences of `seq_len` tokens in a step. RecipeError for an unknown name.
    """
    decoder, batch = random_decoder(shape, seq_len), random_batch(shape, rows, seq_len)
    optimizer = Optimizer(
        dict(decoder.named_parameters()), TrainConfig(model="random", data=("random",), out="nowhere")
    )
    forwards = {name: Forward(decoder, from_name(name)) for name in (BASELINE, *recipes)}
    times: dict[str, list[float]] = {name: [] for name in forwards}
    for i in range(rounds + 1):
        for name, forward in forwards.items():
            times[name].append(_step(forward, batch, optimizer))
        report("rounds", i, rounds)
    settled = {name: seconds[1:] for name, seconds in times.items()}  # the first takes memory and settles scales
    counted = {"tokens": rows * seq_len, "parameters": parameters(decoder), "rounds": rounds}
    return {**counted, "steps": step_summary(settled)}


def step_summary(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """From each one's seconds: fastest and median in ms, and both relative to the baseline's (above 1 is faster)."""
    base = times[BASELINE]
    return {
        name: {
            "fastest_ms": 1e3 * min(seconds),
            "median_ms": 1e3 * median(seconds),
            "fastest_x_bf16": min(base) / min(seconds),
            "median_x_bf16": median(b / s for b, s in zip(base, seconds, strict=True)),
        }
        for name, seconds in times.items()
    }


def _step(forward: Forward, batch: PackedBatch, optimizer: Optimizer) -> float:
    """Seconds."""
    began = time.perf_counter()
    loss, _ = summed_loss(forward.logits(batch), batch.targets)
    (loss / len(batch.targets)).backward()  # type: ignore[no-untyped-call]
    optimizer.collect()
    optimizer.step(1e-5)
    return time.perf_counter() - began


def measure_monitor(
    report: Report, *, shape: Shape, rows: int = 4, seq_len: int = 128, every: int = 16, rounds: int = 10
) -> Any:
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
        report("rounds", i + 1, rounds)
    counted = {"tokens": rows * seq_len, "linears": len(decoder.linear_names()), "every": every}
    return {**counted, "parameters": parameters(decoder), "rounds": rounds, **monitor_summary(times)}


def monitor_summary(times: Mapping[str, list[float]]) -> dict[str, float]:
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
