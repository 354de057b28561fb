"""Sharded layers of serving: each rank of a group has some rows of every weight.

    sharded     W [N / ranks, K]    x [T, K]            -> y [T, N / ranks]    q, k, v, gate and up
    gathered    W [N / ranks, K]    x [T, K / ranks]    -> y [T, N]            o and down

A gathered layer all-gathers its input and its output. No layer divides K, so nothing is summed over the ranks: one rank
computes each element, with the kernel and the order of one process. So the bits do not depend on the number of ranks
wherever those of a row of W do not depend on the other rows, which holds for the kernels of a CPU. The layers of
training (tensor_parallel.py) divide K in every second layer. They need one collective where these need two, and send as
many bytes, because an all-reduce sends each element twice. Their sums depend on the number of ranks.

Every rank casts whole rows of the input. So row-wise scales are those of one process, and `amax` and `saturated` of
each layer are, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

from fp8serve.errors import ModelError
from fp8serve.fp8.batch_invariant import BatchInvariantLinear
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.joined import has_block_scales
from fp8serve.fp8.ops.arithmetic import BLOCK
from fp8serve.fp8.tensor_parallel import all_gather


@dataclass(frozen=True)
class Shard:
    """The part of each weight that rank `rank` of `size` ranks has."""

    rank: int
    size: int

    def rows(self, count: int, start: int = 0) -> slice:
        """Returns this rank's part of `count` rows that begin at row `start`. The last parts may be shorter."""
        part = -(-count // self.size)
        return slice(start + min(count, self.rank * part), start + min(count, (self.rank + 1) * part))

    def rows_of_each(self, counts: Sequence[int]) -> list[slice]:
        """Returns this rank's parts of several groups of adjacent rows, such as those of q, k and v."""
        return [self.rows(count, start) for count, start in zip(counts, accumulate(counts, initial=0), strict=False)]

    def gather_columns(self, x: Tensor, columns: int) -> Tensor:
        """Returns the columns [T, columns] of all ranks; x [T, N] are those of this rank."""
        if len(x) == 0:
            return x.new_empty(0, columns)
        width = -(-columns // self.size)
        parts = all_gather(x if x.shape[1] == width else pad(x, (0, width - x.shape[1])), None)
        if len(x) == 1:
            return parts.view(1, -1)[:, :columns]
        return parts.view(self.size, len(x), width).transpose(0, 1).reshape(len(x), -1)[:, :columns]


def keep_rows(layer: nn.Module, shard: Shard, counts: Sequence[int] | None = None) -> None:
    """Keeps only this rank's rows of a linear layer, a norm or an embedding, in place. `counts` are the rows of the
    groups of a fused layer, each of which is divided.

    Raises ModelError, on every rank, if the scales of blocks cannot be divided.
    """
    tensors: Any = layer._buffers if isinstance(layer, FrozenLinear) else layer._parameters
    weight = layer.weight_q if isinstance(layer, FrozenLinear) else cast(Tensor, layer.weight)
    counts = counts or [len(weight)]
    rows = shard.rows_of_each(counts)
    for name, tensor in tensors.items():
        if name == "weight_scale_inv" and tensor.dim() and has_block_scales(cast(FrozenLinear, layer)):
            tensors[name] = take_rows(tensor, _blocks_of(shard, counts))
        elif name in ("weight_q", "weight_scale_inv", "weight", "bias") and tensor is not None and tensor.dim():
            part = take_rows(tensor.detach(), rows)
            tensors[name] = nn.Parameter(part, requires_grad=False) if isinstance(tensor, nn.Parameter) else part
    layer.row_ranges = rows  # type: ignore[assignment]
    if hasattr(layer, "out_features"):
        layer.out_features = sum(part.stop - part.start for part in rows)


def take_rows(tensor: Tensor, rows: Sequence[slice]) -> Tensor:
    """Returns these rows of a tensor: as a view if they are adjacent and the tensor is a part of a mapped file, else as
    a copy, so that the other rows do not stay in memory."""
    is_part = tensor.nbytes < tensor.untyped_storage().nbytes()
    if is_part and all(a.stop == b.start for a, b in pairwise(rows)):
        return tensor[rows[0].start : rows[-1].stop]
    data = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    return torch.cat([data[part] for part in rows]).view(tensor.dtype)


def _blocks_of(shard: Shard, counts: Sequence[int]) -> list[slice]:
    """Returns the blocks of rows whose scales belong to this rank's rows."""
    for rank in range(shard.size):
        parts = Shard(rank, shard.size).rows_of_each(counts)
        are_whole = all(part.start % BLOCK == 0 or part.start // BLOCK == (part.stop - 1) // BLOCK for part in parts)
        if not are_whole or any((part.stop - part.start) % BLOCK for part in parts[:-1]):
            raise ModelError(
                f"The weights have a scale for each block of {BLOCK} rows, and a rank would get a part of a block; use "
                "a smaller tensor_parallel."
            )
    return [slice(part.start // BLOCK, -(-part.stop // BLOCK)) for part in shard.rows_of_each(counts)]


class _Gathered:
    """A linear layer that gathers its output, and its input unless that is whole."""

    shard: Shard
    columns: int  # of the whole output
    inputs: int | None  # columns of the whole input; None if the input is whole already

    def forward(self, input: Tensor) -> Tensor:
        """Returns the whole output [T, N] for this rank's columns of the input, [T, K / ranks] or [T, K]."""
        x = input if self.inputs is None else self.shard.gather_columns(input, self.inputs)
        return self.shard.gather_columns(super().forward(x), self.columns)  # type: ignore[misc]


class GatheredFrozenLinear(_Gathered, FrozenLinear):
    """A sharded FrozenLinear that gathers its output. `gather` creates it."""

    def can_fuse(self, x: Tensor) -> bool:
        return False


class GatheredLinear(_Gathered, BatchInvariantLinear):
    """A sharded linear layer in high precision that gathers its output. `gather` creates it."""


def gather(layer: nn.Module, shard: Shard, *, input_is_whole: bool = False) -> None:
    """Turns a linear layer with all its rows into a sharded one that gathers its output, in place."""
    inputs, columns = cast(int, layer.in_features), cast(int, layer.out_features)
    keep_rows(layer, shard)
    layer.__class__ = GatheredFrozenLinear if isinstance(layer, FrozenLinear) else GatheredLinear
    gathered: Any = layer
    gathered.shard, gathered.columns, gathered.inputs = shard, columns, None if input_is_whole else inputs


class ShardedEmbedding(nn.Embedding):
    """An embedding of which each rank has some rows. `shard_embedding` creates it."""

    first: int  # the first token of this rank

    def forward(self, input: Tensor) -> Tensor:
        """Returns the embeddings [T, hidden] of token ids [T]. The bytes of all ranks are added up: only one rank has
        other bytes than 0."""
        rows = input - self.first
        is_local = (rows >= 0) & (rows < len(self.weight))
        x = embedding(rows.clamp(0, len(self.weight) - 1), self.weight)
        x = x.masked_fill(~is_local.unsqueeze(-1), 0)
        dist.all_reduce(x.view(torch.uint8))
        return x


def shard_embedding(layer: nn.Embedding, shard: Shard) -> None:
    """Turns an embedding into a sharded one in place."""
    first = shard.rows(len(layer.weight)).start
    keep_rows(layer, shard)
    layer.__class__ = ShardedEmbedding
    cast(ShardedEmbedding, layer).first = first
