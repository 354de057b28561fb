"""A directory becomes a forward pass over shards. Layer after layer is read, whole, and divided: beside its own rows a
process holds one layer at a time, and then the embedding and the head.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fp8serve.fp8.conversion import convert
from fp8serve.fp8.distributed import default_group
from fp8serve.fp8.fsdp import Peers, gather_in_fp8
from fp8serve.fp8.recipe import why_not_gathered
from fp8serve.fp8.torch_private import settle_shards
from fp8serve.model.checkpoint import Checkpoint, fill, outline
from fp8serve.model.config.mixture import keeps_fp32
from fp8serve.ranks import Ranks
from fp8serve.train.config import TrainConfig
from fp8serve.train.forward import Forward
from fp8serve.train.sharded.asking import Asking
from fp8serve.train.sharded.norm import sharded_norm
from fp8serve.train.sharded.rows import Shards
from fp8serve.train.sharded.sums import OrderedSum, ShardedExchange
from fp8serve.train.sharded.units import Unit, divide_rest, divide_unit


class Sharded:
    """A forward pass over a model that is divided among `ranks`, and all that belongs to it.

    in_fp8: how its FP8 linears are gathered; False: in high precision, which sends more, and runs every recipe and
    `Forward.observe`; None: in FP8 where the recipe allows it. kept: the linears that stay in high precision.
    """

    def __init__(
        self, config: TrainConfig, source: Path, kept: Collection[str], ranks: Ranks, in_fp8: bool | None = None
    ) -> None:
        recipe = config.fp8_recipe
        self._second = partial(Sharded, source=source, kept=kept, ranks=ranks, in_fp8=False)
        self._config = config
        decoder, checkpoint = outline(source, torch.float32)
        if recipe is not None:
            convert(decoder, skip=(decoder.head_name, *kept))
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
