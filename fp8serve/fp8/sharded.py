"""Sharded layers of serving: each rank of a group has some rows or some columns of every weight.

    sharded     W [N / ranks, K]    x [T, K]            -> y [T, N / ranks]         q, k, v, gate and up
    reduced     W [N, K / ranks]    x [T, K / ranks]    -> y [T, N], all-reduced    o and down
    gathered    W [N / ranks, K]    x [T, K / ranks]    -> y [T, N]                 o and down, if invariant

Reduced layers are Megatron's row-parallel layers, as in training (tensor_parallel.py): one collective for each. The
ranks exchange their products in the dtype of activations. Every rank adds them up in FP32, in the order of the ranks,
and rounds the sum once. So all ranks have the same bits in every run, but the bits depend on the number of ranks.

A gathered layer all-gathers its input and its output. Nothing is summed over the ranks: one rank computes each element,
with the kernel and the order of one process. So the bits do not depend on the number of ranks wherever those of a row
of W do not depend on the other rows, which holds for the kernels of a CPU.

A scale for each row of an input is computed from the amax of the whole row in both schemes: a reduced layer all-reduces
it. So the inputs are quantized to the values of one process. The counters `amax` and `saturated` of a reduced layer are
those of its own columns, and `input_shard` says so.
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
from fp8serve.fp8.ops import arithmetic
from fp8serve.fp8.ops.arithmetic import BLOCK, FP8_MAX, scale_from_amax
from fp8serve.fp8.ops.packing import GROUP
from fp8serve.fp8.tensor_parallel import all_gather

E4M3 = torch.float8_e4m3fn
TWO_STEPS = 1 << 16  # elements from which a sum over more than two ranks is divided among them
_grouped_quantize = torch.ops.fp8serve.grouped_quantize.default
_silu_mul = torch.ops.fp8serve.silu_mul.default


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

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Returns the sum of the ranks' x, computed in FP32 in the order of the ranks and rounded to x's dtype.

        Every rank receives all terms, or if x [T, N] is large, those of its columns, and then the sums of the others.
        Both give the same bits.
        """
        if x.numel() == 0:
            return x
        if self.size > 2 and x.numel() >= TWO_STEPS and x.shape[1] % self.size == 0:
            columns = x.reshape(len(x), self.size, -1).transpose(0, 1).contiguous()
            terms = torch.empty_like(columns)
            dist.all_to_all_single(terms, columns)
            return self.gather_columns(_sum_in_order(terms), x.shape[1])
        return _sum_in_order(all_gather(x, None).view(self.size, *x.shape))

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


def _sum_in_order(terms: Tensor) -> Tensor:
    """Returns the sum over the first dimension in FP32, in order, rounded to the dtype of `terms`."""
    total = terms[0].float()
    for term in terms[1:]:
        total += term
    return total.to(terms.dtype)


def can_reduce(layer: nn.Module, shard: Shard) -> bool:
    """Returns whether `keep_columns` supports a linear layer: each rank must get whole blocks of scales, and groups of
    16 columns, which some kernels read together. Inputs of 4 bits have scales of blocks and of rows."""
    columns = cast(int, layer.in_features)
    if not isinstance(layer, FrozenLinear):
        return columns % (GROUP * shard.size) == 0
    scale, blocks = layer.weight_scale_inv, [GROUP, layer.input_spec.block[1] or 1]
    if scale.dtype is not torch.float32:
        blocks.append(columns // scale.shape[1])
    elif has_block_scales(layer):
        blocks.append(BLOCK)
    return not layer.input_spec.is_4bit and all(columns % (block * shard.size) == 0 for block in blocks)


def keep_columns(layer: nn.Module, shard: Shard) -> None:
    """Keeps only this rank's columns of a linear layer, in place; `can_reduce` must be true. The layer then returns
    this rank's term of the output. Rank 0's has the bias."""
    tensors: Any = layer._buffers if isinstance(layer, FrozenLinear) else layer._parameters
    for name in ("weight", "weight_q", "weight_scale_inv"):
        tensor = tensors.get(name)
        if tensor is not None and tensor.dim() == 2 and tensor.shape[1] > 1:
            data = tensor.detach().view(torch.uint8) if tensor.itemsize == 1 else tensor.detach()
            part = data.chunk(shard.size, 1)[shard.rank].contiguous().view(tensor.dtype)
            tensors[name] = nn.Parameter(part, requires_grad=False) if isinstance(tensor, nn.Parameter) else part
    if tensors.get("pre_quant_scale") is not None:
        tensors["pre_quant_scale"] = tensors["pre_quant_scale"].chunk(shard.size)[shard.rank].clone()
    if shard.rank > 0:
        tensors["bias"] = None
    if isinstance(layer, FrozenLinear):
        layer.__class__ = PartialFrozenLinear
    partial: Any = layer
    partial.in_features, partial.input_shard = partial.in_features // shard.size, shard


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


class PartialFrozenLinear(FrozenLinear):
    """A FrozenLinear with some columns of the weight, which returns a term of the output. `keep_columns` creates it."""

    @property
    def _has_row_scales(self) -> bool:
        """Whether the input has a scale for each row, which depends on the columns of all ranks."""
        spec = self.input_spec
        return spec.source == "current" and spec.is_fp8 and spec.block[1] is None

    def cast_silu_mul(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return self._cast_current(_silu_mul(gate, up)) if self._has_row_scales else super().cast_silu_mul(gate, up)

    def _cast_current(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self._has_row_scales:
            return super()._cast_current(x)
        amax = arithmetic.amax(x, (1,))
        dist.all_reduce(amax, dist.ReduceOp.MAX)
        scale = scale_from_amax(amax, FP8_MAX[E4M3], self.input_spec.scale_format == "power_of_2")
        ends = torch.arange(1, len(x) + 1, dtype=torch.int32, device=x.device)
        return _grouped_quantize(x, scale, ends, E4M3)[0], scale.reciprocal().unsqueeze(1)


class _Reduced:
    """A linear layer with some columns of the weight, whose output is summed over the ranks."""

    input_shard: Any  # a Shard

    def forward(self, input: Tensor) -> Tensor:
        """Returns the whole output [T, N] for this rank's columns of the input, [T, K / ranks]."""
        return self.input_shard.sum_over_ranks(super().forward(input))  # type: ignore[misc, no-any-return]


class ReducedFrozenLinear(_Reduced, PartialFrozenLinear):
    """A FrozenLinear whose output is summed over the ranks. `reduce` creates it."""

    def forward_add(self, residual: Tensor, x: Tensor) -> Tensor:
        """Returns residual [M, N] + forward(x [M, K / ranks])."""
        return self.product_add(residual, *self.cast(x))

    def product_add(self, residual: Tensor, q: Tensor, scale_inv: Tensor) -> Tensor:
        """Returns residual [M, N] plus the sum of the ranks' products."""
        total: Tensor = self.input_shard.sum_over_ranks(self.product(q, scale_inv, residual.dtype))
        return residual + total


class ReducedLinear(_Reduced, BatchInvariantLinear):
    """A linear layer in high precision whose output is summed over the ranks. `reduce` creates it."""


def reduce(layer: nn.Module, shard: Shard) -> None:
    """Turns a linear layer into one with this rank's columns, whose output is summed over the ranks, in place;
    `can_reduce` must be true."""
    keep_columns(layer, shard)
    layer.__class__ = ReducedFrozenLinear if isinstance(layer, FrozenLinear) else ReducedLinear


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
