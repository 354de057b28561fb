"""The processes of an engine with `tensor_parallel`. Rank 0 is the process of the engine: it schedules, samples and
sends each step to the other ranks, which follow it (follower.py).

    rank 0      Engine -> LeadingRunner    send(op, integers), then runs its part of the step
    rank 1..    follow                     receive() -> (op, integers), then runs its part of the step

`start` starts the other ranks as child processes on this machine. If torchrun has started this process, its ranks are
used instead, so they may be on several machines. The ranks are a group of torch.distributed: integers and the tensors
of a CPU are sent by gloo, those of a GPU by NCCL.

A step that fails on one rank leaves the others in a collective. So every error of a step ends the engine, and the
server starts it again with new ranks (server/serving/supervisor.py). Two things detect that a rank is lost. If it dies
in a step, the collectives of the others fail. And every rank writes a counter to the group's store every second: if a
counter stands still for `lost_seconds`, the process is stopped. (A rank that computes endlessly still counts; the
server ends it after `--step-seconds`.) Rank 0 watches all others and its child processes. The others watch rank 0, and
end when it has ended.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.errors import Fp8ServeError, MachineError, one_line
from fp8serve.fp8.sharded import Shard
from fp8serve.model.storage.memory import share_memory
from fp8serve.processes import describe_error, describe_exit, end_process, to_exception
from fp8serve.ranks import Ranks, leave_group

BEAT_SECONDS, POLL_SECONDS = 1.0, 0.1
REASON_SECONDS = 2.0  # that the watching thread may take to find out why a collective has failed
INLINE = 1022  # integers that are sent together with their number
NOTHING = torch.zeros(0, dtype=torch.long)
ERROR_KEY = "error"  # of the store: the error that ended a rank
OnLoss = Callable[[Fp8ServeError], None]
"""Is called on rank 0, in another thread, with the reason why the ranks cannot continue."""


class Op(IntEnum):
    """What the ranks shall do next, and the integers that are sent with it."""

    STEP = 0  # run a step (step.py)
    STEP_AND_LOGITS = 1  # run a step, and compute the logits of its hidden states
    LOGITS = 2  # compute the logits of hidden states [n], which are broadcast next
    READ_ADAPTER = 3  # read an adapter: the bytes of its path
    FREE_ADAPTER = 4  # free the adapter of this number
    COLLECT_COUNTERS = 5  # add the counters of inputs to those of rank 0
    PACK = 6  # pack the next weight
    END = 7  # leave the group


class RankGroup:
    """The ranks of an engine, of which this process is one. On rank 0, `close` ends the others."""

    def __init__(
        self,
        ranks: Ranks,
        store: Any,
        children: Sequence[subprocess.Popen[bytes]],
        on_loss: OnLoss | None,
        lost_seconds: float,
    ) -> None:
        self.ranks, self.shard = ranks, Shard(ranks.rank, ranks.size)
        self._store, self._children, self._on_loss, self._lost_seconds = store, children, on_loss, lost_seconds
        self._loss: Fp8ServeError | None = None
        self._is_lost, self._is_closed, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._header = torch.zeros(INLINE + 2, dtype=torch.long)
        threading.Thread(target=self._watch, daemon=True).start()

    def send(self, op: Op, values: Tensor = NOTHING) -> None:
        """Sends an operation with integers, int64 [n], from rank 0 to all other ranks."""
        self._header[0], self._header[1] = op, len(values)
        self._header[2 : 2 + len(values)] = values[:INLINE]
        dist.broadcast(self._header, 0)
        if len(values) > INLINE:
            dist.broadcast(values[INLINE:].contiguous(), 0)

    def receive(self) -> tuple[Op, Tensor]:
        """Waits for the next operation of rank 0 and its integers."""
        dist.broadcast(self._header, 0)
        op, count = self._header[:2].tolist()
        values = self._header[2 : 2 + min(count, INLINE)].clone()
        if count > INLINE:
            rest = values.new_empty(count - INLINE)
            dist.broadcast(rest, 0)
            values = torch.cat((values, rest))
        return Op(op), values

    @contextmanager
    def errors(self) -> Iterator[None]:
        """If a RuntimeError or MemoryError ends the block, raises an Fp8ServeError that says why the ranks cannot
        continue, and raises it again in every later block. Any other error passes, but unless it is an Fp8ServeError,
        the ranks cannot continue either, because they are no longer in the same collective."""
        if self._loss is not None:
            raise self._loss
        try:
            yield
        except Fp8ServeError:
            raise
        except BaseException as error:
            self._is_lost.wait(REASON_SECONDS)
            reason = one_line(error) or type(error).__name__
            loss = self._lose(MachineError(f"The ranks of the engine cannot continue: {reason}."))
            if not isinstance(error, RuntimeError | MemoryError):
                raise
            raise loss from None

    def _lose(self, loss: Fp8ServeError) -> Fp8ServeError:
        """Ends the child processes, and returns why the ranks cannot continue: `loss`, unless there was a reason
        before."""
        with self._lock:
            self._loss = self._loss or loss
        self._is_lost.set()
        end_children(self._children)
        return self._loss

    def report(self, error: Fp8ServeError) -> None:
        """Leaves the error that ends this rank for rank 0."""
        self._store.set(ERROR_KEY, json.dumps(describe_error(error)))

    def _reported_error(self) -> Fp8ServeError | None:
        try:
            text = self._store.get(ERROR_KEY) if self._store.check([ERROR_KEY]) else None
        except RuntimeError:  # the store is lost
            return None
        return None if text is None else cast(Fp8ServeError, to_exception(json.loads(text), MachineError))

    def close(self) -> None:
        """Ends the other ranks and leaves the group."""
        if not self._is_closed.is_set():
            self._is_closed.set()
            if self.ranks.is_first and not self._children and self._loss is None:
                with suppress(RuntimeError):  # a rank has ended already
                    self.send(Op.END)
            end_children(self._children)
            leave_group()
            share_memory(1)

    def _watch(self) -> None:
        """Ends this rank, or on rank 0 the child processes, when a rank is lost, so that no collective waits for it."""
        loss = self._wait_for_loss()
        if loss is None or self._is_closed.is_set():  # `close` ends the other ranks itself
            return
        if not self.ranks.is_first:
            end_process(1)
        error = self._lose(self._reported_error() or MachineError(loss))
        if self._on_loss is not None:
            self._on_loss(error)
        elif not self._children:  # torchrun has started the ranks, and a collective may wait for one that hangs
            print(f"fp8serve: {error}", file=sys.stderr)
            end_process(1)

    def _wait_for_loss(self) -> str | None:
        """Adds to this rank's counter every second, and returns a message when a rank that this one depends on is lost,
        or None when the group is closed."""
        peers = range(1, self.ranks.size) if self.ranks.is_first else [0]
        counts, silence = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0.0)
        last_beat = 0.0
        while not self._is_closed.wait(POLL_SECONDS):
            for rank, child in enumerate(self._children, 1):
                if child.poll() is not None:
                    return f"Rank {rank} of the engine has ended: {describe_exit(child.returncode)}."
            if (elapsed := time.monotonic() - last_beat) < BEAT_SECONDS:
                continue
            last_beat += elapsed
            try:
                self._store.add(f"beat {self.ranks.rank}", 1)
                new_counts = {rank: self._store.add(f"beat {rank}", 0) for rank in peers}
            except RuntimeError:
                return "The store of the engine's ranks is lost, and with it the process that has it."
            for rank in peers:
                is_silent = new_counts[rank] == counts[rank]
                counts[rank] = new_counts[rank]
                # if this process was suspended, the other rank is not blamed for it
                silence[rank] = silence[rank] + min(elapsed, 2 * BEAT_SECONDS) if is_silent else 0.0
                if silence[rank] > self._lost_seconds:
                    return f"Rank {rank} of the engine hangs: no sign of life for {self._lost_seconds:g} seconds."
        return None


def end_children(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills child processes and waits for their end. Ranks have nothing to save."""
    for child in children:
        child.kill()
    for child in children:
        child.wait()
