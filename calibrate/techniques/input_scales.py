"""Scales for inputs by a search for the smallest error of outputs, instead of for their largest value.

A scale for the largest value seen cuts nothing off, and the smallest values underflow. A smaller range gives these more
of the format's steps and cuts off a few large ones. The effect on a layer's output depends on its weights, and large
values matter: in many models they are at the first token of every text. So the search reads the calibration text once
more and takes the one of RANGES, fractions of the largest value, with the least sum over tokens of
|(cast(x) - x) W^T|^2.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fp8serve.calibration.data import Batch, first_sequences
from fp8serve.calibration.passes import Linears, forward, hooks
from fp8serve.calibration.progress import Stages
from fp8serve.calibration.techniques.precision import groups
from fp8serve.fp8.ops.arithmetic import FP8_MAX
from fp8serve.model.building import Model

Amaxes = dict[str, float]  # by the name of a tensor, such as "model.layers.0.mlp.down_proj.input"
E4M3 = torch.float8_e4m3fn
RANGES = tuple(2 ** (-k / 4) for k in range(9))  # from all of the range that was seen down to a quarter of it
SEARCHED_TOKENS = 2048  # tokens of the calibration text: the search multiplies each by every range


@torch.no_grad()
def searched_amaxes(
    decoder: Model,
    linears: Linears,
    batches: Sequence[Batch],
    seen: Mapping[str, float],
    stages: Stages | None = None,
) -> Amaxes:
    """For the input of each of `linears`, the fraction of its largest value, in `seen`, whose scale moves outputs
    least."""
    alike = {names[0]: names for names in groups(linears)}
    errors = {name: torch.zeros(len(RANGES), dtype=torch.float64) for name in alike}

    def measure(name: str, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        wide = torch.cat([linears[n].weight.float() for n in alike[name]])
        squares = wide.t() @ wide
        for i, part in enumerate(RANGES):
            scale = FP8_MAX[E4M3] / (part * seen[f"{name}.input"])
            error = (rows * scale).clamp(-FP8_MAX[E4M3], FP8_MAX[E4M3]).to(E4M3).float() / scale - rows
            errors[name][i] += float(((error @ squares) * error).sum(dtype=torch.float64))

    for batch in (stages or Stages()).steps("search", first_sequences(batches, SEARCHED_TOKENS)):
        with _inputs(linears, measure):
            forward(decoder, batch)
    return _for_all(linears, {name: RANGES[int(e.argmin())] * seen[f"{name}.input"] for name, e in errors.items()})


def _for_all(linears: Linears, firsts: Mapping[str, float]) -> Amaxes:
    """The results for the first linear of every group, given to all of the group."""
    return {f"{name}.input": firsts[names[0]] for names in groups(linears) for name in names}


def _inputs(linears: Linears, look: Callable[[str, Tensor], None]) -> AbstractContextManager[None]:
    """Inside, `look` sees the input of the first linear of every group."""

    def make(name: str) -> Callable[..., None]:
        return lambda linear, args, out: look(name, args[0])

    return hooks({names[0]: linears[names[0]] for names in groups(linears)}, make)
