"""The units of a sharded model: each of its layers, and all that is around them. A unit's weights are gathered together
when it runs, forward and backward, and freed behind it.

FSDP2 makes all weights of a unit one type. Where the trainer casts all of them to BF16 (`train.forward`), it is told to
gather BF16. A layer in FP8 hands its FP32 weights to the quantizer: it is gathered as it is, its linears in FP8 where
the recipe allows that (`fp8.fsdp`), and its norms are cast here. Constants that are not trained stay whole.

On a CPU the gathered weights of each layer come from the heap, between activations that stay. glibc would not fit those
of the next layer into the holes: without `trim` a process took more for holes than for its shards.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fp8serve.model.storage.memory import trim
from fp8serve.train.exchange import NOTHING

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
AS_IT_IS = MixedPrecisionPolicy(cast_forward_inputs=False)


class Unit(nn.Module):
    """A layer that is gathered by itself. It holds the layer and is no part of the model, whose names stay.

    name: of the layer in the model. as_is: the names of its weights that are not cast to BF16. recompute: see
    `train.forward.Forward`. trained: the names of what is trained; seen: of what has had a gradient since it was
    cleared.
    """

    def __init__(self, part: nn.Module, name: str, as_is: Collection[str], recompute: bool) -> None:
        super().__init__()
        self.part, self.name, self.as_is, self.recompute = part, name, frozenset(as_is), recompute
        self.trained = [n for n, parameter in part.named_parameters() if parameter.requires_grad]
        self.seen: set[str] = set()

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        """part(x, place, attend)."""
        trim()
        if not torch.is_grad_enabled():
            return self._run(x, *given)
        x = _Completed.apply(x, self)  # type: ignore[no-untyped-call]
        if self.recompute:
            return checkpoint(self._run, x, *given, use_reentrant=False)  # type: ignore[no-any-return]
        return self._run(x, *given)

    def _run(self, x: Tensor, *given: Any) -> Tensor:
        weights = {n: p for n, p in self.part.named_parameters() if n not in self.as_is and p.dtype != torch.bfloat16}
        casts = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        if not casts:
            return self.part(x, *given)  # type: ignore[no-any-return]
        return functional_call(self.part, casts, (x, *given))  # type: ignore[no-any-return]

    def complete_gradients(self) -> None:
        """Notes which weights have a gradient, and gives the others one that changes nothing: on other ranks they may
        have one, and all must send the same."""
        trim()
        parameters = dict(self.part.named_parameters())
        for name in self.trained:
            parameter = parameters[name]
            if parameter.grad is not None:
                self.seen.add(name)
            else:
                parameter.grad = torch.full(parameter.shape, NOTHING, dtype=parameter.dtype, device=parameter.device)


class _Completed(torch.autograd.Function):
    """The input of a unit, as it is. In the backward pass it comes after all of the unit, and before FSDP2 takes the
    gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: Unit) -> Tensor:
        ctx.unit = unit
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.unit.complete_gradients()
        return dx, None


def divide_unit(unit: Unit, mesh: DeviceMesh) -> None:
    """Divides a layer's weights among the ranks of `mesh`; they must be the same on all."""
    kept = {parameter for parameter in unit.parameters() if not parameter.requires_grad}
    all_cast = not any(name in unit.as_is for name in unit.trained)
    fully_shard(unit, mesh=mesh, mp_policy=BF16 if all_cast else AS_IT_IS, ignored_params=kept)


def divide_rest(network: nn.Module, units: Sequence[Unit], mesh: DeviceMesh) -> None:
    """Divides what is around the layers, embedding and head, and makes `network` the root of all units."""
    done = {parameter for unit in units for parameter in unit.parameters()}
    kept = {parameter for parameter in network.parameters() if not parameter.requires_grad}
    fully_shard(network, mesh=mesh, mp_policy=BF16, ignored_params=done | kept, reshard_after_forward=True)
