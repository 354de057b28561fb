"""Loads a model directory as a sharded forward pass. No process ever holds the whole model.

Loading reads one full layer after the other and shards it, then the embedding and the head. Besides its shards, a
process holds one full layer at a time.

FSDP units: each layer is a unit, and the embedding and the head together are one. The weights of a unit are gathered
before its forward and backward pass and freed afterwards. FSDP2 casts all weights of a unit to one dtype. If the
trainer casts all of them to BF16 (`train.forward`), FSDP2 gathers BF16. An FP8 layer is gathered without casts, because
its quantizer reads FP32 weights. Its linear layers are gathered in FP8 if the recipe allows it (`fp8.fsdp`), and `Unit`
casts its norms. Parameters that are not trained are not sharded. On a CPU the gathered weights are allocated on the
heap between activations with a longer life. Without `trim`, glibc would lose more memory to fragmentation than a
process needs for its shards.

Gradient sums: FSDP2 hands over the gradients of a unit after its backward pass. Every rank receives its rows of the
gradients of all N ranks and adds them to its FP32 sum one after the other. This is the order of a single process,
whereas a reduce-scatter would add the N gradients first. A step holds one sum for each unit, with 1/N of its size. The
communication volume is that of a reduce-scatter, and the N parts of one unit are in memory at once. A rank without a
microbatch in the last round of a step repeats rank 0's microbatch, because the other ranks need its shards. Its
gradients are not added, and the amaxes do not change, because they are maxima.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
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
from fp8serve.fp8.recipe import fp8_gather_obstacle
from fp8serve.fp8.torch_private import initialize_fsdp_shards
from fp8serve.model.checkpoint import Checkpoint, load_parameters, open_trainable
from fp8serve.model.config.mixture import needs_fp32
from fp8serve.model.storage.memory import trim
from fp8serve.ranks import Ranks
from fp8serve.train.config import TrainConfig
from fp8serve.train.forward import Forward
from fp8serve.train.sharded.shards import Shards, sharded_norm
from fp8serve.train.state import records_kv
from fp8serve.train.train_step import NO_GRADIENT

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
NO_CAST = MixedPrecisionPolicy(cast_forward_inputs=False)


class Unit(nn.Module):
    """A layer that FSDP2 gathers as one unit. It is not registered in the model, so parameter names do not change.

    `name` is the layer's name in the model. Weights in `uncast` are not cast to BF16. `recompute` enables activation
    checkpointing. `names_with_gradient` holds the names of the weights that have had a gradient in this step.
    """

    def __init__(self, layer: nn.Module, name: str, uncast: Collection[str], recompute: bool) -> None:
        super().__init__()
        self.layer, self.name, self.uncast, self.recompute = layer, name, frozenset(uncast), recompute
        self.trained_names = [n for n, parameter in layer.named_parameters() if parameter.requires_grad]
        self.names_with_gradient: set[str] = set()

    def forward(self, x: Tensor, *arguments: Any) -> Tensor:
        trim()
        if not torch.is_grad_enabled():
            return self._run(x, *arguments)
        x = _FillMissingGradients.apply(x, self)  # type: ignore[no-untyped-call]
        if self.recompute:
            return checkpoint(self._run, x, *arguments, use_reentrant=False)  # type: ignore[no-any-return]
        return self._run(x, *arguments)

    def _run(self, x: Tensor, *arguments: Any) -> Tensor:
        weights = {n: p for n, p in self.layer.named_parameters() if n not in self.uncast and p.dtype != torch.bfloat16}
        casts = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        if not casts:
            return self.layer(x, *arguments)  # type: ignore[no-any-return]
        return functional_call(self.layer, casts, (x, *arguments))  # type: ignore[no-any-return]

    def fill_missing_gradients(self) -> None:
        """Records which weights have a gradient, and sets the others to NO_GRADIENT. All ranks must send gradients of
        the same weights, and other ranks may have gradients where this one has none."""
        trim()
        parameters = dict(self.layer.named_parameters())
        for name in self.trained_names:
            parameter = parameters[name]
            if parameter.grad is not None:
                self.names_with_gradient.add(name)
            else:
                parameter.grad = torch.full(
                    parameter.shape, NO_GRADIENT, dtype=parameter.dtype, device=parameter.device
                )


class _FillMissingGradients(torch.autograd.Function):
    """The identity on the input of a unit. Its backward runs after the backward pass of the unit's layer, and before
    FSDP2 reads the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: Unit) -> Tensor:
        ctx.unit = unit
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.unit.fill_missing_gradients()
        return dx, None


def shard_unit(unit: Unit, mesh: DeviceMesh) -> None:
    """Shards a layer's weights over the ranks of `mesh`. All ranks must hold equal weights."""
    frozen = {parameter for parameter in unit.parameters() if not parameter.requires_grad}
    all_cast = not any(name in unit.uncast for name in unit.trained_names)
    fully_shard(unit, mesh=mesh, mp_policy=BF16 if all_cast else NO_CAST, ignored_params=frozen)


def shard_root(network: nn.Module, units: Sequence[Unit], mesh: DeviceMesh) -> None:
    """Shards the embedding and the head, and makes `network` the root of all units."""
    in_units = {parameter for unit in units for parameter in unit.parameters()}
    frozen = {parameter for parameter in network.parameters() if not parameter.requires_grad}
    fully_shard(network, mesh=mesh, mp_policy=BF16, ignored_params=in_units | frozen, reshard_after_forward=True)


class OrderedGradientSum:
    """Replaces the reduce-scatter of a unit (`set_custom_reduce_scatter`): it adds gradients in the order of the ranks.

    Only the gradients of the first `active_ranks` ranks are added.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = self.active_ranks = world_size
        self.total: Tensor | None = None
        self._allocated = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for FSDP2, which calls this twice a round: first for the gradients that it sends, then for the
        output. The output is the running sum."""
        count = size[0]
        if self._allocated != count * self.world_size:
            self._allocated = count
            return torch.empty(count, dtype=dtype, device=device)
        self._allocated = 0
        if self.total is None:
            self.total = torch.full((count,), NO_GRADIENT, dtype=dtype, device=device)
        return self.total

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Adds this rank's part of all ranks' gradients to `output_tensor`. `input_tensor` holds this rank's gradients,
        one part after the other."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for part in received.view(self.world_size, -1)[: self.active_ranks]:
            output_tensor += part


class ShardedExchange:
    """Sums the gradients of one step into shards. Its methods are those of `train.train_step.GradientExchange`."""

    def __init__(self, shards: Shards, units: Sequence[Unit], sums: Sequence[OrderedGradientSum]) -> None:
        self._shards, self._units, self._sums = shards, units, sums
        self._device = next(iter(shards.masters.values())).device
        for unit in units:
            unit.names_with_gradient.clear()
        self._clear_sums()

    def start_round(self, active_ranks: int) -> None:
        """Must be called before each round, in which the first `active_ranks` ranks compute a microbatch."""
        for total in self._sums:
            total.active_ranks = active_ranks
        self._clear_gradients()

    def finish_round(self) -> None:
        """Does nothing: FSDP2 has already added the gradients."""

    def finish_step(self) -> None:
        """Sets `.grad` of the masters to the sums, or to None where no microbatch gave a gradient."""
        missing = self._without_gradient()
        for name, parameter in self._shards.parameters.items():
            grad = None if name in missing else parameter.grad
            self._shards.masters[name].grad = None if grad is None else local_rows(grad)
        self._clear_gradients()
        self._clear_sums()

    def _without_gradient(self) -> set[str]:
        """Returns the parameters that had no gradient on any rank, such as those of experts that no token chose."""
        names = [f"{unit.name}.{name}" for unit in self._units for name in unit.trained_names]
        local = {f"{unit.name}.{name}" for unit in self._units for name in unit.names_with_gradient}
        has_gradient = torch.tensor([name in local for name in names], dtype=torch.uint8, device=self._device)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
        return {name for name, value in zip(names, has_gradient.tolist(), strict=True) if not value}

    def _clear_gradients(self) -> None:
        for parameter in self._shards.parameters.values():
            parameter.grad = None

    def _clear_sums(self) -> None:
        for total in self._sums:
            total.total = None


class ShardedModel:
    """A model that is sharded over `ranks`, with its forward pass, its shards and its gradient sums.

    With `in_fp8` the FP8 linear layers are gathered in FP8, else in high precision, which sends more bytes but supports
    every recipe and `Forward.observe`. None means FP8 if the recipe allows it. `unquantized` are the linear layers in
    high precision.
    """

    def __init__(
        self, config: TrainConfig, source: Path, unquantized: Collection[str], ranks: Ranks, in_fp8: bool | None = None
    ) -> None:
        recipe = config.fp8_recipe
        self._config, self._source, self._unquantized = config, source, unquantized
        decoder, checkpoint = open_trainable(source, torch.float32)
        if recipe is not None:
            convert(decoder, skip=(decoder.head_name, *unquantized))
        self.fp8_obstacle = fp8_gather_obstacle(recipe)
        self.in_fp8 = self.fp8_obstacle is None if in_fp8 is None else in_fp8
        self.forward = Forward(
            decoder,
            recipe,
            ranks=ranks,
            recompute=config.recompute,
            device=config.device,
            records_kv=records_kv(config, source),
        )
        self.units = _load_units(self.forward, checkpoint, config, self.in_fp8)
        modules = [module for module in self.forward.network.modules() if isinstance(module, FSDPModule)]
        self.sums = [OrderedGradientSum(ranks.size) for _ in modules]
        for module, total in zip(modules, self.sums, strict=True):
            module.set_custom_reduce_scatter(total)  # type: ignore[arg-type]  # whose base class is private
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self.shards = Shards(dict(decoder.named_parameters()), ranks)

    def in_high_precision(self) -> Forward:
        """Returns the forward pass of a second model, loaded again, whose weights are gathered in high precision."""
        config = replace(self._config, recompute=True)  # so that the second model needs little memory
        return ShardedModel(config, self._source, self._unquantized, self.shards.ranks, in_fp8=False).forward

    def norm(self, grads: Mapping[str, Tensor]) -> float:
        """Returns the norm of all ranks' gradients."""
        return sharded_norm(self.shards, grads)

    def exchange(self) -> ShardedExchange:
        """Returns the exchange that sums the gradients of one step."""
        return ShardedExchange(self.shards, self.units, self.sums)


def describe(sharded: ShardedModel | None) -> str:
    """Returns the message about sharding at the start of a run. None means that the run has one process."""
    if sharded is None:
        return "There is one process, so fsdp shards nothing"
    size = sharded.shards.ranks.size
    dtype = "in FP8" if sharded.in_fp8 else f"in high precision, because {sharded.fp8_obstacle}"
    return f"Weights, gradients and moments are sharded over {size} processes (FSDP2); layers are gathered {dtype}"


def _load_units(forward: Forward, checkpoint: Checkpoint, config: TrainConfig, in_fp8: bool) -> list[Unit]:
    decoder, device = forward.network.decoder, config.device
    # If the model holds BF16 weights, a weight is rounded to BF16 before it is quantized. So gathered masters are, too.
    rounded_to = torch.bfloat16 if config.master_weights == "optimizer" else None
    mesh = DeviceMesh.from_group(default_group(), torch.device(device).type)
    peers, unread, units = Peers.of(decoder), list(checkpoint), list[Unit]()
    layer_names = {module: name for name, module in decoder.named_modules()}
    for index, layer in enumerate(decoder.parts):
        names = decoder.names_in_part(index, unread)
        load_parameters(decoder, checkpoint, names, torch.float32, device)
        unread = sorted(set(unread).difference(names))
        if in_fp8:
            gather_in_fp8(layer, peers, rounded_to)
        uncast = _uncast_weights(forward, layer_names[layer], rounded_to)
        units.append(Unit(layer, layer_names[layer], uncast, config.recompute))
        shard_unit(units[-1], mesh)
    load_parameters(decoder, checkpoint, unread, torch.float32, device)
    decoder.tie()
    forward.network.units = nn.ModuleList(units)
    shard_root(forward.network, units, mesh)
    initialize_fsdp_shards(forward.network)
    return units


def _uncast_weights(forward: Forward, layer: str, rounded_to: torch.dtype | None) -> set[str]:
    """Returns the weights of a layer that are not cast to BF16 before use, by their names within the layer."""
    prefix = f"decoder.{layer}."
    names = {name.removeprefix(prefix) for name in forward.uncast if name.startswith(prefix)}
    return names if rounded_to is None else {name for name in names if needs_fp32(name)}
