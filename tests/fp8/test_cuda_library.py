"""Which GPUs and drivers the library of CUDA kernels runs on, and the messages for others."""

from pathlib import Path

import pytest
import torch

from fp8serve.calibration.checks import check_device as check_for_calibration
from fp8serve.engine.loading import check_device as check_for_serving
from fp8serve.errors import MachineError
from fp8serve.fp8 import cuda_support, ops
from fp8serve.fp8.cuda_support import CudaBuild, check_gpu, incompatibility, read_build, slowdown

ALL = CudaBuild(("sm_89", "sm_90a", "sm_100f", "sm_120f"), (13, 0))


def test_read_build_reads_the_architectures_and_the_toolkit(tmp_path: Path) -> None:
    library = tmp_path / "libfp8serve_cuda.so"
    marks = b"fp8serve-cuda-architectures=sm_89+sm_100f;fp8serve-cuda-runtime=13.0.88;"
    library.write_bytes(b"\x7fELF" + bytes(5000) + marks + bytes(99))
    assert read_build(library) == CudaBuild(("sm_89", "sm_100f"), (13, 0))
    library.write_bytes(b"of an older build")
    assert read_build(library) == CudaBuild()


@pytest.mark.parametrize(
    ("capability", "runs", "slow"),
    [(80, False, False), (86, False, False), (89, True, False), (90, True, False), (100, True, False),
     (103, True, False), (110, True, True), (120, True, False), (121, True, False)],
)  # fmt: skip
def test_which_chips_run_and_which_are_slow(capability: int, runs: bool, slow: bool) -> None:
    assert (incompatibility(ALL, "A", capability, None) is None) == runs
    assert (slowdown(ALL, "A", capability) is not None) == slow


def test_a_chip_of_the_same_family_runs_with_a_warning_that_it_is_slow() -> None:
    built = CudaBuild(("sm_89", "sm_100a", "sm_120a"))
    for capability in (103, 121):
        assert incompatibility(built, "B300", capability, None) is None
        assert "uses the slowest GEMM" in str(slowdown(built, "B300", capability))
    assert slowdown(built, "B200", 100) is None
    assert incompatibility(CudaBuild(("sm_100a",)), "B300", 103, None) is not None


@pytest.mark.parametrize(("driver", "runs"), [(None, True), ((12, 9), False), ((13, 0), True), ((14, 1), True)])
def test_a_driver_older_than_the_toolkit_is_refused(driver: tuple[int, int] | None, runs: bool) -> None:
    message = incompatibility(ALL, "A", 90, driver)
    assert (message is None) == runs
    if message is not None:
        assert message == (
            "the driver of A is for CUDA 12.9 and the CUDA kernels were built with CUDA 13.0; update the driver, or "
            "build them with an older toolkit."
        )


@pytest.fixture
def a100(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "libfp8serve_cuda.so"
    library.write_bytes(b"fp8serve-cuda-architectures=sm_89+sm_90a;fp8serve-cuda-runtime=13.0.88;")
    monkeypatch.setitem(ops.LIBRARIES, "cuda", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    monkeypatch.setattr(cuda_support, "driver_version", lambda: (13, 0))


@pytest.mark.usefixtures("a100")
@pytest.mark.parametrize("check", [check_for_serving, check_for_calibration])
def test_an_ampere_is_refused_in_a_sentence_before_any_op(check: object) -> None:
    with pytest.raises(MachineError, match=r"^The CUDA kernels were built for sm_89 sm_90a and not for NVIDIA A100"):
        check("cuda")  # type: ignore[operator]


@pytest.mark.usefixtures("a100")
def test_without_a_library_every_gpu_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    check_gpu(torch.device("cpu"))
    monkeypatch.setitem(ops.LIBRARIES, "cuda", None)
    check_gpu(torch.device("cuda"))
