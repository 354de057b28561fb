"""Captures steps as CUDA graphs and replays them.

A step of a small model takes as long as Python and the driver need to launch its kernels: hundreds, of several
microseconds each. A graph of the same kernels is one launch. Two kinds of steps have a fixed shape when they are
padded, and are captured once for each of several sizes:

* decoding steps, in which every sequence decodes one token: `graph_sizes`, up to max_num_seqs sequences;
* steps with prompts, and with sequences that decode beside them: `prompt_sizes`, up to 4096 tokens. Longer steps keep
  the device busy for longer than their launches take.

A replay reads the same buffers with new contents. All captures allocate from one memory pool, the largest first, so
that the smaller ones reuse its memory. All other steps run without graphs: those with an adapter or a draft, those that
score a prompt, those with prompts and a context of more than 8192 tokens, and every step if capturing fails (`info` has
the reason). Graphs run the same kernels as steps without graphs, except that the padded number of rows may select
another kernel for a product, as a batch of that size would.

Padding. A decoding step is padded with copies of its first sequence. A step with prompts is padded with tokens of one
more sequence, which is as long as they are. Neither writes keys and values (slot -1), and FP8 layers exclude the rows
after the live ones from their statistics (`live_rows`). After its attention, the last layer computes only the sampled
rows, padded to one for each sequence, and has its own number of live rows. Experts cannot exclude padding from their
statistics. In decoding steps they need not, because copies of a live row raise no amax. In steps with prompts the
padding is other tokens, so models with experts do not replay such steps. Neither do models that transformers runs.

Buffers. The integers of a step are in pinned host memory and in a copy of it on the device. There are two pinned
buffers, because a step may be prepared while the copy of the previous one is still queued. Block tables stay on the
device, with the width of the longest possible sequence, and only their new entries are sent. A graph begins by
gathering its rows of them.

Validity. A graph reads the memory that was captured, so it sees new values in this memory but no tensor or module that
was replaced. `CapturedModel` checks for replacements while the device computes. If it finds one, all sizes are captured
again and the step is repeated, which overwrites the same slots of the cache.
"""

import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from fp8serve.engine.defaults import graph_sizes
from fp8serve.engine.flights import PinnedBuffer
from fp8serve.engine.scheduler import StepWork
from fp8serve.engine.step import IntArray, Queries, StepTensors, to_device
from fp8serve.model.network.decoder import Decoder
from fp8serve.model.network.experts import mixtures

MAX_REPLAYED_CONTEXT = 8192
"""The most tokens that may precede a sequence's first token in a replayed step with prompts. Attention treats such a
step as one of max_num_seqs sequences, enough to fill the GPU, and so does not divide a long context over blocks."""


class Capture(Protocol):
    """Captures `run` and returns a function that replays it. Every replay returns the same tensor with new contents."""

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]: ...


class CudaCapture:
    """Captures functions as CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool, self._side = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            run()  # libraries load kernels and allocate workspace
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=self._pool):
            logits = run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


@dataclass(frozen=True, slots=True)
class GraphReport:
    """The sizes that were captured as CUDA graphs, and the reason why no steps, or none with prompts, were captured."""

    sizes: tuple[int, ...] = ()  # sequences of a decoding step
    prompt_sizes: tuple[int, ...] = ()  # tokens of a step with prompts
    reason: str | None = None

    def text(self) -> str:
        if not self.sizes:
            return f"off: {self.reason}"
        prompts = f"; no prompts: {self.reason}" if self.reason else ""
        if self.prompt_sizes:
            prompts = f"; prompts of up to {self.prompt_sizes[-1]} tokens"
        return f"batches of {', '.join(map(str, self.sizes))}{prompts}"


@dataclass(slots=True)
class StepRows:
    """The work of a step as lists with an entry for each sequence. A step may have many sequences that decode, so they
    are read from the lists of `StepWork` without a `Work` for each."""

    tables: list[list[int]]  # the block tables
    starts: list[int]  # the position of each sequence's first token
    counts: list[int]  # of its tokens
    sources: list[int]  # the row of the step in flight that samples the ("promised") token, and -1 for other tokens
    sampled: list[int]  # the rows that sample a token
    tokens: list[int]  # of all sequences; those that are promised are 0

    @classmethod
    def of(cls, work: StepWork) -> "StepRows | None":
        """Returns the rows of `work`, or None if it has a draft or scores a prompt."""
        if any(item.draft or item.scored_positions for item in work.others):
            return None
        seqs, sources = work.decodes, work.sources
        tokens = [0] * len(seqs)
        if min(sources, default=0) < 0:
            decodes = zip(seqs, work.positions, sources, strict=True)
            tokens = [seq.token_ids[position] if source < 0 else 0 for seq, position, source in decodes]
        tables, counts = [seq.block_table for seq in seqs], [1] * len(seqs)
        rows = cls(tables, work.positions.copy(), counts, sources.copy(), list(range(len(seqs))), tokens)
        for item in work.others:
            if item.needs_sample:
                rows.sampled.append(len(rows.tables))
            rows.tables.append(item.seq.block_table)
            rows.starts.append(item.start)
            rows.counts.append(item.count)
            rows.sources.append(item.source)
            rows.tokens += item.token_ids
        return rows

    @property
    def only_decodes(self) -> bool:
        """Whether every sequence decodes one token."""
        return len(self.tokens) == len(self.tables) == len(self.sampled)


def can_replay_prompts(model: nn.Module) -> TypeGuard[Decoder]:
    """Returns whether all FP8 layers of a model can exclude padding from their statistics."""
    return isinstance(model, Decoder) and not mixtures(model)


class StepInputs(NamedTuple):
    """The inputs of a captured step of T tokens and S sequences: tensors, or on the host NumPy arrays."""

    columns: Any  # int64 [4, T]: token ids, sources, positions, slots
    rows: Any  # int64 [3, S]: the places of block tables, the sampled tokens, and the places of their tables
    starts: Any  # int32 [S + 1]
    lengths: Any  # int32 [2, S]: the context lengths of sequences, and of sampled tokens


class StepLayout(NamedTuple):
    """The positions of the inputs in a buffer. Two int64 precede them: the numbers of live tokens and sampled rows."""

    tokens: int
    seqs: int

    @property
    def num_int64(self) -> int:
        return 2 + 4 * self.tokens + 3 * self.seqs

    @property
    def nbytes(self) -> int:
        return 8 * self.num_int64 + 4 * (3 * self.seqs + 1)

    def views(self, buffer: Tensor) -> StepInputs:
        """Returns the inputs in `buffer`, uint8 [nbytes] or longer."""
        tokens, seqs = self
        _, columns, rows = buffer[: 8 * self.num_int64].view(torch.long).split_with_sizes((2, 4 * tokens, 3 * seqs))
        starts, lengths = (
            buffer[8 * self.num_int64 : self.nbytes].view(torch.int32).split_with_sizes((seqs + 1, 2 * seqs))
        )
        return StepInputs(columns.view(4, tokens), rows.view(3, seqs), starts, lengths.view(2, seqs))


class BlockTables:
    """The block tables of up to `rows` sequences on the device, int32 [rows, width]. A block table keeps its place
    until another one needs the place.

    A block table is a list that only grows (kv_cache.py), so its identity tells whether it was sent before.
    """

    def __init__(self, rows: int, width: int, block_size: int, device: torch.device) -> None:
        self.width, self._block_size = width, block_size
        self.tensor = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self._owners: list[list[int] | None] = [None] * rows  # of each place, the block table
        self._place_of: dict[int, int] = {}  # by the id of a block table, which `_owners` keeps alive
        # of each place: the entries on the device, and the index and the block of the last position
        self._num_sent, self._indices, self._blocks = (np.zeros(rows, np.int64) for _ in range(3))
        self._row_tables: list[list[int]] = []  # of the last step
        self.row_places = np.zeros(0, np.int64)  # the places of these tables

    def update(self, tables: list[list[int]], positions: IntArray) -> IntArray:
        """Sends the new entries of a step's block tables to the device. `positions` are the last ones of the rows.
        Returns the block of each of them, and leaves the places of the tables in `row_places`."""
        if len(tables) != len(self._row_tables) or not all(map(operator.is_, tables, self._row_tables)):
            self._row_tables, self.row_places = tables, self._assign_places(tables)
        places, indices = self.row_places, positions // self._block_size
        changed = np.flatnonzero(indices != self._indices[places])
        self._indices[places] = indices
        if len(changed):
            self._blocks[places[changed]] = [tables[row][indices[row]] for row in changed.tolist()]
            self._send_entries(changed[indices[changed] >= self._num_sent[places[changed]]].tolist())
        return self._blocks[places]

    def _assign_places(self, tables: list[list[int]]) -> IntArray:
        """Returns the place of each block table. A new table takes the place of one that this step does not need."""
        places: list[int | None] = list(map(self._place_of.get, map(id, tables)))
        if None in places:
            free = iter(sorted(set(range(len(self._owners))).difference(places)))
            for row in [row for row, place in enumerate(places) if place is None]:
                place = places[row] = next(free)
                self._place_of.pop(id(self._owners[place]), None)
                self._owners[place], self._place_of[id(tables[row])] = tables[row], place
                self._num_sent[place], self._indices[place] = 0, -1
        return np.array(places)

    def _send_entries(self, rows: list[int]) -> None:
        """Sends the entries of these rows' block tables that the device does not have."""
        if not rows:
            return
        cells, blocks, places = list[int](), list[int](), self.row_places[rows]
        for row, place, start in zip(rows, places.tolist(), self._num_sent[places].tolist(), strict=True):
            table = self._row_tables[row]
            cells += range(place * self.width + start, place * self.width + len(table))
            blocks += table[start:]
            self._num_sent[place] = len(table)
        entries = to_device(np.array([cells, blocks]), torch.long, self.tensor.device)
        self.tensor.view(-1).index_copy_(0, entries[0], entries[1].int())


class Buffers:
    """The inputs of captured steps of up to `seqs` sequences and `tokens` tokens, on host and device."""

    def __init__(self, seqs: int, tokens: int, width: int, block_size: int, device: torch.device) -> None:
        self.seqs, self._block_size = seqs, block_size
        nbytes = StepLayout(max(tokens, seqs), seqs + 2).nbytes
        self._host = [PinnedBuffer(nbytes, device) for _ in range(2)]
        # the samples of the previous step, int64 [seqs], and then a copy of a host buffer
        device_bytes = torch.zeros(8 * seqs + nbytes, dtype=torch.uint8, device=device)
        self.samples = device_bytes[: 8 * seqs].view(torch.long)
        self._inputs = device_bytes[8 * seqs :]
        self.live_rows, self.live_samples = self._inputs[:16].view(torch.long)  # int64 []: those that are no padding
        self._candidates = device_bytes[: 8 * (seqs + 2 + max(tokens, seqs))].view(torch.long)
        self._first_token = seqs + 2  # of the host's tokens in `_candidates`
        self._starts = torch.arange(seqs + 1, dtype=torch.int32, device=device)
        self._tables = BlockTables(seqs, width, block_size, device)
        self._views: dict[tuple[int, StepLayout], StepInputs] = {}  # of the host buffers

    @property
    def max_length(self) -> int:
        """The length of the longest sequence."""
        return self._tables.width * self._block_size

    def decoding_step(self, size: int) -> StepTensors:
        """Returns the tensors of a step that decodes `size` sequences, on the device. A graph captures these ops."""
        inputs = StepLayout(size, size).views(self._inputs)
        token_ids, positions, slots = self._gather_tokens(inputs)
        queries = Queries(self._starts[: size + 1], inputs.lengths[0], self._gather_tables(inputs.rows[0]))
        return StepTensors(token_ids, positions, slots, queries, None, queries)

    def prompt_step(self, size: int) -> StepTensors:
        """Returns the tensors of a step of `size` tokens with prompts, on the device. A graph captures these ops."""
        inputs, seqs = self.prompt_layout(size).views(self._inputs), self.seqs
        token_ids, positions, slots = self._gather_tokens(inputs)
        places, last, last_places = inputs.rows
        queries = Queries(inputs.starts, inputs.lengths[0], self._gather_tables(places))
        last_queries = Queries(self._starts, inputs.lengths[1, :seqs], self._gather_tables(last_places[:seqs]))
        return StepTensors(token_ids, positions, slots, queries, last[:seqs], last_queries)

    def prompt_layout(self, size: int) -> StepLayout:
        """Returns the layout of a step of `size` tokens with prompts. It has a sequence for padding, and never as many
        sequences as tokens: attention would take it for a decoding step."""
        return StepLayout(size, self.seqs + (2 if size == self.seqs + 1 else 1))

    def prepare_capture(self, layout: StepLayout) -> None:
        """Fills the inputs with tokens of new sequences that write no keys and values."""
        self._inputs.zero_()
        inputs = layout.views(self._inputs)
        inputs.columns[3].fill_(-1)
        inputs.starts.copy_(torch.arange(layout.seqs + 1) * layout.tokens // layout.seqs)
        inputs.lengths[0].copy_(inputs.starts.diff().clamp(min=1))
        inputs.lengths[1].fill_(1)

    def fill_decoding(self, rows: StepRows, size: int) -> None:
        """Copies the inputs of a decoding step to the device, padded to `size` rows with copies of the first row. Does
        not wait for the device."""
        live, positions = len(rows.starts), np.array(rows.starts)
        blocks = self._tables.update(rows.tables, positions)
        buffer, live_counts, host = self._begin(StepLayout(size, size))
        columns, sources = host.columns, np.array(rows.sources)
        columns[0, :live] = rows.tokens
        columns[1, :live] = self._number_sources(sources)
        columns[2, :live] = positions
        columns[3, :live] = blocks * self._block_size + positions % self._block_size
        host.rows[0, :live] = self._tables.row_places
        for matrix in (columns, host.rows):
            matrix[:, live:size] = matrix[:, :1]
        columns[3, live:size] = -1
        host.lengths[0] = columns[2] + 1
        live_counts[0] = live
        buffer.copy_to(self._inputs[: StepLayout(size, size).nbytes])

    def fill_prompts(self, rows: StepRows, size: int) -> None:
        """Copies the inputs of a step with prompts to the device, padded to `size` tokens with those of one more
        sequence. Does not wait for the device."""
        seqs, live, counts = len(rows.tables), len(rows.tokens), np.array(rows.counts)
        first, ends = np.array(rows.starts), counts.cumsum()
        starts, blocks = ends - counts, self._tables.update(rows.tables, first + counts - 1)
        layout = self.prompt_layout(size)
        buffer, live_counts, host = self._begin(layout)
        token_ids, sources, positions, slots = host.columns
        token_ids[:live] = rows.tokens
        sources[:live] = self._number_sources(np.repeat(rows.sources, counts))
        positions[:live] = np.arange(live) + np.repeat(first - starts, counts)
        offsets = positions[:live] % self._block_size
        slots[:live] = np.repeat(blocks, counts) * self._block_size + offsets
        for row in np.flatnonzero(counts > 1).tolist():
            tokens = slice(int(starts[row]), int(ends[row]))
            indices = positions[tokens] // self._block_size
            table = np.array(rows.tables[row][indices[0] : indices[-1] + 1])
            slots[tokens] = table[indices - indices[0]] * self._block_size + offsets[tokens]
        token_ids[live:], slots[live:] = 0, -1
        sources[live:] = self._first_token + np.arange(live, size)
        positions[live:] = np.arange(size - live)

        places, lengths = self._tables.row_places, first + counts
        sampled = np.array(rows.sampled, np.int64)
        chosen = np.zeros(layout.seqs, np.int64)  # other rows compute the first sequence's last token
        chosen[: len(sampled)] = sampled
        host.rows[0], host.rows[0, :seqs] = places[0], places
        host.rows[1:] = ends[chosen] - 1, places[chosen]
        host.starts[0], host.starts[1 : seqs + 1], host.starts[seqs + 1 : -1], host.starts[-1] = 0, ends, live, size
        host.lengths[0], host.lengths[0, :seqs], host.lengths[0, -1] = 1, lengths, max(size - live, 1)
        host.lengths[1] = 1  # those rows attend to one key
        host.lengths[1, : len(sampled)] = lengths[sampled]
        live_counts[:] = live, len(sampled)
        buffer.copy_to(self._inputs[: layout.nbytes])

    def _begin(self, layout: StepLayout) -> tuple[PinnedBuffer, IntArray, StepInputs]:
        """Returns the host buffer that is not being copied, its first two integers (the numbers of live tokens and of
        sampled rows), and its inputs."""
        buffer = self._host[0]
        self._host.reverse()
        memory = buffer.begin()
        if (host := self._views.get((id(buffer), layout))) is None:
            host = StepInputs(*(view.numpy() for view in layout.views(memory)))
            self._views[id(buffer), layout] = host
        return buffer, memory[:16].view(torch.long).numpy(), host

    def _number_sources(self, sources: IntArray) -> IntArray:
        """Returns where a step finds its tokens in `_candidates`: those that are not promised are the host's."""
        return np.where(sources < 0, np.arange(self._first_token, self._first_token + len(sources)), sources)

    def _gather_tokens(self, inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        _, sources, positions, slots = inputs.columns
        return self._candidates.index_select(0, sources), positions, slots

    def _gather_tables(self, places: Tensor) -> Tensor:
        return self._tables.tensor.index_select(0, places)


class GraphedDecode:
    """Decoding steps that were captured as CUDA graphs.

    `compute` maps the tensors of a step to FP32 logits. `capture` is called for each batch size, and may raise.
    """

    def __init__(self, compute: Callable[[StepTensors], Tensor], capture: Capture, buffers: Buffers) -> None:
        self._buffers, self.sizes = buffers, graph_sizes(buffers.seqs)
        self._replays = {}
        for size in reversed(self.sizes):
            buffers.prepare_capture(StepLayout(size, size))
            self._replays[size] = capture(partial(_run, compute, buffers.decoding_step, size))

    def supports(self, rows: StepRows) -> bool:
        """Returns whether `run` can compute these rows."""
        return rows.only_decodes and len(rows.tables) <= self.sizes[-1]

    def run(self, rows: StepRows) -> Tensor:
        """Returns the logits [sequences, vocab], in a buffer that the next step overwrites."""
        live = len(rows.tables)
        size = self.sizes[bisect_left(self.sizes, live)]
        self._buffers.fill_decoding(rows, size)
        return self._replays[size]()[:live]


class GraphedPrompts:
    """Steps with prompts that were captured as CUDA graphs.

    `compute` maps the tensors of a step to the hidden states of its `last` tokens, [R, hidden]. `capture` is called for
    each of `sizes`, and may raise.
    """

    def __init__(
        self, compute: Callable[[StepTensors], Tensor], capture: Capture, buffers: Buffers, sizes: Sequence[int]
    ) -> None:
        self._buffers, self.sizes = buffers, sizes
        self._replays = {}
        for size in reversed(sizes):
            buffers.prepare_capture(buffers.prompt_layout(size))
            self._replays[size] = capture(partial(_run, compute, buffers.prompt_step, size))

    def supports(self, rows: StepRows) -> bool:
        """Returns whether `run` can compute these rows."""
        if len(rows.tables) > self._buffers.seqs or max(rows.starts) > MAX_REPLAYED_CONTEXT:
            return False
        size = self._padded_size(len(rows.tokens))
        return size is not None and size - len(rows.tokens) <= self._buffers.max_length

    def run(self, rows: StepRows) -> Tensor:
        """Returns the hidden states of the sampled tokens, [samples, hidden], in a buffer that the next step
        overwrites."""
        size = self._padded_size(len(rows.tokens))
        assert size is not None
        self._buffers.fill_prompts(rows, size)
        return self._replays[size]()[: len(rows.sampled)]

    def _padded_size(self, tokens: int) -> int | None:
        index = bisect_left(self.sizes, tokens)
        return self.sizes[index] if index < len(self.sizes) else None


def _run(compute: Callable[[StepTensors], Tensor], gather: Callable[[int], StepTensors], size: int) -> Tensor:
    return compute(gather(size))
