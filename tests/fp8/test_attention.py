"""Attention: the training path and the paged op agree with the formula, and sequences do not see each other."""

import pytest
import torch
from torch import Tensor

from fp8serve.fp8.attention import causal_attention, paged_attention, write_kv
from fp8serve.fp8.ops import Case, cases, reference


def formula(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence in FP64, head by head: q [T, H, D], k and v [L, KV, D]."""
    queries, heads, _ = q.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(queries):
        seen = k.shape[0] - queries + t + 1
        for h in range(heads):
            group = h // (heads // k.shape[1])
            weights = (k[:seen, group].double() @ q[t, h].double() * scale).softmax(0)
            out[t, h] = weights @ v[:seen, group].double()
    return out


@pytest.mark.parametrize("lengths", [[5], [4, 4], [3, 1, 7]])
def test_causal_attention_keeps_sequences_apart(lengths: list[int]) -> None:
    total = sum(lengths)
    q, k, v = torch.randn(total, 4, 8), torch.randn(total, 2, 8), torch.randn(total, 2, 8)
    found = causal_attention(q, k, v, lengths, 0.3)
    parts = zip(*(torch.split(t, lengths) for t in (q, k, v)), strict=True)
    expected = torch.cat([formula(*part, 0.3) for part in parts])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_causal_attention_is_differentiable() -> None:
    q, k, v = (torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda *t: causal_attention(*t, [2, 4], 0.5), (q, k, v))


def test_causal_attention_refuses_lengths_that_do_not_add_up() -> None:
    q = torch.randn(6, 2, 4)
    with pytest.raises(ValueError, match="add up to 5, but there are 6 tokens"):
        causal_attention(q, q, q, [5], 1.0)


@pytest.mark.parametrize("case", cases("paged_attention"), ids=lambda c: c.name)
def test_paged_attention_is_the_formula(case: Case) -> None:
    q, k_cache, v_cache, tables, lengths, starts, k_scale, _, scale = case.make()
    found = torch.ops.fp8serve.paged_attention(*case.make())
    inverse = 1.0 if k_scale is None else float(k_scale)
    for i, length in enumerate(lengths.tolist()):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        k, v = (c[tables[i].long()].flatten(0, 1)[:length].double() * inverse for c in (k_cache, v_cache))
        tolerance = 2.0**-7 if q.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found[rows].double(), formula(q[rows], k, v, scale), rtol=tolerance, atol=tolerance)


def cache(blocks: int = 12) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    k, v = (torch.randn(blocks, 4, 2, 16, generator=noise).bfloat16() for _ in range(2))
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


def test_wrapper_passes_scales_in_order() -> None:
    q = torch.randn(1, 2, 16)
    k, v = (t.to(torch.float8_e4m3fn) for t in cache())
    tables, lengths, starts = torch.tensor([[1]]).int(), torch.tensor([1]).int(), torch.tensor([0, 1]).int()
    out = paged_attention(q, k, v, tables, lengths, starts, 0.25, torch.tensor(3.0), torch.tensor(0.5))
    torch.testing.assert_close(out[0], v[1, 0].float() * 0.5)


def test_write_kv_places_casts_and_skips() -> None:
    k, v = torch.full((3, 1, 2), 300.0), torch.full((3, 1, 2), -5.0)
    caches = [torch.zeros(2, 2, 1, 2).to(torch.float8_e4m3fn) for _ in range(2)]
    write_kv(k, v, caches[0], caches[1], torch.tensor([3, -1, 0]), torch.tensor(2.0), None)
    assert caches[0].float()[..., 0].flatten().tolist() == [448.0, 0.0, 0.0, 448.0]
    assert caches[1].float()[..., 0].flatten().tolist() == [-5.0, 0.0, 0.0, -5.0]


@pytest.mark.parametrize("case", cases("write_kv"), ids=lambda c: c.name)
def test_write_kv_equals_its_reference(case: Case) -> None:
    expected, found = case.make(), case.make()
    reference.write_kv(*expected)
    torch.ops.fp8serve.write_kv(*found)
    for a, b in zip(expected[2:4], found[2:4], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
