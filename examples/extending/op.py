"""Add an op: `fp8serve::count_zeros`, how many elements of an FP8 tensor are zero. docs/extending/op.md explains it.

python examples/extending/op.py
"""

from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.inputs import random_fp8
from fp8serve.fp8.ops.registry import Case, cases, define, reference


# The reference: what the op means, in plain PyTorch. Every kernel is held to its bits.
def count_zeros(q: Tensor) -> Tensor:
    """q FP8 [M, K] -> int64 []: the elements that are zero, with either sign."""
    return (q.float() == 0).sum()


# The fake kernel: shapes and types alone, for torch.compile and for tensors on "meta".
def _fake_count(q: Tensor) -> Tensor:
    return q.new_empty((), dtype=torch.int64)


# The cases: inputs on which the tests hold every kernel to the reference. Ragged and empty shapes belong to them.
def _count_cases() -> list[Case]:
    def make(rows: int, cols: int, dtype: torch.dtype) -> tuple[Any, ...]:
        q = random_fp8(rows, cols, dtype, 1)
        q[:, ::3] = 0
        return (q,)

    shapes, dtypes = ((64, 256), (17, 33), (1, 1), (0, 8)), (torch.float8_e4m3fn, torch.float8_e5m2)
    return [Case(f"{r} x {c}, {d}", lambda r=r, c=c, d=d: make(r, c, d)) for r, c in shapes for d in dtypes]


define("count_zeros(Tensor q) -> Tensor", count_zeros, fake=_fake_count, cases=_count_cases, kernel_devices=("cpu",))


def check() -> int:
    """Hold the op to the rules that the tests hold every op to, and return the number of cases."""
    op = torch.ops.fp8serve.count_zeros.default
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    for case in cases("count_zeros"):
        torch.library.opcheck(op, case.make(), test_utils=checks)
        assert torch.equal(op(*case.make()), reference.count_zeros(*case.make())), case.name
    return len(cases("count_zeros"))


if __name__ == "__main__":
    print(f"count_zeros: {check()} cases, by the reference")
