"""A directory becomes a forward pass over shards, of which no process ever holds the whole.

Layer after layer is read, whole, and divided: beside its own rows a process holds one layer at a time, and then the
embedding and the head.

Units: each layer, and all that is around them. A unit's weights are gathered together when it runs, forward and
backward, and freed behind it. FSDP2 makes all weights of a unit one type. Where the trainer casts all of them to BF16
(`train.forward`), it is told to gather BF16. A layer in FP8 hands its FP32 weights to the quantizer: it is gathered as
it is, its linears in FP8 where the recipe allows that (`fp8.fsdp`), and its norms are cast here. Constants that are not
trained stay whole. On a CPU the gathered weights of each layer come from the heap, between activations that stay. glibc
would not fit those of the next layer into the holes: without `trim` a process took more for holes than for its shards.

Sums: gradients of sharded weights, added in the order of the microbatches. FSDP2 hands over the gradients of a unit
when its backward pass has computed them. Here every rank gets its rows of all N gradients and adds them to its sum in
FP32, one after the other: the order in which one process adds them, where a reduce-scatter would add N of them first. A
step has one sum for each unit, 1/N of its size; nothing else of the gradients is kept. It costs what a reduce-scatter
costs, and the N parts are in memory at once, for one unit at a time. A rank that has no microbatch in the last round of
a step repeats that of rank 0, because the others need its shards. Its gradients are not added; to amaxes, which are
maxima, it adds nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fp8serve.fp8.conversion import convert
from fp8serve.fp8.distributed import default_group
from fp8serve.fp8.fsdp import Peers, gather_in_fp8, local_rows
from fp8serve.fp8.recipe import why_not_gathered
from fp8serve.fp8.torch_private import settle_shards
from fp8serve.model.checkpoint import Checkpoint, fill, outline
from fp8serve.model.config.mixture import keeps_fp32
from fp8serve.model.storage.memory import trim
from fp8serve.ranks import Ranks
from fp8serve.train.config import TrainConfig
from fp8serve.train.forward import Forward
from fp8serve.train.sharded.shards import Asking, Shards, sharded_norm
from fp8serve.train.train_step import NOTHING

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

    def forward(self, x: Tensor, *source: Any) -> Tensor:
        """part(x, place, attend)."""
        trim()
        if not torch.is_grad_enabled():
            return self._run(x, *source)
        x = _Completed.apply(x, self)  # type: ignore[no-untyped-call]
        if self.recompute:
            return checkpoint(self._run, x, *source, use_reentrant=False)  # type: ignore[no-any-return]
        return self._run(x, *source)

    def _run(self, x: Tensor, *source: Any) -> Tensor:
        weights = {n: p for n, p in self.part.named_parameters() if n not in self.as_is and p.dtype != torch.bfloat16}
        casts = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        if not casts:
            return self.part(x, *source)  # type: ignore[no-any-return]
        return functional_call(self.part, casts, (x, *source))  # type: ignore[no-any-return]

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
    retained = {parameter for parameter in unit.parameters() if not parameter.requires_grad}
    all_cast = not any(name in unit.as_is for name in unit.trained)
    fully_shard(unit, mesh=mesh, mp_policy=BF16 if all_cast else AS_IT_IS, ignored_params=retained)


def divide_rest(network: nn.Module, units: Sequence[Unit], mesh: DeviceMesh) -> None:
    """Divides what is around the layers, embedding and head, and makes `network` the root of all units."""
    done = {parameter for unit in units for parameter in unit.parameters()}
    retained = {parameter for parameter in network.parameters() if not parameter.requires_grad}
    fully_shard(network, mesh=mesh, mp_policy=BF16, ignored_params=done | retained, reshard_after_forward=True)


class OrderedSum:
    """What FSDP2 calls in the place of its reduce-scatter, for one unit (`set_custom_reduce_scatter`).

    working: how many ranks have a microbatch of their own.
    """

    def __init__(self, size: int) -> None:
        self.size = self.working = size
        self.total: Tensor | None = None
        self._allocated = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent, and the next time for the result: that is the sum."""
        count = size[0]
        if self._allocated != count * self.size:
            self._allocated = count
            return torch.empty(count, dtype=dtype, device=device)
        self._allocated = 0
        if self.total is None:
            self.total = torch.full((count,), NOTHING, dtype=dtype, device=device)
        return self.total

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """input_tensor: this rank's gradients, part by part; output_tensor: the sum, to which all are added."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for part in received.view(self.size, -1)[: self.working]:
            output_tensor += part


class ShardedExchange:
    """Sums gradients over the microbatches of one step, as `train.train_step.Exchange` does, into shards."""

    def __init__(self, shards: Shards, units: Sequence[Unit], sums: Sequence[OrderedSum]) -> None:
        self._shards, self._units, self._sums = shards, units, sums
        self._device = next(iter(shards.masters.values())).device
        for unit in units:
            unit.seen.clear()
        self._drop()

    def begin(self, working: int) -> None:
        """Before a round, of which so many ranks compute microbatches of their own."""
        for total in self._sums:
            total.working = working
        self._clear()

    def round(self) -> None:
        """FSDP2 has added the gradients already."""

    def finish(self) -> None:
        """Puts the sums into `.grad` of the masters; None where no microbatch gave a gradient."""
        missing = self._missing()
        for name, parameter in self._shards.parameters.items():
            grad = None if name in missing else parameter.grad
            self._shards.masters[name].grad = None if grad is None else local_rows(grad)
        self._clear()
        self._drop()

    def _missing(self) -> set[str]:
        """The parameters that had no gradient on any rank: of experts that no token chose."""
        names = [f"{unit.name}.{name}" for unit in self._units for name in unit.trained]
        own = {f"{unit.name}.{name}" for unit in self._units for name in unit.seen}
        seen = torch.tensor([name in own for name in names], dtype=torch.uint8, device=self._device)
        dist.all_reduce(seen, dist.ReduceOp.MAX)
        return {name for name, yes in zip(names, seen.tolist(), strict=True) if not yes}

    def _clear(self) -> None:
        for parameter in self._shards.parameters.values():
            parameter.grad = None

    def _drop(self) -> None:
        for total in self._sums:
            total.total = None


class Sharded:
    """A forward pass over a model that is divided among `ranks`, and all that belongs to it.

    in_fp8: how its FP8 linears are gathered; False: in high precision, which sends more, and runs every recipe and
    `Forward.observe`; None: in FP8 where the recipe allows it. retained: the linears that stay in high precision.
    """

    def __init__(
        self, config: TrainConfig, source: Path, retained: Collection[str], ranks: Ranks, in_fp8: bool | None = None
    ) -> None:
        recipe = config.fp8_recipe
        self._second = partial(Sharded, source=source, retained=retained, ranks=ranks, in_fp8=False)
        self._config = config
        decoder, checkpoint = outline(source, torch.float32)
        if recipe is not None:
            convert(decoder, skip=(decoder.head_name, *retained))
        self.why_not_fp8 = why_not_gathered(recipe)
        self.in_fp8 = self.why_not_fp8 is None if in_fp8 is None else in_fp8
        self.forward = Forward(decoder, recipe, ranks=ranks, recompute=config.recompute, device=config.device)
        self.units = _divided(self.forward, checkpoint, config, self.in_fp8)
        modules = [module for module in self.forward.network.modules() if isinstance(module, FSDPModule)]
        self.sums = [OrderedSum(ranks.size) for _ in modules]
        for module, total in zip(modules, self.sums, strict=True):
            module.set_custom_reduce_scatter(total)  # type: ignore[arg-type]  # whose base class is private
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self.shards = Shards(dict(decoder.named_parameters()), ranks)

    def in_high_precision(self) -> Forward:
        """A second model, read again, whose weights are gathered as they are; it keeps little of its layers."""
        return self._second(replace(self._config, recompute=True)).forward

    def norm(self, grads: Mapping[str, Tensor]) -> float:
        """Of all gradients; see `sharded_norm`."""
        return sharded_norm(self.shards, grads)

    def asking(self, tensors: Mapping[str, Tensor], owners: Mapping[str, str]) -> Asking:
        """For a checkpoint of these tensors; see `Asking`."""
        return Asking(self.shards, tensors, owners)

    def exchange(self) -> ShardedExchange:
        """For the microbatches of one step."""
        return ShardedExchange(self.shards, self.units, self.sums)


def described(sharded: Sharded | None) -> str:
    """What the start of a run says; None: of one process."""
    if sharded is None:
        return "There is one process, so nothing is divided (fsdp)"
    size = sharded.shards.ranks.size
    how = "in FP8" if sharded.in_fp8 else f"in high precision, because {sharded.why_not_fp8}"
    return f"Weights, gradients and moments are divided among {size} processes (FSDP2); layers are gathered {how}"


def _divided(forward: Forward, checkpoint: Checkpoint, config: TrainConfig, in_fp8: bool) -> list[Unit]:
    """Reads the weights, and divides them: the units of the layers."""
    decoder, device = forward.network.decoder, config.device
    # A BF16 model rounds a weight before it is quantized; here the same is done to the masters when they are gathered.
    through = torch.bfloat16 if config.master_weights == "optimizer" else None
    mesh = DeviceMesh.from_group(default_group(), torch.device(device).type)
    peers, rest, units = Peers.of(decoder), list(checkpoint), list[Unit]()
    names_of = {module: name for name, module in decoder.named_modules()}
    for index, part in enumerate(decoder.parts):
        names = decoder.named_in(index, rest)
        fill(decoder, checkpoint, names, torch.float32, device)
        rest = sorted(set(rest).difference(names))
        if in_fp8:
            gather_in_fp8(part, peers, through)
        units.append(Unit(part, names_of[part], _as_is(forward, names_of[part], through), config.recompute))
        divide_unit(units[-1], mesh)
    fill(decoder, checkpoint, rest, torch.float32, device)
    decoder.tie()
    forward.network.units = nn.ModuleList(units)
    divide_rest(forward.network, units, mesh)
    settle_shards(forward.network)
    return units


def _as_is(forward: Forward, layer: str, through: torch.dtype | None) -> set[str]:
    """The weights of a layer, by their names in it, that are not cast to BF16 before they are used."""
    prefix = f"decoder.{layer}."
    names = {name.removeprefix(prefix) for name in forward.as_is if name.startswith(prefix)}
    return names if through is None else {name for name in names if keeps_fp32(name)}
