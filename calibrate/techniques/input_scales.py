"""Searches the scales of inputs that give the smallest error of outputs.

With a scale for the largest value no value saturates, but the smallest values underflow. A scale for a smaller range
represents small values more precisely, and a few large values saturate. The effect on a layer's output depends on its
weights. Large values matter: in many models they occur at the first token of every text. So the search runs the
calibration text once more. From RANGE_FRACTIONS it selects the fraction of the largest value that has the smallest sum
over tokens of |(cast(x) - x) W^T|^2.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fp8serve.calibration.data import Batch, first_sequences
from fp8serve.calibration.passes import Linears, forward, forward_hooks
from fp8serve.calibration.progress import Stages
from fp8serve.calibration.techniques.precision import input_groups
from fp8serve.fp8.ops.arithmetic import FP8_MAX
from fp8serve.model.building import Model

Amaxes = dict[str, float]  # by the name of a tensor, such as "model.layers.0.mlp.down_proj.input"
E4M3 = torch.float8_e4m3fn
RANGE_FRACTIONS = tuple(2 ** (-k / 4) for k in range(9))  # from 1 to 1/4 of the largest value
SEARCH_TOKENS = 2048  # of the calibration text; every token is multiplied once for each range


@torch.no_grad()
def searched_amaxes(
    decoder: Model,
    linears: Linears,
    batches: Sequence[Batch],
    amaxes: Mapping[str, float],
    stages: Stages | None = None,
) -> Amaxes:
    """Returns amaxes of the linears' inputs, fractions of the observed `amaxes`, with the smallest output error."""
    by_first = {names[0]: names for names in input_groups(linears)}
    first_linears = {name: linears[name] for name in by_first}
    errors = {name: torch.zeros(len(RANGE_FRACTIONS), dtype=torch.float64) for name in by_first}

    def add_errors(name: str, linear: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        rows = args[0].reshape(-1, args[0].shape[-1]).float()
        weights = torch.cat([linears[n].weight.float() for n in by_first[name]])
        products = weights.t() @ weights
        for i, fraction in enumerate(RANGE_FRACTIONS):
            scale = FP8_MAX[E4M3] / (fraction * amaxes[f"{name}.input"])
            error = (rows * scale).clamp(-FP8_MAX[E4M3], FP8_MAX[E4M3]).to(E4M3).float() / scale - rows
            errors[name][i] += float(((error @ products) * error).sum(dtype=torch.float64))

    for batch in (stages or Stages()).steps("search", first_sequences(batches, SEARCH_TOKENS)):
        with forward_hooks(first_linears, add_errors):
            forward(decoder, batch)
    best = {name: RANGE_FRACTIONS[int(e.argmin())] * amaxes[f"{name}.input"] for name, e in errors.items()}
    return {f"{name}.input": best[first] for first, names in by_first.items() for name in names}
