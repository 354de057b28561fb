"""Who computes how many tokens in the next step. Pure Python; no token value is looked at but by its position.

One step is one batch over all running sequences (continuous batching):
  1. every decoding sequence gets its one token, so a long prompt never stalls the others;
  2. prompts under way get a chunk each, oldest first, from what is left of the step's token budget (while others decode
     it is limited further: a step's length is what a reader of a stream waits between tokens);
  3. waiting sequences are admitted while a place, blocks for all their tokens, and budget are left.

A sequence that needs a block when none is free takes it from the sequence admitted last, which loses all its blocks
and waits, first in line, to be computed again (its published blocks are usually still there). The oldest always
proceeds, so every request ends; one that could not run even alone is refused before it gets here (`Limits.check`).

Admission is in turn over tenants and first come, first served within one. The head of the line is never overtaken
because it is large: small requests cannot starve it. It also waits while another sequence computes its prefix.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from fp8serve.engine.kv_cache import BlockPool
from fp8serve.engine.request import FinishReason, Sequence, Status


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens [start, start + count) of `seq` to compute; `samples`: their last one's logits give a new token."""

    seq: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.seq.token_ids)


class WaitingLine:
    """Preempted sequences first, oldest first; then one from each tenant in turn."""

    def __init__(self) -> None:
        self._preempted: deque[Sequence] = deque()
        self._tenants: OrderedDict[str, deque[Sequence]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._tenants.values()))

    def add(self, seq: Sequence) -> None:
        self._tenants.setdefault(seq.request.tenant, deque()).append(seq)

    def add_preempted(self, seq: Sequence) -> None:
        self._preempted.appendleft(seq)  # the last admitted is preempted first

    def head(self) -> Sequence | None:
        if self._preempted:
            return self._preempted[0]
        return next(iter(self._tenants.values()))[0] if self._tenants else None

    def pop(self) -> None:
        """Removes the head; its tenant goes to the end of the line."""
        if self._preempted:
            self._preempted.popleft()
            return
        tenant, line = self._tenants.popitem(last=False)
        line.popleft()
        if line:
            self._tenants[tenant] = line

    def remove(self, seq: Sequence) -> None:
        if seq in self._preempted:
            self._preempted.remove(seq)
            return
        line = self._tenants[seq.request.tenant]
        line.remove(seq)
        if not line:
            del self._tenants[seq.request.tenant]


class Scheduler:
    """Owns the sequences in flight and the block pool. Call `schedule`, compute, then `advance`, in turn."""

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_batch_tokens: int, max_prefill_tokens: int) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens  # at least max_num_seqs
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting = WaitingLine()
        self.running: list[Sequence] = []  # in the order of admission
        self.num_preemptions = 0
        self.num_prefix_queried = 0  # tokens of admitted sequences
        self.num_prefix_hits = 0  # tokens of these that were found in the cache

    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, seq: Sequence) -> None:
        self.waiting.add(seq)

    def schedule(self) -> list[Work]:
        """The next step's work; empty only when there is none."""
        preemptions = self.num_preemptions
        decodes = self._decodes()
        budget = self.max_batch_tokens - len(decodes)
        if decodes:
            budget = min(budget, self.max_prefill_tokens)
        chunks = self._chunks(budget)
        if self.num_preemptions == preemptions:
            chunks += self._admissions(budget - sum(item.count for item in chunks))
        return decodes + chunks

    def advance(self, work: list[Work]) -> None:
        """Records that `work` was computed, before new tokens are appended."""
        for item in work:
            item.seq.num_computed += item.count
            self.pool.publish(item.seq, item.start)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends `seq`, wherever it is, and frees what it holds."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        elif seq.status is not Status.FINISHED:
            self.waiting.remove(seq)
        self.pool.release(seq)
        seq.status, seq.finish_reason = Status.FINISHED, reason

    def _decodes(self) -> list[Work]:
        decoding = [seq for seq in self.running if seq.num_pending == 1]
        return [Work(seq, seq.num_computed, 1) for seq in decoding if self._make_room(seq)]

    def _make_room(self, seq: Sequence) -> bool:
        """False when `seq` itself was, or had to be, preempted."""
        while seq.status is Status.RUNNING and not self.pool.grow(seq):
            self._preempt(self.running[-1])
        return seq.status is Status.RUNNING

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq)
        seq.status = Status.PREEMPTED
        self.waiting.add_preempted(seq)
        self.num_preemptions += 1

    def _chunks(self, budget: int) -> list[Work]:
        """The next part of every prompt under way, as far as `budget` tokens go."""
        work: list[Work] = []
        for seq in self.running:
            if seq.num_pending > 1 and budget > 0:
                work.append(self._chunk(seq, budget))
                budget -= work[-1].count
        return work

    def _admissions(self, budget: int) -> list[Work]:
        work: list[Work] = []
        while budget > 0 and (seq := self._admit_next()):
            work.append(self._chunk(seq, budget))
            budget -= work[-1].count
        return work

    def _chunk(self, seq: Sequence, budget: int) -> Work:
        return Work(seq, seq.num_computed, min(seq.num_pending, budget))

    def _admit_next(self) -> Sequence | None:
        """The head of the line, now running; None when it must wait."""
        seq = self.waiting.head()
        if seq is None or len(self.running) >= self.max_num_seqs or self.pool.is_coming(seq):
            return None
        # a block for each running sequence to grow into, or it would be preempted as soon as it is admitted
        if not self.pool.admit(seq, reserve=len(self.running)):
            return None
        self.waiting.pop()
        self.running.append(seq)
        if seq.status is Status.WAITING:
            seq.num_cached = seq.num_computed
        seq.status = Status.RUNNING
        self.num_prefix_queried += len(seq.token_ids)
        self.num_prefix_hits += seq.num_computed
        return seq
