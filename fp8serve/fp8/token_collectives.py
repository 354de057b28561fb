"""Collectives over the token dimension (the first one) of a tensor-parallel group, and their gradients.

    copied        identity              backward: sum over the ranks
    summed        sum over the ranks    backward: identity
    gathered      [T / ranks] -> [T]    backward: sum and keep one's own tokens
    scattered     sum, own tokens       backward: gather

FP8 goes over the wire as uint8, which every backend knows.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

# Their names since torch 2.13; the older ones warn there.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_gather(x: Tensor, group: Any) -> Callable[[], Tensor]:
    """Begin to gather [T / ranks, ...] -> [T, ...], of any dtype; the returned function waits for the result."""
    x = x.contiguous()
    wire = x.view(torch.uint8) if x.dtype.is_floating_point and x.itemsize == 1 else x
    out = wire.new_empty((wire.shape[0] * dist.get_world_size(group), *wire.shape[1:]))
    work = _ALL_GATHER(out, wire, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return out.view(x.dtype)

    return finish


def gather(x: Tensor, group: Any) -> Tensor:
    """[T / ranks, ...] -> [T, ...] of any dtype."""
    return start_gather(x, group)()


def reduce_scatter(x: Tensor, group: Any) -> Tensor:
    """[T, ...] -> the sum over the ranks of one's own [T / ranks, ...]; raises ValueError when T does not divide."""
    ranks = dist.get_world_size(group)
    if x.shape[0] % ranks:
        raise ValueError(
            f"Sequence parallelism over {ranks} ranks needs a multiple of {ranks} tokens, found {x.shape[0]}."
        )
    out = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
    _REDUCE_SCATTER(out, x.contiguous(), group=group)
    return out


def all_sum(x: Tensor, group: Any) -> Tensor:
    """The sum over the ranks, as a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _unchanged(x: Tensor, group: Any) -> Tensor:
    return x.view_as(x)


class _Both(torch.autograd.Function):
    """One function on the way forward, another on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, there: Callable[..., Tensor], back: Callable[..., Tensor]) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(dy, ctx.group), None, None, None


def _apply(*args: Any) -> Tensor:
    return cast(Tensor, _Both.apply(*args))  # type: ignore[no-untyped-call]


def copied(x: Tensor, group: Any) -> Tensor:
    """A tensor that all ranks hold, for use that differs between ranks."""
    return _apply(x, group, _unchanged, all_sum)


def summed(x: Tensor, group: Any) -> Tensor:
    """Partial sums -> the sum, on all ranks."""
    return _apply(x, group, all_sum, _unchanged)


def gathered(x: Tensor, group: Any) -> Tensor:
    """One's own tokens -> all tokens."""
    return _apply(x, group, gather, reduce_scatter)


def scattered(x: Tensor, group: Any) -> Tensor:
    """Partial sums of all tokens -> the sum of one's own tokens."""
    return _apply(x, group, reduce_scatter, gather)
