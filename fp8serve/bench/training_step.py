"""A whole training step under a recipe and in BF16, taking turns in one process on one model.

A step is what the trainer does for a batch: forward and backward pass, gradient norm and clipping, AdamW on the FP32
masters. BF16 runs the same decoder with its weights cast to BF16, so the two differ in the linears alone. The machine's
speed drifts, and other work can only make a step slower, so the fastest steps are compared, and the median of the
ratios of neighbouring steps.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from fp8serve.bench.options import Shape
from fp8serve.bench.workload import parameters, random_batch, random_decoder
from fp8serve.fp8.recipe import from_name
from fp8serve.model.building import Model
from fp8serve.train.config import TrainConfig
from fp8serve.train.forward import Forward, PackedBatch, summed_loss
from fp8serve.train.optimizer import Optimizer

Tell = Callable[[str, int, int], None]  # (what, done, in all)
BASELINE = "bf16"


def measure(
    tell: Tell, *, shape: Shape, recipes: Sequence[str], rows: int = 4, seq_len: int = 128, rounds: int = 10
) -> Any:
    """Milliseconds of a step under each recipe and in BF16, and how many times as fast as BF16 that is.

    rows: sequences of `seq_len` tokens in a step. RecipeError for an unknown name.
    """
    decoder, batch = random_decoder(shape, seq_len), random_batch(shape, rows, seq_len)
    optimizer = Optimizer(
        dict(decoder.named_parameters()), TrainConfig(model="random", data=("random",), out="nowhere")
    )
    forwards = {name: _forward(decoder, name) for name in (BASELINE, *recipes)}
    times: dict[str, list[float]] = {name: [] for name in forwards}
    for i in range(rounds + 1):
        for name, forward in forwards.items():
            times[name].append(_step(forward, batch, optimizer))
        tell("rounds", i, rounds)
    settled = {name: seconds[1:] for name, seconds in times.items()}  # the first takes memory and settles scales
    counted = {"tokens": rows * seq_len, "parameters": parameters(decoder), "rounds": rounds}
    return {**counted, "steps": summary(settled)}


def summary(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
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


def _forward(decoder: Model, name: str) -> Forward:
    return Forward(decoder, from_name(name))


def _step(forward: Forward, batch: PackedBatch, optimizer: Optimizer) -> float:
    """Seconds."""
    began = time.perf_counter()
    loss, _ = summed_loss(forward.logits(batch), batch.targets)
    (loss / len(batch.targets)).backward()  # type: ignore[no-untyped-call]
    optimizer.collect()
    optimizer.step(1e-5)
    return time.perf_counter() - began
