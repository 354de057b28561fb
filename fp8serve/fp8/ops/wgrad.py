"""The gradient of a weight with few rows or columns: a product whose sum is over tokens."""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.inputs import normal
from fp8serve.fp8.ops.registry import Case, define


def wgrad(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x: BF16 [T, N] and [T, K] -> FP32 [N, K], accumulated in FP32.

    For an adapter, whose N or K is its rank. A matrix product of FP32 copies takes longer to make these than to
    multiply.
    """
    with torch.autocast(dy.device.type, enabled=False):
        return dy.float().t() @ x.float()


def _fake(dy: Tensor, x: Tensor) -> Tensor:
    return dy.new_empty((dy.shape[1], x.shape[1]), dtype=torch.float32)


def _case(tokens: int, n: int, k: int) -> tuple[Any, ...]:
    return normal(tokens, n, torch.bfloat16), normal(tokens, k, torch.bfloat16, 1)


def _cases() -> list[Case]:
    grid = product((0, 1, 37, 600), ((8, 130), (3, 64), (16, 1), (0, 5)))
    return [Case(f"{t} x {n} x {k}", partial(_case, t, n, k)) for t, (n, k) in grid]


define("wgrad(Tensor dy, Tensor x) -> Tensor", wgrad, fake=_fake, cases=_cases, kernels=("cpu",))
