"""Converts the work of a step to tensors, and replays decoding steps as CUDA graphs.

Tensors. The tokens of all sequences of a step are concatenated, so the model reads `[tokens]`, and prefill chunks and
decoding tokens can be mixed. The paged attention op gets the offset of each sequence (`query_starts` [S+1]), its length
including the new tokens (`context_lens` [S]), and the position of its keys and values in the cache (`block_tables`
[S, blocks], `slots` [tokens]). Inputs are copied to the device from pinned memory, so a step waits for the device only
when it reads the sampled tokens.

Only some tokens need logits: the last token of each sequence that is sampled, with its draft, and the tokens of a
prompt whose log-probabilities are requested. Work after the last attention is done for these tokens only, and attention
gets a second description for them (`last_queries`). In a decoding step, all tokens need logits.

CUDA graphs. At batch size 1, a step of a small model takes as long as Python and the driver need to launch its kernels.
A step in which every sequence decodes one token has a fixed shape except for the number of sequences. So it is captured
once for each of several batch sizes (1, 2, 4, 8, 16, 24, ... up to max_num_seqs) and replayed with new contents of the
same buffers. Other batches are padded with copies of their first sequence, whose keys and values are not written (slot
-1). A copy computes the same values as that sequence, so it changes no amax, and `live_rows` excludes it from counters.

Buffers. The integers of a step are in pinned host memory and in a copy of it on the device. All batch sizes use the
first rows of the same buffers. The block table has the width of the longest possible sequence. Its rows are only
written if they have changed since the last step. All captures allocate from one memory pool, the largest first, so that
the smaller ones reuse its memory.

Validity. A graph reads the memory that was captured, so it sees new values in this memory but no tensor or module that
was replaced. `CapturedModel` checks for replacements while the device computes. If it finds one, all sizes are captured
again and the step is repeated, which overwrites the same slots of the cache.

All other steps run without graphs: steps with a prompt or an adapter, and every step if capturing fails (`info` has the
reason). Graphs run the same kernels, so logits have the same bits with and without them.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fp8serve.engine.scheduler import Work
from fp8serve.fp8.change_tracking import (
    MODULE_DICTIONARIES,
    TrackedDict,
    TrackedTensor,
    stop_tracking,
    track_dictionary,
    track_tensor,
)

NUM_WARM_UPS = 2  # runs before a capture, in which libraries load kernels and allocate workspace


@dataclass(frozen=True, slots=True)
class Queries:
    """Describes the queries of paged attention: consecutive tokens of S sequences. All tensors are int32."""

    query_starts: Tensor  # [S + 1]: the offset of each sequence's first query
    context_lens: Tensor  # [S]: the position of each sequence's last query, plus one
    block_tables: Tensor  # [S, blocks], padded with 0


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The inputs of a step of T tokens, on the model's device."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: block * block_size + offset
    queries: Queries  # of all T tokens
    last: Tensor | None  # int64 [R]: the tokens that need logits; None if all T need them
    last_queries: Queries  # of the tokens in `last`


def flatten(work: list[Work], block_size: int, device: torch.device) -> StepTensors:
    """Converts the work of a step to tensors."""
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

    id_tensor, position_tensor, slot_tensor, last_tensor = _copy_lists(
        [token_ids, positions, slots, last], torch.long, device
    )
    queries = _queries(work, starts, device)
    if len(last) == len(token_ids):
        return StepTensors(id_tensor, position_tensor, slot_tensor, queries, None, queries)
    with_logits = [item for item in work if item.num_logits]
    last_starts = [0, *itertools.accumulate(item.num_logits for item in with_logits)]
    last_queries = _queries(with_logits, last_starts, device)
    return StepTensors(id_tensor, position_tensor, slot_tensor, queries, last_tensor, last_queries)


def _queries(work: list[Work], starts: list[int], device: torch.device) -> Queries:
    """Describes queries at the end of each item of `work`. `starts` are their offsets."""
    width = max((len(item.seq.block_table) for item in work), default=0)
    tables = [item.seq.block_table + [0] * (width - len(item.seq.block_table)) for item in work]
    lengths = [item.start + item.count for item in work]
    blocks = list(itertools.chain.from_iterable(tables))
    query_starts, context_lens, block_tables = _copy_lists([starts, lengths, blocks], torch.int32, device)
    return Queries(query_starts, context_lens, block_tables.view(len(work), width))


def _copy_lists(lists: list[list[int]], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Copies several lists to the device in one transfer. Returns a tensor for each."""
    joined = to_device(list(itertools.chain.from_iterable(lists)), dtype, device)
    return joined.split_with_sizes([len(part) for part in lists])


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies numbers, nested lists of numbers or a NumPy array to a tensor on `device`.

    `torch.tensor(values, device="cuda")` would wait for all queued work. A copy from pinned memory is queued like a
    kernel, and torch does not reuse the pinned memory before the copy is done.
    """
    if device.type == "cpu":
        return torch.as_tensor(values, dtype=dtype)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


class Capture(Protocol):
    """Captures `run` and returns a function that replays it. Every replay returns the same tensor with new contents."""

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]: ...


class CudaCapture:
    """Captures functions as CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(NUM_WARM_UPS):
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
    """The batch sizes that were captured as CUDA graphs, or the reason why none was captured."""

    sizes: tuple[int, ...] = ()
    reason: str | None = None

    def text(self) -> str:
        return f"off: {self.reason}" if self.reason else f"batches of {', '.join(map(str, self.sizes))}"


class CapturedModel:
    """The modules, tensors and hooks of a model at the time of a capture. While this object exists, the memory of the
    tensors is not freed.

    They are compared only after a listener was notified of a change (fp8/change_tracking.py). What cannot notify is
    compared at every call: the addresses of parameters, which a served model has few of, and the hooks that a module
    has already.
    """

    def __init__(self, model: nn.Module) -> None:
        self._changed: set[int] = set()
        self._listener = listener = self._changed, 0
        for module, name in itertools.product(model.modules(), MODULE_DICTIONARIES):
            track_dictionary(module, name, listener)
        tables = [module.__dict__[name] for module, name in itertools.product(model.modules(), MODULE_DICTIONARIES)]
        values = [value for table in tables for value in table.values()]
        tensors = {id(value): value for value in values if isinstance(value, Tensor)}.values()
        for tensor in tensors:
            track_tensor(tensor, listener)
        self._tables = [(table, dict(table)) for table in tables]
        self._addresses = [(tensor, tensor.data_ptr()) for tensor in tensors]
        self._silent_tables = [pair for pair in self._tables if not isinstance(pair[0], TrackedDict)]
        self._silent_addresses = [pair for pair in self._addresses if not isinstance(pair[0], TrackedTensor)]
        self._storages = [tensor.untyped_storage() for tensor in tensors]  # references that keep the memory allocated

    def is_current(self) -> bool:
        """Returns whether the model still consists of the same modules, tensors and hooks."""
        if not self._changed:
            return _are_same(self._silent_tables, self._silent_addresses)
        if _are_same(self._tables, self._addresses):
            self._changed.clear()
            return True
        for tracked, _ in (*self._tables, *self._addresses):
            stop_tracking(tracked, self._listener)  # an outdated capture stays outdated
        return False


def _are_same(
    tables: Sequence[tuple[Mapping[Any, Any], Mapping[Any, Any]]], addresses: Sequence[tuple[Tensor, int]]
) -> bool:
    """Returns whether each table has the entries beside it, and each tensor the address."""
    for table, entries in tables:
        if len(table) != len(entries) or any(table.get(key) is not value for key, value in entries.items()):
            return False
    return all(tensor.data_ptr() == address for tensor, address in addresses)


def batch_sizes(max_size: int) -> list[int]:
    """Returns the batch sizes to capture: 1, 2, 4, the multiples of 8, and `max_size`."""
    return sorted({size for size in (1, 2, 4, *range(8, max_size, 8)) if size < max_size} | {max_size})


class Buffers:
    """The inputs of a decoding step of up to `rows` sequences with up to `width` blocks each, on host and device."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.rows, self.width = rows, width
        pinned = device.type == "cuda"
        # int64: token ids, positions and slots [rows] each, then the number of live rows
        self._int64 = torch.zeros(3 * rows + 1, dtype=torch.long, pin_memory=pinned)
        # int32: context lengths [rows], then block tables [rows, width]
        self._int32 = torch.zeros(rows + rows * width, dtype=torch.int32, pin_memory=pinned)
        self._device_int64 = torch.empty_like(self._int64, device=device)
        self._device_int32 = torch.empty_like(self._int32, device=device)
        self._int64[2 * rows : 3 * rows] = -1  # during a capture, every row attends to one key and writes none
        self._int32[:rows] = 1
        self._device_int64.copy_(self._int64)
        self._device_int32.copy_(self._int32)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._tables = self._int32.numpy()[rows:].reshape(rows, width)
        self._written: list[tuple[list[int], int]] = [([], 0)] * rows  # of each row, the block table and its length
        self.live_rows = self._device_int64[-1]  # int64 []: the number of rows that are not padding

    def tensors(self, size: int) -> StepTensors:
        """Returns the device tensors that a step of `size` rows reads. They are the same memory at every call."""
        token_ids, positions, slots = (self._device_int64[i * self.rows :][:size] for i in range(3))
        tables = self._device_int32[self.rows :].view(self.rows, self.width)[:size]
        queries = Queries(self._starts[: size + 1], self._device_int32[:size], tables)
        return StepTensors(token_ids, positions, slots, queries, None, queries)

    def fill(self, work: Sequence[Work], size: int, block_size: int) -> None:
        """Copies the inputs of `work`, one token of each sequence, padded to `size` rows. Does not wait for the
        device."""
        int64, int32, rows = self._int64.numpy(), self._int32.numpy(), self.rows
        padded = [*work, *[work[0]] * (size - len(work))]
        positions = [item.start for item in padded]
        int64[:size] = [item.seq.token_ids[item.start] for item in padded]
        int64[rows : rows + size] = positions
        int64[2 * rows : 2 * rows + size] = _slots(work, size, block_size)
        int64[-1] = len(work)
        int32[:size] = [position + 1 for position in positions]
        for row, item in enumerate(padded):
            self._write_table(row, item.seq.block_table)
        self._device_int64.copy_(self._int64, non_blocking=True)
        used = rows + size * self.width
        self._device_int32[:used].copy_(self._int32[:used], non_blocking=True)

    def _write_table(self, row: int, table: list[int]) -> None:
        """Writes the new blocks of a block table. If `table` is the list that the row has, it can only have grown
        (kv_cache.py). Entries after its end are never read."""
        written_table, written = self._written[row]
        start = written if written_table is table else 0
        if start < len(table):
            self._tables[row, start : len(table)] = table[start:]
            self._written[row] = table, len(table)


def _slots(work: Sequence[Work], size: int, block_size: int) -> list[int]:
    """Returns the slot of each row's key and value, and -1 for padding."""
    slots = [item.seq.block_table[item.start // block_size] * block_size + item.start % block_size for item in work]
    return slots + [-1] * (size - len(work))


class GraphedDecode:
    """Decoding steps that were captured as CUDA graphs.

    `compute` maps the tensors of a step to FP32 logits. `capture` is called for each batch size, and may raise.
    """

    def __init__(
        self,
        compute: Callable[[StepTensors], Tensor],
        capture: Capture,
        buffers: Buffers,
        block_size: int,
    ) -> None:
        self._buffers, self._block_size = buffers, block_size
        self.sizes = batch_sizes(buffers.rows)
        self._replays = {size: capture(partial(compute, buffers.tensors(size))) for size in reversed(self.sizes)}

    def supports(self, work: Sequence[Work]) -> bool:
        """Returns whether every sequence decodes one token, and a captured batch size is large enough."""
        return len(work) <= self.sizes[-1] and all(item.count == 1 and item.needs_sample for item in work)

    def run(self, work: Sequence[Work]) -> Tensor:
        """Returns the logits [sequences, vocab], in a buffer that the next step overwrites."""
        size = self.sizes[bisect_left(self.sizes, len(work))]
        self._buffers.fill(work, size, self._block_size)
        return self._replays[size]()[: len(work)]
