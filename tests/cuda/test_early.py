"""Early launches: kernels that may start before earlier launches have ended (programmatic dependent launch).

test_races.py detects kernels that read results of earlier kernels before they wait.
"""

import re
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("annotated_types")

from benchmarks import gpu_decode
from tests.cuda import emulated
from tests.cuda.conftest import kernels_on
from tests.cuda.test_decoding import on_emulated_kernels
from tests.cuda.test_emulated_decoding import LAUNCHES_OF_A_LAYER

ANY_TENSOR = torch.zeros(1)
CHIPS = {"Ada": (89, 142, 99 * 1024), "Hopper": (90, 132, 227 * 1024), "B200": (100, 148, 227 * 1024)}
SOURCES = emulated.ROOT / "csrc/cuda"


@pytest.fixture
def gpu() -> Iterator[emulated.Emulator]:
    kernels_on("emulated")
    gpu = emulated.emulator()
    yield gpu
    gpu.set_chip(89, 4, 99 * 1024)


@pytest.mark.emulator
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("off", ["none", "overlap"])
def test_every_launch_of_a_decoding_step_is_early_if_the_chip_supports_it(
    gpu: emulated.Emulator, monkeypatch: pytest.MonkeyPatch, chip: str, off: str
) -> None:
    on_emulated_kernels(monkeypatch)
    gpu.set_chip(*CHIPS[chip])
    gpu.ops.gemm_kernels(ANY_TENSOR, off)
    step = gpu_decode.DecodeStep("cpu", dry=True)
    gpu.starts()
    step(0)
    launches = gpu.starts()
    assert len(launches) >= 2 * (LAUNCHES_OF_A_LAYER - 2)  # norms are cast by products, because all switches are on
    assert {early for _, early in launches} == {chip != "Ada" and off == "none"}, launches


@pytest.mark.emulator
def test_a_kernel_that_never_waits_is_refused(gpu: emulated.Emulator) -> None:
    assert gpu.launch_impatient() == ""
    gpu.set_chip(*CHIPS["Hopper"])
    assert gpu.launch_impatient() == (
        "emulator: a kernel that was launched early ends without waiting for those before"
    )


def kernels_that_wait() -> dict[str, str]:
    """Returns the source code before the wait for earlier kernels, by "file: kernel"."""
    code_by_kernel = {}
    for path in sorted(SOURCES.glob("*.cu")):
        for name, body in re.findall(
            r"__global__ [^;{]*?\b((?!__)\w+)\([^;{]*\{\n(.*?)^\}", path.read_text(), re.M | re.S
        ):
            before, wait, _ = body.partition("after_earlier_kernels();")
            if wait:
                code_by_kernel[f"{path.name}: {name}"] = before.strip()
    return code_by_kernel


def test_kernels_wait_first() -> None:
    """Before the wait, kernels may only prefetch weights; test_races.py checks that these are no results of kernels."""
    code_by_kernel = kernels_that_wait()
    assert len(code_by_kernel) > 20
    assert {name: code.split(";\n  ") for name, code in code_by_kernel.items() if code} == {
        "gemm_skinny.cu: gemm_stream": [
            "const BlockRows rows = Output::rows(g, to)",
            "Prefetcher<kGroups, From> prefetcher(g, rows)",
            "prefetcher.prefetch_early();",
        ]
    }
