"""`served_attention`, for training, has the bits of a server's attention on every instruction set, and the gradient of
plain attention."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.fp8 import ops
from fp8serve.fp8.attention import KvScale, causal_attention, served_attention
from fp8serve.fp8.batch_invariant import BatchInvariantLinear, has_batch_invariant_products, product
from fp8serve.fp8.ops import LEVELS

pytestmark = pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")
LENGTHS = [70, 5, 131]
BLOCK = 16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 50},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 0.0, 3.0])},
}
SCALES = {"bf16": None, "fp8": KvScale.of(torch.tensor(90.0), torch.tensor(70.0))}


@pytest.fixture(autouse=True)
def restore_isa() -> Iterator[None]:
    yield
    torch.ops.fp8serve.cpu_isa("best")


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    tokens = sum(LENGTHS)
    return [torch.randn(tokens, heads, 40).to(dtype).requires_grad_() for heads in (4, 2, 2)]


@torch.no_grad()
def decode(q: Tensor, k: Tensor, v: Tensor, scale: KvScale | None, options: dict[str, Any]) -> Tensor:
    """Computes attention token by token as a server does: each token is written to a paged cache before it is used."""
    out, start = [], 0
    for length in LENGTHS:
        blocks = -(-length // BLOCK)
        table = torch.arange(blocks - 1, -1, -1, dtype=torch.int32)
        caches = [torch.zeros(blocks, BLOCK, 2, 40).to(torch.float8_e4m3fn if scale else q.dtype) for _ in range(2)]
        for at in range(length):
            row, slot = slice(start + at, start + at + 1), int(table[at // BLOCK]) * BLOCK + at % BLOCK
            cast = (scale.k, scale.v) if scale else (None, None)
            torch.ops.fp8serve.write_kv(k[row], v[row], *caches, torch.tensor([slot]), *cast)
            where = table[None], torch.tensor([at + 1]).int(), torch.tensor([0, 1]).int()
            inverse = (scale.k_inv, scale.v_inv) if scale else (None, None)
            out.append(torch.ops.fp8serve.paged_attention(q[row], *caches, *where, *inverse, 0.3, **options))
        start += length
    return torch.cat(out)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cache", SCALES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_attends_as_decoding_does(level: str, cache: str, options: dict[str, Any]) -> None:
    torch.ops.fp8serve.cpu_isa(level)
    q, k, v = inputs()
    actual = served_attention(q, k, v, LENGTHS, 0.3, **options, scale=SCALES[cache])
    assert torch.equal(actual, decode(q, k, v, SCALES[cache], options))


@pytest.mark.parametrize("cache", SCALES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_gradient_is_that_of_plain_attention(cache: str, options: dict[str, Any]) -> None:
    (q, k, v), scale, learned = inputs(), SCALES[cache], dict(options)
    upstream = torch.randn(sum(LENGTHS), 4, 40).bfloat16()
    more = [learned["sinks"].clone().requires_grad_()] if "sinks" in options else []
    learned |= dict(zip(["sinks"], more, strict=False))
    grads = torch.autograd.grad(
        served_attention(q, k, v, LENGTHS, 0.3, **learned, scale=scale), [q, k, v, *more], upstream
    )
    if scale is not None:
        k, v = ((ops.quantize(x.detach(), scale=s)[0].float() / s).bfloat16() for x, s in ((k, scale.k), (v, scale.v)))
    inner = [t.detach().requires_grad_() for t in (q, k, v)]
    plain = causal_attention(*inner, LENGTHS, 0.3, **learned)
    for one, other in zip(grads, torch.autograd.grad(plain, [*inner, *more], upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_fp32_inputs_which_no_server_has_take_plain_attention() -> None:
    q, k, v = inputs(torch.float32)
    assert torch.equal(served_attention(q, k, v, LENGTHS, 0.3), causal_attention(q, k, v, LENGTHS, 0.3))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_a_row_of_a_product_does_not_depend_on_the_batch(level: str, out_dtype: torch.dtype) -> None:
    torch.ops.fp8serve.cpu_isa(level)
    x, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((37, 300), (50, 300), (50,)))
    alone = torch.cat([product(row[None], weight, bias, out_dtype) for row in x])
    with torch.enable_grad():
        assert torch.equal(product(x.requires_grad_(), weight, bias, out_dtype), alone)


def test_the_gradient_of_a_batch_invariant_linear_is_that_of_torch() -> None:
    plain = torch.nn.Linear(60, 30).bfloat16()
    x, upstream = torch.randn(2, 7, 60).bfloat16().requires_grad_(), torch.randn(2, 7, 30).bfloat16()
    expected = torch.autograd.grad(plain(x), [x, plain.weight, plain.bias], upstream)
    converted = BatchInvariantLinear.convert(plain)
    assert converted is plain
    grads = torch.autograd.grad(converted(x), [x, converted.weight, converted.bias], upstream)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other)
