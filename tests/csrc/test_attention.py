"""Paged attention and write_kv: accurate, and with the same bits for every batch, chunking and number of threads."""

import pytest
import torch

from fp8serve.fp8.ops import reference
from tests.csrc.helpers import FORMATS, HIGH, assert_bits_equal, assert_fp8_equal, hostile
from tests.csrc.paged import CACHES, LONG, OPS, PagedBatch, naive


@pytest.mark.smoke
@pytest.mark.pairwise
@pytest.mark.parametrize(("q_dtype", "cache_dtype"), CACHES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 64), (4, 4, 16), (6, 3, 80), (8, 1, 128), (2, 1, 7)])
def test_error_is_at_most_twice_the_naive_one(level, heads, kv_heads, dim, q_dtype, cache_dtype):
    batch = PagedBatch([(37, 37), (1, 1), (100, 3), (16, 16), (90, 1)], heads, kv_heads, dim, q_dtype, cache_dtype)
    actual = OPS.paged_attention(*batch.args())
    args = list(batch.args())
    truth = reference.paged_attention(args[0].double(), *args[1:])
    error, naive_error = (actual.double() - truth).abs().max(), (naive(batch).double() - truth).abs().max()
    assert error <= 2 * naive_error + torch.finfo(q_dtype).eps * truth.abs().max()


@pytest.mark.pairwise
@pytest.mark.parametrize(("q_dtype", "cache_dtype"), CACHES)
@pytest.mark.parametrize("group", [1, 3, 8])
def test_neighbours_and_chunks_do_not_change_a_bit(level, q_dtype, cache_dtype, group):
    batch = PagedBatch([(53, 53), (200, 1), (64, 33), (17, 2)], 2 * group, 2, 64, q_dtype, cache_dtype)
    whole = OPS.paged_attention(*batch.args())
    for sequence in range(4):
        start, end = (int(s) for s in batch.starts[sequence : sequence + 2])
        new = end - start
        for cut in {1, new // 2, new - 1, new} - {0}:
            pieces = torch.cat([batch.part(sequence, 0, cut), batch.part(sequence, cut, new)])
            assert_bits_equal(pieces, whole[start:end])


@pytest.mark.parametrize(("q_dtype", "cache_dtype"), CACHES)
def test_threads_do_not_change_a_bit(threads, level, q_dtype, cache_dtype):
    """If there are more threads than sequences and heads, several threads share a long sequence."""
    batch, results = PagedBatch(LONG, 4, 1, 24, q_dtype, cache_dtype), []
    for count in (1, 2, 7, 64):
        torch.set_num_threads(count)
        results.append(OPS.paged_attention(*batch.args()))
        cuts = [(i, *cut) for i, (_, new) in enumerate(LONG) for cut in ((0, new // 2), (new // 2, new))]
        results.append(torch.cat([batch.part(i, first, last) for i, first, last in cuts if last > first]))
    for result in results[1:]:
        assert_bits_equal(result, results[0])


@pytest.mark.pairwise
@pytest.mark.parametrize(("q_dtype", "cache_dtype"), CACHES)
@pytest.mark.parametrize(("kv_heads", "group"), [(3, 2), (11, 1), (5, 8)])
@pytest.mark.parametrize("count", [1, 3])
def test_heads_computed_together_have_the_bits_of_single_heads(
    threads, level, q_dtype, cache_dtype, kv_heads, group, count
):
    torch.set_num_threads(count)
    batch = PagedBatch([(700, 1), (70, 1), (90, 1), (200, 3)], kv_heads * group, kv_heads, 40, q_dtype, cache_dtype)
    q, k, v, *rest = batch.args()
    whole = OPS.paged_attention(q, k, v, *rest)
    for head in range(kv_heads):
        queries, keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
        alone = OPS.paged_attention(q[:, queries], k[:, :, keys], v[:, :, keys], *rest)
        assert_bits_equal(alone, whole[:, queries])


@pytest.mark.parametrize(("q_dtype", "cache_dtype"), CACHES)
def test_error_of_long_sequences_is_at_most_twice_the_naive_one(level, q_dtype, cache_dtype):
    batch = PagedBatch(LONG, 4, 2, 24, q_dtype, cache_dtype)
    args = list(batch.args())
    truth = reference.paged_attention(args[0].double(), *args[1:])
    error = (OPS.paged_attention(*args).double() - truth).abs().max()
    naive_error = (naive(batch).double() - truth).abs().max()
    assert error <= 2 * naive_error + torch.finfo(q_dtype).eps * truth.abs().max()


def test_keys_after_the_query_are_not_used(level):
    batch = PagedBatch([(20, 20)], 4, 2, 16, torch.float32, torch.float32)
    before = OPS.paged_attention(*batch.args())
    block, offset = int(batch.tables[0, 1]), 3  # position 19, the last
    batch.k[block, offset], batch.v[block, offset] = torch.nan, torch.nan
    after = OPS.paged_attention(*batch.args())
    assert_bits_equal(after[:19], before[:19])
    assert after[19].isnan().all()


def test_blocks_may_have_any_size(level):
    batch = PagedBatch([(64, 40)], 4, 2, 16, torch.float32, torch.float32)
    expected = OPS.paged_attention(*batch.args())
    order = batch.tables[0].long()
    batch.k, batch.v = (c[order].flatten(0, 1)[:75].reshape(-1, 5, 2, 16) for c in (batch.k, batch.v))
    batch.tables = torch.arange(15, dtype=torch.int32).unsqueeze(0)
    assert_bits_equal(OPS.paged_attention(*batch.args()), expected)


def test_sequences_without_new_tokens_are_skipped(level):
    batch = PagedBatch([(20, 0), (7, 7), (30, 0)], 4, 2, 16, torch.float32, torch.float32)
    assert_bits_equal(OPS.paged_attention(*batch.args()), batch.part(1, 0, 7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: torch.zeros(3, 16, 3, 16)}, "k_cache: dim|q: has 4 heads, must be a multiple of the cache's 3|v_cache"),
        ({3: torch.full((1, 3), 99, dtype=torch.int32)}, "block_tables: block 99 of sequence 0 is not one of"),
        ({3: torch.zeros((1, 1), dtype=torch.int32)}, "block_tables: holds 1 blocks, sequence 0 needs 2"),
        ({4: torch.tensor([3], dtype=torch.int32)}, "context_lens: sequence 0 has 3 tokens, fewer than its 20"),
        ({5: torch.tensor([0, 19], dtype=torch.int32)}, "query_starts: must run from 0 to the 20 rows of q"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    args = dict(enumerate(PagedBatch([(20, 20)], 4, 2, 16, torch.float32, torch.float32).args()))
    with pytest.raises(RuntimeError, match=message):
        OPS.paged_attention(*(args | change).values())


@pytest.mark.smoke
@pytest.mark.pairwise
@pytest.mark.parametrize("high", HIGH)
@pytest.mark.parametrize("dtype", [*HIGH, *FORMATS])
@pytest.mark.parametrize("scale", [None, 3.7])
def test_write_kv_equals_the_reference(level, high, dtype, scale):
    k, v = hostile(9, 2 * 24, high, 1).view(9, 2, 24), hostile(9, 2 * 24, high, 2).view(9, 2, 24)
    slots = torch.tensor([3, 0, -1, 17, 31, 8, -1, 9, 10])
    factor = None if scale is None else torch.tensor(scale)
    actual = [torch.zeros(4, 8, 2, 24).to(dtype) for _ in range(2)]
    expected = [torch.zeros(4, 8, 2, 24).to(dtype) for _ in range(2)]
    OPS.write_kv(k, v, *actual, slots, factor, factor)
    reference.write_kv(k, v, *expected, slots, factor, factor)
    compare = assert_fp8_equal if dtype in FORMATS else assert_bits_equal
    compare(actual[0], expected[0])
    compare(actual[1], expected[1])


def test_write_kv_refuses_invalid_slots_and_caches():
    k, cache = torch.zeros(2, 2, 8), torch.zeros(3, 4, 2, 8)
    with pytest.raises(RuntimeError, match="slots: slot 12 is beyond the cache's 12"):
        OPS.write_kv(k, k, cache, cache.clone(), torch.tensor([0, 12]), None, None)
    with pytest.raises(RuntimeError, match="k_cache: must be contiguous"):
        OPS.write_kv(k, k, cache.transpose(0, 1)[:3], cache[:, :3], torch.tensor([0, 1]), None, None)
