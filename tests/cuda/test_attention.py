"""paged_attention and write_kv on the device: close to the reference, with bits that do not depend on the batch."""

import pytest
import torch

from fp8serve.fp8.ops import cases, reference
from tests.csrc.helpers import assert_bits_equal, assert_fp8_equal

E4M3 = torch.float8_e4m3fn


def assert_close(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    tolerance = 2 * torch.finfo(actual.dtype).eps * expected.double().abs().max() + 1e-5
    assert (actual.double() - expected.double()).abs().max() <= tolerance


@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("paged_attention"), ids=lambda case: case.name)
def test_registered_cases_are_close_to_the_reference(kernels, case):
    assert_close(kernels.run("paged_attention", *case.make()), reference.paged_attention(*case.make()))


class Paged:
    """Sequences of random keys and values in shuffled blocks of 16."""

    def __init__(self, lengths, heads=4, kv_heads=2, dim=32, dtype=torch.bfloat16):
        self.noise = torch.Generator().manual_seed(len(lengths))
        self.width = -(-max(lengths) // 16)
        order = torch.randperm(self.width * len(lengths), generator=self.noise)
        self.tables = order.view(len(lengths), self.width).int()
        shape = (len(order), 16, kv_heads, dim)
        self.k, self.v = (torch.randn(shape, generator=self.noise).to(dtype) for _ in range(2))
        self.kv_scale = torch.tensor(0.5) if dtype.itemsize == 1 else None
        self.lengths, self.scale = lengths, dim**-0.5
        self.queries = [torch.randn(n, heads, dim, generator=self.noise).bfloat16() for n in lengths]

    def attend(self, kernels, parts, *options):
        """Runs attention, compares it with the reference, and returns the output of each part.

        `parts` are triples (sequence, first query token, end of query tokens); `options` are window, softcap, sinks.
        """
        chosen = [self.queries[s][first:last] for s, first, last in parts]
        starts = torch.tensor([0] + [len(q) for q in chosen]).cumsum(0).int()
        tables = torch.stack([self.tables[s] for s, _, _ in parts])
        lens = torch.tensor([last for _, _, last in parts]).int()
        scales = self.kv_scale, self.kv_scale, self.scale
        args = (torch.cat(chosen), self.k, self.v, tables, lens, starts, *scales, *options)
        expected = reference.paged_attention(*args)
        actual = kernels.run("paged_attention", *args)
        assert_close(actual, expected)
        return list(actual.split([len(q) for q in chosen]))


CACHES = [torch.bfloat16, E4M3, torch.float8_e5m2]


@pytest.mark.parametrize("cache", CACHES)
def test_a_sequence_does_not_depend_on_its_batch(kernels, cache):
    """Alone, each segment of keys has its own block; in a large batch, one block computes all segments; in a batch with
    prompts, a block has four warps."""
    paged = Paged([1100, 40, 700, 513, 16, 90], dtype=cache)
    alone = paged.attend(kernels, [(0, 1099, 1100)])[0]
    together = paged.attend(kernels, [(s, n - 1, n) for s, n in enumerate(paged.lengths)])
    mixed = paged.attend(kernels, [(1, 0, 40), (2, 690, 700), (0, 1099, 1100), (5, 0, 90)])
    prompt = paged.attend(kernels, [(0, 1080, 1100)])[0]
    assert_bits_equal(prompt[-1:], alone)
    assert_bits_equal(together[0], alone)
    assert_bits_equal(mixed[2], alone)


SINKS = torch.tensor([0.5, -3.0, 5.0, 0.0, 1.0, -1.0])
OPTIONS = [(1,), (33, None, SINKS), (256,), (700, 2.0), (None, 0.7, SINKS), (90, 1.5, SINKS)]


@pytest.mark.pairwise
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("cache", "dim"), [(torch.bfloat16, 32), (E4M3, 32), (torch.bfloat16, 20)])
def test_windows_soft_caps_and_sinks_have_the_same_bits_in_every_batch(kernels, cache, dim, options):
    """Close to the reference, with the same bits for one block per segment, one block for all, and every chunking."""
    paged = Paged([1100, 40, 700, 513, 16, 90], heads=6, kv_heads=2, dim=dim, dtype=cache)
    alone = paged.attend(kernels, [(0, 1099, 1100)], *options)[0]
    together = paged.attend(kernels, [(s, n - 1, n) for s, n in enumerate(paged.lengths)], *options)
    prompts = [(1, 0, 40), (2, 660, 700), (0, 1020, 1100), (5, 0, 90)]
    mixed = paged.attend(kernels, prompts, *options)
    assert_bits_equal(together[0], alone)
    assert_bits_equal(mixed[2][-1:], alone)
    for cut in (1021, 1024, 1025, 1060):
        first = paged.attend(kernels, [(0, 1020, cut)], *options)[0]
        second = paged.attend(kernels, [(0, cut, 1100)], *options)[0]
        assert_bits_equal(torch.cat([first, second]), mixed[2])


@pytest.mark.parametrize("dim", [32, 20])
def test_options_without_effect_change_no_bit(kernels, dim):
    paged = Paged([600, 90], heads=4, dim=dim)
    parts = [(0, 590, 600), (1, 0, 90)]
    plain = torch.cat(paged.attend(kernels, parts))
    for options in ((600,), (2**62,), (None, None, torch.full((4,), -torch.inf))):
        assert_bits_equal(torch.cat(paged.attend(kernels, parts, *options)), plain)


@pytest.mark.parametrize("dim", [32, 20])
def test_keys_far_before_a_window_are_not_read(kernels, dim):
    paged = Paged([900], dim=dim)
    clean = paged.attend(kernels, [(0, 880, 900)], 100)[0]
    for position in range(880 - 100 - 64):  # a tile of keys is read as a whole
        paged.k[paged.tables[0, position // 16], position % 16] = torch.nan
    assert_bits_equal(paged.attend(kernels, [(0, 880, 900)], 100)[0], clean)


@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3])
def test_a_prompt_may_be_split_anywhere(kernels, cache):
    paged = Paged([560], heads=3, kv_heads=1, dim=16, dtype=cache)
    whole = paged.attend(kernels, [(0, 500, 560)])[0]
    for cut in (501, 512, 513, 559):
        first = paged.attend(kernels, [(0, 500, cut)])[0]
        second = paged.attend(kernels, [(0, cut, 560)])[0]
        assert_bits_equal(torch.cat([first, second]), whole)


@pytest.mark.parametrize("dim", [20, 48, 64, 80, 128, 130, 256, 300])
@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3])
def test_every_width_of_head(kernels, dim, cache):
    paged = Paged([70, 3], heads=6, kv_heads=2, dim=dim, dtype=cache)
    paged.attend(kernels, [(0, 60, 70), (1, 0, 3)])


@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (24, 1), (40, 2)])
def test_every_size_of_group(kernels, heads):
    """The heads of a decoding token fill a part of a tile, a tile, or more."""
    paged = Paged([45, 300], heads=heads[0], kv_heads=heads[1], dim=32)
    decoded = paged.attend(kernels, [(0, 44, 45), (1, 299, 300)])
    chunk = paged.attend(kernels, [(1, 290, 300)])[0]
    assert_bits_equal(decoded[1], chunk[-1:])


def test_more_segments_than_one_merge_step_takes(kernels):
    """A context of 260 segments of 128 keys."""
    paged = Paged([33_200], heads=1, kv_heads=1, dim=16)
    paged.attend(kernels, [(0, 33_199, 33_200)])


@pytest.mark.parametrize("dim", [32, 20])
def test_a_row_without_context_is_zero(kernels, dim):
    """A padding sequence has no keys; its output is zero."""
    paged = Paged([20, 1], dim=dim)
    tables, lens, starts = paged.tables, torch.tensor([20, 0]).int(), torch.tensor([0, 1, 2]).int()
    q = torch.cat([paged.queries[0][:1], paged.queries[1]])
    actual = kernels.run("paged_attention", q, paged.k, paged.v, tables, lens, starts, None, None, 0.2)
    assert_bits_equal(actual[1], torch.zeros_like(actual[1]))
    assert bool(actual[0].isfinite().all())


def test_keys_after_a_query_are_not_used(kernels):
    """Keys and values after a position, and unused slots, may be NaN."""
    paged = Paged([40])
    clean = paged.attend(kernels, [(0, 20, 30)])[0]
    block = paged.tables[0]
    for position in range(30, 48):
        paged.k[block[position // 16], position % 16] = torch.nan
        paged.v[block[position // 16], position % 16] = torch.nan
    assert_bits_equal(paged.attend(kernels, [(0, 20, 30)])[0], clean)


@pytest.mark.parametrize("case", cases("write_kv"), ids=lambda case: case.name)
def test_write_kv_has_the_bits_of_the_reference(kernels, case):
    args, expected = kernels.here(case.make()), case.make()
    kernels.ops.write_kv(*args)
    reference.write_kv(*expected)
    for actual, cache in zip(args[2:4], expected[2:4], strict=True):
        compare = assert_fp8_equal if cache.itemsize == 1 else assert_bits_equal
        compare(actual.cpu(), cache)


def test_write_kv_skips_slots_outside_of_the_cache(kernels):
    k, v = torch.ones(3, 1, 8), torch.ones(3, 1, 8)
    caches = kernels.here([torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8)])
    kernels.ops.write_kv(*kernels.here((k, v)), *caches, kernels.here(torch.tensor([-1, 4, 2])), None, None)
    for cache in caches:
        assert torch.equal(cache.cpu().view(4, 8).sum(1), torch.tensor([0.0, 0.0, 8.0, 0.0]))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3])
def test_large_batches_are_close_to_the_reference(gpu, cache):
    paged = Paged([4000, 2500, 17, 1], heads=32, kv_heads=8, dim=128, dtype=cache)
    paged.attend(gpu, [(0, 3900, 4000), (1, 2499, 2500), (2, 0, 17), (3, 0, 1)])
