"""Fixtures for the CPU library. `level` runs a test with the kernels of every instruction set of this machine."""

from collections.abc import Iterator

import pytest
import torch

from fp8serve.fp8 import ops
from fp8serve.fp8.ops import LEVELS


@pytest.fixture(autouse=True)
def library() -> None:
    if ops.LIBRARIES["cpu"] is None:
        pytest.skip("libfp8serve_cpu.so was not built")


def is_present(level: str) -> bool:
    """Returns whether this machine has the instructions of `level`."""
    if ops.LIBRARIES["cpu"] is None:
        return False
    active = torch.ops.fp8serve.cpu_isa(level)
    torch.ops.fp8serve.cpu_isa("best")
    return bool(active == level)


ABSENT = [level for level in LEVELS if not is_present(level)]
SLOW_DOT = ["avx512bf16+slow_dot"] if is_present("avx512bf16") else []
"""The cap under which products of many rows use FMAs instead of the BF16 dot product."""


@pytest.fixture(
    params=[pytest.param(cap, marks=pytest.mark.skip(reason=f"this machine has no {cap}")) for cap in ABSENT]
    + [cap for cap in LEVELS if cap not in ABSENT]
    + SLOW_DOT
)
def level(request: pytest.FixtureRequest, library: None) -> Iterator[str]:
    cap: str = request.param
    torch.ops.fp8serve.cpu_isa(cap)
    yield cap
    torch.ops.fp8serve.cpu_isa("best")


@pytest.fixture
def threads() -> Iterator[None]:
    """Lets a test change torch's thread count."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
