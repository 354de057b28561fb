"""The error of a cast: E4M3, E5M2 and INT8 on Gaussian values, on Gaussian values with outliers, and on activations.

Every tensor is quantized with a scale from its own amax, once for the whole tensor and once per row, and dequantized.
SQNR = 10 log10(sum x^2 / sum (x - x_dq)^2) in dB, sums in FP64. Because a few outliers have most of the power, the SQNR
of the other elements is given, too: it shows what an outlier costs its neighbours. INT8 is symmetric, round to nearest
even, -127..127: a uniform grid, which is best for values of one magnitude; FP8 has finer steps near zero.

Known result (Kuzmin et al. 2022, van Baalen et al. 2023): INT8 wins on Gaussian values, FP8 E4M3 as soon as there are
outliers, E5M2 never on well-behaved tensors.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fp8serve.calibration.data import Batch
from fp8serve.calibration.passes import Linears, forward
from fp8serve.fp8.ops import dequantize, quantize
from fp8serve.model.building import Model

ROWS, COLUMNS = 1024, 1024
OUTLIER = 50.0  # how much larger an outlier is
GRANULARITIES = ("tensor", "row")


def sqnr_db(exact: Tensor, rounded: Tensor) -> float:
    """Returns the SQNR of `rounded` in dB; infinite if it equals `exact`."""
    wide = exact.double()
    noise = float((wide - rounded.double()).square().sum())
    return 10 * math.log10(float(wide.square().sum()) / noise) if noise else math.inf


def _fp8(fmt: str) -> Callable[[Tensor, str], Tensor]:
    return lambda x, granularity: dequantize(*quantize(x, fmt=fmt, granularity=granularity))  # type: ignore[arg-type]


def int8(x: Tensor, granularity: str) -> Tensor:
    """x [M, K] through INT8 and back."""
    amax = x.abs().amax(1, keepdim=True) if granularity == "row" else x.abs().amax()
    scale = torch.where(amax > 0, 127 / amax, torch.ones_like(amax))
    return (x * scale).round().clamp(-127, 127) / scale


FORMATS: Mapping[str, Callable[[Tensor, str], Tensor]] = {"e4m3": _fp8("e4m3"), "e5m2": _fp8("e5m2"), "int8": int8}


def gaussian(outliers: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns (FP32 values [1024, 1024], a mask of the outliers). The standard deviation is 1; the outliers, a fraction
    `outliers` of all, are 50 times as large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    is_outlier = torch.rand(ROWS, COLUMNS, generator=generator) < outliers
    return torch.where(is_outlier, OUTLIER * x, x), is_outlier


def synthetic() -> Iterable[dict[str, Any]]:
    """One row of figures per distribution, format and granularity."""
    for name, fraction in (("gaussian", 0.0), ("1 % outliers", 0.01), ("5 % outliers", 0.05)):
        x, is_outlier = gaussian(fraction)
        for fmt, cast in FORMATS.items():
            for granularity in GRANULARITIES:
                dequantized = cast(x, granularity)
                yield {
                    "tensor": name,
                    "format": fmt,
                    "granularity": granularity,
                    "sqnr_db": sqnr_db(x, dequantized),
                    "ordinary_sqnr_db": sqnr_db(x[~is_outlier], dequantized[~is_outlier]),
                }


def activations(decoder: Model, linears: Linears, batch: Batch) -> Iterable[dict[str, Any]]:
    """The SQNR of casting the inputs of all linears on one batch: a row for each format and granularity, with the
    median layer and the worst."""
    sqnr_by_format: dict[tuple[str, str], dict[str, float]] = {(f, g): {} for f in FORMATS for g in GRANULARITIES}

    def watch(name: str) -> Callable[..., None]:
        def hook(linear: nn.Module, args: tuple[Tensor]) -> None:
            x = args[0].detach().float().flatten(0, -2)
            for (fmt, granularity), by_linear in sqnr_by_format.items():
                by_linear[name] = sqnr_db(x, FORMATS[fmt](x, granularity))

        return hook

    handles = [linear.register_forward_pre_hook(watch(name)) for name, linear in linears.items()]
    with torch.no_grad():
        forward(decoder, batch)
    for handle in handles:
        handle.remove()
    for (fmt, granularity), by_linear in sqnr_by_format.items():
        worst = min(by_linear, key=lambda name: by_linear[name])
        yield {
            "tensor": f"inputs of {len(by_linear)} linears",
            "format": fmt,
            "granularity": granularity,
            "sqnr_db": median(by_linear.values()),
            "worst_sqnr_db": by_linear[worst],
            "worst": worst,
        }
