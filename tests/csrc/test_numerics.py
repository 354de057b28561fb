"""Which variant of a kernel runs, by the features in force, and that it keeps what its numerics class promises."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.fp8 import ops
from fp8serve.fp8.ops import LEVELS, cases, reference
from tests.csrc.helpers import assert_bits_equal, assert_fp8_equal

PAGE = Path(__file__).parents[2] / "docs/numerics.md"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# How far a class may be from the reference, of the norm of a result and beside its rounding to its dtype.
ALLOWED = {"exact": 0.0, "sums_fp64": 0.0, "last_bit": 1e-6, "four_lanes": 1e-6, "tiles16_fp32": 1e-5}
ALLOWED["tiles64_bf16"] = ALLOWED["pairs_bf16"] = 2.0**-8
NUMERICS = sorted({kernel["numerics"] for kernel in ops.cpu_kernels().values()})


@pytest.fixture(autouse=True)
def any_cap() -> Iterator[None]:
    yield
    torch.ops.fp8serve.cpu_isa("best")


def capped(cap: str) -> dict[str, dict[str, str]]:
    torch.ops.fp8serve.cpu_isa(cap)
    return ops.cpu_kernels()


def run_op(op: str, kernels: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """The results of an op, and its arguments afterwards."""
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


def assert_near(actual: Tensor, expected: Tensor, allowed: float) -> None:
    if not actual.is_floating_point():
        return assert_same(actual, expected)
    exact, value = expected.double().nan_to_num(), actual.double().nan_to_num()
    relative = allowed + torch.finfo(actual.dtype).eps
    assert (value - exact).norm() <= relative * exact.norm() + 1e-30
    return None


def test_every_op_with_a_kernel_says_which_variant_it_runs() -> None:
    assert set(ops.cpu_kernels()) == ops.compiled_for("cpu")


@pytest.mark.smoke
@pytest.mark.parametrize("op", sorted(ops.compiled_for("cpu")))
def test_a_variant_keeps_what_its_class_promises(op: str) -> None:
    """Variants of one class give the same bits; each is as near to the reference as its class allows."""
    at = {cap: capped(cap)[op] for cap in LEVELS}
    for case in cases(op):
        expected = run_op(op, reference, case.make())
        first: dict[str, list[Tensor]] = {}
        for cap, kernel in at.items():
            torch.ops.fp8serve.cpu_isa(cap)
            outputs = run_op(op, torch.ops.fp8serve, case.make())
            for one, same in zip(outputs, first.setdefault(kernel["numerics"], outputs), strict=True):
                assert_same(one, same)
            for one, other in zip(outputs, expected, strict=True):
                if ALLOWED[kernel["numerics"]]:
                    assert_near(one, other, ALLOWED[kernel["numerics"]])
                else:
                    assert_same(one, other)


def test_the_page_describes_every_class() -> None:
    described = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert set(described) >= {*NUMERICS}
    assert set(ALLOWED) <= set(described)


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
        "mm_4bit",
        "grouped_mm",
        "grouped_mm_4bit",
        "grouped_mlp",
        "paged_attention",
        "attention_backward",
        "wgrad",
    }
    assert ops.reads_packed()
