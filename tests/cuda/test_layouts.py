"""The emulated instructions have the operand layouts of CuTe's traits, which are independent of our code."""

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
# Keys are (instruction, operand) with offsets [threads, values], (tile, "ours" or "cute") with offsets [rows, columns],
# and (tile + " matrices", "ours" or "cute") with the start and the upper 50 bits of the descriptor of every step.
Layouts = dict[tuple[str, str], Tensor]
SHARED = 1024  # the address where the emulated shared memory begins
pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(NVCC is None or CUTLASS is None, reason="needs nvcc, and CUTLASS's headers: make cuda"),
    pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler"),
]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    """The layouts that layouts.cu prints."""
    assert CUTLASS is not None
    headers = Path(CUTLASS.submodule_search_locations[0]) / "source/include"
    program = tmp_path_factory.mktemp("layouts") / "layouts"
    options = ["-std=c++17", "--expt-relaxed-constexpr", "-arch=sm_89", f"-I{headers}", f"-I{ROOT / 'csrc'}"]
    subprocess.run([NVCC, *options, ROOT / "tests/cuda/layouts.cu", "-o", program], check=True)
    rows: dict[tuple[str, str], dict[int, list[int]]] = {}
    for line in subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines():
        kind, *fields = line.split()
        if kind == "matrix":  # a row of its own for each step: start, upper bits
            name, operand, step, *numbers = fields
            rows.setdefault((f"{name} matrices", operand), {})[int(step)] = [int(number) for number in numbers]
        elif kind != "ERROR:":
            name, operand, thread, _, offset = fields
            rows.setdefault((name, operand), {}).setdefault(int(thread), []).append(int(offset))
    return {key: torch.tensor([values[thread] for thread in sorted(values)]) for key, values in rows.items()}


def words(values: Tensor) -> Tensor:
    """Packs [32, n] codes of 8 or 16 bits into int32 words; the first code is in the lowest bits."""
    return values.contiguous().view(torch.int32)


@pytest.mark.parametrize("name", ["e4m3-e4m3", "e4m3-e5m2", "e5m2-e4m3", "e5m2-e5m2", "bf16"])
def test_mma_has_the_fragments_of_cute(layouts: Layouts, name: str) -> None:
    """Multiplies integers, whose sums are exact, with operands and results in CuTe's layouts."""
    types = [torch.bfloat16] * 2 if name == "bf16" else [FP8[part] for part in name.split("-")]
    k = 16 if name == "bf16" else 32
    noise = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, (rows, k), generator=noise).float() for rows in (16, 8))
    fragments = [words(m.to(t).t().reshape(-1)[layouts[name, o]]) for m, t, o in zip((a, b), types, "ab", strict=True)]
    fragment = emulated.emulator().mma(name, *fragments)
    expected = (a @ b.t()).t().reshape(-1)
    assert torch.equal(fragment, expected[layouts[name, "c"]])


def halves(offsets: Tensor) -> Iterator[tuple[int, int]]:
    """Yields (thread, index) of every 16-bit value."""
    yield from ((thread, half) for thread in range(offsets.shape[0]) for half in range(offsets.shape[1]))


@pytest.mark.parametrize("name", ["as-it-lies", "transposed"])
def test_ldmatrix_has_the_layout_of_cute(layouts: Layouts, name: str) -> None:
    rows = torch.randperm(32 * 8).to(torch.int16).view(32, 8)
    source, target = layouts[name, "source"], layouts[name, "target"]
    values = {int(source[place]): rows[place] for place in halves(source)}
    expected = torch.stack([values[int(target[place])] for place in halves(target)]).view(32, 8)
    fragment = emulated.emulator().ldmatrix(name == "transposed", rows)
    assert torch.equal(fragment.view(torch.int16), expected)


TILES = ["keys-64", "keys-128", "queries-128", "values-64", "values-128"]


@pytest.mark.parametrize("tile", TILES)
def test_tiles_and_descriptors_equal_those_of_cute(layouts: Layouts, tile: str) -> None:
    """Compares the offsets of elements, and the descriptors, of csrc/cuda/wgmma_matrix.h."""
    for name in (tile, f"{tile} matrices"):
        assert torch.equal(layouts[name, "ours"], layouts[name, "cute"])


def descriptor(layouts: Layouts, tile: str, step: int, base: int) -> int:
    """Returns CuTe's descriptor of one step's matrix in a tile that starts at byte `base` of the shared memory."""
    start, upper = layouts[f"{tile} matrices", "cute"][step].tolist()
    return int(upper) << 14 | (SHARED + base + 2 * int(start)) >> 4


def in_memory(layouts: Layouts, tile: str, elements: Tensor) -> Tensor:
    """Returns a BF16 tile [rows, columns] in CuTe's order in memory."""
    memory = torch.zeros(elements.numel(), dtype=torch.bfloat16)
    memory[layouts[tile, "cute"].flatten()] = elements.bfloat16().flatten()
    return memory


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(shape[1])).float()


@pytest.mark.parametrize(("dim", "second_half"), [(64, False), (128, False), (128, True)])
def test_wgmma_with_both_operands_in_shared_memory(layouts: Layouts, dim: int, second_half: bool) -> None:
    """The product of attention scores, with CuTe's layouts and descriptors: each step takes 16 columns of K, and the
    first or second 64 of 128 queries."""
    name = "queries-128" if dim == 128 else "keys-64"
    q, k = whole_numbers(layouts[name, "cute"].shape[0], dim), whole_numbers(64, dim)
    memory = torch.cat([in_memory(layouts, name, q), in_memory(layouts, f"keys-{dim}", k)])
    rows = slice(64, 128) if second_half else slice(0, 64)
    for step in range(dim // 16):
        a = descriptor(layouts, name, step, 128 * rows.start)
        b = descriptor(layouts, f"keys-{dim}", step, 2 * q.numel())
        accumulators = emulated.emulator().wgmma(64, memory, None, a, b)
        columns = slice(16 * step, 16 * step + 16)
        expected = (q[rows, columns] @ k[:, columns].t()).t().reshape(-1)
        assert torch.equal(accumulators, expected[layouts["warpgroup-64", "c"]])


@pytest.mark.parametrize("dim", [64, 128])
def test_wgmma_with_the_left_operand_in_registers(layouts: Layouts, dim: int) -> None:
    """The product with attention values: the left operand is in registers, the right one in shared memory, [K, N]."""
    weights, v = whole_numbers(64, 64), whole_numbers(64, dim)
    memory = in_memory(layouts, f"values-{dim}", v)
    for step in range(4):
        part = weights[:, 16 * step : 16 * step + 16]
        registers = words(part.bfloat16().t().reshape(-1)[layouts[f"warpgroup-{dim}", "a"]])
        accumulators = emulated.emulator().wgmma(
            dim, memory, registers, 0, descriptor(layouts, f"values-{dim}", step, 0)
        )
        expected = (part @ v[16 * step : 16 * step + 16]).t().reshape(-1)
        assert torch.equal(accumulators, expected[layouts[f"warpgroup-{dim}", "c"]])
