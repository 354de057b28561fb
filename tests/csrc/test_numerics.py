"""Which variant of a kernel runs, by the features in force, and that it is as the table of numerics classes says."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.fp8 import ops
from fp8serve.fp8.numerics_classes import CLASSES, FTZ, ROWS
from fp8serve.fp8.ops import LEVELS, cases, reference
from fp8serve.fp8.ops.inputs import random_normal
from tests.csrc.helpers import assert_bits_equal, assert_fp8_equal
from tests.csrc.numerics_rows import PRESENT, edge_cases, row_of

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(autouse=True)
def any_cap() -> Iterator[None]:
    yield
    torch.ops.fp8serve.cpu_isa("best")


def capped(cap: str) -> dict[str, dict[str, str]]:
    torch.ops.fp8serve.cpu_isa(cap)
    return ops.cpu_kernels()


def run_op(op: str, kernels: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Returns the results of an op, and its arguments afterwards."""
    result = getattr(kernels, op)(*args)
    flat = [*(result if isinstance(result, tuple) else (result,)), *args]
    nested = [x if isinstance(x, list) else [x] for x in flat]
    return [x for part in nested for x in part if isinstance(x, Tensor)]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    if actual.dtype in FP8:
        assert_fp8_equal(actual, expected)
    elif actual.is_floating_point() and actual.dtype != torch.float64:
        assert_bits_equal(actual, expected)
    else:
        assert torch.equal(actual, expected)


def is_same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    try:
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    except AssertionError:
        return False
    return True


def assert_near(actual: Tensor, expected: Tensor, allowed: float) -> None:
    if not actual.is_floating_point() or allowed == 0:
        return assert_same(actual, expected)
    exact, value = expected.double().nan_to_num(), actual.double().nan_to_num()
    relative = allowed + torch.finfo(actual.dtype).eps
    assert (value - exact).norm() <= relative * exact.norm() + 1e-30
    return None


def test_every_op_with_a_kernel_says_which_variant_it_runs() -> None:
    assert set(ops.cpu_kernels()) == ops.compiled_for("cpu")


def test_every_op_with_a_kernel_is_in_the_table() -> None:
    assert {op for row in ROWS for op in row.ops} == ops.compiled_for("cpu")
    assert len({(row.operation, row.format) for row in ROWS}) == len(ROWS)
    arm = ("neon", "neonfhm", "neonbf16")
    assert all(row.cells[level] == row.cells["portable"] for row in ROWS for level in arm)  # as in tests/arm
    assert {numerics for row in ROWS for numerics in row.cells.values()} == set(CLASSES)


@pytest.mark.parametrize("level", PRESENT)
def test_kernels_report_the_classes_of_the_table(level: str) -> None:
    """A kernel reports a class for each op, without the distinctions between formats."""
    for op, kernel in capped(level).items():
        assert kernel["numerics"] in {row.cells[PRESENT[level]].removesuffix(FTZ) for row in ROWS if op in row.ops}


@pytest.mark.smoke
@pytest.mark.parametrize("op", sorted(ops.compiled_for("cpu")))
def test_levels_of_one_class_give_the_same_bits_and_others_do_not(op: str) -> None:
    """On every case of the op and the edges of its rows. Each level is as near to the reference as its class allows."""
    rows, different = set(), set()
    for case in [*cases(op), *edge_cases(op)]:
        row = row_of(op, case.make())
        rows.add(row)
        expected = run_op(op, reference, case.make())
        first: dict[str, list[Tensor]] = {}
        for cap, column in PRESENT.items():
            torch.ops.fp8serve.cpu_isa(cap)
            outputs, numerics = run_op(op, torch.ops.fp8serve, case.make()), row.cells[column]
            for one, same in zip(outputs, first.setdefault(numerics, outputs), strict=True):
                assert_same(one, same)
            different |= {(row, frozenset({numerics, c})) for c, other in first.items() if not is_same(outputs, other)}
            for one, other in zip(outputs, expected, strict=True):
                assert_near(one, other, CLASSES[numerics].error or 0.0)
    assert rows == {row for row in ROWS if op in row.ops}
    classes = {row: sorted({row.cells[column] for column in PRESENT.values()}) for row in rows}
    assert different == {(row, frozenset(pair)) for row in rows for pair in combinations(classes[row], 2)}


@pytest.mark.skipif("avx2" not in PRESENT, reason="this machine has no avx2")
def test_products_below_the_normal_range_have_no_promise() -> None:
    """The page excludes products of BF16 values below 2^-126: `portable` rounds them before it adds."""
    a, b = (random_normal(rows, 64, torch.bfloat16, rows) * 2.0**-65 for rows in (9, 33))
    results = []
    for level in ("portable", "avx2"):
        torch.ops.fp8serve.cpu_isa(level)
        results.append([torch.ops.fp8serve.mm(x, y, None, torch.float32) for x, y in ((a, b), (a, b * 2.0**60))])
    assert not is_same(results[0][:1], results[1][:1])
    assert is_same(results[0][1:], results[1][1:])


def test_a_kernel_runs_wherever_its_own_features_are() -> None:
    """AVX-512 with VBMI and without BF16, as some processors are: neither level, and the cast needs no more."""
    torch.ops.fp8serve.cpu_isa("best")
    if ops.cpu_isa() != "avx512bf16":
        pytest.skip("this machine has no avx512bf16")
    kernels = capped("avx512+avx512vbmi")
    assert ops.cpu_isa() == "avx512"
    chosen = {
        op: kernels[op]["variant"] for op in ("quantize", "scaled_mm", "rms_norm", "paged_attention", "pack_weight")
    }
    assert chosen == {
        "quantize": "avx512vbmi",
        "scaled_mm": "avx512",
        "rms_norm": "avx512",
        "paged_attention": "avx512",
        "pack_weight": "portable",
    }
    assert not ops.reads_packed()


def test_without_one_feature_a_level_is_not_reached() -> None:
    assert capped("avx512f+avx512bw")["scaled_mm"]["variant"] == "portable"
    if torch.ops.fp8serve.cpu_isa("avx2") == "avx2":
        assert capped("avx2+avx512f")["rms_norm"]["variant"] == "avx2"
    assert ops.cpu_isa() in LEVELS


def test_only_bf16_products_need_bf16() -> None:
    torch.ops.fp8serve.cpu_isa("best")
    if ops.cpu_isa() != "avx512bf16":
        pytest.skip("this machine has no avx512bf16")
    variants = {op: kernel["variant"] for op, kernel in ops.cpu_kernels().items()}
    assert {op for op, variant in variants.items() if variant == "avx512bf16"} == {
        "scaled_mm",
        "scaled_mm_add",
        "mm",
        "packed_mm",
        "joined_mm",
        "mx_mm",
        "nvfp4_mm",
        "mm_4bit",
        "grouped_mm",
        "grouped_mm_4bit",
        "grouped_mlp",
        "paged_attention",
        "attention_backward",
        "wgrad",
    }
    assert ops.reads_packed()
