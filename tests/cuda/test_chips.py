"""The kernels that each chip selects, on an emulated GPU of that chip, fit its shared memory and are correct.

CUTLASS's kernels are not emulated; gemm_cutlass.h checks their shared memory at compile time.
"""

import re
from collections.abc import Iterator

import pytest
import torch

from fp8serve.fp8.ops import OPS, compiled_for
from fp8serve.fp8.selfcheck.candidates import gpu_cases
from tests.csrc.test_sample import arguments
from tests.cuda import emulated
from tests.cuda.accumulation import assert_within_accumulation
from tests.cuda.conftest import Kernels, kernels_on
from tests.cuda.test_attention import Paged
from tests.cuda.test_gemm import operands

# Compute capability, multiprocessors, and maximal bytes of shared memory of a block (CUDA's programming guide).
CHIPS = {
    "Ada": (89, 142, 99 * 1024),
    "Hopper": (90, 132, 227 * 1024),
    "B200": (100, 148, 227 * 1024),
    "B300": (103, 148, 227 * 1024),
    "RTX 5090": (120, 170, 99 * 1024),
    "GB10": (121, 48, 99 * 1024),
    "one multiprocessor": (89, 1, 99 * 1024),
}
pytestmark = pytest.mark.emulator


@pytest.fixture(params=CHIPS)
def chip(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    kernels = kernels_on("emulated")
    emulated.emulator().set_chip(*CHIPS[request.param])
    yield kernels
    emulated.emulator().set_chip(89, 4, 99 * 1024)


def test_every_block_fits_the_shared_memory_of_the_chip(chip: Kernels, request: pytest.FixtureRequest) -> None:
    """Checks declared and dynamic shared memory, for some cases of every op and for all kernels that need much."""
    capability, _, most = CHIPS[request.node.callspec.params["chip"]]
    emulated.emulator().launches()
    for op in sorted(compiled_for("cuda") & set(OPS)):
        for case in gpu_cases(op)[:: max(1, len(gpu_cases(op)) // 3)]:
            getattr(chip.ops, op)(*case.make())
    for rows in (1, 17, 65):
        chip.run("scaled_mm", *operands(rows, 72, 656, "1x128", "1x128"), None, torch.float32)
    for dim in (20, 128, 256):
        Paged([300, 40], heads=4, kv_heads=2, dim=dim).attend(chip, [(0, 290, 300), (1, 0, 40)])
    for cache in (torch.bfloat16, torch.float8_e4m3fn):  # a prompt, which takes wgmma on Hopper
        Paged([100], heads=4, kv_heads=2, dim=128, dtype=cache).attend(chip, [(0, 60, 100)])
    chip.run("sample", *arguments(32000, 2, 32000, True))
    launched = emulated.emulator().launches()
    largest = max(launched, key=lambda launch: launch[1])
    assert len({name for name, _ in launched}) > 60
    assert 16 * 1024 < largest[1] <= most, largest
    assert shared_bytes_of(capability) == most


def shared_bytes_of(capability: int) -> int:
    """Returns the limit that csrc/cuda/chips.h states, which CUTLASS's kernels are checked against."""
    text = (emulated.ROOT / "csrc/cuda/chips.h").read_text()
    match = re.search(r"family == 90 \|\| family == 100 \? (\d+) : (\d+)\) \* 1024", text)
    assert match is not None
    return int(match[1 if capability // 10 in (9, 10) else 2]) * 1024


@pytest.mark.parametrize("rows", [1, 17, 65])
@pytest.mark.parametrize("by", ["tensor", "1x128"])
def test_products_are_close_to_exact_ones(chip: Kernels, rows: int, by: str) -> None:
    a, b, a_scale, b_scale = operands(rows, 40, 400, by, by)
    product = chip.run("scaled_mm", a, b, a_scale, b_scale, None, torch.float32)
    assert_within_accumulation(product, a, b, a_scale, b_scale)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 128), (torch.float8_e4m3fn, 256), (torch.bfloat16, 20)])
def test_attention_is_close_to_the_reference(chip: Kernels, dtype: torch.dtype, dim: int) -> None:
    """Paged.attend compares with the reference."""
    paged = Paged([300, 40], heads=4, kv_heads=2, dim=dim, dtype=dtype)
    paged.attend(chip, [(0, 290, 300), (1, 0, 40)])
    paged.attend(chip, [(0, 299, 300), (1, 39, 40)])
