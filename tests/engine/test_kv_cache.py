"""The block pool: blocks are shared exactly if prefixes are equal, and all of them are freed."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from fp8serve.engine.kv_cache import ALL_REMOVED, MAX_POPPED, BlockChange, BlockPool
from fp8serve.engine.request import Request
from fp8serve.engine.sequence import Sequence

BLOCK = 4


def sequence(tokens: list[int], tenant: str = "") -> Sequence:
    return Sequence.of(Request("r", tuple(tokens), tenant=tenant))


def compute(pool: BlockPool, seq: Sequence) -> None:
    seq.num_computed = len(seq.token_ids)
    pool.cache_blocks(seq)


def test_equal_prefixes_share_full_blocks_and_leave_a_token_to_compute() -> None:
    pool = BlockPool(8, BLOCK)
    first, second = sequence(list(range(8))), sequence(list(range(8)))
    assert pool.allocate(first)
    compute(pool, first)
    assert pool.allocate(second)
    assert second.num_computed == BLOCK  # sharing the second block would leave no token to compute
    assert second.block_table[0] == first.block_table[0]
    assert second.block_table[1] != first.block_table[1]


def test_blocks_are_shared_only_once_they_are_computed() -> None:
    pool = BlockPool(8, BLOCK)
    first, second = sequence(list(range(9))), sequence(list(range(9)))
    assert pool.allocate(first)
    first.num_computed = 5  # one block and one token
    pool.cache_blocks(first)
    assert pool.allocate(second)
    assert second.num_computed == BLOCK


def test_tenants_do_not_share() -> None:
    pool = BlockPool(8, BLOCK)
    mine, yours = sequence(list(range(9)), "me"), sequence(list(range(9)), "you")
    assert pool.allocate(mine)
    compute(pool, mine)
    assert pool.allocate(yours)
    assert yours.num_computed == 0
    assert not set(mine.block_table) & set(yours.block_table)


def test_equal_tokens_after_different_prefixes_are_not_shared() -> None:
    pool = BlockPool(8, BLOCK)
    first, second = sequence([0] * 4 + [1] * 5), sequence([2] * 4 + [1] * 5)
    assert pool.allocate(first)
    compute(pool, first)
    assert pool.allocate(second)
    assert second.num_computed == 0


def test_released_blocks_stay_cached_until_they_are_reused() -> None:
    pool = BlockPool(4, BLOCK)
    old, again = sequence(list(range(9))), sequence(list(range(9)))
    assert pool.allocate(old)
    compute(pool, old)
    pool.release(old)
    assert pool.num_free == 4
    assert pool.allocate(again)
    assert again.num_computed == 8
    pool.release(again)
    assert pool.allocate(sequence([50] * 16))
    assert pool.allocate(sequence(list(range(9)))) is False


def test_changes_of_the_prefix_cache_are_reported_in_order() -> None:
    pool = BlockPool(3, BLOCK)
    assert pool.pop_changes() == []  # begins to record
    first, second = sequence(list(range(9)), "me"), sequence(list(range(4, 13)))
    assert pool.allocate(first)
    compute(pool, first)
    a, b = first.block_hashes
    assert pool.pop_changes() == [(a, None, [0, 1, 2, 3], "me"), (b, a, [4, 5, 6, 7], "me")]
    pool.release(first)
    assert pool.allocate(second)
    assert pool.pop_changes() == [(b, None, (), ""), (a, None, (), "")]  # evicted, the last block first
    compute(pool, second)
    assert [key for key, *_ in pool.pop_changes()] == second.block_hashes
    pool.release(second)
    pool.reset_prefix_cache()
    assert pool.pop_changes() == [ALL_REMOVED]


def test_a_cached_block_without_tokens_is_reported_when_a_sequence_shares_it() -> None:
    """Blocks of a file, and those that were cached before the first report, come before the blocks that follow them."""
    pool = BlockPool(4, BLOCK)
    first, second = sequence(list(range(9)), "me"), sequence(list(range(13)), "me")
    assert pool.allocate(first)
    compute(pool, first)
    pool.release(first)
    assert pool.pop_changes() == []
    assert pool.allocate(second)
    a, b, c = second.block_hashes
    assert pool.pop_changes() == [(a, None, [0, 1, 2, 3], "me"), (b, a, [4, 5, 6, 7], "me")]
    compute(pool, second)
    assert pool.pop_changes() == [(c, b, [8, 9, 10, 11], "me")]


def test_a_block_that_was_not_reported_is_not_reported_as_removed() -> None:
    pool = BlockPool(2, BLOCK)
    pool.restore([b"one", b"two"])
    assert pool.pop_changes() == []
    seq = sequence(list(range(8)))
    assert pool.allocate(seq)
    compute(pool, seq)
    assert [key for key, *_ in pool.pop_changes()] == seq.block_hashes


def test_changes_that_nobody_reads_are_forgotten() -> None:
    """The report then begins anew: a block that is still cached is reported again when a sequence shares it."""
    pool = BlockPool(4, BLOCK)
    pool.pop_changes()
    for number in range(2 * MAX_POPPED):
        seq = sequence([number] * 13)
        assert pool.allocate(seq)
        compute(pool, seq)
        pool.release(seq)
    changes = []
    while part := pool.pop_changes():
        assert len(part) <= MAX_POPPED
        changes += part
    assert changes[0] == ALL_REMOVED
    assert len(changes) < 2 * MAX_POPPED
    assert reported(changes) == set(seq.block_hashes)


def reported(changes: list[BlockChange]) -> set[bytes]:
    """Returns the blocks that are cached after some changes. Each is added after its predecessor and removed once."""
    keys: set[bytes] = set()
    for change in changes:
        key, previous, tokens, _ = change
        if change == ALL_REMOVED:
            keys.clear()
        elif tokens:
            assert key not in keys
            assert previous is None or previous in keys
            keys.add(key)
        else:
            keys.remove(key)
    return keys


def test_admission_is_all_or_nothing() -> None:
    pool = BlockPool(3, BLOCK)
    seq = sequence(list(range(9)))
    assert not pool.allocate(seq, reserve=1)
    assert (seq.block_table, pool.num_free) == ([], 3)
    assert pool.allocate(seq)
    seq.token_ids += range(4)
    assert not pool.grow(seq)
    assert len(seq.block_table) == 3


STEPS = st.lists(
    st.tuples(st.sampled_from(["admit", "grow", "compute", "release"]), st.integers(0, 5), st.integers(0, 40)),
    max_size=60,
)


@settings(max_examples=300)
@given(STEPS, st.integers(1, 12), st.integers(1, 4))
def test_no_block_is_leaked_or_wrongly_shared(
    steps: list[tuple[str, int, int]], num_blocks: int, block_size: int
) -> None:
    """`contents` models the cache: it records for every block which tokens after which prefix were written into it."""
    pool = BlockPool(num_blocks, block_size)
    live: dict[int, Sequence] = {}
    contents: dict[int, tuple[str, tuple[int, ...]]] = {}
    changes: list[BlockChange] = []
    for count, (action, which, number) in enumerate(steps):
        apply(pool, live, contents, action, which, number)
        check(pool, live, contents)
        if count >= 5:  # the first blocks are cached before changes are recorded
            changes += pool.pop_changes()
            assert reported(changes) == pool._cached.keys() - pool._unrecorded
    for seq in live.values():
        pool.release(seq)
    assert pool.num_free == num_blocks
    assert not pool._in_progress


def apply(pool: BlockPool, live: dict[int, Sequence], contents: dict[int, tuple[str, tuple[int, ...]]],
          action: str, which: int, number: int) -> None:  # fmt: skip
    seq = live.get(which)
    if action == "admit" and seq is None:
        # few different tokens and tenants, so that prefixes meet
        fresh = sequence([number % 2] * (1 + number % 9) + [number % 3] * (number % 5), tenant="ab"[number % 2])
        if pool.allocate(fresh):
            live[which] = fresh
            for index, block in enumerate(fresh.block_table[: fresh.num_computed // pool.block_size]):
                assert contents[block] == cached_prefix(pool, fresh, index)
    elif action == "grow" and seq is not None:
        seq.token_ids.append(number % 3)
        if not pool.grow(seq):
            seq.token_ids.pop()
    elif action == "compute" and seq is not None:
        for index in range(seq.num_computed // pool.block_size, len(seq.block_table)):
            contents[seq.block_table[index]] = cached_prefix(pool, seq, index)
        compute(pool, seq)
    elif action == "release" and seq is not None:
        pool.release(live.pop(which))


def cached_prefix(pool: BlockPool, seq: Sequence, index: int) -> tuple[str, tuple[int, ...]]:
    return seq.request.tenant, tuple(seq.token_ids[: (index + 1) * pool.block_size])


def check(pool: BlockPool, live: dict[int, Sequence], contents: dict[int, tuple[str, tuple[int, ...]]]) -> None:
    holders = Counter(block for seq in live.values() for block in seq.block_table)
    assert pool.num_used == len(holders)
    for seq in live.values():
        assert len(seq.block_table) == -(-len(seq.token_ids) // pool.block_size)
        for index, block in enumerate(seq.block_table):
            if (index + 1) * pool.block_size <= seq.num_computed:
                assert contents[block] == cached_prefix(
                    pool, seq, index
                )  # no other sequence overwrote the blocks that it will read
            elif index * pool.block_size >= seq.num_computed:
                assert holders[block] == 1  # what it will write is its own
