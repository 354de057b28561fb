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
once for each of several batch sizes (`graph_sizes`, up to max_num_seqs) and replayed with new contents of the
same buffers. Other batches are padded with copies of their first sequence, whose keys and values are not written (slot
-1). A copy computes the same values as that sequence, so it changes no amax, and `live_rows` excludes it from counters.

Buffers. The integers of a step are in pinned host memory and in a copy of it on the device. All batch sizes use the
first rows of the same buffers. There are two pinned buffers, because a step may be prepared while the copy of the
previous one is still queued. Block tables stay on the device, with the width of the longest possible sequence, and only
their new entries are sent. A graph begins by gathering its rows of them. All captures allocate from one memory pool,
the largest first, so that the smaller ones reuse its memory.

Promised tokens. If the previous step is still in flight (flights.py), the host does not know the tokens that it
samples. So the device keeps the sampled tokens, and a step names the row of each promised token (`sources`).

Validity. A graph reads the memory that was captured, so it sees new values in this memory but no tensor or module that
was replaced. `CapturedModel` checks for replacements while the device computes. If it finds one, all sizes are captured
again and the step is repeated, which overwrites the same slots of the cache.

All other steps run without graphs: steps with a prompt or an adapter, and every step if capturing fails (`info` has the
reason). Graphs run the same kernels, so logits have the same bits with and without them.
"""

import itertools
import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fp8serve.engine.defaults import graph_sizes
from fp8serve.engine.flights import PinnedBuffer
from fp8serve.engine.scheduler import StepWork, Work
from fp8serve.fp8.change_tracking import (
    MODULE_DICTIONARIES,
    TrackedDict,
    TrackedTensor,
    stop_tracking,
    track_dictionary,
    track_tensor,
)

IntArray = NDArray[np.int64]
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


def flatten(work: Sequence[Work], block_size: int, device: torch.device, samples: Tensor | None = None) -> StepTensors:
    """Converts the work of a step to tensors. `samples` are the tokens that the step in flight samples, int64 [rows] on
    the device. A negative one stands for a row that fails, and becomes 0."""
    counts = [item.count for item in work]
    starts = [0, *itertools.accumulate(counts)]
    token_ids = list(itertools.chain.from_iterable(item.token_ids for item in work))
    positions = np.arange(starts[-1]) + np.repeat(
        [item.start - start for item, start in zip(work, starts[:-1], strict=True)], counts
    )
    tables, lengths = _pad_tables(work), [item.start + item.count for item in work]
    rows = np.repeat(np.arange(len(work)), counts)
    slots = tables[rows, positions // block_size] * block_size + positions % block_size
    num_logits = [item.num_logits for item in work]
    last = [i for end, n in zip(starts[1:], num_logits, strict=True) for i in range(end - n, end)]
    promised = [start for start, item in zip(starts[:-1], work, strict=True) if item.source >= 0]
    sources = [item.source for item in work if item.source >= 0]

    id_tensor, position_tensor, slot_tensor, last_tensor, promised_tensor, source_tensor = _copy_arrays(
        [token_ids, positions, slots, last, promised, sources], torch.long, device
    )
    if promised and samples is not None:
        id_tensor.index_copy_(0, promised_tensor, samples.index_select(0, source_tensor).clamp(min=0))
    queries = _queries(starts, lengths, tables, device)
    if len(last) == len(token_ids):
        return StepTensors(id_tensor, position_tensor, slot_tensor, queries, None, queries)
    with_logits = [row for row, n in enumerate(num_logits) if n]
    last_queries = _queries(
        [0, *itertools.accumulate(num_logits[row] for row in with_logits)],
        [lengths[row] for row in with_logits],
        tables[with_logits, : max((len(work[row].seq.block_table) for row in with_logits), default=0)],
        device,
    )
    return StepTensors(id_tensor, position_tensor, slot_tensor, queries, last_tensor, last_queries)


def _pad_tables(work: Sequence[Work]) -> IntArray:
    """Returns the block tables of `work`, padded with 0 to equal lengths."""
    width = max((len(item.seq.block_table) for item in work), default=0)
    tables = np.zeros((len(work), width), np.int64)
    for row, item in enumerate(work):
        tables[row, : len(item.seq.block_table)] = item.seq.block_table
    return tables


def _queries(starts: list[int], lengths: list[int], tables: IntArray, device: torch.device) -> Queries:
    """Describes queries at the end of each sequence. `starts` are their offsets."""
    arrays = _copy_arrays([starts, lengths, tables.ravel()], torch.int32, device)
    return Queries(arrays[0], arrays[1], arrays[2].view(tables.shape))


def _copy_arrays(
    arrays: Sequence[list[int] | IntArray], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Copies several lists and arrays to the device in one transfer. Returns a tensor for each."""
    joined = np.concatenate([np.asarray(array, np.int64) for array in arrays])
    return to_device(joined, dtype, device).split_with_sizes([len(array) for array in arrays])


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


@dataclass(slots=True)
class DecodeRows:
    """A step in which every sequence decodes one token, as lists with an entry for each."""

    tables: list[list[int]]  # the block tables
    positions: list[int]
    tokens: list[int]  # those that are promised are 0
    sources: list[int]  # the row of a promised token in the step in flight, and -1 for another token

    @classmethod
    def of(cls, work: StepWork | Sequence[Work]) -> "DecodeRows | None":
        """Returns the rows of `work`, or None if it has other work than one token of each sequence."""
        others = work.others if isinstance(work, StepWork) else work
        if not all(item.count == 1 and item.needs_sample for item in others):
            return None
        if others or not isinstance(work, StepWork):
            items = list(work)
            tables, positions = [item.seq.block_table for item in items], [item.start for item in items]
            return cls(tables, positions, [item.token_ids[0] for item in items], [item.source for item in items])
        seqs, sources = work.decodes, work.sources
        tokens = [0] * len(seqs)
        if min(sources) < 0:
            rows = zip(seqs, work.positions, sources, strict=True)
            tokens = [seq.token_ids[position] if source < 0 else 0 for seq, position, source in rows]
        return cls([seq.block_table for seq in seqs], work.positions, tokens, sources)


class Buffers:
    """The inputs of a decoding step of up to `rows` sequences with up to `width` blocks each, on host and device."""

    NUM_COLUMNS = 5  # int64 [rows] each: token ids, sources, positions, slots, places

    def __init__(self, rows: int, width: int, block_size: int, device: torch.device) -> None:
        self.rows, self.width, self._block_size = rows, width, block_size
        # The number of live rows follows the columns, and then the context lengths, int32 [rows].
        nbytes = 8 * (self.NUM_COLUMNS * rows + 1) + 4 * rows
        self._host = [PinnedBuffer(nbytes, device) for _ in range(2)]
        # the samples of the previous step, int64 [rows], and then a copy of a host buffer
        device_bytes = torch.zeros(8 * rows + nbytes, dtype=torch.uint8, device=device)
        self.samples = device_bytes[: 8 * rows].view(torch.long)
        self._inputs = device_bytes[8 * rows :]
        int64, self._context_lens = self._views(self._inputs)
        self._candidates = device_bytes[: 16 * rows].view(torch.long)  # samples, then token ids of the host
        self._columns = int64[:-1].view(self.NUM_COLUMNS, rows)
        self.live_rows = int64[-1]  # int64 []: the number of rows that are not padding
        self._columns[3].fill_(-1)  # during a capture, every row attends to one key and writes none
        self._context_lens.fill_(1)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        # A block table keeps its place on the device until another one needs the place.
        self._tables = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self._owners: list[list[int] | None] = [None] * rows  # of each place, the block table
        self._place_of: dict[int, int] = {}  # by the id of a block table, which `_owners` keeps alive
        self._num_sent = np.zeros(rows, np.int64)  # of each place, the entries on the device
        # of the rows of the last step
        self._row_tables: list[list[int]] = []
        self._row_places = self._row_indices = self._row_blocks = np.zeros(0, np.int64)

    def _views(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the int64 part and the int32 part of a buffer."""
        end = 8 * (self.NUM_COLUMNS * self.rows + 1)
        return buffer[:end].view(torch.long), buffer[end:].view(torch.int32)

    def gather(self, size: int) -> StepTensors:
        """Returns the tensors of a step of `size` rows, on the device. A graph captures these ops."""
        _, sources, positions, slots, places = self._columns[:, :size]
        tables = self._tables.index_select(0, places)
        queries = Queries(self._starts[: size + 1], self._context_lens[:size], tables)
        return StepTensors(self._candidates.index_select(0, sources), positions, slots, queries, None, queries)

    def fill(self, inputs: DecodeRows, size: int) -> None:
        """Copies the inputs of a step to the device, padded to `size` rows with copies of the first row. Does not wait
        for the device."""
        live, rows = len(inputs.positions), self.rows
        positions = np.array(inputs.positions)
        blocks = self._update_tables(inputs.tables, positions)
        buffer = self._host[0]
        self._host.reverse()
        int64, int32 = (view.numpy() for view in self._views(buffer.begin()))
        columns = int64[:-1].reshape(self.NUM_COLUMNS, rows)
        columns[0, :live] = inputs.tokens
        sources = np.array(inputs.sources)
        columns[1, :live] = np.where(sources < 0, np.arange(rows, rows + live), sources)
        columns[2, :live] = positions
        columns[3, :live] = blocks * self._block_size + positions % self._block_size
        columns[4, :live] = self._row_places
        columns[:, live:size] = columns[:, :1]
        columns[3, live:size] = -1
        int64[-1] = live
        int32[:size] = columns[2, :size] + 1
        buffer.copy_to(self._inputs)

    def _update_tables(self, tables: list[list[int]], positions: IntArray) -> IntArray:
        """Sends the new entries of block tables to the device. Returns the block of each row's position.

        A block table is a list that only grows (kv_cache.py), so its identity tells whether it was sent before.
        """
        indices = positions // self._block_size
        if len(tables) == len(self._row_tables) and all(map(operator.is_, tables, self._row_tables)):
            changed = np.flatnonzero(indices != self._row_indices)
            blocks = self._row_blocks
        else:
            self._row_tables, self._row_places = tables, self._assign_places(tables)
            changed, blocks = np.arange(len(tables)), np.zeros(len(tables), np.int64)
        for row in changed.tolist():
            blocks[row] = tables[row][indices[row]]
        self._row_indices, self._row_blocks = indices, blocks
        self._send_entries([row for row in changed.tolist() if indices[row] >= self._num_sent[self._row_places[row]]])
        return blocks

    def _assign_places(self, tables: list[list[int]]) -> IntArray:
        """Returns the place of each block table. A new table takes the place of one that this step does not need."""
        places = [self._place_of.get(id(table), -1) for table in tables]
        if min(places) < 0:
            needed = set(map(id, tables))
            free = (place for place, owner in enumerate(self._owners) if owner is None or id(owner) not in needed)
            for row, table in enumerate(tables):
                if places[row] < 0 and (place := self._place_of.get(id(table), -1)) < 0:
                    place = next(free)
                    self._place_of.pop(id(self._owners[place]), None)
                    self._owners[place], self._place_of[id(table)], self._num_sent[place] = table, place, 0
                places[row] = self._place_of[id(table)]
        return np.array(places)

    def _send_entries(self, rows: list[int]) -> None:
        """Sends the entries of these rows' block tables that the device does not have."""
        if not rows:
            return
        cells, blocks = [], list[int]()
        for row in rows:
            place, table = int(self._row_places[row]), self._row_tables[row]
            start = int(self._num_sent[place])
            cells.append(np.arange(place * self.width + start, place * self.width + len(table)))
            blocks += table[start:]
            self._num_sent[place] = len(table)
        entries = to_device(np.stack([np.concatenate(cells), np.array(blocks)]), torch.long, self._tables.device)
        self._tables.view(-1).index_copy_(0, entries[0], entries[1].int())


class GraphedDecode:
    """Decoding steps that were captured as CUDA graphs.

    `compute` maps the tensors of a step to FP32 logits. `capture` is called for each batch size, and may raise.
    """

    def __init__(self, compute: Callable[[StepTensors], Tensor], capture: Capture, buffers: Buffers) -> None:
        self._compute, self._buffers = compute, buffers
        self.sizes = graph_sizes(buffers.rows)
        self._replays = {size: capture(partial(self._run, size)) for size in reversed(self.sizes)}

    def run(self, rows: DecodeRows) -> Tensor:
        """Returns the logits [sequences, vocab], in a buffer that the next step overwrites."""
        live = len(rows.positions)
        size = self.sizes[bisect_left(self.sizes, live)]
        self._buffers.fill(rows, size)
        return self._replays[size]()[:live]

    def _run(self, size: int) -> Tensor:
        return self._compute(self._buffers.gather(size))
