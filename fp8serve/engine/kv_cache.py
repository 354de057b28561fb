"""Block management for the key/value cache: decides which blocks belong to which sequence. It handles block numbers
only, not the contents of blocks.

A block holds the keys and values of `block_size` consecutive tokens of one sequence, in every layer. A sequence's block
table lists its blocks in order: token t is in block `block_table[t // block_size]` at offset `t % block_size`.

Prefix caching. A full block whose tokens have all been computed becomes a cached block: it is stored under a hash of
the tenant, the adapter, the previous block's hash and its own tokens. Equal hashes mean equal prefixes of one tenant,
so later sequences share the block by reference count. A cached block with no references stays in the prefix cache until
its memory is needed. The free list is ordered by last use, and blocks that are not cached come first. Partly filled
blocks are never shared, so copy-on-write is not needed.

A sequence that needs a prefix which another sequence is computing waits for it (`is_prefix_in_progress`). So four
completions of one prompt compute the prompt once.

A draft model (draft_model.py) has its own cache, in which a block number stands for the same tokens. So its keys and
values are freed, shared and evicted together with the model's. The draft model computes tokens later or not at all, so
the pool also counts how many tokens of each block the draft model has computed (`num_draft_computed`).

Every method takes time proportional to the number of blocks that it touches. Each block of a sequence is hashed once.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Items
from hashlib import blake2b

from fp8serve.engine.sequence import Sequence

HASH_BYTES = 16
BlockChange = tuple[bytes, bytes | None, Items[int], str]
"""The hash of a block; and, if it was added to the prefix cache, the previous block's hash, its tokens and its tenant.
If it was removed, they are None, () and "". ALL_REMOVED has no hash."""
ALL_REMOVED: BlockChange = (b"", None, (), "")
MAX_POPPED = 2048  # changes that one call of `pop_changes` returns


class BlockPool:
    """A pool of `num_blocks` blocks of `block_size` tokens. A block is free, used by one sequence, or shared."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._cached: dict[bytes, int] = {}  # hash -> cached block
        self._hashes: list[bytes | None] = [None] * num_blocks  # block -> hash; None if the block is not cached
        self._free = OrderedDict.fromkeys(range(num_blocks))  # in the order of allocation
        self._in_progress: dict[bytes, Sequence] = {}  # hash of a block that is not yet full -> sequence computing it
        self._restored: set[int] = set()  # blocks whose contents were read from a file
        self._changes: list[BlockChange] | None = None  # of the prefix cache; None until `pop_changes` was called
        self._unrecorded: set[bytes] = set()  # hashes of cached blocks that `_changes` has not had
        self._num_draft_computed = [0] * num_blocks  # block -> tokens that the draft model has computed

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, seq: Sequence, reserve: int = 0) -> bool:
        """Allocates blocks for all tokens of `seq`, sharing the blocks of its cached prefix, and sets
        `seq.num_computed` to the length of this prefix. At least one token is left to compute, because its logits are
        needed. Returns False and changes nothing if fewer than `reserve` blocks would remain free."""
        if not self.can_allocate(seq, reserve):
            return False
        shared = self._cached_prefix(seq)
        num_new = self._blocks_for(len(seq.token_ids)) - len(shared)
        for block in shared:
            self._add_reference(block)
        self._record(seq, len(shared))
        seq.block_table = shared + [self._allocate_block() for _ in range(num_new)]
        seq.num_computed = seq.num_launched = len(shared) * self.block_size
        num_full = len(seq.token_ids) // self.block_size
        self._hash_blocks(seq, num_full)
        for key in seq.block_hashes[len(shared) : num_full]:
            self._in_progress.setdefault(key, seq)
        return True

    def can_allocate(self, seq: Sequence, reserve: int = 0) -> bool:
        """Returns whether all tokens of `seq` fit, with `reserve` blocks remaining free."""
        shared = self._cached_prefix(seq)
        num_new = self._blocks_for(len(seq.token_ids)) - len(shared)
        return self.num_free - sum(self._ref_counts[block] == 0 for block in shared) - num_new >= reserve

    def is_prefix_in_progress(self, seq: Sequence) -> bool:
        """Returns whether another sequence is computing the first block that `seq` would have to compute."""
        num_cached = len(self._cached_prefix(seq))
        return num_cached < self._num_shareable(seq) and seq.block_hashes[num_cached] in self._in_progress

    def grow(self, seq: Sequence, extra: int = 0, reserve: int = 0) -> bool:
        """Allocates blocks for every token of `seq` and `extra` more tokens. Returns False and changes nothing if new
        blocks are necessary and fewer than `reserve` blocks would remain free."""
        missing = self._blocks_for(seq.num_tokens + extra) - len(seq.block_table)
        if missing > 0 and missing + reserve > self.num_free:
            return False
        seq.block_table += [self._allocate_block() for _ in range(missing)]
        return True

    def needs_block(self, seq: Sequence) -> bool:
        """Returns whether the tokens of `seq` do not fit in its blocks."""
        return seq.num_tokens > len(seq.block_table) * self.block_size

    def cache_blocks(self, seq: Sequence, start: int = 0) -> None:
        """Adds the full and computed blocks of `seq` to the prefix cache, beginning with the block of token `start`."""
        num_full = seq.num_computed // self.block_size
        self._hash_blocks(seq, num_full)
        for index in range(start // self.block_size, num_full):
            block, key = seq.block_table[index], seq.block_hashes[index]
            if self._hashes[block] is None and key not in self._cached:
                self._cached[key] = block
                self._hashes[block] = key
                if self._changes is not None:
                    self._unrecorded.add(key)
            self._end_progress(seq, key)
        self._record(seq, num_full)

    def release(self, seq: Sequence) -> None:
        """Frees all blocks of `seq`. Its cached blocks stay in the prefix cache until they are evicted, last block
        first."""
        for block in reversed(seq.block_table):
            self._remove_reference(block)
        for key in seq.block_hashes[seq.num_computed // self.block_size :]:
            self._end_progress(seq, key)
        seq.block_table = []
        seq.num_computed = seq.num_launched = 0

    def num_draft_computed(self, seq: Sequence) -> int:
        """Returns how many tokens at the beginning of `seq` the draft model has computed."""
        for index, block in enumerate(seq.block_table):
            if self._num_draft_computed[block] < self.block_size:
                return index * self.block_size + self._num_draft_computed[block]
        return len(seq.block_table) * self.block_size

    def mark_draft_computed(self, seq: Sequence, start: int, end: int) -> None:
        """Records that the draft model has computed tokens [start, end) of `seq`. All earlier tokens must be recorded
        already, and the tokens must be accepted, so that sequences which share a block can rely on the record."""
        for index in range(start // self.block_size, self._blocks_for(end)):
            block = seq.block_table[index]
            count = min(self.block_size, end - index * self.block_size)
            self._num_draft_computed[block] = max(self._num_draft_computed[block], count)

    def cached_blocks(self) -> list[tuple[bytes, int]]:
        """Returns (hash, block) of every cached block: first the blocks in use, then the others from the most to the
        least recently used."""
        in_use = [block for block in self._cached.values() if self._ref_counts[block]]
        blocks = (*in_use, *reversed(self._free))
        return [(key, block) for block in blocks if (key := self._hashes[block]) is not None]

    def restore(self, hashes: Items[bytes]) -> list[int]:
        """Adds cached blocks with these hashes to an unused pool, as many as fit. `hashes` begin with the most
        recently used block. Returns the blocks, whose contents the caller must fill in."""
        blocks = list(range(min(self.num_blocks, len(hashes))))
        for key, block in zip(hashes, blocks, strict=False):
            self._cached[key], self._hashes[block] = block, key
        for block in reversed(blocks):
            self._free.move_to_end(block)
        self._restored = set(blocks)
        return blocks

    def reset_prefix_cache(self) -> None:
        """Removes all blocks from the prefix cache, because the weights have changed. No block may be in use."""
        if self._changes is not None:
            self._changes = [ALL_REMOVED]
        self._unrecorded.clear()
        self._cached.clear()
        self._in_progress.clear()
        self._restored.clear()
        self._hashes = [None] * self.num_blocks

    def pop_changes(self) -> list[BlockChange]:
        """Returns how the prefix cache has changed, in order; changes after MAX_POPPED are left for the next call. The
        first call begins to record. A block that was cached before, for example one of a file, is recorded when a
        sequence shares it, because then its tokens are known."""
        if self._changes is None:
            self._changes, self._unrecorded = [], set(self._cached)
        changes, self._changes = self._changes[:MAX_POPPED], self._changes[MAX_POPPED:]
        return changes

    def num_restored_tokens(self, seq: Sequence) -> int:
        """Returns how many tokens of the cached prefix of a newly admitted `seq` were read from a file."""
        blocks = seq.block_table[: seq.num_computed // self.block_size]
        return self.block_size * sum(block in self._restored for block in blocks)

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        """Returns the blocks of the longest cached prefix that leaves a token to compute."""
        blocks: list[int] = []
        num_shareable = self._num_shareable(seq)
        self._hash_blocks(seq, num_shareable)
        for key in seq.block_hashes[:num_shareable]:
            if (block := self._cached.get(key)) is None:
                break
            blocks.append(block)
        return blocks

    def _hash_blocks(self, seq: Sequence, count: int) -> None:
        """Hashes the first `count` blocks of `seq`, except those that are hashed already. Their tokens never change."""
        hashes, size = seq.block_hashes, self.block_size
        for index in range(len(hashes), count):
            previous = hashes[-1] if hashes else self._initial_hash(seq)
            tokens = array("q", seq.token_ids[index * size : (index + 1) * size])
            hashes.append(blake2b(previous + tokens.tobytes(), digest_size=HASH_BYTES).digest())

    def _initial_hash(self, seq: Sequence) -> bytes:
        return blake2b(seq.request.tenant.encode(), digest_size=HASH_BYTES, key=seq.cache_salt).digest()

    def _num_shareable(self, seq: Sequence) -> int:
        """Returns how many blocks of `seq` may come from the prefix cache."""
        if seq.num_unscored:  # log-probabilities of the prompt need logits, which are not cached
            return 0
        return (len(seq.token_ids) - 1) // self.block_size

    def _end_progress(self, seq: Sequence, key: bytes) -> None:
        if self._in_progress.get(key) is seq:
            del self._in_progress[key]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _record(self, seq: Sequence, end: int) -> None:
        """Records the cached blocks of `seq` before block `end` that are not recorded yet. A block is recorded after
        the previous one, so recorded blocks never follow one that is not. If too many changes are not popped, forgets
        them and records that all blocks were removed."""
        if self._changes is None:
            return
        start = end
        while start and seq.block_hashes[start - 1] in self._unrecorded:
            start -= 1
        for index in range(start, end):
            key, previous = seq.block_hashes[index], seq.block_hashes[index - 1] if index else None
            tokens = seq.token_ids[index * self.block_size : (index + 1) * self.block_size]
            self._unrecorded.discard(key)
            self._changes.append((key, previous, tokens, seq.request.tenant))
        if len(self._changes) > 2 * self.num_blocks + MAX_POPPED:
            self._changes, self._unrecorded = [ALL_REMOVED], set(self._cached)

    def _allocate_block(self) -> int:
        """Returns the least recently used free block, after it was removed from the prefix cache."""
        block, _ = self._free.popitem(last=False)
        if (key := self._hashes[block]) is not None:
            del self._cached[key]
            self._hashes[block] = None
            if key in self._unrecorded:
                self._unrecorded.discard(key)
            elif self._changes is not None:
                self._changes.append((key, None, (), ""))
        self._restored.discard(block)
        self._num_draft_computed[block] = 0
        self._ref_counts[block] = 1
        return block

    def _add_reference(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1

    def _remove_reference(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._free[block] = None
            if self._hashes[block] is None:
                self._free.move_to_end(block, last=False)
