"""The ops: registration, fake kernels, the names of their kernels, and the public wrappers."""

from collections.abc import Callable

import pytest
import torch

import fp8serve
from fp8serve.errors import RecipeError
from fp8serve.fp8 import ops
from fp8serve.fp8.ops import Case, arithmetic, cases, reference
from fp8serve.fp8.ops.arithmetic import E8M0, FP8_MAX

OPCHECK_CASES = [
    (op, case)
    for op in ops.OPS
    for case in cases(op)[:: max(1, len(cases(op)) // 4)]
    # opcheck treats NaN as different from itself
    if case.name != "hostile" and not case.name.startswith("edges")
]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def test_every_op_has_cases_and_a_reference() -> None:
    assert set(ops.OPS) == set(vars(reference)) == set(ops.backends())
    for op in ops.OPS:
        assert cases(op)
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fp8serve::{op}", "CompositeExplicitAutograd")


def test_no_kernel_is_registered_under_a_mistyped_name() -> None:
    assert not [line for line in torch._C._dispatch_find_dangling_impls() if "fp8serve" in line]


def test_backends_name_the_kernel_of_every_op() -> None:
    served = ops.backends()
    if ops.LIBRARIES["cpu"] is None:
        assert served["quantize"] == served["scaled_mm"] == "reference"
    else:
        assert served["scaled_mm"] == f"cpu kernel ({ops.cpu_isa()})"
        assert served["delayed_update"] == "cpu kernel (portable)"
        assert served["layer_norm_quantize"] == "composed"
    if ops.LIBRARIES["cuda"] is None:
        assert set(ops.backends("cuda").values()) == {"reference", "composed"}


@pytest.mark.pairwise(each=("op",))
@pytest.mark.parametrize(("op", "case"), OPCHECK_CASES, ids=[f"{op}: {case.name}" for op, case in OPCHECK_CASES])
def test_opcheck(op: str, case: Case) -> None:
    args = case.make()
    # torch's schema test compares inputs by arithmetic that FP8 tensors do not have
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(isinstance(a, torch.Tensor) and a.dtype in {*FP8_MAX, E8M0} for a in args):
        checks.append("test_schema")
    torch.library.opcheck(getattr(torch.ops.fp8serve, op).default, args, test_utils=checks)


def is_mutable(op: str) -> bool:
    return bool(getattr(torch.ops.fp8serve, op).default._schema.is_mutable)


@pytest.mark.parametrize("op", [op for op in ops.OPS if not is_mutable(op)])
def test_ops_do_not_change_their_inputs(op: str) -> None:
    for case in cases(op):
        args, before = case.make(), case.make()
        getattr(torch.ops.fp8serve, op)(*args)
        for argument, original in zip(args, before, strict=True):
            if isinstance(argument, torch.Tensor):
                assert torch.equal(bits(argument), bits(original))


@pytest.mark.parametrize("case", cases("scaled_mm"), ids=lambda c: c.name)
def test_scaled_mm_error_is_at_most_that_of_fp32(case: Case) -> None:
    """Against FP64, at most twice the error of the naive FP32 computation; rows G1 and G2 of docs/numerics.md."""
    a, b, a_scale_inv, b_scale_inv, bias, out_dtype = case.make()
    wide = [arithmetic.dequantize(t, s).double() for t, s in ((a, a_scale_inv), (b, b_scale_inv))]
    added = 0.0 if bias is None else bias.double()
    exact = wide[0] @ wide[1].t() + added
    naive = ((wide[0].float() @ wide[1].float().t()) + torch.as_tensor(added).float()).to(out_dtype)
    actual = torch.ops.fp8serve.scaled_mm(*case.make())
    assert actual.dtype == out_dtype
    assert (actual - exact).norm() <= 2 * (naive - exact).norm() + 1e-6 * exact.norm()


def test_a_nan_affects_only_its_row() -> None:
    """Row G3."""
    a = torch.tensor([[1.0, torch.nan], [2.0, 3.0]]).to(torch.float8_e4m3fn)
    one = torch.tensor(1.0)
    y = fp8serve.scaled_mm(a, torch.ones(3, 2).to(torch.float8_e4m3fn), one, one, out_dtype=torch.float32)
    assert y[0].isnan().all()
    assert y[1].tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("kernel", [reference.scaled_mm, torch.ops.fp8serve.scaled_mm], ids=["reference", "op"])
def test_a_row_does_not_depend_on_the_other_rows(kernel: Callable[..., torch.Tensor]) -> None:
    """Row G4: decoding alone or in a batch gives the same bits."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 2048, generator=generator).to(torch.float8_e4m3fn) for n in (40, 600))
    one = torch.tensor(1.0)
    together = kernel(a, b, one, one, None, torch.float32)
    for rows in (1, 2, 3, 5, 7, 17, 33):
        assert torch.equal(kernel(a[:rows], b, one, one, None, torch.float32), together[:rows])


def test_scales_that_cancel_do_not_overflow_in_between() -> None:
    """Row G6. tests/csrc and tests/cuda check that every kernel has these bits."""
    one = torch.full((16, 16), 2.0).to(torch.float8_e4m3fn)
    for a, b in ((3e38, 1e-6), (1e-6, 3e38)):
        y = reference.scaled_mm(one, one, torch.tensor(a), torch.tensor(b), None, torch.float32)
        assert torch.equal(y, fp8serve.scaled_mm(one, one, torch.tensor(a), torch.tensor(b), out_dtype=torch.float32))
        torch.testing.assert_close(y, torch.full((16, 16), 64 * 3e32))


def test_scaled_mm_is_not_rounded_by_a_surrounding_autocast() -> None:
    case = next(c for c in cases("scaled_mm") if c.make()[2].dim() == 2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = reference.scaled_mm(*case.make())
    assert torch.equal(inside, reference.scaled_mm(*case.make()))


@pytest.mark.parametrize(
    ("granularity", "shape"), [("tensor", ()), ("row", (5, 1)), ("block1x128", (5, 3)), ("block128x128", (1, 3))]
)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_quantize_shapes_and_round_trip(fmt: str, granularity: str, shape: tuple[int, ...]) -> None:
    x = torch.linspace(-7, 7, 1500).view(5, 300).bfloat16()
    q, scale_inv = fp8serve.quantize(x, fmt=fmt, granularity=granularity)
    assert (q.shape, q.dtype) == (x.shape, ops.DTYPES[fmt])
    assert (tuple(scale_inv.shape), scale_inv.dtype) == (shape, torch.float32)
    rtol = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}[fmt]
    torch.testing.assert_close(fp8serve.dequantize(q, scale_inv), x.float(), rtol=rtol, atol=1e-4)


@pytest.mark.parametrize("granularity", ["tensor", "row", "block1x128"])
def test_leading_dimensions_are_flattened_into_rows(granularity: str) -> None:
    x = torch.randn(2, 3, 200, generator=torch.Generator().manual_seed(0))
    q, scale_inv = fp8serve.quantize(x, granularity=granularity)
    flat_q, flat_scale_inv = fp8serve.quantize(x.view(6, 200), granularity=granularity)
    assert torch.equal(q.view(torch.uint8), flat_q.view(2, 3, 200).view(torch.uint8))
    assert scale_inv.numel() == flat_scale_inv.numel()
    assert torch.equal(fp8serve.dequantize(q, scale_inv).view(6, 200), fp8serve.dequantize(flat_q, flat_scale_inv))


def test_values_are_multiplied_by_the_scale_argument() -> None:
    q, scale_inv = fp8serve.quantize(torch.tensor([3.0, -500.0]), scale=2.0)
    assert q.float().tolist() == [6.0, -448.0]
    assert scale_inv.item() == 0.5


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan"), torch.tensor(0.0)])
def test_an_invalid_scale_argument_is_refused(bad: float | torch.Tensor) -> None:
    with pytest.raises(ValueError, match="scale must be positive and finite, found"):
        fp8serve.quantize(torch.ones(2, 4), scale=bad)


def test_power_2_scale_rounds_down() -> None:
    _, scale_inv = fp8serve.quantize(torch.tensor([3.0]), power_2_scale=True)
    assert scale_inv.item() == 2.0**-7  # 448 / 3 = 149.3 -> 128


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 7), (17, 19, 23), (2, 4, 0)])
def test_any_sizes(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    a, b = torch.ones(m, k).to(torch.float8_e4m3fn), torch.ones(n, k).to(torch.float8_e5m2)
    y = fp8serve.scaled_mm(a, b, torch.tensor(2.0), torch.tensor(0.5), bias=torch.ones(n), out_dtype=torch.float32)
    assert torch.equal(y, torch.full((m, n), k + 1.0))


def test_unknown_names_are_refused() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(RecipeError, match="no FP8 format 'e3m4'"):
        fp8serve.quantize(x, fmt="e3m4")
    with pytest.raises(RecipeError, match="no granularity 'column'"):
        fp8serve.quantize(x, granularity="column")


def test_wrong_shapes_are_refused_by_naming_them() -> None:
    a, one = torch.ones(4, 300).to(torch.float8_e4m3fn), torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"a \[M, K\] and b \[N, K\], found \[4, 300\] and \[300, 4\]"):
        fp8serve.scaled_mm(a, a.t(), one, one)
    with pytest.raises(ValueError, match=r"a_scale_inv of a \[4, 300\] matrix must have .* found \[3, 1\]"):
        fp8serve.scaled_mm(a, a, torch.ones(3, 1), one)
    with pytest.raises(ValueError, match=r"bias must have shape \[4\], found \[5\]"):
        fp8serve.scaled_mm(a, a, one, one, bias=torch.ones(5))
    with pytest.raises(ValueError, match=r"needs FP8 operands, found torch.float32"):
        fp8serve.scaled_mm(torch.ones(4, 300), a, one, one)
    with pytest.raises(ValueError, match=r"scale_inv of a \[4, 300\] matrix"):
        fp8serve.dequantize(a, torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"128x128 blocks need a matrix"):
        fp8serve.quantize(torch.ones(2, 2, 2), granularity="block128x128")
    with pytest.raises(ValueError, match=r"scale must be one number"):
        fp8serve.quantize(torch.ones(2), scale=torch.ones(2))
    with pytest.raises(ValueError, match=r"scale applies to the whole tensor"):
        fp8serve.quantize(torch.ones(2), scale=1.0, granularity="row")


def test_fp8_maxima_are_those_of_torch() -> None:
    assert {torch.finfo(dtype).max: dtype for dtype in FP8_MAX} == {limit: dtype for dtype, limit in FP8_MAX.items()}
