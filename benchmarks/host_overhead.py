"""The host's time for the forward and backward pass of one Linear, by recipe: python -m benchmarks.host_overhead

A GPU computes while Python launches, so a layer whose launches take longer than its kernels runs at Python's pace. The
layer here is so small (32 -> 32 over 16 tokens, BF16, one thread of a CPU, histories of 16) that its kernels cost next
to nothing, and what is left is the host's time. Recipes take turns; the figure is the median of `--rounds` rounds of
`--repeats` passes, in microseconds of the processor. "torch" is nn.Linear, "bf16" a converted layer outside of
`autocast`. `--profile NAME` prints what one of them spends its time on instead. Prints JSON.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fp8serve import Linear, autocast
from fp8serve.fp8.recipe import Recipe, from_name

RECIPES = ("bf16", "delayed", "current", "rowwise", "block")
FEATURES, TOKENS = 32, 16


class Arm:
    """One layer, with an input and the gradient of its output."""

    def __init__(self, layer: nn.Module, recipe: Recipe | None) -> None:
        self.layer, self.recipe = layer, recipe
        self.x = torch.randn(TOKENS, FEATURES, dtype=torch.bfloat16, requires_grad=True)
        self.dy = torch.randn(TOKENS, FEATURES, dtype=torch.bfloat16)

    def _context(self) -> AbstractContextManager[object]:
        return nullcontext() if self.recipe is None else autocast(recipe=self.recipe)

    def run(self) -> None:
        """One forward and backward pass."""
        with self._context():
            y: Tensor = self.layer(self.x)
        y.backward(self.dy)

    def us(self, repeats: int) -> float:
        """Microseconds of a pass, the mean of `repeats`."""
        begin = time.process_time()
        for _ in range(repeats):
            self.run()
        return (time.process_time() - begin) / repeats * 1e6


def recipe(name: str) -> Recipe | None:
    return from_name(name, **({"amax_history_len": 16} if name == "delayed" else {}))


def arms() -> dict[str, Arm]:
    options: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16}
    arms_by_name = {"torch": Arm(nn.Linear(FEATURES, FEATURES, **options), None)}
    return arms_by_name | {name: Arm(Linear(FEATURES, FEATURES, **options), recipe(name)) for name in RECIPES}


def profile(arm: Arm, repeats: int) -> None:
    arm.us(repeats)
    with cProfile.Profile() as profiler:
        arm.us(repeats)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--profile", choices=("torch", *RECIPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    every = arms()
    if options.profile is not None:
        profile(every[options.profile], options.rounds * options.repeats)
        return
    times: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(options.rounds):
        for name, arm in every.items():
            times[name].append(arm.us(options.repeats))
    print(json.dumps({name: round(statistics.median(us), 1) for name, us in times.items()}))


if __name__ == "__main__":
    main()
