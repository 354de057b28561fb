"""Tensor-parallel linear layers: the weight is sharded over the ranks of a group.

    column    W [N / ranks, K]    x [T, K], equal on all ranks    -> y [T, N / ranks]
    row       W [N, K / ranks]    x [T, K / ranks]                -> y [T, N], all-reduced; then the bias is added

A column layer followed by a row layer needs one all-reduce per direction, whatever elementwise ops are between them.
With sequence parallelism, activations outside of these layers are sharded along the tokens: the column layer
all-gathers its input, the row layer reduce-scatters its output, and norms and residuals process a shard of the tokens.

If the recipe has one scale per tensor (delayed, current), the all-gathers transfer FP8 data, one byte per element: of x
in a column layer and of dY in a row layer. A column layer saves only the data of its own tokens and gathers the data of
the other ranks again in the backward pass, while dgrad runs. Row-wise and block scales are valid along one direction
only, so both directions would have to be gathered. With such scales, or if a GEMM runs in high precision, a single
all-gather transfers high-precision values.

All ranks use the scale of the whole tensor. Delayed scaling: the amax reduction group of the `autocast` contains all
ranks, as the default group does. Current scaling: each cast all-reduces its amax with MAX. Row-wise and block scales
are computed on each rank for its own shard. NVFP4 is refused: it has scales for tensors, rows and blocks.

These are the collectives over the tokens (the first dimension), with Megatron's names, and their gradients. FP8 data
are sent as uint8, which every backend supports:

    copy_to_region                       forward: identity                         backward: all-reduce
    reduce_from_region                   forward: all-reduce                       backward: identity
    gather_from_sequence_region          forward: all-gather to [T]                backward: reduce-scatter
    reduce_scatter_to_sequence_region    forward: reduce-scatter to [T / ranks]    backward: all-gather

Sums over the ranks use the dtype of activations. Weights are plain parameters of the local shape. They are not
DTensors, because DTensor cannot redistribute FP8 data together with their scale.
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

from fp8serve.errors import RecipeError
from fp8serve.fp8.autocast import Frame
from fp8serve.fp8.casting import Operand, Quantized
from fp8serve.fp8.distributed import check_shared_scale
from fp8serve.fp8.linear import Linear, LinearCall, LinearInput, LinearPlan, Parameters, mm
from fp8serve.fp8.recipe import has_tensor_scales

# torch 2.13 renamed these functions and warns about the old names.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_all_gather(x: Tensor, group: Any) -> Callable[[], Tensor]:
    """Starts to all-gather x [T / ranks, ...] of any dtype. Returns a function that waits for the result [T, ...]."""
    x = x.contiguous()
    data = x.view(torch.uint8) if x.dtype.is_floating_point and x.itemsize == 1 else x
    out = data.new_empty((data.shape[0] * dist.get_world_size(group), *data.shape[1:]))
    work = _ALL_GATHER(out, data, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return out.view(x.dtype)

    return wait


def all_gather(x: Tensor, group: Any) -> Tensor:
    """Returns the tensors [T / ranks, ...] of all ranks, of any dtype, concatenated to [T, ...]."""
    return start_all_gather(x, group)()


def reduce_scatter(x: Tensor, group: Any) -> Tensor:
    """Returns this rank's [T / ranks, ...] of the sum over the ranks of x [T, ...].

    Raises ValueError if T is not a multiple of the number of ranks.
    """
    ranks = dist.get_world_size(group)
    if x.shape[0] % ranks:
        raise ValueError(
            f"Sequence parallelism over {ranks} ranks needs a multiple of {ranks} tokens, found {x.shape[0]}."
        )
    out = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
    _REDUCE_SCATTER(out, x.contiguous(), group=group)
    return out


def all_reduce(x: Tensor, group: Any) -> Tensor:
    """Returns the sum over the ranks as a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _identity(x: Tensor, group: Any) -> Tensor:
    return x.view_as(x)


class _Collective(torch.autograd.Function):
    """Applies one collective in the forward pass and another in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Any, in_forward: Callable[..., Tensor], in_backward: Callable[..., Tensor]
    ) -> Tensor:
        ctx.group, ctx.in_backward = group, in_backward
        return in_forward(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.in_backward(dy, ctx.group), None, None, None


def _apply(*args: Any) -> Tensor:
    return cast(Tensor, _Collective.apply(*args))  # type: ignore[no-untyped-call]


def copy_to_region(x: Tensor, group: Any) -> Tensor:
    """Returns x, which is equal on all ranks. The backward pass all-reduces the gradient."""
    return _apply(x, group, _identity, all_reduce)


def reduce_from_region(x: Tensor, group: Any) -> Tensor:
    """Returns the sum over the ranks. The backward pass returns the gradient as it is."""
    return _apply(x, group, all_reduce, _identity)


def gather_from_sequence_region(x: Tensor, group: Any) -> Tensor:
    """Returns the tokens of all ranks. The backward pass reduce-scatters the gradient."""
    return _apply(x, group, all_gather, reduce_scatter)


def reduce_scatter_to_sequence_region(x: Tensor, group: Any) -> Tensor:
    """Returns this rank's tokens of the sum over the ranks. The backward pass all-gathers the gradient."""
    return _apply(x, group, reduce_scatter, all_gather)


Kind = Literal["column", "row"]
NAN_CODE = 0x7F  # NaN in both FP8 formats


class ParallelLinear(Linear):
    """The base class of column-parallel and row-parallel linear layers, which `parallelize` creates."""

    group: Any
    sequence_parallel: bool
    shard_dim: int  # the dimension of the weight that is sharded over the ranks

    def shard(self, group: Any, sequence_parallel: bool) -> None:
        """Shards the weight over the ranks. Raises ValueError if it cannot be divided evenly."""
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = _local_shard(cast(nn.Parameter, self.weight), self.shard_dim, group)
        self.out_features, self.in_features = self.weight.shape

    def whole_weight(self) -> Tensor:
        """Returns the whole weight [N, K] in high precision. All ranks must call it."""
        rows = self.weight.detach().movedim(self.shard_dim, 0)
        return all_gather(rows, self.group).movedim(0, self.shard_dim).contiguous()

    def _create_call(self, frame: Frame) -> LinearCall:
        if any(spec.is_nvfp4 for spec in frame.recipe.specs.linear.values()):
            raise RecipeError("Tensor parallelism does not support NVFP4; use another recipe.")
        if self.sequence_parallel and has_tensor_scales(frame.recipe):
            check_shared_scale(frame.recipe, frame.group, self.group, "Sequence parallelism")
        return replace(super()._create_call(frame), shard_group=self.group)

    def _gathers_fp8(self, plan: LinearPlan) -> bool:
        return self.sequence_parallel and has_tensor_scales(plan.call.recipe) and not any(plan.call.high_precision)


class ColumnParallelLinear(ParallelLinear):
    """y [T, N / ranks] = x W^T with the rows of W sharded over the ranks; x is [T, K], or [T / ranks, K] with sequence
    parallelism."""

    shard_dim = 0

    def shard(self, group: Any, sequence_parallel: bool) -> None:
        """Shards the weight and the bias over the ranks."""
        super().shard(group, sequence_parallel)
        if self.bias is not None:
            self.bias = _local_shard(self.bias, 0, group)

    def _to_region(self, x: Tensor) -> Tensor:
        return (gather_from_sequence_region if self.sequence_parallel else copy_to_region)(x, self.group)

    def _run_in_high_precision(self, x: Tensor, parameters: Parameters) -> Tensor:
        return super()._run_in_high_precision(self._to_region(x), parameters)

    def _run_in_fp8(self, input: LinearInput, plan: LinearPlan, parameters: Parameters) -> Tensor:
        if self._gathers_fp8(plan):
            x, x_q = self._quantize_input(input, replace(plan, input_columnwise=False))
            args = (x, *parameters, plan.call, x_q.rowwise, plan.weight, self.group)
            return cast(Tensor, _GatherMatmul.apply(*args))  # type: ignore[no-untyped-call]
        if self.sequence_parallel:
            x = self._to_region(input.compute())
            return super()._run_in_fp8(LinearInput(x, lambda: x), plan, parameters)
        graph_tensor, compute, fused_quantize, _ = input
        region_input = LinearInput(self._to_region(graph_tensor), lambda: self._to_region(compute()), fused_quantize)
        return super()._run_in_fp8(region_input, plan, parameters)


class RowParallelLinear(ParallelLinear):
    """y [T, N] = x W^T with the columns of W and x sharded over the ranks; y is [T / ranks, N] with sequence
    parallelism."""

    shard_dim = 1

    def _from_region(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Sums y over the ranks and adds the bias once."""
        reduce = reduce_scatter_to_sequence_region if self.sequence_parallel else reduce_from_region
        y = reduce(y, self.group)
        if bias is None:
            return y
        return y + (copy_to_region(bias, self.group) if self.sequence_parallel else bias).to(y.dtype)

    def _run_in_high_precision(self, x: Tensor, parameters: Parameters) -> Tensor:
        y = super()._run_in_high_precision(x, parameters._replace(bias=None))
        return self._from_region(y, parameters.bias)

    def _run_in_fp8(self, input: LinearInput, plan: LinearPlan, parameters: Parameters) -> Tensor:
        weight, bias = parameters
        if not self._gathers_fp8(plan):
            return self._from_region(super()._run_in_fp8(input, plan, Parameters(weight, None)), bias)
        x, x_q = self._quantize_input(input, plan)
        args = (x, weight, plan.call, x_q, plan.weight, self.group)
        y = cast(Tensor, _MatmulReduceScatter.apply(*args))  # type: ignore[no-untyped-call]
        return y if bias is None else y + copy_to_region(bias, self.group).to(y.dtype)


class _GatherMatmul(torch.autograd.Function):
    """All-gathers x [T / ranks, K] in FP8 and multiplies it by weight [N / ranks, K] -> [T, N / ranks]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: LinearCall,
        x_q: Quantized,
        weight_q: Operand,
        group: Any,
    ) -> Tensor:
        ctx.call, ctx.group = call, group
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(*x_q, *(weight_q.columnwise or (None, None)))
        q = all_gather(x_q.q, group)
        return mm(Quantized(q, x_q.scale_inv), cast(Quantized, weight_q.rowwise), bias, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x_dtype, w_dtype, b_dtype), (needs_dx, needs_dw, needs_db) = ctx.dtypes, ctx.needs_input_grad[:3]
        q, scale_inv, w_q, w_scale_inv = ctx.saved_tensors
        wait_for_x = start_all_gather(q, ctx.group) if needs_dw else None
        dy_q = ctx.call.cast("grad_output", dy, needs_dx, needs_dw)
        weight = Quantized(w_q, w_scale_inv)
        dx = reduce_scatter(mm(dy_q.rowwise, weight, None, x_dtype), ctx.group) if needs_dx else None
        dw = None if wait_for_x is None else mm(dy_q.columnwise, Quantized(wait_for_x().t(), scale_inv), None, w_dtype)
        db = dy.float().sum(0).to(b_dtype) if needs_db else None
        return dx, dw, db, None, None, None, None


class _MatmulReduceScatter(torch.autograd.Function):
    """Multiplies x [T, K / ranks] by weight [N, K / ranks] and reduce-scatters the product -> [T / ranks, N].

    The backward pass all-gathers dY in FP8.
    """

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
        (x_dtype, w_dtype), (needs_dx, needs_dw) = ctx.dtypes, ctx.needs_input_grad[:2]
        x_q, x_scale_inv, w_q, w_scale_inv = ctx.saved_tensors
        dy_q = ctx.call.cast("grad_output", dy, True, False).rowwise
        _write_nan_into_data(dy_q)
        q, scale_inv = all_gather(dy_q.q, ctx.group), dy_q.scale_inv
        dx = mm(Quantized(q, scale_inv), Quantized(w_q, w_scale_inv), None, x_dtype) if needs_dx else None
        dw = mm(Quantized(q.t(), scale_inv), Quantized(x_q, x_scale_inv), None, w_dtype) if needs_dw else None
        return dx, dw, None, None, None, None


def _write_nan_into_data(data: Quantized) -> None:
    """Writes NaN into every row if the scale_inv is NaN, because other ranks receive the data without the scale."""
    data.q.view(torch.uint8)[:, :1].masked_fill_(data.scale_inv.isnan(), NAN_CODE)


def _local_shard(parameter: nn.Parameter, dim: int, group: Any) -> nn.Parameter:
    """Returns this rank's shard of a parameter that is equal on all ranks."""
    ranks, size = dist.get_world_size(group), parameter.shape[dim]
    if size % ranks:
        raise ValueError(f"A dimension of {size} cannot be cut evenly over {ranks} ranks.")
    shard = parameter.detach().chunk(ranks, dim)[dist.get_rank(group)].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)


_CLASSES: dict[Kind, type[ParallelLinear]] = {"column": ColumnParallelLinear, "row": RowParallelLinear}


def parallelize(
    module: nn.Module, layout: Mapping[str, Kind], group: Any, sequence_parallel: bool = False
) -> nn.Module:
    """Shards the `Linear` layers inside `module` over the ranks of `group`, in place, and returns `module`.

    Raises ValueError for a pattern that matches no layer and for a layer that cannot be divided evenly.

    Args:
        layout: Maps name patterns to "column" or "row", such as {"*.up_proj": "column", "*.down_proj": "row"}. The
            weights must be equal on all ranks.
        sequence_parallel: If True, activations between a row layer and the next column layer are [T / ranks, ...],
            tokens first. The gradients of parameters that are applied to them, such as norms, are then partial sums on
            each rank; call `sum_gradients` on them.
    """
    for pattern, kind in layout.items():
        layers = [m for name, m in module.named_modules() if type(m) is Linear and fnmatch(name, pattern)]
        if not layers:
            raise ValueError(f"No fp8serve.Linear has a name like {pattern!r}.")
        for layer in layers:
            layer.__class__ = _CLASSES[kind]
            cast(ParallelLinear, layer).shard(group, sequence_parallel)
    return module


def sum_gradients(parameters: Iterable[nn.Parameter], group: Any) -> None:
    """All-reduces the gradients of parameters that each rank applied to its own tokens only, in one collective.

    For parameters that FSDP2 has sharded over other ranks, it sums the local shards.
    """
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    if grads:
        flat = all_reduce(torch.cat([g.flatten() for g in grads]), group)
        for grad, total in zip(grads, torch.split(flat, [g.numel() for g in grads]), strict=True):
            grad.copy_(total.view_as(grad))
