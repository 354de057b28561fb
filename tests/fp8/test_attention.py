"""Attention: the training path and the paged op agree with the formula, and sequences do not see each other."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.fp8 import attention
from fp8serve.fp8.attention import causal_attention
from fp8serve.fp8.ops import Case, cases, reference
from fp8serve.fp8.ops import attention as attention_op


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of one sequence in FP64, head by head: q [T, H, D], k and v [L, KV, D]."""
    queries, heads, _ = q.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(queries):
        visible = k.shape[0] - queries + t + 1
        near = slice(max(0, visible - (window or visible)), visible)
        for h in range(heads):
            group = h // (heads // k.shape[1])
            scores = k[near, group].double() @ q[t, h].double() * scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            sink = 0.0 if sinks is None else sinks[h].double().exp()
            out[t, h] = scores.exp() / (scores.exp().sum() + sink) @ v[near, group].double()
    return out


@pytest.mark.parametrize("lengths", [[5], [4, 4], [3, 1, 7]])
def test_causal_attention_keeps_sequences_apart(lengths: list[int]) -> None:
    total = sum(lengths)
    q, k, v = torch.randn(total, 4, 8), torch.randn(total, 2, 8), torch.randn(total, 2, 8)
    actual = causal_attention(q, k, v, lengths, 0.3)
    parts = zip(*(torch.split(t, lengths) for t in (q, k, v)), strict=True)
    expected = torch.cat([formula(*part, 0.3) for part in parts])
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 3},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 0.0, 3.0])},
    "all": {"window": 2, "softcap": 1.5, "sinks": torch.tensor([1.0, -2.0, 0.0, 3.0])},
}


@pytest.mark.parametrize("lengths", [[9], [5, 5], [3, 1, 7]])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_causal_attention_with_windows_soft_caps_and_sinks(lengths: list[int], options: dict[str, Any]) -> None:
    total = sum(lengths)
    q, k, v = torch.randn(total, 4, 8), torch.randn(total, 2, 8), torch.randn(total, 2, 8)
    actual = causal_attention(q, k, v, lengths, 0.3, **options)
    parts = zip(*(torch.split(t, lengths) for t in (q, k, v)), strict=True)
    expected = torch.cat([formula(*part, 0.3, **options) for part in parts])
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 70, 299])
def test_long_windowed_sequences_are_computed_in_pieces(window: int) -> None:
    q, k, v = torch.randn(600, 2, 8), torch.randn(600, 1, 8), torch.randn(600, 1, 8)
    actual = causal_attention(q, k, v, [300, 300], 0.3, window)
    halves = zip(*(t.split(300) for t in (q, k.double(), v.double())), strict=True)
    whole = [attention_op.attend(a, b.transpose(0, 1), c.transpose(0, 1), 0.3, window) for a, b, c in halves]
    torch.testing.assert_close(actual.double(), torch.cat(whole), rtol=1e-4, atol=1e-5)


def test_a_window_as_long_as_the_sequence_changes_no_bit() -> None:
    q, k, v = (torch.randn(12, 2, 8) for _ in range(3))
    for lengths in ([12], [5, 7]):
        whole = causal_attention(q, k, v, lengths, 0.3)
        assert torch.equal(causal_attention(q, k, v, lengths, 0.3, window=12), whole)


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"window": 2, "softcap": 0.6}])
def test_causal_attention_is_differentiable(options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda *t: causal_attention(*t, [2, 4], 0.5, **options), (q, k, v))


def test_sinks_are_learned() -> None:
    q, k, v = (torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    attend = partial(causal_attention, lengths=[2, 4], softmax_scale=0.5)
    assert torch.autograd.gradcheck(lambda *t: attend(*t[:3], sinks=t[3]), (q, k, v, sinks))


def flash_attention_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, key_ends: Tensor, longest: int, longest_key: int, dropout: float,
    *, is_causal: bool, return_debug_mask: bool, scale: float, window_size_left: int, window_size_right: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Computes ATen's flash attention sequence by sequence, as its documentation defines it."""
    assert (dropout, window_size_right, return_debug_mask) == (0.0, 0, False)
    assert is_causal == (window_size_left < 0), "FlashAttention 2 takes a causal mask or a window"
    assert torch.equal(ends, key_ends)
    assert ends.dtype == torch.int32
    parts = []
    for begin, end in pairwise(ends.tolist()):
        assert end - begin <= longest == longest_key
        rows = torch.arange(end - begin)
        distance = rows[:, None] - rows
        mask = (distance >= 0) & ((distance <= window_size_left) | (window_size_left < 0))
        operands = (t[begin:end].transpose(0, 1)[None] for t in (q, k, v))
        out = F.scaled_dot_product_attention(*operands, attn_mask=mask, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return (torch.cat(parts),)


@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
def test_sequences_of_different_lengths_take_one_flash_call_on_a_gpu(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, generator = [9, 1, 30, 2], torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(42, heads, 16, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    expected = causal_attention(q, k, v, lengths, 0.3, window)
    grads = torch.autograd.grad(expected.square().sum(), (q, k, v))
    calls: list[int] = []
    monkeypatch.setattr(attention, "_can_use_flash_attention", lambda *_: True)
    monkeypatch.setattr(
        attention, "_flash_attention", lambda *a, **o: (calls.append(1), flash_attention_on_cpu(*a, **o))[1]
    )
    actual = causal_attention(q, k, v, lengths, 0.3, window)
    torch.testing.assert_close(actual, expected)
    for grad, other in zip(torch.autograd.grad(actual.square().sum(), (q, k, v)), grads, strict=True):
        torch.testing.assert_close(grad, other)
    assert len(calls) == 1
    causal_attention(q, k, v, [21, 21], 0.3, window)
    causal_attention(q, k, v, lengths, 0.3, window, softcap=5.0)
    causal_attention(q, k, v, lengths, 0.3, window, sinks=torch.zeros(4))
    assert len(calls) == 1, "equal lengths, soft caps and sinks take other paths"


def test_atens_flash_attention_accepts_our_arguments_and_has_a_gradient() -> None:
    """Runs without a GPU, on the device "meta"."""
    q, k, v = (
        torch.randn(42, heads, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    )
    out = attention._attend_flash(q, k, v, (9, 1, 30, 2), 0.3, 4)
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert out.shape == q.shape == q.grad.shape  # type: ignore[union-attr]
    assert v.grad is not None
    assert attention._ends((9, 1, 30, 2), torch.device("cpu")).tolist() == [0, 9, 10, 40, 42]


def test_a_cpu_does_not_use_flash_attention() -> None:
    q = torch.randn(3, 2, 64, dtype=torch.bfloat16)
    assert not attention._can_use_flash_attention(q, q, q)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 33])
def test_flash_attention_on_a_gpu(window: int | None) -> None:
    lengths, generator = [90, 1, 300, 22], torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn(413, heads, 64, generator=generator, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    assert attention._can_use_flash_attention(q, k, v)
    actual = causal_attention(q, k, v, lengths, 0.125, window)
    parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
    expected = torch.cat([causal_attention(a, b, c, [len(a)], 0.125, window) for a, b, c in parts])
    torch.testing.assert_close(actual, expected, atol=0.02, rtol=0.02)
    weights = torch.randn_like(actual)
    for name, grad, other in zip(
        "qkv", *(torch.autograd.grad((y * weights).sum(), (q, k, v)) for y in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(grad, other, atol=0.05, rtol=0.05, msg=name)


def test_causal_attention_refuses_lengths_that_do_not_add_up() -> None:
    q = torch.randn(6, 2, 4)
    with pytest.raises(ValueError, match="add up to 5, but there are 6 tokens"):
        causal_attention(q, q, q, [5], 1.0)


@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("paged_attention"), ids=lambda c: c.name)
def test_paged_attention_is_the_formula(case: Case) -> None:
    q, k_cache, v_cache, tables, lengths, starts, k_scale, _, *options = case.make()
    actual = torch.ops.fp8serve.paged_attention(*case.make())
    inverse = 1.0 if k_scale is None else float(k_scale)
    for i, length in enumerate(lengths.tolist()):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        k, v = (c[tables[i].long()].flatten(0, 1)[:length].double() * inverse for c in (k_cache, v_cache))
        tolerance = 2.0**-7 if q.dtype == torch.bfloat16 else 1e-5
        expected = formula(q[rows], k, v, *options)
        torch.testing.assert_close(actual[rows].double(), expected, rtol=tolerance, atol=tolerance)


def cache(blocks: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(blocks, 4, 2, 16, generator=generator).bfloat16() for _ in range(2))
    return k, v


def attend(kernel: object, q: Tensor, tables: list[list[int]], lengths: list[int], new: list[int]) -> Tensor:
    starts = torch.tensor([0, *new]).cumsum(0).int()
    ints = torch.tensor(tables).int(), torch.tensor(lengths).int(), starts
    out: Tensor = kernel(q, *cache(), *ints, None, None, 0.25)  # type: ignore[operator]
    return out


KERNELS = {"reference": reference.paged_attention, "op": torch.ops.fp8serve.paged_attention}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_sequence_does_not_depend_on_its_neighbours(kernel: object) -> None:
    q = torch.randn(6, 4, 16).bfloat16()
    tables, lengths, new = [[3, 7, 1], [0, 5, 0], [9, 2, 11]], [11, 6, 9], [4, 1, 1]
    together = attend(kernel, q, tables, lengths, new)
    for i, rows in enumerate((slice(0, 4), slice(4, 5), slice(5, 6))):
        alone = attend(kernel, q[rows], [tables[i]], [lengths[i]], [new[i]])
        assert torch.equal(together[rows], alone)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_prompt_may_be_cut_into_chunks(kernel: object) -> None:
    q, table = torch.randn(11, 4, 16).bfloat16(), [[3, 7, 1]]
    whole = attend(kernel, q, table, [11], [11])
    chunks = [attend(kernel, q[a:b], table, [b], [b - a]) for a, b in ((0, 4), (4, 5), (5, 11))]
    assert torch.equal(whole, torch.cat(chunks))


def test_paged_attention_applies_each_scale_and_option() -> None:
    q = torch.randn(1, 2, 16)
    k, v = (t.to(torch.float8_e4m3fn) for t in cache())
    tables, lengths, starts = torch.tensor([[1]]).int(), torch.tensor([1]).int(), torch.tensor([0, 1]).int()
    args = q, k, v, tables, lengths, starts, torch.tensor(3.0), torch.tensor(0.5), 0.25
    torch.testing.assert_close(torch.ops.fp8serve.paged_attention(*args)[0], v[1, 0].float() * 0.5)
    sunk = torch.ops.fp8serve.paged_attention(*args, window=1, softcap=2.0, sinks=torch.full((2,), 99.0))
    torch.testing.assert_close(sunk, torch.zeros(1, 2, 16))


def test_write_kv_casts_writes_to_slots_and_skips_negative_slots() -> None:
    k, v = torch.full((3, 1, 2), 300.0), torch.full((3, 1, 2), -5.0)
    caches = [torch.zeros(2, 2, 1, 2).to(torch.float8_e4m3fn) for _ in range(2)]
    torch.ops.fp8serve.write_kv(k, v, caches[0], caches[1], torch.tensor([3, -1, 0]), torch.tensor(2.0), None)
    assert caches[0].float()[..., 0].flatten().tolist() == [448.0, 0.0, 0.0, 448.0]
    assert caches[1].float()[..., 0].flatten().tolist() == [-5.0, 0.0, 0.0, -5.0]


@pytest.mark.parametrize("case", cases("write_kv"), ids=lambda c: c.name)
def test_write_kv_equals_its_reference(case: Case) -> None:
    expected, actual = case.make(), case.make()
    reference.write_kv(*expected)
    torch.ops.fp8serve.write_kv(*actual)
    for a, b in zip(expected[2:4], actual[2:4], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
