"""One step's work as tensors.

All sequences of a step are flattened into one row of tokens: the model sees `[tokens]`, the paged attention op is told
where each sequence begins (`query_starts` [S+1]), how long it is with its new tokens (`context_lens` [S]) and where its
keys and values lie (`block_tables` [S, most blocks], `slots` [tokens]). Prefill chunks and decoding tokens mix freely.
Numbers reach the device from pinned memory, so a step waits for the device once: when it reads the sampled tokens.

Few tokens need logits: the last one of each sequence that samples, with its draft, and those of a prompt whose
log-probabilities are wanted. Work that only these tokens need is done for them alone, and the attention op gets a
second description, with these queries. In a decoding step these are all tokens.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8serve.engine.scheduler import Work


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
        last += range(len(token_ids) - item.wanted, len(token_ids))

    ids, places, into, wanted = _parts([token_ids, positions, slots, last], torch.long, device)
    queries = _queries(work, starts, device)
    if len(last) == len(token_ids):
        return StepTensors(ids, places, into, queries, None, queries)
    some = [item for item in work if item.wanted]
    few = _queries(some, [0, *itertools.accumulate(item.wanted for item in some)], device)
    return StepTensors(ids, places, into, queries, wanted, few)


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
