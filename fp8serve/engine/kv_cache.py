"""Which block of the key/value cache belongs to which sequence. Pure bookkeeping: numbers of blocks, never their
contents.

A block holds the keys and values of `block_size` consecutive tokens of one sequence, in every layer. A sequence's block
table lists its blocks in order; token t lies in `block_table[t // block_size]` at offset `t % block_size`.

A full block whose tokens have all been computed is published under a hash that chains the tenant's salt, the hash of
the block before it and its own tokens, so equal hashes mean equal prefixes of the same tenant, and later sequences
share it by reference count. A block nobody holds stays published until its memory is needed: the free list is ordered
by last use, unpublished blocks first. Partly filled blocks are never shared, so nothing is ever copied on write.

A prefix that a sequence is still computing is known, too (`is_coming`): another sequence that needs it waits instead of
computing it again, so four answers to one prompt cost one prompt.

A draft model (draft_model.py) has a cache of its own in which the same block numbers mean the same tokens, so that its
keys and values are freed, shared and lost with the sequence's. It computes later than the model and not always, so each
block records how many of its tokens the draft model has computed (`drafted`).

Costs: O(blocks touched) for every call; one BLAKE2b of a block's tokens, once per sequence.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Items
from hashlib import blake2b

from fp8serve.engine.sequence import Sequence

HASH_BYTES = 16


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens: free, held by one sequence, or shared by several."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = [0] * num_blocks
        self._published: dict[bytes, int] = {}  # hash -> block
        self._hashes: list[bytes | None] = [None] * num_blocks  # block -> hash it is published under
        self._free = OrderedDict.fromkeys(range(num_blocks))  # next to be taken first
        self._coming: dict[bytes, Sequence] = {}  # hash of a block to be published -> the sequence that computes it
        self._restored: set[int] = set()  # blocks whose contents came from a file
        self._drafted = [0] * num_blocks  # of each block, how many tokens the draft model has computed

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def admit(self, seq: Sequence, reserve: int = 0) -> bool:
        """Gives `seq` blocks for all its tokens, shared where its prefix is cached, leaving `reserve` blocks free.

        All or nothing: False changes nothing. On success `num_computed` says how many tokens need no computation; at
        least one token is always left to compute, since its logits are wanted.
        """
        if not self.fits(seq, reserve):
            return False
        shared = self._cached_prefix(seq)
        fresh = self._blocks_for(len(seq.token_ids)) - len(shared)
        for block in shared:
            self._hold(block)
        seq.block_table = shared + [self._take() for _ in range(fresh)]
        seq.num_computed = len(shared) * self.block_size
        full = len(seq.token_ids) // self.block_size
        self._extend_chain(seq, full)
        for key in seq.block_hashes[len(shared) : full]:
            self._coming.setdefault(key, seq)
        return True

    def fits(self, seq: Sequence, reserve: int = 0) -> bool:
        """Whether there are blocks for all tokens of `seq`, leaving `reserve` free."""
        shared = self._cached_prefix(seq)
        fresh = self._blocks_for(len(seq.token_ids)) - len(shared)
        return self.num_free - sum(self._holders[block] == 0 for block in shared) - fresh >= reserve

    def is_coming(self, seq: Sequence) -> bool:
        """Whether the first block that `seq` would have to compute is being computed by another sequence."""
        cached = len(self._cached_prefix(seq))
        return cached < self._shareable(seq) and seq.block_hashes[cached] in self._coming

    def grow(self, seq: Sequence, extra: int = 0, reserve: int = 0) -> bool:
        """Makes room for every token of `seq` and `extra` more; False, changing nothing, when there are not enough free
        blocks. If any are taken, `reserve` must remain free."""
        missing = self._blocks_for(len(seq.token_ids) + extra) - len(seq.block_table)
        if missing > 0 and missing + reserve > self.num_free:
            return False
        seq.block_table += [self._take() for _ in range(missing)]
        return True

    def publish(self, seq: Sequence, start: int = 0) -> None:
        """Offers the full and computed blocks of `seq`, from the one with token `start`, to later sequences."""
        full = seq.num_computed // self.block_size
        self._extend_chain(seq, full)
        for index in range(start // self.block_size, full):
            block, key = seq.block_table[index], seq.block_hashes[index]
            if self._hashes[block] is None and key not in self._published:
                self._published[key] = block
                self._hashes[block] = key
            self._forget_coming(seq, key)

    def release(self, seq: Sequence) -> None:
        """Takes all blocks from `seq`; the published ones stay in the prefix cache until evicted, the last first."""
        for block in reversed(seq.block_table):
            self._drop(block)
        for key in seq.block_hashes[seq.num_computed // self.block_size :]:
            self._forget_coming(seq, key)
        seq.block_table = []
        seq.num_computed = 0

    def drafted(self, seq: Sequence) -> int:
        """How many tokens of `seq`, from the first, have their place in the draft model's cache filled."""
        for index, block in enumerate(seq.block_table):
            if self._drafted[block] < self.block_size:
                return index * self.block_size + self._drafted[block]
        return len(seq.block_table) * self.block_size

    def mark_drafted(self, seq: Sequence, start: int, end: int) -> None:
        """Records that the draft model has computed tokens [start, end) of `seq`; all earlier ones must be recorded
        already. Only accepted tokens are recorded, so a sequence that shares a block can reuse them."""
        for index in range(start // self.block_size, self._blocks_for(end)):
            block = seq.block_table[index]
            filled = min(self.block_size, end - index * self.block_size)
            self._drafted[block] = max(self._drafted[block], filled)

    def recent(self) -> list[tuple[bytes, int]]:
        """(hash, block) of every published block: those in use first, then the others, most recently used first."""
        held = [block for block in self._published.values() if self._holders[block]]
        blocks = (*held, *reversed(self._free))
        return [(key, block) for block in blocks if (key := self._hashes[block]) is not None]

    def restore(self, hashes: Items[bytes]) -> list[int]:
        """Publishes as many of `hashes` as there are blocks, the most recently used first, in a pool that was never
        used; returns the blocks, which the caller fills."""
        blocks = list(range(min(self.num_blocks, len(hashes))))
        for key, block in zip(hashes, blocks, strict=False):
            self._published[key], self._hashes[block] = block, key
        for block in reversed(blocks):
            self._free.move_to_end(block)
        self._restored = set(blocks)
        return blocks

    def forget(self) -> None:
        """Forgets all published blocks, because the weights have changed. No sequence may hold a block."""
        self._published.clear()
        self._coming.clear()
        self._restored.clear()
        self._hashes = [None] * self.num_blocks

    def restored_tokens(self, seq: Sequence) -> int:
        """How many of the tokens that an admitted `seq` found in the cache came from a file."""
        blocks = seq.block_table[: seq.num_computed // self.block_size]
        return self.block_size * sum(block in self._restored for block in blocks)

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        """The blocks of the longest cached prefix that leaves a token to compute."""
        blocks: list[int] = []
        most = self._shareable(seq)
        self._extend_chain(seq, most)
        for key in seq.block_hashes[:most]:
            if (block := self._published.get(key)) is None:
                break
            blocks.append(block)
        return blocks

    def _extend_chain(self, seq: Sequence, count: int) -> None:
        """Hashes the first `count` full blocks of `seq`, once: tokens never change."""
        hashes, size = seq.block_hashes, self.block_size
        for index in range(len(hashes), count):
            before = hashes[-1] if hashes else self._root(seq)
            tokens = array("q", seq.token_ids[index * size : (index + 1) * size])
            hashes.append(blake2b(before + tokens.tobytes(), digest_size=HASH_BYTES).digest())

    def _root(self, seq: Sequence) -> bytes:
        """The hash with which a chain begins."""
        return blake2b(seq.request.tenant.encode(), digest_size=HASH_BYTES, key=seq.salt).digest()

    def _shareable(self, seq: Sequence) -> int:
        if seq.num_unscored:  # what is cached are keys and values, not logits
            return 0
        return (len(seq.token_ids) - 1) // self.block_size

    def _forget_coming(self, seq: Sequence, key: bytes) -> None:
        if self._coming.get(key) is seq:
            del self._coming[key]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _take(self) -> int:
        """A free block, the one least recently used, no longer published."""
        block, _ = self._free.popitem(last=False)
        if (key := self._hashes[block]) is not None:
            del self._published[key]
            self._hashes[block] = None
        self._restored.discard(block)
        self._drafted[block] = 0
        self._holders[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if self._holders[block] == 0:
            del self._free[block]
        self._holders[block] += 1

    def _drop(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._free[block] = None
            if self._hashes[block] is None:
                self._free.move_to_end(block, last=False)
