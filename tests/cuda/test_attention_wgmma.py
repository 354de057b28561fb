"""The wgmma kernel of paged_attention for prompts on Hopper: the bits of the mma kernel on the emulated GPU, and which
calls it takes."""

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.csrc.helpers import assert_bits_equal
from tests.cuda import emulated
from tests.cuda.conftest import DEVICES, Kernels, kernels_on
from tests.cuda.test_attention import CACHES, Paged

E4M3 = torch.float8_e4m3fn
HOPPER, ADA, B200 = (90, 132, 227 * 1024), (89, 142, 99 * 1024), (100, 148, 227 * 1024)
FEW = (90, 1, 227 * 1024)  # one multiprocessor, so one block computes all segments
SINKS = torch.tensor([0.5, -3.0, 5.0, 0.0, 1.0, -1.0])
OPTIONS = [(), (100, 2.0, SINKS), (300,), (None, 0.7, SINKS), (1,)]


@pytest.fixture(params=DEVICES)
def hopper(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    kernels = kernels_on(request.param)
    if kernels.device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper")
    emulate_chip(kernels, *HOPPER)
    yield kernels
    emulate_chip(kernels, 89, 4, 99 * 1024)
    disable_kernels(kernels, "none")


@pytest.fixture
def emulated_hopper() -> Iterator[Kernels]:
    kernels = kernels_on("emulated")
    emulate_chip(kernels, *HOPPER)
    yield kernels
    emulate_chip(kernels, 89, 4, 99 * 1024)
    disable_kernels(kernels, "none")


def emulate_chip(kernels: Kernels, *chip: int) -> None:
    if kernels.device == "cpu":
        emulated.emulator().set_chip(*chip)


def disable_kernels(kernels: Kernels, names: str) -> None:
    kernels.ops.gemm_kernels(kernels.here(torch.zeros(1)), names)


def launched() -> list[str]:
    """Returns the kernels launched since the last call: attend_to_prompt uses wgmma, attend uses mma or FP32."""
    names = (name.replace("(anonymous namespace)::", "") for name, _ in emulated.emulator().starts())
    return [re.sub(r"[<(].*", "", name).split("::")[-1] for name in names]


Parts = list[tuple[int, int, int]]


def attend(paged: Paged, kernels: Kernels, parts: Parts, *options: object) -> tuple[Tensor, set[str]]:
    """Returns the rows of all sequences, and the names of the kernels that computed them."""
    launched()
    actual = torch.cat(paged.attend(kernels, parts, *options))
    return actual, set(launched()) - {"merge_parts"}


@pytest.mark.pairwise
@pytest.mark.emulator
@pytest.mark.parametrize("chip", [HOPPER, FEW], ids=["a block for each segment", "a block for all"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("cache", "dim"), [(cache, dim) for cache in CACHES for dim in (64, 128)] + [(E4M3, 80)])
def test_wgmma_has_the_bits_of_mma(emulated_hopper: Kernels, cache, dim, options, chip) -> None:
    """Several segments, rows that do not fill a block, a second sequence, and rows with less than one tile of keys."""
    emulate_chip(emulated_hopper, *chip)
    paged = Paged([600, 90], heads=6, kv_heads=2, dim=dim, dtype=cache)
    parts = [(0, 530, 600), (1, 0, 90)]
    actual, by = attend(paged, emulated_hopper, parts, *options)
    assert by == {"attend_to_prompt", "attend"}
    disable_kernels(emulated_hopper, "attention_wgmma")
    expected, by = attend(paged, emulated_hopper, parts, *options)
    assert by == {"attend"}
    assert_bits_equal(actual, expected)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (24, 1), (8, 4)])
def test_every_size_of_group(hopper: Kernels, heads, cache) -> None:
    paged = Paged([200, 70], heads=heads[0], kv_heads=heads[1], dim=32, dtype=cache)
    paged.attend(hopper, [(0, 100, 200), (1, 0, 70)])


@pytest.mark.pairwise
@pytest.mark.parametrize("dim", [16, 48, 64, 96, 112, 128])
@pytest.mark.parametrize("cache", CACHES)
def test_every_width_of_head(hopper: Kernels, dim, cache) -> None:
    paged = Paged([150, 3], heads=6, kv_heads=2, dim=dim, dtype=cache)
    paged.attend(hopper, [(0, 60, 150), (1, 0, 3)])


TOKENS = [
    ([(0, 40, 72)], {"attend_to_prompt"}),  # two heads in a group, so 64 rows
    ([(0, 41, 72)], {"attend"}),
    ([(0, 40, 72), (1, 0, 40)], {"attend_to_prompt", "attend"}),
    ([(0, 71, 72), (1, 39, 40)], {"attend"}),
]


@pytest.mark.emulator
@pytest.mark.parametrize(("parts", "by"), TOKENS)
def test_which_kernels_compute_a_call(emulated_hopper: Kernels, parts, by) -> None:
    paged = Paged([72, 40], heads=4, kv_heads=2, dim=64)
    assert attend(paged, emulated_hopper, parts)[1] == by
    for chip in (ADA, B200):
        emulate_chip(emulated_hopper, *chip)
        assert attend(paged, emulated_hopper, parts)[1] == {"attend"}


@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3])
def test_a_prompt_does_not_depend_on_its_batch(hopper: Kernels, cache) -> None:
    """Other sequences do not depend on the prompt, either. Both kernels run; alone, the prompt has other blocks."""
    paged = Paged([700, 300, 40, 90], dim=64, dtype=cache)
    parts = [(2, 39, 40), (0, 600, 700), (3, 80, 90), (1, 0, 300)]
    together = paged.attend(hopper, parts)
    for part, rows in zip(parts, together, strict=True):
        assert_bits_equal(paged.attend(hopper, [part])[0], rows)


@pytest.mark.emulator
@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3])
def test_on_the_emulated_gpu_a_prompt_may_be_split_anywhere(emulated_hopper: Kernels, cache) -> None:
    """On the emulated GPU, mma and wgmma add in the same order."""
    paged = Paged([560], heads=3, kv_heads=1, dim=64, dtype=cache)
    whole = paged.attend(emulated_hopper, [(0, 500, 560)])[0]
    for cut in (501, 512, 527, 559):
        first = paged.attend(emulated_hopper, [(0, 500, cut)])[0]
        second = paged.attend(emulated_hopper, [(0, cut, 560)])[0]
        assert_bits_equal(torch.cat([first, second]), whole)


def test_keys_after_a_prompt_or_far_before_its_window_are_not_read(hopper: Kernels) -> None:
    paged = Paged([900], dim=64)
    clean = paged.attend(hopper, [(0, 700, 800)], 100)[0]
    for position in range(700 - 100 - 64):  # a tile of keys is read as a whole
        paged.k[paged.tables[0, position // 16], position % 16] = torch.nan
    for position in range(800, 900):
        paged.k[paged.tables[0, position // 16], position % 16] = torch.nan
        paged.v[paged.tables[0, position // 16], position % 16] = torch.nan
    assert_bits_equal(paged.attend(hopper, [(0, 700, 800)], 100)[0], clean)


@pytest.mark.emulator
def test_unaligned_queries_do_not_take_wgmma(emulated_hopper: Kernels) -> None:
    paged = Paged([100], dim=64)
    buffer = torch.zeros(100 * 4 * 64 + 2, dtype=torch.bfloat16)
    buffer[2:] = paged.queries[0].flatten()
    paged.queries[0] = buffer[2:].view(100, 4, 64)
    args = paged.queries[0], paged.k, paged.v, paged.tables, torch.tensor([100]).int(), torch.tensor([0, 100]).int()
    launched()
    emulated_hopper.run("paged_attention", *args, None, None, 0.125)
    assert "attend_to_prompt" not in launched()


@pytest.mark.parametrize(("off", "merging"), [("attention_wgmma", "merge_parts"), ("attention_mma", "merge_segments")])
def test_without_a_kernel_the_next_one_computes(hopper: Kernels, off: str, merging: str) -> None:
    """mma replaces wgmma, and FP32 replaces mma; all are close to the reference."""
    paged = Paged([600, 40], dim=64)
    disable_kernels(hopper, off)
    if hopper.device == "cpu":
        launched()
    paged.attend(hopper, [(0, 500, 600), (1, 39, 40)])
    if hopper.device == "cpu":
        assert launched() == ["attend", merging]


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("dim", [64, 128])
def test_large_batches_are_close_to_the_reference(gpu: Kernels, cache, dim) -> None:
    paged = Paged([4000, 2500, 17, 1], heads=32, kv_heads=8, dim=dim, dtype=cache)
    paged.attend(gpu, [(0, 3000, 4000), (1, 2300, 2500), (2, 0, 17), (3, 0, 1)])
    paged.attend(gpu, [(0, 3900, 4000)])
