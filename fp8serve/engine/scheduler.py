"""Decides how many tokens each sequence computes in the next step. Pure Python; it uses positions of tokens, not
values.

One step is one batch over all running sequences (continuous batching):
  1. every decoding sequence gets its one token, so a long prompt never stalls the others;
  2. prompts under way get a chunk each, in turn over tenants and their groups and oldest first within one, from the
     rest of the step's token budget (while others decode, prompts get less: the reader of a stream waits for a whole
     step between two tokens);
  3. waiting sequences are admitted while a place, blocks for all their tokens, and budget are left;
  4. decoding sequences get drafts of what may follow (drafting.py) from what is left of the budget and of the blocks.

A sequence that needs a block when none is free takes it from the sequence admitted last, which loses all its blocks
and waits, first in line, to be computed again (its published blocks are usually still there). The oldest always
proceeds, so every request ends; one that could not run even alone is refused earlier (`EngineLimits.check`).

Admission is in turn over tenants, in turn over a tenant's groups (the parts of one request), and first come, first
served within one. A newcomer whose tenant or group has less than its share need not wait until a sequence ends:
the youngest sequence of those with most gives way to it, and waits as the next of its own group. The head of the line
is not overtaken even if it is large, so small requests cannot starve it. It also waits while another sequence computes
its prefix.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

from fp8serve.engine.kv_cache import BlockPool
from fp8serve.engine.output import FinishReason
from fp8serve.engine.sequence import Sequence, Status

MOST_DRAFTED = 32  # tokens of decoding sequences and their drafts; beyond this, a row costs as much as it gains


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens [start, start + count) of `seq` to compute; `samples`: their last one's logits give a new token.

    The last of them may be a `draft`: tokens that the sequence does not have yet.
    """

    seq: Sequence
    start: int
    count: int
    draft: tuple[int, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        return [*self.seq.token_ids[self.start : self.start + self.count], *self.draft]

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.seq.token_ids) + len(self.draft)

    @property
    def drawn(self) -> int:
        """How many tokens are drawn: one after the last token, and one after each token of the draft."""
        return 1 + len(self.draft) if self.samples else 0

    @property
    def scored(self) -> range:
        """Positions whose logits give the log-probability of the prompt's next token, where that is wanted.

        They are the last ones of the work, except the one that samples.
        """
        if not self.seq.num_unscored:
            return range(0)
        first, end = len(self.seq.prompt_logprobs), min(self.start + self.count, self.seq.num_prompt - 1)
        return range(max(self.start, first), end)

    @property
    def num_logits(self) -> int:
        """How many of its last tokens need logits."""
        return len(self.scored) + self.drawn


class WaitingQueue:
    """Preempted sequences first, oldest first; then one from each tenant in turn, and of its groups in turn."""

    def __init__(self) -> None:
        self._preempted: deque[Sequence] = deque()
        self._tenants: OrderedDict[str, OrderedDict[tuple[str, str], deque[Sequence]]] = OrderedDict()

    def __len__(self) -> int:
        lines = (line for groups in self._tenants.values() for line in groups.values())
        return len(self._preempted) + sum(map(len, lines))

    def add(self, seq: Sequence) -> None:
        self._line(seq).append(seq)

    def add_first(self, seq: Sequence) -> None:
        """Adds `seq`, which gave up its place, as the next of its group."""
        self._line(seq).appendleft(seq)

    def add_preempted(self, seq: Sequence) -> None:
        self._preempted.appendleft(seq)  # the last admitted is preempted first

    def head(self) -> Sequence | None:
        return self._preempted[0] if self._preempted else next(self.newcomers(), None)

    def newcomers(self) -> Iterator[Sequence]:
        """The next of each group, in the order of the line; none while a preempted sequence waits."""
        if not self._preempted:
            for groups in self._tenants.values():
                for line in groups.values():
                    yield line[0]

    def promote(self, seq: Sequence) -> None:
        """Makes `seq`, the next of its group, the head."""
        self._tenants.move_to_end(seq.tenant, last=False)
        self._tenants[seq.tenant].move_to_end(seq.group, last=False)

    def pop(self) -> None:
        """Removes the head; its tenant goes to the end of the line, its group to the end of the tenant's."""
        if self._preempted:
            self._preempted.popleft()
            return
        tenant, groups = self._tenants.popitem(last=False)
        group, line = groups.popitem(last=False)
        line.popleft()
        if line:
            groups[group] = line
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

    def _line(self, seq: Sequence) -> deque[Sequence]:
        return self._tenants.setdefault(seq.tenant, OrderedDict()).setdefault(seq.group, deque())


def round_robin(seqs: Iterable[Sequence]) -> list[Sequence]:
    """The first of each tenant, then the second of each, and so on; within a tenant the same by groups. The order is
    otherwise kept."""
    return _ranked(_ranked(seqs, lambda seq: seq.group), lambda seq: seq.tenant)


def _ranked(seqs: Iterable[Sequence], name: Callable[[Sequence], Hashable]) -> list[Sequence]:
    ranks: list[tuple[int, Sequence]] = []
    seen: Counter[Hashable] = Counter()
    for seq in seqs:
        ranks.append((seen[name(seq)], seq))
        seen[name(seq)] += 1
    return [seq for _, seq in sorted(ranks, key=lambda item: item[0])]


class Scheduler:
    """Owns the sequences in flight and the block pool. Call `schedule`, compute, then `advance`, in turn."""

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_batch_tokens: int, max_prefill_tokens: int) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens  # at least max_num_seqs
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in the order of admission
        self.num_preemptions = 0
        self.num_prefix_queried = 0  # tokens of admitted sequences
        self.num_prefix_hits = 0  # how many of these were found in the cache
        self.num_restored_hits = 0  # how many of these an earlier process computed

    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, seq: Sequence) -> None:
        self.waiting.add(seq)

    def schedule(self) -> list[Work]:
        """The next step's work; empty only when there is none."""
        self._yield_to_newcomer()
        preemptions = self.num_preemptions
        decodes = self._decodes()
        budget = self.max_batch_tokens - len(decodes)
        if decodes:
            budget = min(budget, self.max_prefill_tokens)
        chunks = self._chunks(budget)
        if self.num_preemptions == preemptions:
            chunks += self._admissions(budget - sum(item.count for item in chunks))
        room = self.max_batch_tokens - sum(item.count for item in decodes + chunks)
        return self._drafted(decodes, min(room, MOST_DRAFTED - len(decodes))) + chunks

    def advance(self, work: list[Work]) -> None:
        """Records that `work` was computed, before new tokens are appended."""
        for item in work:
            item.seq.num_computed += item.count - len(item.draft)
            self.pool.publish(item.seq, item.start)

    def confirm(self, seq: Sequence) -> None:
        """Records that the token appended last is the one that was drafted: it is computed."""
        seq.num_computed += 1
        self.pool.publish(seq, seq.num_computed - 1)

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

    def _drafted(self, decodes: list[Work], room: int) -> list[Work]:
        """`decodes`, with drafts of `room` tokens in all: each gets its share, and what the ones before it left
        over."""
        if room <= 0 or all(item.seq.drafter is None for item in decodes):
            return decodes
        result: list[Work] = []
        for item in decodes:
            draft = self._draft(item.seq, room // (len(decodes) - len(result)), len(decodes))
            result.append(replace(item, count=1 + len(draft), draft=draft))
            room -= len(draft)
        return result

    def _draft(self, seq: Sequence, room: int, rows: int) -> tuple[int, ...]:
        """A draft for `seq`, no longer than its remaining tokens; no sequence loses a block for it."""
        room = min(room, seq.params.max_new_tokens - seq.num_generated - 1)
        if seq.drafter is None or room < 1:
            return ()
        draft = seq.drafter.propose(seq.token_ids, room, rows)
        return tuple(draft) if self.pool.grow(seq, len(draft), reserve=len(self.running)) else ()

    def _make_room(self, seq: Sequence) -> bool:
        """False when `seq` itself was, or had to be, preempted."""
        while seq.status is Status.RUNNING and not self.pool.grow(seq):
            self._preempt(self.running[-1])
        return seq.status is Status.RUNNING

    def _preempt(self, seq: Sequence) -> None:
        self._stop(seq)
        self.waiting.add_preempted(seq)

    def _stop(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq)
        seq.status = Status.PREEMPTED
        self.num_preemptions += 1

    def _yield_to_newcomer(self) -> None:
        """Moves the first waiting sequence whose tenant or group is below its share to the head of the line, and
        preempts at most one sequence for it."""
        tenants = Counter(seq.tenant for seq in self.running)
        groups = Counter(seq.group for seq in self.running)
        for seq in self.waiting.newcomers():
            if (victim := self._victim_for(seq, tenants, groups)) is not None:
                self.waiting.promote(seq)
                if not self._has_room(seq):
                    self._stop(victim)
                    self.waiting.add_first(victim)
                return

    def _has_room(self, seq: Sequence) -> bool:
        return len(self.running) < self.max_num_seqs and self.pool.fits(seq, reserve=len(self.running))

    def _victim_for(self, seq: Sequence, tenants: Counter[str], groups: Counter[tuple[str, str]]) -> Sequence | None:
        """The sequence to preempt for `seq`, or None. If the busiest tenant runs at least two sequences more than that
        of `seq`: the youngest of that tenant's largest group. Otherwise, if the group of `seq` runs nothing: the
        youngest of its own tenant's largest group, if that runs at least two. Never the oldest sequence of all.
        """
        largest, most = max(tenants.items(), key=lambda item: item[1], default=("", 0))
        if most >= tenants[seq.tenant] + 2:
            return self._youngest(largest, groups)
        if groups[seq.group] or tenants[seq.tenant] < 2:
            return None
        youngest = self._youngest(seq.tenant, groups)
        return youngest if groups[youngest.group] > 1 else None

    def _youngest(self, tenant: str, groups: Counter[tuple[str, str]]) -> Sequence:
        """The youngest sequence of the tenant's largest group."""
        return max((s for s in reversed(self.running) if s.tenant == tenant), key=lambda s: groups[s.group])

    def _chunks(self, budget: int) -> list[Work]:
        """The next part of every unfinished prompt, as far as `budget` tokens go."""
        work: list[Work] = []
        for seq in round_robin(seq for seq in self.running if seq.num_pending > 1):
            if budget > 0:
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
            seq.num_cached, seq.admitted = seq.num_computed, time.monotonic()
        seq.status = Status.RUNNING
        self.num_prefix_queried += len(seq.token_ids)
        self.num_prefix_hits += seq.num_computed
        self.num_restored_hits += self.pool.restored_tokens(seq)
        return seq
