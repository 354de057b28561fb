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

Flights. On a GPU, the engine schedules a step while the device still computes the previous one (flights.py). The
scheduler needs no values of tokens for that, only their number: a token that a launched step samples is promised. A
sequence whose last token is promised is not scheduled again. No sequence may be preempted while a step is in flight.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fp8serve.engine.kv_cache import BlockPool
from fp8serve.engine.output import FinishReason
from fp8serve.engine.sequence import Sequence, Status

MAX_DRAFT_ROWS = 32  # decoding tokens and drafted tokens of a step; with more rows, drafts cost more than they save


@dataclass(slots=True)
class Work:
    """The tokens of one sequence that a step computes: positions [start, start + count).

    The last tokens may be a `draft`, which is not yet part of the sequence. If the work is one promised token (see
    above), `source` is the row of the step in flight that samples it. Otherwise `source` is -1.
    """

    seq: Sequence
    start: int
    count: int
    draft: tuple[int, ...] = ()
    source: int = -1

    @property
    def needs_sample(self) -> bool:
        """Whether the work includes the last token of the sequence, so that a new token is sampled. Valid only
        until the step lands."""
        return self.source >= 0 or self.start + self.count == len(self.seq.token_ids) + len(self.draft)

    @property
    def token_ids(self) -> list[int]:
        """The tokens; a promised one is 0 until the device replaces it."""
        return [0] if self.source >= 0 else [*self.seq.token_ids[self.start : self.start + self.count], *self.draft]

    @property
    def num_samples(self) -> int:
        """The number of tokens to sample: one after the last token, and one after each token of the draft."""
        return 1 + len(self.draft) if self.needs_sample else 0

    @property
    def scored_positions(self) -> range:
        """The positions whose logits give a requested log-probability of the prompt's next token. In the work, only
        positions that need a sample follow them."""
        if not self.seq.num_unscored:
            return range(0)
        first, end = len(self.seq.prompt_logprobs), min(self.start + self.count, self.seq.num_prompt - 1)
        return range(max(self.start, first), end)

    @property
    def num_logits(self) -> int:
        """The number of tokens, at the end of the work, that need logits."""
        return len(self.scored_positions) + self.num_samples


@dataclass(slots=True)
class StepWork:
    """The work of one step: sequences that decode one token each, without a draft, and then `others`. The decoding
    sequences are stored as parallel lists, because a step may have many, and a `Work` for each would take longer.

    Iteration yields the `Work` of all sequences.
    """

    decodes: list[Sequence] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # of the token that each of `decodes` computes
    sources: list[int] = field(default_factory=list)  # of the tokens, as in `Work`
    others: list[Work] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.decodes) + len(self.others)

    def __iter__(self) -> Iterator[Work]:
        for seq, start, source in zip(self.decodes, self.positions, self.sources, strict=True):
            yield Work(seq, start, 1, source=source)
        yield from self.others

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decodes, *(item.seq for item in self.others)]

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(item.count for item in self.others)


class WaitingQueue:
    """The waiting sequences. Preempted sequences come first, the oldest of them at the head. Then the tenants take
    turns, and so do the groups of each tenant."""

    def __init__(self) -> None:
        self._preempted: deque[Sequence] = deque()
        self._tenants: OrderedDict[str, OrderedDict[tuple[str, str], deque[Sequence]]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, seq: Sequence) -> None:
        self._size += 1
        self._group_queue(seq).append(seq)

    def add_first(self, seq: Sequence) -> None:
        """Adds a sequence that was preempted for fairness, as the next of its group."""
        self._size += 1
        self._group_queue(seq).appendleft(seq)

    def add_preempted(self, seq: Sequence) -> None:
        """Adds a sequence that was preempted for its blocks. Sequences are preempted from the youngest to the
        oldest."""
        self._size += 1
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
        self._size -= 1
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
        self._size -= 1
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


def _decrement(counts: Counter[Any], key: Hashable) -> None:
    """Counts one less of `key`, and forgets a key whose count is 0."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


class Scheduler:
    """Owns the waiting and running sequences and the block pool. For each step the engine calls `schedule`, launches
    the work, and calls `launch`; when the sampled tokens have arrived, it calls `advance`. Between `launch` and
    `advance`, it may schedule and launch one more step."""

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_batch_tokens: int, max_prefill_tokens: int) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens  # at least max_num_seqs
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting = WaitingQueue()
        self.suspended: WaitingQueue | None = None  # the sequences that wait for `resume`
        self.running: list[Sequence] = []  # in the order of admission
        self._num_running_of_tenant: Counter[str] = Counter()
        self._num_running_of_group: Counter[tuple[str, str]] = Counter()
        self.num_preemptions = 0
        self.num_prefix_queried = 0  # tokens of admitted sequences
        self.num_prefix_hits = 0  # those of them that were in the prefix cache
        self.num_restored_hits = 0  # those of the hits that an earlier process computed
        self._is_fair = True  # no waiting sequence is below its share, and nothing has changed since this was checked

    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, seq: Sequence) -> None:
        self._is_fair = False
        self._queue_of(seq).add(seq)

    def suspend(self) -> None:
        """Preempts all running sequences and sets all sequences aside until `resume`. No step may be in flight.

        Requests of clients that are added in the meantime are set aside, too. The server's own ones, which have no
        group, run.
        """
        while self.running:
            youngest = self.running[-1]
            self._preempt(youngest)
            self.waiting.add_preempted(youngest)
        if self.suspended is None:
            self.suspended, self.waiting = self.waiting, WaitingQueue()

    def resume(self) -> None:
        """Continues the suspended sequences; a preempted one computes its tokens so far again. Call this while none of
        the server's own requests runs."""
        if self.suspended is not None:
            self.waiting, self.suspended = self.suspended, None
            self._is_fair = False

    def _queue_of(self, seq: Sequence) -> WaitingQueue:
        return self.waiting if self.suspended is None or seq.is_own else self.suspended

    def may_preempt(self) -> bool:
        """Returns whether the next `schedule` may preempt a sequence. No step may be in flight then."""
        if (pair := self._find_victim()) is not None and not self._has_room(pair[0]):
            return True
        free = self.pool.num_free
        return free < len(self.running) and free < sum(self.pool.needs_block(seq) for seq in self.running)

    def schedule(self) -> StepWork:
        """Returns the work of the next step. It is empty if there is no sequence, or if all sequences wait for tokens
        of the step in flight."""
        self._preempt_for_fairness()
        preemptions = self.num_preemptions
        work, prompts = self._decodes()
        budget = self.max_batch_tokens - len(work.decodes)
        if work.decodes:
            budget = min(budget, self.max_prefill_tokens)
        chunks = self._chunks(prompts, budget)
        if self.num_preemptions == preemptions and self.waiting:
            chunks += self._admissions(budget - sum(item.count for item in chunks))
        remaining = self.max_batch_tokens - len(work.decodes) - sum(item.count for item in chunks)
        self._add_drafts(work, min(remaining, MAX_DRAFT_ROWS - len(work.decodes)))
        work.others += chunks
        return work

    def launch(self, work: StepWork) -> None:
        """Records that `work` was launched. From now on, a token is promised to each sampled sequence."""
        for row, seq in enumerate(work.decodes):
            seq.num_launched += 1
            seq.sample_row = row
        row = len(work.decodes)
        for item in work.others:
            item.seq.num_launched += item.count - len(item.draft)
            item.seq.sample_row = row
            row += item.num_samples

    def advance(self, work: StepWork) -> None:
        """Records that launched work was computed. Call this before the sampled tokens are appended to the sequences.
        Sequences that have finished in the meantime are left as they are."""
        size, finished = self.pool.block_size, Status.FINISHED
        for seq, position in zip(work.decodes, work.positions, strict=True):
            if seq.status is not finished:
                seq.num_computed = end = position + 1
                if end % size == 0:
                    self.pool.cache_blocks(seq, position)
        for item in work.others:
            if item.seq.status is not finished:
                item.seq.num_computed += item.count - len(item.draft)
                self.pool.cache_blocks(item.seq, item.start)

    def accept_drafted_token(self, seq: Sequence) -> None:
        """Records that the last token of `seq` is a drafted token, which is computed already."""
        seq.num_computed = seq.num_launched = seq.num_computed + 1
        self.pool.cache_blocks(seq, seq.num_computed - 1)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a waiting or running sequence and frees its blocks. A step in flight may still write to the blocks;
        later steps that get them run after it."""
        self._is_fair = False
        if seq.status is Status.RUNNING:
            self._remove_running(seq)
        elif seq.status is not Status.FINISHED:
            self._queue_of(seq).remove(seq)
        self.pool.release(seq)
        seq.status, seq.finish_reason = Status.FINISHED, reason

    def _decodes(self) -> tuple[StepWork, list[Sequence]]:
        """Returns the work of the decoding sequences, and the running sequences whose prompt is not fully computed."""
        work, prompts, size = StepWork(), list[Sequence](), self.pool.block_size
        decodes, positions, sources = work.decodes, work.positions, work.sources
        for seq in self.running:  # `_grow` removes sequences from the end only, at most down to this one
            start, num_tokens = seq.num_launched, len(seq.token_ids)
            if start + 1 < num_tokens:
                prompts.append(seq)
            elif start >= num_tokens and start + 1 >= seq.max_tokens:
                continue  # its last token is promised
            elif start % size or self._grow(seq):  # only the first token of a block needs a new one
                decodes.append(seq)
                positions.append(start)
                sources.append(seq.sample_row if start >= num_tokens else -1)
        return work, prompts

    def _add_drafts(self, work: StepWork, max_tokens: int) -> None:
        """Adds drafts of up to `max_tokens` tokens in all to the decoding sequences. Every sequence gets an equal
        share, and the sequences after it get what it does not use."""
        if max_tokens <= 0 or all(seq.drafter is None for seq in work.decodes):
            return
        items, rows = list[Work](), len(work.decodes)
        for seq in work.decodes:
            draft = self._draft(seq, max_tokens // (rows - len(items)), rows)
            items.append(Work(seq, seq.num_computed, 1 + len(draft), draft))
            max_tokens -= len(draft)
        if any(item.draft for item in items):
            work.decodes, work.positions, work.sources, work.others = [], [], [], items

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

    def _add_running(self, seq: Sequence) -> None:
        self.running.append(seq)
        self._num_running_of_tenant[seq.tenant] += 1
        self._num_running_of_group[seq.group] += 1

    def _remove_running(self, seq: Sequence) -> None:
        self.running.remove(seq)
        _decrement(self._num_running_of_tenant, seq.tenant)
        _decrement(self._num_running_of_group, seq.group)

    def _preempt(self, seq: Sequence) -> None:
        self._is_fair = False
        self._remove_running(seq)
        self.pool.release(seq)
        seq.status = Status.PREEMPTED
        self.num_preemptions += 1

    def _preempt_for_fairness(self) -> None:
        """Moves the first waiting sequence whose tenant or group is below its share to the head of the queue, and
        preempts a sequence for it if there is no room."""
        if (pair := self._find_victim()) is not None:
            seq, victim = pair
            self.waiting.promote(seq)
            if not self._has_room(seq):
                self._preempt(victim)
                self.waiting.add_first(victim)

    def _find_victim(self) -> tuple[Sequence, Sequence] | None:
        """Returns the first waiting sequence whose tenant or group is below its share, and the sequence to preempt for
        it. Returns None if there is no such sequence."""
        if self._is_fair or not self.waiting:
            return None
        for seq in self.waiting.group_heads():
            if (victim := self._victim_for(seq)) is not None:
                return seq, victim
        self._is_fair = True
        return None

    def _has_room(self, seq: Sequence) -> bool:
        return len(self.running) < self.max_num_seqs and self.pool.can_allocate(seq, reserve=len(self.running))

    def _victim_for(self, seq: Sequence) -> Sequence | None:
        """Returns the sequence to preempt for `seq`, or None if `seq` must wait.

        If the largest tenant runs at least two sequences more than the tenant of `seq`, the victim is the youngest
        sequence of the largest group of the largest tenant. Otherwise, if the group of `seq` runs no sequence, the
        victim is the youngest sequence of the largest group of the same tenant, if this group runs at least two. The
        victim is never the oldest running sequence.
        """
        tenants, groups = self._num_running_of_tenant, self._num_running_of_group
        most = max(tenants.values(), default=0)
        if most >= tenants[seq.tenant] + 2:
            return self._youngest(next(s.tenant for s in self.running if tenants[s.tenant] == most))
        if groups[seq.group] or tenants[seq.tenant] < 2 or max(groups.values()) == 1:
            return None
        youngest = self._youngest(seq.tenant)
        return youngest if groups[youngest.group] > 1 else None

    def _youngest(self, tenant: str) -> Sequence:
        """Returns the youngest sequence of the tenant's largest group."""
        seqs = (seq for seq in reversed(self.running) if seq.tenant == tenant)
        return max(seqs, key=lambda seq: self._num_running_of_group[seq.group])

    def _chunks(self, prompts: list[Sequence], budget: int) -> list[Work]:
        """Schedules the next chunk of every partly computed prompt, up to `budget` tokens in all."""
        work: list[Work] = []
        for seq in round_robin(prompts):
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
        return Work(seq, seq.num_launched, min(seq.num_pending, budget))

    def _admit_next(self) -> Sequence | None:
        """Admits the head of the waiting queue and returns it, or returns None if it must wait."""
        seq = self.waiting.head()
        if seq is None or len(self.running) >= self.max_num_seqs or self.pool.is_prefix_in_progress(seq):
            return None
        # reserves a block for each running sequence, which would otherwise soon preempt the admitted one
        if not self.pool.allocate(seq, reserve=len(self.running)):
            return None
        self._is_fair = False
        self.waiting.pop()
        self._add_running(seq)
        if seq.status is Status.WAITING:
            seq.num_cached, seq.admitted = seq.num_computed, time.monotonic()
        seq.status = Status.RUNNING
        self.num_prefix_queried += len(seq.token_ids)
        self.num_prefix_hits += seq.num_computed
        self.num_restored_hits += self.pool.num_restored_tokens(seq)
        return seq
