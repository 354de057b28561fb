"""Fused ops on the device equal their parts: bit for bit if the reference promises it, otherwise up to the last bit."""

import pytest
import torch

from fp8serve.fp8.ops import cases, reference
from tests.csrc.helpers import FORMATS, assert_bits_equal, assert_fp8_equal, hostile, tame
from tests.cuda.accumulation import assert_within_accumulation


def assert_last_bit(actual, expected):
    """Checks that at most 1 % of FP8 codes differ, by one step, and that amaxes differ only by roundings."""
    bits, expected_bits = (t[0].view(torch.uint8).int() for t in (actual, expected))
    assert actual[0].shape == expected[0].shape
    assert int((bits - expected_bits).abs().max() if bits.numel() else 0) <= 1
    assert (bits != expected_bits).float().mean() <= 0.01 or bits.numel() == 0
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-2 if expected_bits.numel() == 0 else 1e-6, atol=0)


@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("quantize_transpose"), ids=lambda case: case.name)
def test_quantize_transpose(kernels, case):
    actual, expected = kernels.run("quantize_transpose", *case.make()), reference.quantize_transpose(*case.make())
    assert_fp8_equal(actual[0], expected[0])
    assert_fp8_equal(actual[1], expected[1])
    assert torch.equal(actual[2], expected[2])


@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("quantize_delayed"), ids=lambda case: case.name)
def test_quantize_delayed(kernels, case):
    """Also compares the history, which the kernel updates in place."""
    x, scale, history, *rest = case.make()
    here = [None if t is None else kernels.here(t) for t in (x, scale, history)]
    actual, expected = kernels.ops.quantize_delayed(*here, *rest), reference.quantize_delayed(x, scale, history, *rest)
    for one, other in zip(actual[:2], expected[:2], strict=True):
        assert_fp8_equal(one.cpu(), other)
    assert_bits_equal(actual[2].cpu(), expected[2])
    if history is not None:
        assert torch.equal(here[2].cpu(), history)


FUSED_DELAYED = ("rms_norm_quantize_delayed", "silu_mul_quantize_delayed", "silu_mul_backward_quantize_delayed")


def unfused(kernels, op, arguments):
    """Returns the results of an op's parts, run separately on this device."""
    if op == "rms_norm_quantize_delayed":
        x, weight, eps, scale, history, *rest = arguments
        return kernels.ops.quantize_delayed(kernels.ops.rms_norm(x, weight, eps), scale, history, *rest, False)
    if op == "silu_mul_quantize_delayed":
        gate, up, scale, history, *rest = arguments
        return kernels.ops.quantize_delayed(kernels.ops.silu_mul(gate, up), scale, history, *rest, False)
    grad, gate, up, *states, dtype, transpose = arguments
    gradients = kernels.ops.silu_mul_backward(grad, gate, up)
    return [
        tensor
        for d, state in zip(gradients, (states[:2], states[2:]), strict=True)
        for tensor in kernels.ops.quantize_delayed(d, *state, dtype, transpose, True)
    ]


@pytest.mark.pairwise
@pytest.mark.parametrize(("op", "case"), [(op, case) for op in FUSED_DELAYED for case in cases(op)])
def test_fused_casts_of_training_have_the_bits_of_their_parts(kernels, op, case):
    """Compares results and histories, on the same device."""
    here, again = kernels.here(case.make()), kernels.here(case.make())
    actual, expected = getattr(kernels.ops, op)(*here), unfused(kernels, op, again)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert_bits_equal(one.cpu(), other.cpu())
    for one, other in zip(here, again, strict=True):
        assert not isinstance(one, torch.Tensor) or one.dim() != 1 or torch.equal(one, other)


@pytest.mark.parametrize("op", FUSED_DELAYED)
def test_fused_casts_of_training_equal_the_reference_up_to_the_last_bit(kernels, op):
    for case in cases(op):
        expected = getattr(reference, op)(*case.make())
        actual = kernels.run(op, *case.make())
        for i in range(0, len(actual), 3):
            if case.name != "hostile":
                assert_last_bit((actual[i], actual[i + 2]), (expected[i], expected[i + 2]))
            assert torch.equal(actual[i + 2].isnan(), expected[i + 2].isnan())
            if actual[i + 1].numel():
                assert_bits_equal(actual[i + 1], actual[i].t().contiguous())


@pytest.mark.parametrize("shape", [(128, 256), (144, 136), (131, 300)])
def test_quantize_transpose_of_many_tiles(kernels, shape):
    args = hostile(*shape, torch.bfloat16, seed=3), torch.tensor(3.0), FORMATS[1]
    actual, expected = kernels.run("quantize_transpose", *args), reference.quantize_transpose(*args)
    assert_fp8_equal(actual[0], expected[0])
    assert_fp8_equal(actual[1], expected[1])


@pytest.mark.parametrize("op", ["rms_norm_quantize", "silu_mul_quantize"])
def test_norm_and_activation_casts_equal_the_reference_up_to_the_last_bit(kernels, op):
    for case in cases(op):
        assert_last_bit(kernels.run(op, *case.make()), getattr(reference, op)(*case.make()))


@pytest.mark.parametrize("case", cases("rotary_write_kv"), ids=lambda case: case.name)
def test_rotary_write_kv_has_the_bits_of_the_reference(kernels, case):
    args, expected = kernels.here(case.make()), case.make()
    rotated = reference.rotary_write_kv(*expected)
    assert_bits_equal(kernels.ops.rotary_write_kv(*args).cpu(), rotated)
    for actual, cache in zip(args[5:7], expected[5:7], strict=True):
        assert_bits_equal(actual.cpu(), cache)


def test_rotary_into_fp8_from_a_fused_projection(kernels):
    """q, k and v as views of one [T, (4 + 2 + 2) * 16] tensor, caches in FP8."""
    qkv = hostile(5, 128, torch.bfloat16)
    angle = tame(5, 16, seed=2)
    caches = [torch.zeros(2, 4, 2, 16).to(FORMATS[0]) for _ in range(2)]
    rest = (angle.cos().bfloat16().unsqueeze(1), angle.sin().bfloat16().unsqueeze(1))
    tail = (torch.tensor([7, 0, -1, 3, 4]), torch.tensor(2.5), torch.tensor(0.5))

    def split(x):
        heads = x.view(5, 8, 16)
        return heads[:, :4], heads[:, 4:6], heads[:, 6:]

    here = kernels.here([c.clone() for c in caches])
    actual = kernels.ops.rotary_write_kv(*split(kernels.here(qkv)), *kernels.here(rest), *here, *kernels.here(tail))
    expected = reference.rotary_write_kv(*split(qkv), *rest, *caches, *tail)
    assert_bits_equal(actual.cpu(), expected)
    for one, other in zip(here, caches, strict=True):
        differs = one.cpu().view(torch.uint8) != other.view(torch.uint8)
        assert bool(
            (one.cpu().float().isnan() & other.float().isnan())[differs].all()
        )  # the sign of a computed NaN may differ


@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("watched_mm_add"), ids=lambda case: case.name)
def test_watched_mm_add_has_the_bits_of_its_parts(kernels, case):
    """Some cases take one launch, others several."""
    fused, parts = kernels.here(case.make()), kernels.here(case.make())
    actual = kernels.ops.watched_mm_add(*fused)
    x, scale, amax, saturated, rows, *weight, residual = parts
    q = kernels.ops.quantize_watched(x, None, None, scale, amax, saturated, rows)
    assert_bits_equal(actual.cpu(), kernels.ops.scaled_mm_add(q, weight[0], *weight[1:], residual).cpu())
    assert (float(fused[2]), int(fused[3])) == (float(amax), int(saturated))
    x, scale, seen_then, saturated_then, rows, b, *scales, bias, residual = case.make()
    q = reference.quantize_watched(x, None, None, scale, seen_then, saturated_then, rows)
    assert_within_accumulation(actual.cpu(), q, b, *scales, bias, residual, device=kernels.device)
    assert (float(amax), int(saturated)) == (float(seen_then), int(saturated_then))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 64, 70])
def test_a_residual_is_added_to_the_rounded_product(kernels, rows, dtype):
    """One kernel adds the residual in its epilogue, another one adds it separately."""
    a, b = tame(rows, 1200, seed=1).to(FORMATS[0]), tame(24, 1200, seed=2).to(FORMATS[0])
    one, residual = torch.tensor(0.37), tame(rows, 24, dtype, 3)
    product = kernels.run("scaled_mm", a, b, one, one, None, dtype)
    assert_bits_equal(kernels.run("scaled_mm_add", a, b, one, one, None, residual), residual + product)


@pytest.mark.parametrize("op", ["mm", "scaled_mm_add"])
def test_products_are_close_to_the_reference(kernels, op):
    for case in cases(op):
        expected = getattr(reference, op)(*case.make())
        actual = kernels.run(op, *case.make())
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=1.6e-2 if expected.itemsize == 2 else 1e-5, atol=1e-3)


@pytest.mark.parametrize("shape", [(5, 40, 264), (70, 136, 200), (3, 9, 13), (80, 24, 7)])
def test_bf16_products_are_close_to_exact_ones(kernels, shape):
    m, n, k = shape
    a, b, bias = tame(m, k, torch.bfloat16, 1), tame(n, k, torch.bfloat16, 2), tame(1, n, torch.bfloat16, 3)[0]
    actual = kernels.run("mm", a, b, bias, torch.float32)
    truth = a.double() @ b.double().t() + bias.double()
    bound = a.double().abs() @ b.double().abs().t() + bias.double().abs()
    assert ((actual.double() - truth).abs() <= 2.0**-20 * bound).all()


def test_a_row_of_a_bf16_product_does_not_depend_on_its_neighbours(kernels):
    a, b = tame(64, 1096, torch.bfloat16, 1), tame(24, 1096, torch.bfloat16, 2)
    whole = kernels.run("mm", a, b, None, torch.float32)
    for rows in (1, 9, 17, 33):
        assert_bits_equal(kernels.run("mm", a[:rows], b, None, torch.float32), whole[:rows])
