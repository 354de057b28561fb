"""The emulated instructions take and give their operands where CuTe's own traits have them, an independent oracle."""

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cuda import emulated

ROOT = Path(__file__).parents[2]
NVCC = shutil.which("nvcc")
CUTLASS = importlib.util.find_spec("cutlass_library")
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
Layouts = dict[tuple[str, str], Tensor]  # (instruction, operand) -> offsets [threads, values]
pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(NVCC is None or CUTLASS is None, reason="needs nvcc, and CUTLASS's headers: make cuda"),
    pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler"),
]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    """What layouts.cu prints."""
    assert CUTLASS is not None
    headers = Path(CUTLASS.submodule_search_locations[0]) / "source/include"
    program = tmp_path_factory.mktemp("layouts") / "layouts"
    options = ["-std=c++17", "--expt-relaxed-constexpr", "-arch=sm_89", f"-I{headers}"]
    subprocess.run([NVCC, *options, ROOT / "tests/cuda/layouts.cu", "-o", program], check=True)
    rows: dict[tuple[str, str], dict[int, list[int]]] = {}
    for line in subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines():
        _, name, operand, thread, _, offset = line.split()
        rows.setdefault((name, operand), {}).setdefault(int(thread), []).append(int(offset))
    return {key: torch.tensor([values[thread] for thread in sorted(values)]) for key, values in rows.items()}


def words(values: Tensor) -> Tensor:
    """[32, n] codes of 8 or 16 bits -> [32, words], the first lowest."""
    return values.contiguous().view(torch.int32)


@pytest.mark.parametrize("name", ["e4m3-e4m3", "e4m3-e5m2", "e5m2-e4m3", "e5m2-e5m2", "bf16"])
def test_a_product_of_fragments(layouts: Layouts, name: str) -> None:
    """Whole numbers, whose sums are exact, from and to where CuTe has them."""
    types = [torch.bfloat16] * 2 if name == "bf16" else [FP8[part] for part in name.split("-")]
    k = 16 if name == "bf16" else 32
    noise = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, (rows, k), generator=noise).float() for rows in (16, 8))
    fragments = [words(m.to(t).t().reshape(-1)[layouts[name, o]]) for m, t, o in zip((a, b), types, "ab", strict=True)]
    found = emulated.emulator().mma(name, *fragments)
    expected = (a @ b.t()).t().reshape(-1)
    assert torch.equal(found, expected[layouts[name, "c"]])


def halves(offsets: Tensor) -> Iterator[tuple[int, int]]:
    """The places of each 16 bits: (thread, which)."""
    yield from ((thread, half) for thread in range(offsets.shape[0]) for half in range(offsets.shape[1]))


@pytest.mark.parametrize("name", ["as-it-lies", "transposed"])
def test_ldmatrix(layouts: Layouts, name: str) -> None:
    rows = torch.randperm(32 * 8).to(torch.int16).view(32, 8)
    source, target = layouts[name, "source"], layouts[name, "target"]
    held = {int(source[place]): rows[place] for place in halves(source)}
    expected = torch.stack([held[int(target[place])] for place in halves(target)]).view(32, 8)
    found = emulated.emulator().ldmatrix(name == "transposed", rows)
    assert torch.equal(found.view(torch.int16), expected)
