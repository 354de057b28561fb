"""The fixture `kernels` runs a test on a GPU (mark `gpu`) and on the emulated GPU, which needs only a C++ compiler."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.fp8 import ops
from tests.cuda import emulated


@dataclass(frozen=True)
class Kernels:
    """The ops of one device. Arguments come from the CPU, and results are compared there."""

    ops: Any
    device: str

    def here(self, value: Any) -> Any:
        """Moves tensors to this device, also in lists and tuples; returns other values unchanged."""
        if isinstance(value, list | tuple):
            return type(value)(self.here(v) for v in value)
        return value.to(self.device) if isinstance(value, Tensor) else value

    def run(self, op: str, *args: Any) -> Any:
        """Runs an op on arguments from the CPU; returns its results on the CPU."""
        result = getattr(self.ops, op)(*self.here(args))
        return tuple(t.cpu() for t in result) if isinstance(result, tuple) else result.cpu()


DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("emulated", marks=pytest.mark.emulator)]


def kernels_on(device: str) -> Kernels:
    if device == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        assert ops.LIBRARIES["cuda"] is not None, "there is a GPU, but libfp8serve_cuda.so was not built"
        return Kernels(torch.ops.fp8serve, "cuda")
    if emulated.COMPILER is None:
        pytest.skip("no C++ compiler")
    return Kernels(emulated.ops(), "cpu")


@pytest.fixture(autouse=True)
def default_switches() -> Iterator[None]:
    """Restores the switches of the emulated GPU after a test."""
    yield
    if emulated.emulator.cache_info().currsize:
        emulated.emulator().restore_switches()


@pytest.fixture(params=DEVICES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_on(request.param)


@pytest.fixture
def gpu() -> Kernels:
    """A real GPU, for tests that are too slow for the emulated one."""
    return kernels_on("cuda")


# For tests of engine and training: they run on a GPU, and on the CPU so that the tests themselves are tested.
on_both = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"], indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)
