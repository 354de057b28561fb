"""RMS norm, gated activation and rotary embedding: values and gradients of FP64 formulas, and bits of the fused ops."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fp8serve.fp8 import elementwise
from fp8serve.fp8.ops import cpu_isa, reference

HIGH = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (9, 70), (300, 33), (0, 8)]
E4M3 = torch.float8_e4m3fn


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm_arguments(rows: int, cols: int) -> list[Tensor]:
    return [noise(rows, cols), noise(cols, seed=1)]


def gate_arguments(rows: int, cols: int) -> list[Tensor]:
    return [3 * noise(rows, cols), noise(rows, cols, seed=1)]


def rotary_arguments(rows: int, cols: int) -> list[Tensor]:
    dim = cols // 2 * 2
    angle = noise(rows, 1, dim // 2, seed=2).repeat(1, 1, 2)
    return [noise(rows, 3 * dim).view(rows, 3, dim), angle.cos(), angle.sin()]


def wide_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


# name: (our op, the formula for FP64, function that makes the arguments, number of arguments with gradients)
CHECKED: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[[int, int], list[Tensor]], int]] = {
    "rms_norm": (lambda x, w: elementwise.rms_norm(x, w, 1e-5), wide_norm, norm_arguments, 2),
    "silu_mul": (elementwise.silu_mul, lambda g, u: g * g.sigmoid() * u, gate_arguments, 2),
    "rotary": (elementwise.rotary, reference.rotary, rotary_arguments, 1),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", list(CHECKED))
def test_values_and_gradients(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    ours, exact, arguments, trained = CHECKED[name]
    inputs = [a.to(dtype).requires_grad_(i < trained) for i, a in enumerate(arguments(*shape))]
    wide = [a.detach().double().requires_grad_(a.requires_grad) for a in inputs]
    actual, expected = ours(*inputs), exact(*wide)
    assert actual.dtype == dtype
    upstream = noise(*actual.shape, seed=5).to(dtype)
    actual.backward(upstream)  # type: ignore[no-untyped-call]
    expected.backward(upstream.double())  # type: ignore[no-untyped-call]
    assert_near(actual, expected, dtype)
    for ours_in, exact_in in zip(inputs[:trained], wide, strict=False):
        assert ours_in.grad is not None
        assert exact_in.grad is not None
        assert ours_in.grad.dtype == dtype
        assert_near(ours_in.grad, exact_in.grad, dtype)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Allows an error of a few roundings of the element, or of the largest element as an estimate of its terms."""
    expected = expected.detach()
    size = expected.abs().amax() if expected.numel() else 0.0
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=float(tolerance * size) + 1e-12)


@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_fused_casts_have_the_bits_of_the_op_and_a_cast(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = (a.to(dtype) for a in norm_arguments(*shape))
    gate, up = (a.to(dtype) for a in gate_arguments(*shape))
    scale, op = torch.tensor(3.0), torch.ops.fp8serve
    pairs = [
        (op.rms_norm_quantize(x, weight, 1e-5, scale, E4M3), elementwise.rms_norm(x, weight, 1e-5)),
        (op.silu_mul_quantize(gate, up, scale, E4M3), elementwise.silu_mul(gate, up)),
    ]
    for (q, amax), y in pairs:
        expected_q, expected_amax = op.quantize(y, scale, E4M3)
        assert torch.equal(q.view(torch.uint8), expected_q.view(torch.uint8))
        assert torch.equal(amax, expected_amax)


def test_no_autograd_graph_is_recorded_without_requires_grad() -> None:
    x, weight = norm_arguments(3, 8)
    assert elementwise.rms_norm(x, weight, 1e-5).grad_fn is None
    with torch.no_grad():
        assert elementwise.rms_norm(x, weight.requires_grad_(), 1e-5).grad_fn is None


def test_mixed_types_promote_as_torch_does() -> None:
    x, weight = norm_arguments(3, 8)
    mixed = elementwise.rms_norm(x.bfloat16(), weight, 1e-5)
    assert mixed.dtype == torch.float32
    assert torch.equal(mixed, reference.rms_norm(x.bfloat16(), weight, 1e-5))


@pytest.mark.skipif(cpu_isa() is None, reason="the CPU kernels are not built")
def test_gradients_do_not_depend_on_threads() -> None:
    x, weight, grad = noise(500, 64), noise(64, seed=1), noise(500, 64, seed=2)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(torch.ops.fp8serve.rms_norm_backward(grad, x, weight, 1e-5))
    torch.set_num_threads(1)
    for d_x, d_weight in results[1:]:
        assert torch.equal(d_x, results[0][0])
        assert torch.equal(d_weight, results[0][1])
