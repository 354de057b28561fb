"""If a GEMM kernel is switched off, another of our kernels, cuBLASLt or the reference computes the product.

On a CPU, torch's scaled_mm replaces cuBLASLt; it has the same arguments, so these tests also check what we pass.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from fp8serve.fp8.ops import Case, cases, reference
from fp8serve.fp8.ops.attention import rotary_mm_case
from fp8serve.fp8.ops.gemm import normed_case
from fp8serve.fp8.selfcheck.child import flatten_tensors
from tests.csrc.helpers import FORMATS, assert_bits_equal, tame
from tests.cuda import emulated
from tests.cuda.accumulation import assert_within_accumulation
from tests.cuda.conftest import Kernels
from tests.cuda.test_gemm import BF16, E4M3, E5M2, operands, whole_numbers

OWN = "skinny+large+medium+small+thin128+thin64+thin32+mma"


@pytest.fixture
def switched(kernels: Kernels) -> Iterator[Kernels]:
    default = disable_kernels(kernels, "")
    disable_kernels(kernels, "none")
    yield kernels
    disable_kernels(kernels, default or "none")


def disable_kernels(kernels: Kernels, names: str) -> str:
    """Returns the names that were disabled before. "" changes nothing, and "none" enables all kernels."""
    return str(kernels.ops.gemm_kernels(kernels.here(torch.zeros(1)), names))


def test_gemm_kernels_returns_and_sets_the_switched_off_kernels(switched: Kernels) -> None:
    assert disable_kernels(switched, "") == ""
    assert disable_kernels(switched, "mma+skinny") == "skinny+mma"
    assert disable_kernels(switched, "") == "skinny+mma"
    with pytest.raises(RuntimeError, match=r"gemm_kernels: off: is 'mma\+huge', must be names of kernels"):
        disable_kernels(switched, "mma+huge")
    assert disable_kernels(switched, "") == "skinny+mma"
    assert disable_kernels(switched, "none") == ""


@pytest.mark.pairwise
@pytest.mark.parametrize("off", [OWN, f"{OWN}+cublaslt+cublaslt_rows", "skinny", "mma"])
@pytest.mark.parametrize("case", cases("scaled_mm")[::3], ids=lambda case: case.name)
def test_the_remaining_kernels_compute_every_product(switched: Kernels, off: str, case) -> None:
    a, b, a_scale, b_scale, bias, out = case.make()
    disable_kernels(switched, off)
    actual = switched.run("scaled_mm", a, b, a_scale, b_scale, bias, out)
    assert actual.dtype == out
    if a.shape[1] == 0:
        assert_bits_equal(actual, reference.scaled_mm(a, b, a_scale, b_scale, bias, out))
    else:
        assert_within_accumulation(actual, a, b, a_scale, b_scale, bias, device=switched.device)


@pytest.mark.parametrize("op", ["scaled_mm_quantize", "scaled_mm_add"])
def test_ops_fused_with_a_product_work_without_our_kernels(switched: Kernels, op: str) -> None:
    disable_kernels(switched, f"{OWN}+cublaslt+cublaslt_rows")
    for case in cases(op):
        expected, actual = getattr(reference, op)(*case.make()), switched.run(op, *case.make())
        for one, expected_tensor in zip(
            *(x if isinstance(x, tuple) else (x,) for x in (actual, expected)), strict=True
        ):
            torch.testing.assert_close(
                one.float(), expected_tensor.float(), rtol=1.3e-1 if one.dtype == E4M3 else 2e-2, atol=1e-3
            )


def test_the_reference_computes_if_all_kernels_are_off(switched: Kernels) -> None:
    if switched.device != "cpu":
        pytest.skip("the reference on a GPU sums in another order than on the CPU")
    args = *operands(17, 40, 400, "row", "row"), None, torch.float32
    plain = switched.run("scaled_mm", *args)
    disable_kernels(switched, f"{OWN}+cublaslt+cublaslt_rows")
    assert_bits_equal(switched.run("scaled_mm", *args), reference.scaled_mm(*args))
    assert not torch.equal(plain, reference.scaled_mm(*args)), "the other kernel should have other roundings"


KINDS = [("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("block1x128", "block128x128")]


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", [(1, 16, 16), (5, 48, 400), (70, 32, 77), (128, 24, 144), (3, 7, 32)])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
def test_cublaslt_computes_the_products_that_its_documentation_allows(kernels: Kernels, shape, kinds, formats) -> None:
    """Its products are close to exact ones. K is padded for it; no other argument is changed."""
    m, n, k = shape
    args = operands(m, n, k, *kinds, formats)
    for out in (BF16, torch.float32, torch.float16):
        for bias in (None, tame(1, n, seed=3)[0].to(out)):
            one_each = all(scale.numel() == 1 for scale in args[2:])  # a single block has one scale, too
            each = zip(args[2:], (m, n), strict=True)  # a single block of 1x128 is a row
            by_rows = all(s.numel() == 1 or s.shape == (rows, 1) for s, rows in each) and out == BF16
            biased = bias is None or out != torch.float32
            is_allowed = n % 16 == 0 and formats != (E5M2, E5M2) and biased and (one_each or by_rows)
            if is_allowed:
                actual = kernels.run("scaled_mm_by", *args, bias, out, "cublaslt", 1)
                assert_within_accumulation(actual, *args, bias, device=kernels.device)
            else:
                with pytest.raises(RuntimeError, match="kernel: is cublaslt, which does not multiply this here"):
                    kernels.run("scaled_mm_by", *args, bias, out, "cublaslt", 1)


def test_cublaslt_refuses_a_bias_of_another_dtype(kernels: Kernels) -> None:
    *args, bias = whole_numbers(5, 16, 32)
    with pytest.raises(RuntimeError, match="kernel: is cublaslt, which does not multiply this here"):
        kernels.run("scaled_mm_by", *args, bias, BF16, "cublaslt", 1)
    assert bool(kernels.run("scaled_mm_by", *args, bias.bfloat16(), BF16, "cublaslt", 1).isfinite().all())


def test_cublaslt_refuses_unaligned_scales(kernels: Kernels) -> None:
    """The scales of an expert's rows may be unaligned; torch raised an error for them on an H200."""
    a, b, a_scale, b_scale = kernels.here(operands(129, 32, 64, "row", "row"))
    args = a[1:], b, a_scale[1:], b_scale, None, BF16
    with pytest.raises(RuntimeError, match="kernel: is cublaslt, which does not multiply this here"):
        kernels.ops.scaled_mm_by(*args, "cublaslt", 1)
    actual = kernels.ops.scaled_mm(*args)
    assert_within_accumulation(actual.cpu(), *(t.cpu() for t in args[:4]), device=kernels.device)


@pytest.mark.parametrize("out", FORMATS)
def test_cublaslt_is_not_used_for_fp8_output(switched: Kernels, out: torch.dtype) -> None:
    args = *whole_numbers(5, 48, 144), torch.tensor(0.5), out
    expected = switched.run("scaled_mm_quantize", *args)
    disable_kernels(switched, OWN)
    for one, expected_tensor in zip(switched.run("scaled_mm_quantize", *args), expected, strict=True):
        assert torch.equal(one.float(), expected_tensor.float())


@pytest.mark.parametrize("case", cases("stored_mm"), ids=lambda case: case.name)
def test_weights_read_before_the_wait_give_the_same_bits(switched: Kernels, case) -> None:
    """The op copies weights with unaligned rows; they are tested, too."""
    expected = switched.run("scaled_mm", *case.make())
    assert_bits_equal(switched.run("stored_mm", *case.make()), expected)
    disable_kernels(switched, "early_weights")
    assert_bits_equal(switched.run("stored_mm", *case.make()), expected)


CHIPS = pytest.mark.parametrize("chip", [(89, 4, 99 * 1024), (90, 132, 227 * 1024)], ids=["Ada", "Hopper"])


def results_with_and_without(kernels: Kernels, kernel: str, op: str, case: Case, chip: tuple[int, int, int]) -> Any:
    """Returns the results of an op, and all its tensor arguments afterwards: with a kernel switched on, and off. On
    Hopper, two teams of warps share a block's rows."""
    results = []
    if kernels.device == "cpu":
        emulated.emulator().set_chip(*chip)
    try:
        for off in ("none", kernel):
            disable_kernels(kernels, off)
            arguments = kernels.here(case.make())
            results.append(flatten_tensors(getattr(kernels.ops, op)(*arguments), *arguments))
    finally:
        if kernels.device == "cpu":
            emulated.emulator().set_chip(89, 4, 99 * 1024)
    return [[tensor.cpu() for tensor in tensors] for tensors in results]


def assert_same_results(kernels: Kernels, kernel: str, op: str, case: Case, chip: tuple[int, int, int]) -> None:
    for actual, expected in zip(*results_with_and_without(kernels, kernel, op, case, chip), strict=True):
        assert_bits_equal(actual, expected)


def id_of(value: str | Case) -> str:
    return value.name if isinstance(value, Case) else value


FUSED = [("gated", "stored_gated_mm"), ("rotary", "stored_rotary_mm")]


@CHIPS
@pytest.mark.parametrize(("kernel", "op", "case"), [(*one, case) for one in FUSED for case in cases(one[1])], ids=id_of)
def test_a_product_fused_with_what_follows_has_the_same_bits(switched: Kernels, kernel, op, case, chip) -> None:
    """Also compares counters and caches, which the ops update in place."""
    assert_same_results(switched, kernel, op, case, chip)


@CHIPS
@pytest.mark.parametrize("cache", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_rotary_in_the_epilogue_has_the_same_bits_for_every_number_of_tokens(
    switched: Kernels, dim: int, cache: torch.dtype, chip: tuple[int, int, int]
) -> None:
    """Queries have an odd number of heads, and values overflow, are NaN and are not cached."""
    for tokens in range(1, 17):
        sizes = (tokens, 3, 1 if tokens % 2 else 2, dim)

        def make(sizes: tuple[int, int, int, int] = sizes) -> tuple[Any, ...]:
            a, *rest = rotary_mm_case(sizes, 272, "row", cache, cache is E4M3)
            a.view(torch.uint8)[-1, :16] = 0x7F  # NaN
            rest[2][: 2 * dim] *= 2.0**120
            return a, *rest

        assert_same_results(switched, "rotary", "stored_rotary_mm", Case("", make), chip)


STORED = ("stored_mm", "stored_gated_mm", "stored_rotary_mm")


@CHIPS
@pytest.mark.parametrize(
    ("op", "case"), [(op, normed_case(case)) for op in STORED for case in cases(op)[::2]], ids=id_of
)
def test_a_product_that_casts_a_norm_has_the_same_bits(switched: Kernels, op, case, chip) -> None:
    """Also compares all counters, and the caches."""
    assert_same_results(switched, "normed", op, case, chip)


@CHIPS
@pytest.mark.parametrize("inputs", [16, 512, 528, 2048, 4112])
def test_a_norm_in_the_prologue_has_the_same_bits_for_every_size(switched: Kernels, inputs: int, chip) -> None:
    """A warp sums the squares of up to 512 inputs, and eight warps those of more. Some values are NaN or infinite."""

    def make(tokens: int, unaligned: bool) -> tuple[Any, ...]:
        one = torch.tensor(1.0)
        a, b = (torch.ones(rows, inputs).to(E4M3) for rows in (tokens, 40))
        x, *rest = normed_case(Case("", lambda: (a, b, one, one, None, BF16))).make()
        x[-1, 0] = torch.inf if tokens == 3 else torch.nan if tokens == 4 else 7.0
        if unaligned:
            x = torch.cat([x[:, :1], x], 1)[:, 1:]
        return x, *rest

    for tokens, unaligned in product(range(1, 6), (False, True)):
        case = Case("", partial(make, tokens, unaligned))
        assert_same_results(switched, "normed", "stored_mm", case, chip)


@pytest.mark.emulator
@pytest.mark.parametrize("op", STORED)
def test_a_norm_of_few_rows_takes_no_launch(op: str) -> None:
    """A norm of five rows takes a launch, and so does one with unaligned rows or an unaligned weight."""
    gpu, here = emulated.emulator(), torch.zeros(1)
    case = next(case for case in cases(op) if len(case.make()[0]) in (1, 2, 3) and case.make()[0].shape[1] % 16 == 0)
    x, *arguments = normed_case(case).make()
    launches = []
    for off, input in (("normed", x), ("none", x), ("none", torch.cat([x[:, :1], x], 1)[:, 1:])):
        gpu.ops.gemm_kernels(here, off)
        gpu.launches()
        getattr(gpu.ops, op)(input, *arguments)
        launches.append(len(gpu.launches()))
    assert launches == [2, 1, 2]


def test_rotary_in_the_epilogue_skips_slots_outside_of_the_cache(switched: Kernels) -> None:
    arguments = switched.here(rotary_mm_case((3, 2, 1, 64), 144, "row", BF16, False))
    k_cache, v_cache, slots = arguments[7:10]
    slots.copy_(torch.tensor([-1, 6, 0]))
    switched.ops.stored_rotary_mm(*arguments)
    for cache in (k_cache, v_cache):
        assert bool(cache.view(-1, 64)[0].any())
        assert not bool(cache.view(-1, 64)[1:].any())


def test_stored_rotary_mm_checks_its_arguments(kernels: Kernels) -> None:
    a, b, *rest = kernels.here(rotary_mm_case((3, 2, 1, 64), 144, "row", BF16, False))
    with pytest.raises(RuntimeError, match="stored_rotary_mm: b: has 200 rows, must be those of whole heads"):
        kernels.ops.stored_rotary_mm(a, b[:200], *rest)
