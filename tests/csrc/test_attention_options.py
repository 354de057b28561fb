"""Windows, soft caps and sinks of paged attention: accurate, with the same bits however the work is divided, and keys
outside of the window unused."""

import pytest
import torch
from torch import Tensor

from tests.csrc.helpers import assert_bits_equal
from tests.csrc.paged import BLOCK_SIZE, CACHES, LONG, OPS, PagedBatch, naive

SHORT = [(37, 37), (1, 1), (300, 3), (16, 16), (190, 1), (129, 70)]
SINKS = torch.tensor([0.5, -3.0, 2.0, 9.0, 0.0, -40.0, 1.0, 4.0])
OPTIONS = {
    "window 1": {"window": 1},
    "window 5": {"window": 5},
    "window 16": {"window": 16},
    "window 64": {"window": 64},
    "window 100": {"window": 100},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": SINKS},
    "all": {"window": 33, "softcap": 2.0, "sinks": SINKS},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_cache = pytest.mark.parametrize(("q_dtype", "cache_dtype"), CACHES)


def assert_accurate(batch: PagedBatch) -> None:
    truth = batch.truth()
    error, naive_error = ((x.double() - truth).abs().max() for x in (batch.run(), naive(batch)))
    assert error <= 2 * naive_error + torch.finfo(batch.q.dtype).eps * truth.abs().max()


@pytest.mark.pairwise
@every_cache
@every_option
@pytest.mark.parametrize(("kv_heads", "dim"), [(2, 80), (1, 7)])
def test_error_is_at_most_twice_the_naive_one(level, kv_heads, dim, q_dtype, cache_dtype, options):
    assert_accurate(PagedBatch(SHORT, 8, kv_heads, dim, q_dtype, cache_dtype, **options))


@pytest.mark.pairwise
@every_cache
@pytest.mark.parametrize("window", [1, 100, 512, 600])
def test_error_of_windows_in_long_sequences_is_at_most_twice_the_naive_one(level, q_dtype, cache_dtype, window):
    assert_accurate(PagedBatch([*LONG, (1500, 700)], 4, 2, 24, q_dtype, cache_dtype, window=window))


@pytest.mark.pairwise
@every_cache
@every_option
def test_neighbours_and_chunks_do_not_change_a_bit(level, q_dtype, cache_dtype, options):
    batch = PagedBatch(SHORT, 8, 4, 64, q_dtype, cache_dtype, **options)
    whole = batch.run()
    for sequence, (_, new) in enumerate(SHORT):
        start, end = (int(s) for s in batch.starts[sequence : sequence + 2])
        for cut in {1, new // 2, new - 1, new} - {0}:
            pieces = torch.cat([batch.part(sequence, 0, cut), batch.part(sequence, cut, new)])
            assert_bits_equal(pieces, whole[start:end])


@pytest.mark.pairwise
@every_cache
@pytest.mark.parametrize("options", [{"window": 7}, {"window": 515}, {"window": 600, "sinks": SINKS[:4]}], ids=str)
def test_threads_do_not_change_a_bit(threads, level, q_dtype, cache_dtype, options):
    sequences = [*LONG, (1100, 590)]
    batch, results = PagedBatch(sequences, 4, 1, 24, q_dtype, cache_dtype, **options), []
    for count in (1, 2, 7, 64):
        torch.set_num_threads(count)
        results.append(batch.run())
        cuts = [(i, *cut) for i, (_, new) in enumerate(sequences) for cut in ((0, new // 2), (new // 2, new))]
        results.append(torch.cat([batch.part(i, first, last) for i, first, last in cuts if last > first]))
    for result in results[1:]:
        assert_bits_equal(result, results[0])


@pytest.mark.pairwise
@every_cache
@pytest.mark.parametrize("count", [1, 3])
def test_heads_computed_together_have_the_bits_of_single_heads(threads, level, q_dtype, cache_dtype, count):
    torch.set_num_threads(count)
    batch = PagedBatch([(700, 1), (70, 1), (200, 3)], 10, 5, 40, q_dtype, cache_dtype, window=90)
    sinks = torch.arange(10.0)
    q, k, v, *rest = batch.args()
    whole = OPS.paged_attention(q, k, v, *rest, 90, 3.0, sinks)
    for head in range(5):
        queries, keys = slice(head * 2, head * 2 + 2), slice(head, head + 1)
        alone = OPS.paged_attention(q[:, queries], k[:, :, keys], v[:, :, keys], *rest, 90, 3.0, sinks[queries])
        assert_bits_equal(alone, whole[:, queries])


@every_cache
def test_options_without_effect_change_no_bit(level, q_dtype, cache_dtype):
    batch = PagedBatch([*SHORT, (600, 2)], 4, 2, 40, q_dtype, cache_dtype)
    plain = batch.run()
    for options in ({"window": 600}, {"window": 2**62}, {"sinks": torch.full((4,), -torch.inf)}):
        batch.options = options
        assert_bits_equal(batch.run(), plain)


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16])
@every_option
def test_levels_without_bf16_products_agree_bit_for_bit(q_dtype, options):
    batch, results = PagedBatch(SHORT, 8, 2, 40, q_dtype, torch.bfloat16, **options), []
    for level in ("portable", "avx2", "avx512"):
        OPS.cpu_isa(level)
        results.append(batch.run())
    OPS.cpu_isa("best")
    for result in results[1:]:
        assert_bits_equal(result, results[0])


@pytest.mark.pairwise
@every_cache
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 200])
def test_keys_before_the_window_are_not_used(level, q_dtype, cache_dtype, window):
    """NaN in keys and values before the window does not change the result."""
    context, new = 700, 5
    batch = PagedBatch([(context, new)], 4, 1, 40, q_dtype, cache_dtype, window=window)
    before = batch.run()
    write_nan(batch, range(context - new - window + 1))
    assert_bits_equal(batch.run(), before)
    write_nan(batch, range(context - new - window + 2))
    assert batch.run()[0].isnan().all()
    assert_bits_equal(batch.run()[1:], before[1:])


def write_nan(batch: PagedBatch, positions: range) -> None:
    for p in positions:
        for cache in (batch.k, batch.v):
            cache[batch.tables[0, p // BLOCK_SIZE].long(), p % BLOCK_SIZE] = torch.nan


def test_blocks_before_the_window_are_not_read(level):
    """The table may have any block of the cache for positions before the window."""
    batch = PagedBatch([(900, 3)], 4, 2, 64, torch.bfloat16, torch.bfloat16, window=100)
    before = batch.run()
    batch.tables[0, : (900 - 3 - 100) // BLOCK_SIZE - 4] = 0
    assert_bits_equal(batch.run(), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window: is 0, must be positive"),
        ({"softcap": -1.0}, "softcap: is -1, must be positive"),
        ({"sinks": torch.zeros(3)}, "sinks: dim 0 is 3, must be heads = 4"),
        ({"sinks": torch.zeros(4).double()}, "sinks: dtype is Double, must be Float"),
    ],
)
def test_options_are_checked(options: dict[str, int | float | Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        PagedBatch([(20, 20)], 4, 2, 16, torch.float32, torch.float32, **options).run()
