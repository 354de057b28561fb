"""The self-check on the emulated GPU: every kernel agrees, a kernel without its waits does not, and the next kernel
replaces it."""

import re
from collections.abc import Iterator

import pytest
import torch

from fp8serve.fp8.ops import OPS, cases, compiled_for, reference
from fp8serve.fp8.selfcheck.candidates import MAX_CASES, gpu_candidates
from fp8serve.fp8.selfcheck.child import check_kernel
from fp8serve.fp8.selfcheck.switches import GEMMS, SEPARATE, TILES, switch_off_by_name
from fp8serve.fp8.selfcheck.verdict import KernelResult
from tests.cuda import emulated
from tests.cuda.accumulation import assert_within_accumulation
from tests.cuda.conftest import Kernels
from tests.cuda.test_attention import assert_close

CUTLASS = {f"scaled_mm.{tile}" for tile in TILES}
NAMES = [f"scaled_mm.{name}" for name in GEMMS] + sorted(compiled_for("cuda") & set(OPS))
NAMES += ["grouped_mm.cutlass", "grouped_wgrad.cutlass", "paged_attention.mma", "paged_attention.wgmma", *SEPARATE]


@pytest.fixture
def switched(kernels: Kernels) -> Iterator[Kernels]:
    tensor = kernels.here(torch.zeros(1))
    default = kernels.ops.gemm_kernels(tensor, "")
    kernels.ops.gemm_kernels(tensor, "none")
    yield kernels
    kernels.ops.gemm_kernels(tensor, default or "none")


def test_every_kernel_is_a_candidate(kernels: Kernels) -> None:
    assert sorted(candidate.name for candidate in gpu_candidates(kernels.ops)) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_agrees_with_the_reference(switched: Kernels, name: str) -> None:
    candidate = next(c for c in gpu_candidates(switched.ops) if c.name == name)
    result = check_kernel(candidate, switched.device)
    if result is None:
        assert name in CUTLASS, "only a tile that was not compiled may have no case"
    else:
        assert (result.state, result.why) == ("agrees", "")


@pytest.mark.parametrize("name", ["scaled_mm.mma", "scaled_mm.skinny", "scaled_mm.cublaslt"])
def test_a_kernel_is_checked_on_thirty_cases_of_all_kinds(kernels: Kernels, name: str) -> None:
    candidate = next(c for c in gpu_candidates(kernels.ops) if c.name == name)
    assert len(candidate.cases) >= MAX_CASES
    arguments = [case.make() for case in candidate.cases[:MAX_CASES]]
    assert len({a.shape for a, *_ in arguments}) == 6
    assert {out for *_, out in arguments} == {torch.bfloat16, torch.float32}
    assert len({(a.dtype, b.dtype) for a, b, *_ in arguments}) == 3
    by_block = {s.shape for _, _, s, *_ in arguments if s.dim() == 2 and s.shape[1] > 1}
    assert bool(by_block) == (name != "scaled_mm.cublaslt")


@pytest.mark.emulator
def test_attention_without_a_wait_is_found_and_replaced() -> None:
    """Tests prompts on Hopper: mma replaces wgmma, and FP32 replaces mma."""
    gpu, here = emulated.emulator(), torch.zeros(1)
    gpu.ops.gemm_kernels(here, "none")
    by_name = {c.name: c for c in gpu_candidates(gpu.ops)}
    prompt = by_name["paged_attention.wgmma"].cases[0].make()
    gpu.set_chip(90, 132, 227 * 1024)
    try:
        for name, source, off in (
            ("paged_attention.wgmma", "attention_wgmma.cu", "attention_wgmma"),
            ("paged_attention.mma", "attention_mma.cu", "attention_mma+attention_wgmma"),
        ):
            gpu.leave_out(waits(source)[0])
            result = check_kernel(by_name[name], "cpu")
            gpu.leave_out("")
            assert result is not None
            assert result.state == "disagrees"
            switch_off_by_name(here, [name], gpu.ops)
            assert gpu.ops.gemm_kernels(here, "") == off
            assert_close(gpu.ops.paged_attention(*prompt), reference.paged_attention(*prompt))
        assert check_kernel(by_name["paged_attention"], "cpu") == KernelResult("agrees")
        assert gpu.ops.gemm_kernels(here, "") == off, "kernels that were off stay off"
    finally:
        gpu.leave_out("")
        gpu.set_chip(89, 4, 99 * 1024)


def waits(source: str) -> list[str]:
    """Returns the lines where a kernel waits for its copies into shared memory, as "file:line"."""
    lines = (emulated.ROOT / "csrc/cuda" / source).read_text().splitlines()
    return [f"{source}:{i}" for i, line in enumerate(lines, 1) if re.search(r"copy_wait<[^>]+>\(\)", line)]


@pytest.mark.emulator
def test_a_gemm_without_a_wait_is_found_and_replaced() -> None:
    """mma without a wait is replaced by cuBLASLt (here torch's scaled_mm on a CPU), or by the reference."""
    gpu, here = emulated.emulator(), torch.zeros(1)
    gpu.ops.gemm_kernels(here, "none")
    candidate = next(c for c in gpu_candidates(gpu.ops) if c.name == "scaled_mm.mma")
    try:
        gpu.leave_out(waits("gemm_sm89.cu")[0])
        result = check_kernel(candidate, "cpu")
        assert result is not None
        assert result.state == "disagrees"
        assert re.search(r"\d+ of \d+ values, the first at \[", result.why)
        switch_off_by_name(here, ["scaled_mm.mma"], gpu.ops)
        assert gpu.ops.gemm_kernels(here, "") == "mma"
        for case in cases("scaled_mm")[::5]:
            a, b, a_scale, b_scale, bias, out = case.make()
            if a.numel():
                product = gpu.ops.scaled_mm(a, b, a_scale, b_scale, bias, out)
                assert_within_accumulation(product, a, b, a_scale, b_scale, bias)
        a, b = (torch.ones(n, 64).to(torch.float8_e4m3fn) for n in (70, 32))
        args = a, b, torch.tensor(0.3), torch.tensor(0.7), None, torch.bfloat16
        assert torch.equal(gpu.ops.scaled_mm(*args), gpu.ops.scaled_mm_by(*args, "cublaslt", 1))
        switch_off_by_name(here, ["scaled_mm.skinny"], gpu.ops)
        assert gpu.ops.gemm_kernels(here, "") == "skinny+mma", "kernels that were off stay off"
    finally:
        gpu.leave_out("")


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("name", "switches"),
    [("scaled_mm.overlap", "overlap"), ("paged_attention.overlap", "overlap"),
     ("stored_mm.early_weights", "early_weights+overlap")],
)  # fmt: skip
def test_early_launches_are_checked_and_switched_off_separately(name: str, switches: str) -> None:
    gpu, here = emulated.emulator(), torch.zeros(1)
    candidate = next(c for c in gpu_candidates(gpu.ops) if c.name == name)
    gpu.set_chip(90, 4, 227 * 1024)
    try:
        for off in (switches, f"{switches}+skinny"):
            gpu.ops.gemm_kernels(here, off)
            gpu.starts()
            assert check_kernel(candidate, "cpu") is not None
            assert any(early for _, early in gpu.starts())
            assert sorted(gpu.ops.gemm_kernels(here, "").split("+")) == off.split("+")
        gpu.ops.gemm_kernels(here, "none")
        switch_off_by_name(here, [name], gpu.ops)
        assert gpu.ops.gemm_kernels(here, "") in switches.split("+")
        if name.endswith(".early_weights"):
            return
        gpu.ops.quantize(torch.ones(8), torch.tensor(1.0), torch.float8_e4m3fn)
        assert not any(early for _, early in gpu.starts())
    finally:
        gpu.set_chip(89, 4, 99 * 1024)
