"""paged_attention of prompts on Hopper's warpgroups: the mma kernel's bits on the emulated GPU, and who takes what."""

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
FEW = (90, 1, 227 * 1024)  # multiprocessors: one block takes all segments
SINKS = torch.tensor([0.5, -3.0, 5.0, 0.0, 1.0, -1.0])
OPTIONS = [(), (100, 2.0, SINKS), (300,), (None, 0.7, SINKS), (1,)]


@pytest.fixture(params=DEVICES)
def hopper(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    kernels = kernels_on(request.param)
    if kernels.device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper")
    be(kernels, *HOPPER)
    yield kernels
    be(kernels, 89, 4, 99 * 1024)
    switch(kernels, "none")


@pytest.fixture
def emulated_hopper() -> Iterator[Kernels]:
    kernels = kernels_on("emulated")
    be(kernels, *HOPPER)
    yield kernels
    be(kernels, 89, 4, 99 * 1024)
    switch(kernels, "none")


def be(kernels: Kernels, *chip: int) -> None:
    if kernels.device == "cpu":
        emulated.emulator().be(*chip)


def switch(kernels: Kernels, off: str) -> None:
    kernels.ops.gemm_kernels(kernels.here(torch.zeros(1)), off)


def launched() -> list[str]:
    """The kernels since the last call: attend_to_prompt for warpgroups, attend for warps or FP32."""
    names = (name.replace("(anonymous namespace)::", "") for name, _ in emulated.emulator().starts())
    return [re.sub(r"[<(].*", "", name).split("::")[-1] for name in names]


Parts = list[tuple[int, int, int]]


def attended(paged: Paged, kernels: Kernels, parts: Parts, *options: object) -> tuple[Tensor, set[str]]:
    """The rows of all sequences, and the kernels that made them."""
    launched()
    found = torch.cat(paged.attend(kernels, parts, *options))
    return found, set(launched()) - {"merge_parts"}


@pytest.mark.pairwise
@pytest.mark.emulator
@pytest.mark.parametrize("chip", [HOPPER, FEW], ids=["a block for each segment", "a block for all"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("cache", "dim"), [(cache, dim) for cache in CACHES for dim in (64, 128)] + [(E4M3, 80)])
def test_its_bits_are_those_of_the_mma_kernel(emulated_hopper: Kernels, cache, dim, options, chip) -> None:
    """With several segments, rows that do not fill a block, and a second sequence; the first rows see no whole tile."""
    be(emulated_hopper, *chip)
    paged = Paged([600, 90], heads=6, kv_heads=2, dim=dim, dtype=cache)
    parts = [(0, 530, 600), (1, 0, 90)]
    found, by = attended(paged, emulated_hopper, parts, *options)
    assert by == {"attend_to_prompt", "attend"}
    switch(emulated_hopper, "attention_wgmma")
    expected, by = attended(paged, emulated_hopper, parts, *options)
    assert by == {"attend"}
    assert_bits_equal(found, expected)


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
    ([(0, 40, 72)], {"attend_to_prompt"}),  # two heads a group: 64 rows
    ([(0, 41, 72)], {"attend"}),
    ([(0, 40, 72), (1, 0, 40)], {"attend_to_prompt", "attend"}),
    ([(0, 71, 72), (1, 39, 40)], {"attend"}),
]


@pytest.mark.emulator
@pytest.mark.parametrize(("parts", "by"), TOKENS)
def test_who_takes_a_call(emulated_hopper: Kernels, parts, by) -> None:
    paged = Paged([72, 40], heads=4, kv_heads=2, dim=64)
    assert attended(paged, emulated_hopper, parts)[1] == by
    for chip in (ADA, B200):
        be(emulated_hopper, *chip)
        assert attended(paged, emulated_hopper, parts)[1] == {"attend"}


@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3])
def test_a_prompt_does_not_depend_on_its_batch(hopper: Kernels, cache) -> None:
    """Nor do the others on it: rows that either kernel leaves out are the other's. Alone, a call has other blocks."""
    paged = Paged([700, 300, 40, 90], dim=64, dtype=cache)
    parts = [(2, 39, 40), (0, 600, 700), (3, 80, 90), (1, 0, 300)]
    together = paged.attend(hopper, parts)
    for part, rows in zip(parts, together, strict=True):
        assert_bits_equal(paged.attend(hopper, [part])[0], rows)


@pytest.mark.emulator
@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3])
def test_on_the_emulated_gpu_a_prompt_may_be_cut_anywhere(emulated_hopper: Kernels, cache) -> None:
    """There both kernels' instructions add alike."""
    paged = Paged([560], heads=3, kv_heads=1, dim=64, dtype=cache)
    whole = paged.attend(emulated_hopper, [(0, 500, 560)])[0]
    for cut in (501, 512, 527, 559):
        first = paged.attend(emulated_hopper, [(0, 500, cut)])[0]
        second = paged.attend(emulated_hopper, [(0, cut, 560)])[0]
        assert_bits_equal(torch.cat([first, second]), whole)


def test_what_lies_behind_a_prompt_or_far_before_its_window_is_not_read(hopper: Kernels) -> None:
    paged = Paged([900], dim=64)
    clean = paged.attend(hopper, [(0, 700, 800)], 100)[0]
    for position in range(700 - 100 - 64):  # a tile of keys is read as a whole
        paged.k[paged.tables[0, position // 16], position % 16] = torch.nan
    for position in range(800, 900):
        paged.k[paged.tables[0, position // 16], position % 16] = torch.nan
        paged.v[paged.tables[0, position // 16], position % 16] = torch.nan
    assert_bits_equal(paged.attend(hopper, [(0, 700, 800)], 100)[0], clean)


@pytest.mark.emulator
def test_queries_that_begin_between_chunks_are_for_warps(emulated_hopper: Kernels) -> None:
    paged = Paged([100], dim=64)
    room = torch.zeros(100 * 4 * 64 + 2, dtype=torch.bfloat16)
    room[2:] = paged.queries[0].flatten()
    paged.queries[0] = room[2:].view(100, 4, 64)
    args = paged.queries[0], paged.k, paged.v, paged.tables, torch.tensor([100]).int(), torch.tensor([0, 100]).int()
    launched()
    emulated_hopper.run("paged_attention", *args, None, None, 0.125)
    assert "attend_to_prompt" not in launched()


@pytest.mark.parametrize(("off", "merging"), [("attention_wgmma", "merge_parts"), ("attention_mma", "merge_segments")])
def test_the_next_kernel_takes_over(hopper: Kernels, off: str, merging: str) -> None:
    """From warpgroups warps, from tensor cores FP32; all are right."""
    paged = Paged([600, 40], dim=64)
    switch(hopper, off)
    if hopper.device == "cpu":
        launched()
    paged.attend(hopper, [(0, 500, 600), (1, 39, 40)])
    if hopper.device == "cpu":
        assert launched() == ["attend", merging]


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("dim", [64, 128])
def test_large(gpu: Kernels, cache, dim) -> None:
    paged = Paged([4000, 2500, 17, 1], heads=32, kv_heads=8, dim=dim, dtype=cache)
    paged.attend(gpu, [(0, 3000, 4000), (1, 2300, 2500), (2, 0, 17), (3, 0, 1)])
    paged.attend(gpu, [(0, 3900, 4000)])
