"""A function of one BF16 number, as a table of all its values."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.fakes import fake_like_first
from fp8serve.fp8.ops.inputs import hostile, normal
from fp8serve.fp8.ops.registry import Case, define


def look_up(x: Tensor, table: Tensor) -> Tensor:
    """x BF16 [M, K] and table BF16 [65536] -> [M, K]: for each element the table's entry at the integer with its
    bits."""
    places = x.contiguous().view(torch.uint16).int()
    return table.index_select(0, places.view(-1)).view(x.shape)  # a fifth of the time of indexing by []


def _case(kind: str) -> tuple[Any, ...]:
    """All entries of the table differ: each is its index read as a BF16 number, negated."""
    table = torch.arange(2**16).to(torch.int16).roll(2**15).view(torch.bfloat16)
    dtype = torch.bfloat16
    inputs = {
        "hostile": lambda: hostile(dtype).nan_to_num(0.0, torch.inf, -torch.inf),  # NaN equals nothing
        "odd": lambda: normal(5, 70, dtype),
        "rows apart": lambda: normal(9, 64, dtype)[:, 3:36],
        "no rows": lambda: normal(0, 16, dtype),
        "several tasks": lambda: normal(130, 1032, dtype),
    }
    return inputs[kind](), table


def _cases() -> list[Case]:
    return [Case(kind, partial(_case, kind)) for kind in ("hostile", "odd", "rows apart", "no rows", "several tasks")]


define("look_up(Tensor x, Tensor table) -> Tensor", look_up, fake=fake_like_first, cases=_cases, kernels=("cpu",))
