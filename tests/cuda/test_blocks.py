"""Blocks of one launch that work together, on the emulated GPU (emulator/cuda/grid.h), and the races between them.

The kernels, and the program that runs one of them, are in blocks.cu.
"""

import re
from collections import Counter

import pytest

from tests.cuda import emulated
from tests.cuda.emulated import needs_compiler, needs_thread_sanitizer
from tests.cuda.programs import Program

BLOCKS = Program(emulated.ROOT / "tests/cuda/blocks.cu")
RESULTS = {
    "pass_along": "1 64 34 33 3 66 36 35 sum 0",
    "gather": "0 0 1 1 2 2 3 3 sum 6",
    "last_adds": "0 0 1 1 2 2 3 3 sum 6",
    "stream_pages": " ".join(["650 645"] * 4) + " sum 0",
    "exchange_in_cluster": "101 163 101 163 501 563 501 563 sum 0",
}
ORDERS = {  # how many of all calls that order accesses to memory the kernels have
    "__syncthreads": 5,
    "__threadfence": 2,
    "load_acquire": 2,
    "store_release": 1,
    "add_release": 1,
    "cluster_arrive": 2,
    "cluster_wait": 2,
    "mbarrier_arrive": 1,
    "mbarrier_wait": 2,
    "sync_warps": 1,
}
pytestmark = [pytest.mark.emulator, needs_compiler]


@pytest.mark.parametrize("kernel", RESULTS)
def test_results_do_not_depend_on_the_order_of_blocks(kernel: str) -> None:
    for seed in range(20):
        assert BLOCKS.run(kernel, seed, backwards=seed % 2 == 1)[0].startswith(RESULTS[kernel] + " order")


def test_the_order_of_blocks_is_that_of_the_seed() -> None:
    assert BLOCKS.run("take_turns")[0].endswith(" order" + " 0 1 2 3" * 4)
    assert BLOCKS.run("take_turns", backwards=True)[0].endswith(" order" + " 3 2 1 0" * 4)
    orders = [BLOCKS.run("take_turns", seed)[0] for seed in range(1, 9)]
    assert orders == [BLOCKS.run("take_turns", seed)[0] for seed in range(1, 9)]
    assert len(set(orders)) > 6


@pytest.mark.parametrize(
    ("kernel", "waiting"),
    [
        ("wait_in_circle", r"0 at (\S+), 1 at \1, 2 at \1, 3 at \1"),
        ("miss_a_barrier", r"0 at a barrier, 1 at (\S+)"),
        ("wait_in_circle, ordinary", r"0 at (\S+)"),
    ],
)
def test_the_emulator_names_blocks_that_wait_for_ever(kernel: str, waiting: str) -> None:
    """The blocks of an ordinary launch need not be resident together, so the first one waits alone."""
    message = re.fullmatch("emulator: blocks wait for each other for ever: " + waiting, BLOCKS.run(kernel)[0])
    assert message is not None
    assert "load_acquire(" in BLOCKS.line_at(message[1])


@pytest.mark.parametrize(
    ("kernel", "error"),
    [
        ("arrive_twice", "a thread arrives twice at its cluster's barrier"),
        ("use_declared", "blocks that run at once use static shared memory"),
        ("too many blocks", "this chip could not launch this"),
    ],
)
def test_mistakes_are_errors(kernel: str, error: str) -> None:
    assert BLOCKS.run(kernel)[0] == f"emulator: {error}"


@needs_thread_sanitizer
def test_no_kernel_has_a_race() -> None:
    for kernel in RESULTS:
        for seed in range(3):
            assert BLOCKS.race(kernel, seed) == ""


@needs_thread_sanitizer
def test_a_race_between_blocks_names_both_lines() -> None:
    [site] = [site for site in BLOCKS.run("pass_along")[1] if "store_release" in BLOCKS.line_at(site)]
    sites = re.findall(r"#0 pass_along \S*(blocks\.cu:\d+)", BLOCKS.race("pass_along", left_out=site))
    assert [BLOCKS.line_at(at).partition("=")[0].strip() for at in sites[:2]] == [
        "const int before",
        "work->values[block][thread]",
    ]


@needs_thread_sanitizer
def test_a_bulk_copy_of_what_the_launch_has_written_is_a_race() -> None:
    assert "copy_new_page" in BLOCKS.race("copy_new_page")


@needs_thread_sanitizer
def test_removing_any_release_acquire_fence_or_barrier_is_a_race() -> None:
    calls: Counter[str] = Counter()
    for kernel in RESULTS:
        for site in BLOCKS.run(kernel)[1]:
            calls.update(call for call in ORDERS if f"{call}(" in BLOCKS.line_at(site))
            assert BLOCKS.race(kernel, left_out=site) != "", f"{site} of {kernel}"
    assert calls == ORDERS
