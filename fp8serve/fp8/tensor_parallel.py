"""Linear layers whose weight is divided over the ranks of a tensor-parallel group.

    column    W [N / ranks, K]    x whole                 -> y [T, N / ranks]
    row       W [N, K / ranks]    x [T, K / ranks]        -> y whole, summed over the ranks; bias added once, after it

A column layer followed by a row layer communicates twice per direction, whatever elementwise ops are between them. With
sequence parallelism the whole tensors above are divided along the tokens instead: the column layer gathers its input,
the row layer scatters its output, and norms and residuals work on a part of the tokens.

Those gathers carry FP8 data where the recipe has one scale for a tensor (delayed, current): one byte an element, for x
in a column layer and for dY in a row layer. A column layer keeps only its own tokens' data and gathers them again in
the backward pass, while dgrad runs. Row-wise and block scales are valid along one direction only, so both directions
would have to be gathered. With them, and where a GEMM stays in high precision, a single gather carries high precision.

The scales are those of the whole tensor. Delayed: the amax reduction group of the `autocast` spans the ranks, as the
default group does. Current: each cast takes a MAX of one number over the group. Row-wise and block scales are each
rank's own.

The collectives over the tokens (the first dimension), and their gradients; FP8 goes over the wire as uint8, which every
backend knows:

    copied        identity              backward: sum over the ranks
    summed        sum over the ranks    backward: identity
    gathered      [T / ranks] -> [T]    backward: sum and keep one's own tokens
    scattered     sum, own tokens       backward: gather

Sums over the ranks are made in the activations' dtype. Weights are plain parameters of the local shape. We did not
build on DTensor, because it cannot redistribute FP8 data together with their scale.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from fp8serve.fp8.autocast import Frame
from fp8serve.fp8.casting import Operand, Quantized
from fp8serve.fp8.distributed import one_scale
from fp8serve.fp8.linear import Fused, Linear, LinearCall, LinearPlan, Parameters, mm
from fp8serve.fp8.recipe import one_per_tensor

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


Kind = Literal["column", "row"]
NAN_CODE = 0x7F  # in both formats


class ParallelLinear(Linear):
    """The common part of both kinds; made by `parallelize`."""

    group: Any
    sequence_parallel: bool
    cut: int  # the dimension of the weight that is divided over the ranks

    def take_part(self, group: Any, sequence_parallel: bool) -> None:
        """Become one rank's part of a whole layer. Raises ValueError if it cannot be divided evenly."""
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = _part(cast(nn.Parameter, self.weight), self.cut, group)
        self.out_features, self.in_features = self.weight.shape

    def whole_weight(self) -> Tensor:
        """The weight [N, K] of all ranks, in high precision; a collective."""
        rows = self.weight.detach().movedim(self.cut, 0)
        return gather(rows, self.group).movedim(0, self.cut).contiguous()

    def _call(self, context: Frame) -> LinearCall:
        if self.sequence_parallel and one_per_tensor(context.recipe):
            one_scale(context.recipe, context.group, self.group, "Sequence parallelism")
        return replace(super()._call(context), sharers=self.group)

    def _gathers_fp8(self, plan: LinearPlan) -> bool:
        return self.sequence_parallel and one_per_tensor(plan.call.recipe) and not any(plan.call.hp)


class ColumnParallelLinear(ParallelLinear):
    """y [T, N / ranks] = x W^T, the rows of W divided over the ranks; x [T, K], or [T / ranks, K] (sequence
    parallel)."""

    cut = 0

    def take_part(self, group: Any, sequence_parallel: bool) -> None:
        """Cut the weight and the bias."""
        super().take_part(group, sequence_parallel)
        if self.bias is not None:
            self.bias = _part(self.bias, 0, group)

    def _enter(self, x: Tensor) -> Tensor:
        return gathered(x, self.group) if self.sequence_parallel else copied(x, self.group)

    def _in_high_precision(self, x: Tensor, own: Parameters) -> Tensor:
        return super()._in_high_precision(self._enter(x), own)

    def _quantized(
        self, edge: Tensor, values: Callable[[], Tensor], fused: Fused | None, plan: LinearPlan, own: Parameters
    ) -> Tensor:
        if self._gathers_fp8(plan):
            x, x_q = self._input(edge, values, fused, replace(plan, input_columnwise=False))
            args = (x, *own, plan.call, x_q.rowwise, plan.weight, self.group)
            return cast(Tensor, _GatheredMatmul.apply(*args))  # type: ignore[no-untyped-call]
        if self.sequence_parallel:
            whole = self._enter(values())
            return super()._quantized(whole, lambda: whole, None, plan, own)
        return super()._quantized(self._enter(edge), lambda: self._enter(values()), fused, plan, own)


class RowParallelLinear(ParallelLinear):
    """y [T, N] = x W^T, the columns of W and x divided over the ranks; y [T / ranks, N] with sequence parallelism."""

    cut = 1

    def _leave(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """The sum over the ranks, to which the bias is added once."""
        y = scattered(y, self.group) if self.sequence_parallel else summed(y, self.group)
        if bias is None:
            return y
        return y + (copied(bias, self.group) if self.sequence_parallel else bias).to(y.dtype)

    def _in_high_precision(self, x: Tensor, own: Parameters) -> Tensor:
        return self._leave(super()._in_high_precision(x, own._replace(bias=None)), own.bias)

    def _quantized(
        self, edge: Tensor, values: Callable[[], Tensor], fused: Fused | None, plan: LinearPlan, own: Parameters
    ) -> Tensor:
        if not self._gathers_fp8(plan):
            return self._leave(super()._quantized(edge, values, fused, plan, own._replace(bias=None)), own.bias)
        x, x_q = self._input(edge, values, fused, plan)
        args = (x, own.weight, plan.call, x_q, plan.weight, self.group)
        y = cast(Tensor, _ScatteredMatmul.apply(*args))  # type: ignore[no-untyped-call]
        return y if own.bias is None else y + copied(own.bias, self.group).to(y.dtype)


class _GatheredMatmul(torch.autograd.Function):
    """x [T / ranks, K], gathered in FP8, times weight [N / ranks, K] -> [T, N / ranks]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: LinearCall,
        mine: Quantized,
        weight_q: Operand,
        group: Any,
    ) -> Tensor:
        ctx.call, ctx.group = call, group
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(*mine, *(weight_q.columnwise or (None, None)))
        q = gather(mine.q, group)
        return mm(Quantized(q, mine.scale_inv), cast(Quantized, weight_q.rowwise), bias, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x_dtype, w_dtype, b_dtype), (want_dx, want_dw, want_db) = ctx.dtypes, ctx.needs_input_grad[:3]
        q, scale_inv, w_q, w_scale_inv = ctx.saved_tensors
        whole = start_gather(q, ctx.group) if want_dw else None
        dy_q = ctx.call.cast("grad_output", dy, want_dx, want_dw)
        weight = Quantized(w_q, w_scale_inv)
        dx = reduce_scatter(mm(dy_q.rowwise, weight, None, x_dtype), ctx.group) if want_dx else None
        dw = mm(dy_q.columnwise, Quantized(whole().t(), scale_inv), None, w_dtype) if whole is not None else None
        db = dy.float().sum(0).to(b_dtype) if want_db else None
        return dx, dw, db, None, None, None, None


class _ScatteredMatmul(torch.autograd.Function):
    """x [T, K / ranks] times weight [N, K / ranks], summed over ranks -> [T / ranks, N]; dY is gathered in FP8."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, call: LinearCall, x_q: Operand, weight_q: Operand, group: Any
    ) -> Tensor:
        ctx.call, ctx.group, ctx.dtypes = call, group, (x.dtype, weight.dtype)
        ctx.save_for_backward(*(x_q.columnwise or (None, None)), *(weight_q.columnwise or (None, None)))
        return reduce_scatter(mm(cast(Quantized, x_q.rowwise), cast(Quantized, weight_q.rowwise), None, x.dtype), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x_dtype, w_dtype), (want_dx, want_dw) = ctx.dtypes, ctx.needs_input_grad[:2]
        x_q, x_scale_inv, w_q, w_scale_inv = ctx.saved_tensors
        mine = ctx.call.cast("grad_output", dy, True, False).rowwise
        _mark(mine)
        q = gather(mine.q, ctx.group)
        dx = mm(Quantized(q, mine.scale_inv), Quantized(w_q, w_scale_inv), None, x_dtype) if want_dx else None
        dw = mm(Quantized(q.t(), mine.scale_inv), Quantized(x_q, x_scale_inv), None, w_dtype) if want_dw else None
        return dx, dw, None, None, None, None


def _mark(data: Quantized) -> None:
    """Puts a NaN into each row of data whose scale_inv is NaN, because the other ranks get the data without the
    scale."""
    data.q.view(torch.uint8)[:, :1].masked_fill_(data.scale_inv.isnan(), NAN_CODE)


def _part(parameter: nn.Parameter, dim: int, group: Any) -> nn.Parameter:
    """This rank's part of a parameter that all ranks hold whole."""
    ranks, size = dist.get_world_size(group), parameter.shape[dim]
    if size % ranks:
        raise ValueError(f"A dimension of {size} cannot be cut evenly over {ranks} ranks.")
    part = parameter.detach().chunk(ranks, dim)[dist.get_rank(group)].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


_CLASSES: dict[Kind, type[ParallelLinear]] = {"column": ColumnParallelLinear, "row": RowParallelLinear}


def parallelize(
    module: nn.Module, layout: Mapping[str, Kind], group: Any, sequence_parallel: bool = False
) -> nn.Module:
    """Cut the `Linear`s inside `module` whose names match a pattern of `layout`, in place; returns module.

    layout: pattern -> "column" or "row", such as {"*.up_proj": "column", "*.down_proj": "row"}. All ranks must hold the
    same whole weights. With `sequence_parallel` the activations between a row layer and the next column layer are
    [T / ranks, ...], tokens first; the gradients of the parameters that work on them (norms) are then partial on each
    rank, and `sum_gradients` sums them. Raises ValueError for a pattern that matches nothing and for a layer that
    cannot be divided evenly.
    """
    for pattern, kind in layout.items():
        chosen = [m for name, m in module.named_modules() if type(m) is Linear and fnmatch(name, pattern)]
        if not chosen:
            raise ValueError(f"No fp8serve.Linear has a name like {pattern!r}.")
        for layer in chosen:
            layer.__class__ = _CLASSES[kind]
            cast(ParallelLinear, layer).take_part(group, sequence_parallel)
    return module


def sum_gradients(parameters: Iterable[nn.Parameter], group: Any) -> None:
    """Sum, in one collective, the gradients of parameters that every rank holds but used on its own tokens only.

    For parameters that FSDP2 has sharded over other ranks, it sums this rank's shards.
    """
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    if grads:
        flat = all_sum(torch.cat([g.flatten() for g in grads]), group)
        for grad, part in zip(grads, torch.split(flat, [g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))
