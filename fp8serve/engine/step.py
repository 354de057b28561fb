"""One step's work as tensors, and a decoding step as a CUDA graph.

All sequences of a step are flattened into one row of tokens: the model sees `[tokens]`, and the paged attention op gets
where each sequence begins (`query_starts` [S+1]), how long it is with its new tokens (`context_lens` [S]) and where its
keys and values lie (`block_tables` [S, most blocks], `slots` [tokens]). Prefill chunks and decoding tokens mix freely.
Numbers reach the device from pinned memory, so a step waits for the device once: when it reads the sampled tokens.

At batch 1 a step of a small model is bound by the time that Python and the driver take to launch its kernels. A step in
which every sequence decodes one token has a fixed shape but for the number of sequences, so it is captured once for
each of a few sizes (1, 2, 4, 8, 16, 24, ... up to max_num_seqs) and replayed with new contents of the same buffers. A
batch between two sizes is filled up with copies of its first sequence, whose keys and values are not written (slot -1):
they compute what that sequence computes, so they change no maximum that is watched, and `live_rows` keeps them out
of the counters.

Buffers. A step's integers lie in pinned memory on the host and in its copy on the device; all sizes share them, the
first n rows each. The block table is as wide as the longest sequence allowed; rows that have not changed since the last
step are not written again. Every capture takes its memory from one pool, the largest first, so that the others fit in.

A graph reads the memory that its capture read, so it sees values that are written there, but not a tensor or module
that was replaced. `Recorded` looks for those while the device computes; if there is one, everything is captured anew
and the step repeated, which writes the same places of the cache.

Steps that cannot be captured run as before: prompts, batches with a prompt in them, and everything if the capture
fails; `info` then shows the reason. Logits are bit-equal to those of the step that was not captured: the same kernels
run.

Few tokens need logits: the last one of each sequence that samples, with its draft, and those of a prompt whose
log-probabilities are wanted. Work that only these tokens need is done for them alone, and the attention op gets a
second description, with these queries. In a decoding step these are all tokens.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fp8serve.engine.scheduler import Work

WARM_UPS = 2  # runs before the capture: libraries load kernels and take their workspace in the first


@dataclass(frozen=True, slots=True)
class Queries:
    """Tokens that attend, flattened over S sequences; int32."""

    query_starts: Tensor  # [S + 1]
    context_lens: Tensor  # [S]: the position of each sequence's last query, plus one
    block_tables: Tensor  # [S, most blocks], rows filled up with 0


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step in the form that the ops take: integers, on the model's device."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: block * block_size + offset
    queries: Queries  # all T
    last: Tensor | None  # int64 [R]: rows whose logits are wanted; None: all T
    last_queries: Queries  # these; where they are all, `queries` itself


def flatten(work: list[Work], block_size: int, device: torch.device) -> StepTensors:
    """The tensors of one step."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, last = [0], list[int]()
    for item in work:
        span = range(item.start, item.start + item.count)
        table = item.seq.block_table
        token_ids += item.token_ids
        positions += span
        slots += [table[i // block_size] * block_size + i % block_size for i in span]
        starts.append(len(token_ids))
        last += range(len(token_ids) - item.num_logits, len(token_ids))

    ids, places, into, rows = _parts([token_ids, positions, slots, last], torch.long, device)
    queries = _queries(work, starts, device)
    if len(last) == len(token_ids):
        return StepTensors(ids, places, into, queries, None, queries)
    some = [item for item in work if item.num_logits]
    few = _queries(some, [0, *itertools.accumulate(item.num_logits for item in some)], device)
    return StepTensors(ids, places, into, queries, rows, few)


def _queries(work: list[Work], starts: list[int], device: torch.device) -> Queries:
    """The last tokens of every item of `work`, as many as `starts` says."""
    most = max((len(item.seq.block_table) for item in work), default=0)
    tables = [item.seq.block_table + [0] * (most - len(item.seq.block_table)) for item in work]
    lengths = [item.start + item.count for item in work]
    blocks = list(itertools.chain.from_iterable(tables))
    begins, context, held = _parts([starts, lengths, blocks], torch.int32, device)
    return Queries(begins, context, held.view(len(work), most))


def _parts(lists: list[list[int]], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Each list as a tensor; all of them in one copy."""
    whole = to_device(list(itertools.chain.from_iterable(lists)), dtype, device)
    return whole.split_with_sizes([len(part) for part in lists])


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` (numbers, nested lists of them, or a NumPy array) as a tensor on `device`.

    `torch.tensor(values, device="cuda")` would wait for all queued work, because it copies from memory that may change.
    From pinned memory the copy is queued like a kernel; torch keeps the memory until it is done.
    """
    if device.type == "cpu":
        return torch.as_tensor(values, dtype=dtype)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


class Capture(Protocol):
    """Records `run`, and returns a function that repeats it: it returns the same tensor every time, overwritten."""

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]: ...


class CudaCapture:
    """torch's CUDA graphs, all in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=self._pool):
            logits = run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


@dataclass(frozen=True, slots=True)
class GraphReport:
    """The batch sizes at which decoding is replayed, or the reason why it is not."""

    sizes: tuple[int, ...] = ()
    reason: str | None = None

    def text(self) -> str:
        return f"off: {self.reason}" if self.reason else f"batches of {', '.join(map(str, self.sizes))}"


class Recorded:
    """The modules and tensors of `model` that a capture has read; their memory is kept as long as this object."""

    def __init__(self, model: nn.Module) -> None:
        owners = list(model.modules())
        tables = [table for m in owners for table in (m._modules, m._parameters, m._buffers)]
        self._things = [(table, name, thing) for table in tables for name, thing in table.items()]
        tensors = [thing for _, _, thing in self._things if isinstance(thing, Tensor)]
        self._places = [(tensor, tensor.data_ptr()) for tensor in tensors]
        self._memory = [tensor.untyped_storage() for tensor in tensors]

    def is_current(self) -> bool:
        """Whether the model still consists of these."""
        for table, name, thing in self._things:
            if table.get(name) is not thing:
                return False
        return all(tensor.data_ptr() == place for tensor, place in self._places)


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 4, 8, then every eighth number, and `most` itself."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most})


class Buffers:
    """The integers of a decoding step of up to `rows` sequences with up to `width` blocks each, on host and device."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.rows, self.width = rows, width
        pinned = device.type == "cuda"
        # token ids, positions, slots [rows] each, and how many rows are live; context lengths, then block tables
        self._wide = torch.zeros(3 * rows + 1, dtype=torch.long, pin_memory=pinned)
        self._narrow = torch.zeros(rows + rows * width, dtype=torch.int32, pin_memory=pinned)
        self._wide_there, self._narrow_there = (torch.empty_like(t, device=device) for t in (self._wide, self._narrow))
        self._wide[2 * rows : 3 * rows] = -1  # a capture writes no keys, and reads one
        self._narrow[:rows] = 1
        self._wide_there.copy_(self._wide)
        self._narrow_there.copy_(self._narrow)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._tables = self._narrow.numpy()[rows:].reshape(rows, width)
        self._known: list[tuple[list[int], int]] = [([], 0)] * rows  # what the rows of the tables hold
        self.live_rows = self._wide_there[-1]  # int64 []

    def tensors(self, size: int) -> StepTensors:
        """The memory on the device that a step of `size` rows reads: the same at every call."""
        token_ids, positions, slots = (self._wide_there[i * self.rows :][:size] for i in range(3))
        tables = self._narrow_there[self.rows :].view(self.rows, self.width)[:size]
        queries = Queries(self._starts[: size + 1], self._narrow_there[:size], tables)
        return StepTensors(token_ids, positions, slots, queries, None, queries)

    def fill(self, work: Sequence[Work], size: int, block_size: int) -> None:
        """Sends the integers of `work`, one token each, padded to `size` rows. Nothing waits."""
        wide, narrow, rows = self._wide.numpy(), self._narrow.numpy(), self.rows
        padded = [*work, *[work[0]] * (size - len(work))]
        positions = [item.start for item in padded]
        wide[:size] = [item.seq.token_ids[item.start] for item in padded]
        wide[rows : rows + size] = positions
        wide[2 * rows : 2 * rows + size] = _slots(work, size, block_size)
        wide[-1] = len(work)
        narrow[:size] = [position + 1 for position in positions]
        for row, item in enumerate(padded):
            self._write_table(row, item.seq.block_table)
        self._wide_there.copy_(self._wide, non_blocking=True)
        sent = rows + size * self.width
        self._narrow_there[:sent].copy_(self._narrow[:sent], non_blocking=True)

    def _write_table(self, row: int, table: list[int]) -> None:
        """A table that is still the same list has only grown (kv_cache.py); blocks behind its end are never read."""
        known, written = self._known[row]
        start = written if known is table else 0
        if start < len(table):
            self._tables[row, start : len(table)] = table[start:]
            self._known[row] = table, len(table)


def _slots(work: Sequence[Work], size: int, block_size: int) -> list[int]:
    """Where the keys and values go; nowhere (-1) for rows that are padding."""
    slots = [item.seq.block_table[item.start // block_size] * block_size + item.start % block_size for item in work]
    return slots + [-1] * (size - len(work))


class GraphedDecode:
    """Decoding steps of up to `most` sequences, replayed.

    `compute`: a step's tensors -> FP32 logits. `capture` is called once for each size; what it raises is raised.
    """

    def __init__(
        self,
        compute: Callable[[StepTensors], Tensor],
        capture: Capture,
        buffers: Buffers,
        block_size: int,
    ) -> None:
        self._buffers, self._block_size = buffers, block_size
        self.sizes = sizes_up_to(buffers.rows)
        self._replays = {size: capture(partial(compute, buffers.tensors(size))) for size in reversed(self.sizes)}

    def takes(self, work: Sequence[Work]) -> bool:
        """Whether every sequence decodes one token, and there are not too many."""
        return len(work) <= self.sizes[-1] and all(item.count == 1 and item.samples for item in work)

    def run(self, work: Sequence[Work]) -> Tensor:
        """Logits [sequences, vocab], in a buffer that the next step overwrites."""
        size = self.sizes[bisect_left(self.sizes, len(work))]
        self._buffers.fill(work, size, self._block_size)
        return self._replays[size]()[: len(work)]
