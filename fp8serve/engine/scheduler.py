"""The scheduler: decides how many tokens of each sequence the next step computes. It does not import torch.

One step computes one batch of tokens of several sequences (continuous batching). `Scheduler.schedule` fills it in this
order:

  1. Every decoding sequence gets one token, so a long prompt never delays the others.
  2. Running sequences whose prompt is not fully computed get a chunk of it, from what remains of the token budget.
     Tenants take turns, and so do the groups of a tenant; within a group the oldest sequence comes first. While other
     sequences are decoding, the budget for prompts is smaller, because their streams wait for the whole step.
  3. Waiting sequences are admitted, as long as max_num_seqs, the blocks for all their tokens and the budget allow it.
  4. Decoding sequences get drafts (drafting.py, draft_model.py), if budget and blocks remain.

Preemption. If a running sequence needs a block and none is free, the scheduler preempts the sequence that was admitted
last. That sequence loses its blocks, becomes the first in the waiting queue and is computed again later; its cached
blocks are usually still there. The oldest sequence is never preempted, so every request ends. A request that could not
run even alone was refused before (`EngineLimits.check`).

Fairness. A group consists of the sequences of one HTTP request. Admission takes turns over tenants and over the groups
of a tenant; within a group it is first come, first served. If the tenant or group of a waiting sequence runs fewer
sequences than its share, the scheduler preempts a sequence of the tenant or group that runs the most; the preempted
sequence becomes the next of its own group. No sequence overtakes the head of the waiting queue, so a large request
cannot be starved by small ones. The head also waits while another sequence computes its prefix (kv_cache.py).
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

from fp8serve.engine.kv_cache import BlockPool
from fp8serve.engine.output import FinishReason
from fp8serve.engine.sequence import Sequence, Status

MAX_DRAFT_ROWS = 32  # decoding tokens and drafted tokens of a step; with more rows, drafts cost more than they save


@dataclass(frozen=True, slots=True)
class Work:
    """The tokens of one sequence that a step computes: positions [start, start + count).

    The last of them may be a `draft`: tokens that are not yet part of the sequence.
    """

    seq: Sequence
    start: int
    count: int
    draft: tuple[int, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        return [*self.seq.token_ids[self.start : self.start + self.count], *self.draft]

    @property
    def needs_sample(self) -> bool:
        """Whether the work includes the last token of the sequence, so that a new token is sampled."""
        return self.start + self.count == len(self.seq.token_ids) + len(self.draft)

    @property
    def num_samples(self) -> int:
        """The number of tokens to sample: one after the last token, and one after each token of the draft."""
        return 1 + len(self.draft) if self.needs_sample else 0

    @property
    def scored_positions(self) -> range:
        """The positions whose logits give a requested log-probability of the prompt's next token. These are the last
        positions of the work, except the positions that need a sample."""
        if not self.seq.num_unscored:
            return range(0)
        first, end = len(self.seq.prompt_logprobs), min(self.start + self.count, self.seq.num_prompt - 1)
        return range(max(self.start, first), end)

    @property
    def num_logits(self) -> int:
        """The number of tokens, at the end of the work, that need logits."""
        return len(self.scored_positions) + self.num_samples


class WaitingQueue:
    """The waiting sequences. Preempted sequences come first, the oldest of them at the head. Then the tenants take
    turns, and so do the groups of each tenant."""

    def __init__(self) -> None:
        self._preempted: deque[Sequence] = deque()
        self._tenants: OrderedDict[str, OrderedDict[tuple[str, str], deque[Sequence]]] = OrderedDict()

    def __len__(self) -> int:
        queues = (queue for groups in self._tenants.values() for queue in groups.values())
        return len(self._preempted) + sum(map(len, queues))

    def add(self, seq: Sequence) -> None:
        self._group_queue(seq).append(seq)

    def add_first(self, seq: Sequence) -> None:
        """Adds a sequence that was preempted for fairness, as the next of its group."""
        self._group_queue(seq).appendleft(seq)

    def add_preempted(self, seq: Sequence) -> None:
        """Adds a sequence that was preempted for its blocks. Sequences are preempted from the youngest to the
        oldest."""
        self._preempted.appendleft(seq)

    def head(self) -> Sequence | None:
        return self._preempted[0] if self._preempted else next(self.group_heads(), None)

    def group_heads(self) -> Iterator[Sequence]:
        """Yields the next sequence of each group, in queue order. Yields nothing while a preempted sequence waits."""
        if not self._preempted:
            for groups in self._tenants.values():
                for queue in groups.values():
                    yield queue[0]

    def promote(self, seq: Sequence) -> None:
        """Makes `seq`, the next of its group, the head of the queue."""
        self._tenants.move_to_end(seq.tenant, last=False)
        self._tenants[seq.tenant].move_to_end(seq.group, last=False)

    def pop(self) -> None:
        """Removes the head of the queue. Its tenant, and its group within the tenant, become the last in turn."""
        if self._preempted:
            self._preempted.popleft()
            return
        tenant, groups = self._tenants.popitem(last=False)
        group, queue = groups.popitem(last=False)
        queue.popleft()
        if queue:
            groups[group] = queue
        if groups:
            self._tenants[tenant] = groups

    def remove(self, seq: Sequence) -> None:
        if seq in self._preempted:
            self._preempted.remove(seq)
            return
        groups = self._tenants[seq.tenant]
        groups[seq.group].remove(seq)
        if not groups[seq.group]:
            del groups[seq.group]
        if not groups:
            del self._tenants[seq.tenant]

    def _group_queue(self, seq: Sequence) -> deque[Sequence]:
        return self._tenants.setdefault(seq.tenant, OrderedDict()).setdefault(seq.group, deque())


def round_robin(seqs: Iterable[Sequence]) -> list[Sequence]:
    """Returns the first sequence of each tenant, then the second of each, and so on. The sequences of a tenant are
    ordered in the same way by their groups. Otherwise the order does not change."""
    return _interleave(_interleave(seqs, lambda seq: seq.group), lambda seq: seq.tenant)


def _interleave(seqs: Iterable[Sequence], owner: Callable[[Sequence], Hashable]) -> list[Sequence]:
    """Returns the first sequence of each owner, then the second of each, and so on."""
    rounds: list[tuple[int, Sequence]] = []
    counts: Counter[Hashable] = Counter()
    for seq in seqs:
        rounds.append((counts[owner(seq)], seq))
        counts[owner(seq)] += 1
    return [seq for _, seq in sorted(rounds, key=lambda item: item[0])]


class Scheduler:
    """Owns the waiting and running sequences and the block pool. For each step the engine calls `schedule`, computes
    the work, and calls `advance`."""

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_batch_tokens: int, max_prefill_tokens: int) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens  # at least max_num_seqs
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in the order of admission
        self.num_preemptions = 0
        self.num_prefix_queried = 0  # tokens of admitted sequences
        self.num_prefix_hits = 0  # those of them that were in the prefix cache
        self.num_restored_hits = 0  # those of the hits that an earlier process computed

    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, seq: Sequence) -> None:
        self.waiting.add(seq)

    def schedule(self) -> list[Work]:
        """Returns the work of the next step, which is empty only if there is no sequence."""
        self._preempt_for_fairness()
        preemptions = self.num_preemptions
        decodes = self._decodes()
        budget = self.max_batch_tokens - len(decodes)
        if decodes:
            budget = min(budget, self.max_prefill_tokens)
        chunks = self._chunks(budget)
        if self.num_preemptions == preemptions:
            chunks += self._admissions(budget - sum(item.count for item in chunks))
        remaining = self.max_batch_tokens - sum(item.count for item in decodes + chunks)
        return self._add_drafts(decodes, min(remaining, MAX_DRAFT_ROWS - len(decodes))) + chunks

    def advance(self, work: list[Work]) -> None:
        """Records that `work` was computed. Call this before the sampled tokens are appended to the sequences."""
        for item in work:
            item.seq.num_computed += item.count - len(item.draft)
            self.pool.cache_blocks(item.seq, item.start)

    def accept_drafted_token(self, seq: Sequence) -> None:
        """Records that the last token of `seq` is a drafted token, which is computed already."""
        seq.num_computed += 1
        self.pool.cache_blocks(seq, seq.num_computed - 1)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a waiting or running sequence and frees its blocks."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        elif seq.status is not Status.FINISHED:
            self.waiting.remove(seq)
        self.pool.release(seq)
        seq.status, seq.finish_reason = Status.FINISHED, reason

    def _decodes(self) -> list[Work]:
        decoding = [seq for seq in self.running if seq.num_pending == 1]
        return [Work(seq, seq.num_computed, 1) for seq in decoding if self._grow(seq)]

    def _add_drafts(self, decodes: list[Work], max_tokens: int) -> list[Work]:
        """Adds drafts of up to `max_tokens` tokens in all to `decodes`. Every sequence gets an equal share, and the
        sequences after it get what it does not use."""
        if max_tokens <= 0 or all(item.seq.drafter is None for item in decodes):
            return decodes
        result: list[Work] = []
        for item in decodes:
            draft = self._draft(item.seq, max_tokens // (len(decodes) - len(result)), len(decodes))
            result.append(replace(item, count=1 + len(draft), draft=draft))
            max_tokens -= len(draft)
        return result

    def _draft(self, seq: Sequence, max_tokens: int, rows: int) -> tuple[int, ...]:
        """Returns a draft for `seq`, not longer than its remaining tokens. No sequence is preempted for a draft."""
        max_tokens = min(max_tokens, seq.params.max_new_tokens - seq.num_generated - 1)
        if seq.drafter is None or max_tokens < 1:
            return ()
        draft = seq.drafter.propose(seq.token_ids, max_tokens, rows)
        return tuple(draft) if self.pool.grow(seq, len(draft), reserve=len(self.running)) else ()

    def _grow(self, seq: Sequence) -> bool:
        """Allocates a block for the next token if necessary, and preempts the youngest sequences until one is free.
        Returns False if `seq` itself is preempted."""
        while seq.status is Status.RUNNING and not self.pool.grow(seq):
            youngest = self.running[-1]
            self._preempt(youngest)
            self.waiting.add_preempted(youngest)
        return seq.status is Status.RUNNING

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq)
        seq.status = Status.PREEMPTED
        self.num_preemptions += 1

    def _preempt_for_fairness(self) -> None:
        """Moves the first waiting sequence whose tenant or group is below its share to the head of the queue, and
        preempts a sequence for it if there is no room."""
        tenants = Counter(seq.tenant for seq in self.running)
        groups = Counter(seq.group for seq in self.running)
        for seq in self.waiting.group_heads():
            if (victim := self._victim_for(seq, tenants, groups)) is not None:
                self.waiting.promote(seq)
                if not self._has_room(seq):
                    self._preempt(victim)
                    self.waiting.add_first(victim)
                return

    def _has_room(self, seq: Sequence) -> bool:
        return len(self.running) < self.max_num_seqs and self.pool.can_allocate(seq, reserve=len(self.running))

    def _victim_for(self, seq: Sequence, tenants: Counter[str], groups: Counter[tuple[str, str]]) -> Sequence | None:
        """Returns the sequence to preempt for `seq`, or None if `seq` must wait.

        If the largest tenant runs at least two sequences more than the tenant of `seq`, the victim is the youngest
        sequence of the largest group of the largest tenant. Otherwise, if the group of `seq` runs no sequence, the
        victim is the youngest sequence of the largest group of the same tenant, if this group runs at least two. The
        victim is never the oldest running sequence.
        """
        largest, most = max(tenants.items(), key=lambda item: item[1], default=("", 0))
        if most >= tenants[seq.tenant] + 2:
            return self._youngest(largest, groups)
        if groups[seq.group] or tenants[seq.tenant] < 2:
            return None
        youngest = self._youngest(seq.tenant, groups)
        return youngest if groups[youngest.group] > 1 else None

    def _youngest(self, tenant: str, groups: Counter[tuple[str, str]]) -> Sequence:
        """Returns the youngest sequence of the tenant's largest group."""
        return max((s for s in reversed(self.running) if s.tenant == tenant), key=lambda s: groups[s.group])

    def _chunks(self, budget: int) -> list[Work]:
        """Schedules the next chunk of every partly computed prompt, up to `budget` tokens in all."""
        work: list[Work] = []
        for seq in round_robin(seq for seq in self.running if seq.num_pending > 1):
            if budget > 0:
                work.append(self._chunk(seq, budget))
                budget -= work[-1].count
        return work

    def _admissions(self, budget: int) -> list[Work]:
        """Admits waiting sequences and schedules their first chunks, up to `budget` tokens in all."""
        work: list[Work] = []
        while budget > 0 and (seq := self._admit_next()):
            work.append(self._chunk(seq, budget))
            budget -= work[-1].count
        return work

    def _chunk(self, seq: Sequence, budget: int) -> Work:
        return Work(seq, seq.num_computed, min(seq.num_pending, budget))

    def _admit_next(self) -> Sequence | None:
        """Admits the head of the waiting queue and returns it, or returns None if it must wait."""
        seq = self.waiting.head()
        if seq is None or len(self.running) >= self.max_num_seqs or self.pool.is_prefix_in_progress(seq):
            return None
        # reserves a block for each running sequence, which would otherwise soon preempt the admitted one
        if not self.pool.allocate(seq, reserve=len(self.running)):
            return None
        self.waiting.pop()
        self.running.append(seq)
        if seq.status is Status.WAITING:
            seq.num_cached, seq.admitted = seq.num_computed, time.monotonic()
        seq.status = Status.RUNNING
        self.num_prefix_queried += len(seq.token_ids)
        self.num_prefix_hits += seq.num_computed
        self.num_restored_hits += self.pool.num_restored_tokens(seq)
        return seq
