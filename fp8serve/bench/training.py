"""Benchmarks of training steps on a decoder with random weights.

`measure_steps` compares recipes with BF16. A step is what the trainer does for a batch: forward and backward pass,
gradient norm and clipping, and AdamW on FP32 master weights. BF16 uses the same decoder with its weights cast to BF16,
so only the linear layers differ. Recipes and BF16 take turns in one process. Other work on the machine can only make a
step slower, so the fastest steps are compared. The median of the ratios of neighbouring steps is reported, too.

`measure_monitor` compares steps with and without a `Monitor`. A step is a forward and backward pass with the delayed
recipe. There is no optimizer, which would only make the monitor's share smaller. A round is `every` steps, in one of
which the monitor counts FP8 values. Rounds with and without the monitor alternate. The fastest rounds are compared, and
the median of the differences of neighbouring rounds is reported, too.
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

Report = Callable[[str, int, int], None]  # called with a name, the done and the total number of rounds
BASELINE = "bf16"


def random_decoder(shape: Shape, context: int) -> Decoder:
    """Returns a decoder with FP32 master weights and tied embeddings, whose linear layers are converted for FP8. It
    takes sequences of at most `context` tokens."""
    torch.manual_seed(0)
    config = llama_config(context=context, **asdict(shape))
    decoder = Decoder(parse_config(config), dtype=torch.float32)
    convert(decoder)
    return decoder


def random_batch(shape: Shape, rows: int, seq_len: int) -> PackedBatch:
    """Returns `rows` sequences of `seq_len` random tokens. Every token has the next one as its target."""
    tokens = torch.randint(shape.vocab_size, (rows * seq_len,), generator=torch.Generator().manual_seed(0))
    indices = torch.arange(rows * seq_len)
    return PackedBatch(tokens, indices % seq_len, [seq_len] * rows, indices, tokens.roll(-1))


def parameters(decoder: Decoder) -> int:
    return sum(p.numel() for p in decoder.parameters())


def measure_steps(
    report: Report, *, shape: Shape, recipes: Sequence[str], rows: int = 4, seq_len: int = 128, rounds: int = 10
) -> Any:
    """Measures a step with each recipe and in BF16. A step has `rows` sequences of `seq_len` tokens. Returns
    milliseconds and the speed-up over BF16. Raises RecipeError for an unknown recipe."""
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
    # the first round is dropped, because it allocates memory and computes the first scales
    measured = {name: seconds[1:] for name, seconds in times.items()}
    sizes = {"tokens": rows * seq_len, "parameters": parameters(decoder), "rounds": rounds}
    return {**sizes, "steps": step_summary(measured)}


def step_summary(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Returns the fastest and the median step of each recipe in milliseconds, and their speed-ups over the baseline."""
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
    start = time.perf_counter()
    loss, _ = summed_loss(forward.logits(batch), batch.targets)
    (loss / len(batch.targets)).backward()  # type: ignore[no-untyped-call]
    optimizer.accumulate_in_fp32()
    optimizer.step(1e-5)
    return time.perf_counter() - start


def measure_monitor(
    report: Report, *, shape: Shape, rows: int = 4, seq_len: int = 128, every: int = 16, rounds: int = 10
) -> Any:
    """Measures a step with and without a monitor that counts values in every `every`-th step. A step has `rows`
    sequences of `seq_len` tokens. Returns milliseconds and the share of the monitor in percent."""
    decoder, batch = random_decoder(shape, seq_len), random_batch(shape, rows, seq_len)
    forward = Forward(decoder, DelayedScaling())
    _round(forward, batch, every)  # a warm-up, which allocates memory and computes the first scales
    times: dict[str, list[float]] = {"without": [], "with": []}
    for i in range(rounds):
        times["without"].append(_round(forward, batch, every))
        with Monitor(forward.network, every=every) as monitor:
            times["with"].append(_round(forward, batch, every, monitor))
        report("rounds", i + 1, rounds)
    sizes = {"tokens": rows * seq_len, "linears": len(decoder.linear_names()), "every": every}
    return {**sizes, "parameters": parameters(decoder), "rounds": rounds, **monitor_summary(times)}


def monitor_summary(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Returns the fastest and the median step in milliseconds, and the cost of the monitor in percent of a step.
    `times` are seconds for each step, averaged over a round."""
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
    start = time.perf_counter()
    for _ in range(every):
        loss, _ = summed_loss(forward.logits(batch), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        forward.network.zero_grad(set_to_none=True)
        if monitor is not None:
            monitor.step()
    return (time.perf_counter() - start) / every
