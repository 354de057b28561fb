"""Converts the work of a step to tensors.

The tokens of all sequences of a step are concatenated, so the model reads `[tokens]`, and prefill chunks and
decoding tokens can be mixed. The paged attention op gets the offset of each sequence (`query_starts` [S+1]), its length
including the new tokens (`context_lens` [S]), and the position of its keys and values in the cache (`block_tables`
[S, blocks], `slots` [tokens]). Inputs are copied to the device from pinned memory, so a step waits for the device only
when it reads the sampled tokens.

Only some tokens need logits: the last token of each sequence that is sampled, with its draft, and the tokens of a
prompt whose log-probabilities are requested. The last layer computes the output of attention, and all that follows, for
these tokens only; `last_queries` describes them. In a decoding step, all tokens need logits.

Promised tokens. If the previous step is still in flight (flights.py), the host does not know the tokens that it
samples. So the device keeps the sampled tokens, and a step names the row of each promised token (`source`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8serve.engine.scheduler import Work
from fp8serve.fp8.lora import NO_ADAPTER

IntArray = NDArray[np.int64]


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
    adapters: Tensor | None = None  # int64 [T]: the number of each token's adapter; None if no token has one


def flatten(work: Sequence[Work], block_size: int, device: torch.device, samples: Tensor | None = None) -> StepTensors:
    """Converts the work of a step to tensors. `samples` are the tokens that the step in flight samples, int64 [rows] on
    the device. A negative token stands for a row that fails, and is replaced by 0."""
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
    adapters = _adapter_numbers(work, counts, device)
    if len(last) == len(token_ids):
        return StepTensors(id_tensor, position_tensor, slot_tensor, queries, None, queries, adapters)
    with_logits = [row for row, n in enumerate(num_logits) if n]
    last_queries = _queries(
        [0, *itertools.accumulate(num_logits[row] for row in with_logits)],
        [lengths[row] for row in with_logits],
        tables[with_logits, : max((len(work[row].seq.block_table) for row in with_logits), default=0)],
        device,
    )
    return StepTensors(id_tensor, position_tensor, slot_tensor, queries, last_tensor, last_queries, adapters)


def pack(step: StepTensors) -> Tensor:
    """Returns a step on the CPU as one tensor, int64 [n], for other ranks: the sizes of its tensors, then all values. A
    tensor that is None has the size -1."""
    parts: list[Tensor | None] = [step.token_ids, step.positions, step.slots, *_parts(step.queries)]
    parts += [step.last, step.adapters]
    parts += () if step.last is None else _parts(step.last_queries)
    sizes = [-1 if part is None else part.numel() for part in parts]
    values = [part.reshape(-1).to(torch.long) for part in parts if part is not None]
    return torch.cat([torch.tensor([len(sizes), *sizes]), *values])


def unpack(values: Tensor, device: torch.device) -> StepTensors:
    """Returns the step that `pack` has packed, on `device`."""
    count = int(values[0])
    sizes = values[1 : 1 + count].tolist()
    rest = iter(values[1 + count :].to(device).split_with_sizes([size for size in sizes if size >= 0]))
    parts = [next(rest) if size >= 0 else None for size in sizes[:8]]
    token_ids, positions, slots, *first, last, adapters = parts
    queries = _from_parts(*first)  # type: ignore[arg-type]  # none is None
    last_queries = queries if last is None else _from_parts(*rest)
    return StepTensors(token_ids, positions, slots, queries, last, last_queries, adapters)  # type: ignore[arg-type]


def _parts(queries: Queries) -> tuple[Tensor, Tensor, Tensor]:
    return queries.query_starts, queries.context_lens, queries.block_tables


def _from_parts(query_starts: Tensor, context_lens: Tensor, block_tables: Tensor) -> Queries:
    starts, lens, tables = (part.to(torch.int32) for part in (query_starts, context_lens, block_tables))
    return Queries(starts, lens, tables.view(len(lens), -1) if len(lens) else tables.view(0, 0))


def _adapter_numbers(work: Sequence[Work], counts: list[int], device: torch.device) -> Tensor | None:
    if all(item.seq.adapter is None for item in work):
        return None
    numbers = [NO_ADAPTER if item.seq.adapter is None else item.seq.adapter.number for item in work]
    rows = to_device(numbers, torch.long, device)
    return rows.repeat_interleave(to_device(counts, torch.long, device))


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
