"""FSDP2 with its all-gather in FP8: one byte a weight element instead of BF16's two or FP32's four.

    convert(model)
    gather_in_fp8(model)                         # before fully_shard
    for block in model.blocks: fully_shard(block)
    fully_shard(model)
    with autocast(recipe=recipe, amax_reduction_group=group): loss = model(x)

Each rank holds its rows of a weight in high precision. Before an all-gather it casts them, with the scale of the *whole*
weight, so the gathered codes are those that one process would have made, bit for bit:

* delayed: the scale is known beforehand and equal on all ranks, because the amaxes are reduced over the group of the
  `autocast`; it must span the ranks that share the weight. The shard's own amax is staged in the same read.
* current: the scale needs the amax of the whole weight. The first gather of a step takes the amax of every shard of the
  model and reduces them with one MAX, not one for each weight.

The codes are kept with the shard (1 / ranks bytes an element) for the backward pass's second all-gather, which must send
what the forward pass computed with although the scale has moved on by then, and while gradients accumulate, when a
weight is cast once.

FSDP2's extension points are methods of a tensor, so two tensor subclasses are needed here, and only here: what a rank
holds (`ShardedWeight`), and what a layer sees once it is gathered (`GatheredWeight`), which has the codes in FSDP's own
buffer (freed and filled again by FSDP, also under the tensors that autograd has saved) and no high-precision values.
Hence what needs those is refused in words: row-wise and block recipes, whose two directions would gather two sets of
codes, high-precision fprop or dgrad, and a forward pass outside of `autocast`. FSDP itself, without `gather_in_fp8`,
serves them all in high precision.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from fp8serve.errors import RecipeError
from fp8serve.fp8 import autocast as contexts
from fp8serve.fp8 import reference
from fp8serve.fp8.casting import Codes, Pair, cast_by_amax
from fp8serve.fp8.distributed import one_scale
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.ops import DTYPES
from fp8serve.fp8.recipe import DelayedScaling, Float8CurrentScaling

# What FSDP2, DTensor and `nn.Module` do to a parameter while they shard, move and load it: the result is a shard again.
_KEEP = {
    getattr(torch.ops.aten, name).default
    for name in ("detach", "clone", "empty_like", "new_zeros", "view", "as_strided", "_to_copy", "_pin_memory")
} | {torch.ops.aten.slice.Tensor, torch.ops.aten.split.Tensor}


class Peers:
    """The layers whose weights are gathered together; they find their amaxes in one collective."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        self._layers = [weakref.ref(layer) for layer in layers]
        self._session: weakref.ref[Any] = weakref.ref(self)

    def shards(self, mesh: DeviceMesh) -> list["ShardedWeight"]:
        """Those over `mesh` that are sharded at this moment; the same ones on every rank."""
        weights = [layer.weight for layer in (ref() for ref in self._layers) if layer is not None]
        over_mesh = [w for w in weights if isinstance(w, DTensor) and w.device_mesh == mesh]
        return [w._local_tensor for w in over_mesh if isinstance(w._local_tensor, ShardedWeight)]

    def synchronize(self, shard: "ShardedWeight", mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
        """Give every shard over `mesh` the amax of its whole weight, once in a step."""
        session = contexts.session()
        if self._session() is session and shard.amax is not None:
            return
        self._session = weakref.ref(session)
        shards = self.shards(mesh)
        amaxes = torch.stack([reference.amax(s.hp) for s in shards])
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
        for found, amax in zip(shards, amaxes.unbind(), strict=True):
            found.amax = amax


class Cast(NamedTuple):
    """A shard's codes, float8 [ceil(N / ranks), K], the scale_inv [] they were made with, and what they were made from."""

    q: Tensor
    scale_inv: Tensor
    key: tuple[Any, ...]


@dataclass(frozen=True)
class Gathering:
    """What one all-gather passes from its beginning to its end. size: of the whole weight, [N, K]."""

    size: torch.Size
    fp8: torch.dtype
    scale_inv: Tensor


class ShardedWeight(torch.Tensor):
    """A rank's rows [n, K] of a weight, in high precision (`hp`), that FSDP2 gathers as FP8 codes."""

    hp: Tensor
    peers: Peers
    amax: Tensor | None
    cast: Cast | None

    @staticmethod
    def __new__(cls, hp: Tensor, peers: Peers) -> "ShardedWeight":
        options = {"dtype": hp.dtype, "device": hp.device, "requires_grad": hp.requires_grad}
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, hp.size(), strides=hp.stride(), storage_offset=hp.storage_offset(), **options
        )
        return cast(ShardedWeight, made)

    def __init__(self, hp: Tensor, peers: Peers) -> None:
        self.hp, self.peers = hp, peers
        self.amax = self.cast = None

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Compute on `hp`; what only reshapes, moves or copies the shard is a shard again."""
        out = func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))
        first = args[0] if args else None
        if not isinstance(first, ShardedWeight):
            return out
        if out is first.hp:  # in place
            return first
        return tree_map(lambda t: ShardedWeight(t, first.peers), out) if func in _KEEP else out

    def __repr__(self, **kwargs: Any) -> str:
        return f"ShardedWeight({self.hp!r})"

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Gathering]:
        """Codes of this rank's rows as uint8 [ceil(N / ranks), K]; cast anew only when the weight may have changed."""
        layer = cast(Linear, module)
        in_backward = torch._C._current_graph_task_id() != -1
        if self.cast is None or not (in_backward or self._holds(layer)):
            self.cast = self._cast_rows(mesh, -(-outer_size[0] // mesh.size()), layer)
        return (self.cast.q.view(torch.uint8),), Gathering(outer_size, self.cast.q.dtype, self.cast.scale_inv)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], gathering: Gathering, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight that the layer sees; `out` is the one of an earlier gather, whose codes FSDP has just renewed."""
        if out is not None:
            _renew(cast(GatheredWeight, out).scale_inv, gathering.scale_inv)
            return None
        q = outputs[0].view(gathering.fp8)[: gathering.size[0]]
        return GatheredWeight(q, gathering.scale_inv.clone(), dtype), ()

    def _key(self, layer: Linear) -> tuple[Any, ...]:
        context = contexts.current()
        return layer.weight._version, self.hp._version, None if context is None else context.recipe

    def _holds(self, layer: Linear) -> bool:
        """Whether gradients accumulate and the codes are still those of the weight."""
        return self.cast is not None and layer.weight.grad is not None and self.cast.key == self._key(layer)

    def _cast_rows(self, mesh: DeviceMesh, rows: int, layer: Linear) -> Cast:
        context = _usable(mesh, layer)
        if isinstance(context.recipe, DelayedScaling):
            q, scale_inv = cast(Codes, layer.call(context).cast("weight", self.hp, True, False).rows)
        else:
            q, scale_inv = self._cast_current(cast(Float8CurrentScaling, context.recipe), mesh, layer)
        padded = F.pad(q.view(torch.uint8), (0, 0, 0, rows - q.shape[0])).view(q.dtype)
        return Cast(padded, scale_inv, self._key(layer))

    def _cast_current(self, recipe: Float8CurrentScaling, mesh: DeviceMesh, layer: Linear) -> tuple[Tensor, Tensor]:
        self.peers.synchronize(self, cast(DTensor, layer.weight).device_mesh, mesh.get_group())
        return cast_by_amax(self.hp, cast(Tensor, self.amax), DTYPES[recipe.fp8_format.forward], recipe.power_2_scale)


class GatheredWeight(torch.Tensor):
    """A whole weight [N, K] that exists as FP8 codes only; its dtype is that of the gradient it wants.

    q: float8 [N, K], in FSDP's buffer. scale_inv: FP32 [].
    """

    q: Tensor
    scale_inv: Tensor

    @staticmethod
    def __new__(cls, q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> "GatheredWeight":
        made = torch.Tensor._make_wrapper_subclass(cls, q.size(), dtype=dtype, device=q.device)  # type: ignore[attr-defined]
        return cast(GatheredWeight, made)

    def __init__(self, q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> None:
        self.q, self.scale_inv = q, scale_inv

    @property
    def pair(self) -> Pair:
        """The codes for both directions: a view, which FSDP frees and fills with the rest, and the GEMM copies."""
        return Pair(Codes(self.q, self.scale_inv), Codes(self.q.t(), self.scale_inv))

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """What FSDP and `nn.Parameter` do to an unsharded parameter; it has no values for anything else."""
        self = next(a for a in args if isinstance(a, GatheredWeight))
        if func in (torch.ops.aten.detach.default, torch.ops.aten.as_strided.default):
            return GatheredWeight(self.q, self.scale_inv, self.dtype)
        if func is torch.ops.aten.zeros_like.default:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        raise RecipeError(
            f"This weight was gathered in FP8 and has no high-precision values for {func}; run the layer inside an "
            "autocast with a delayed or current recipe, or shard the model without gather_in_fp8."
        )

    def __repr__(self, **kwargs: Any) -> str:
        return f"GatheredWeight({list(self.shape)}, scale_inv={self.scale_inv!r})"


def _plain(value: Any) -> Any:
    return value.hp if isinstance(value, ShardedWeight) else value


def _renew(scale_inv: Tensor, value: Tensor) -> None:
    """In place and unseen by autograd, like FSDP's own refilling of the codes that go with it."""
    with torch.autograd._unsafe_preserve_version_counter(scale_inv):
        scale_inv.copy_(value)


def _usable(mesh: DeviceMesh, layer: Linear) -> contexts.autocast:
    """The context in force, which must quantize weights with one scale a tensor that the ranks of `mesh` share."""
    context = contexts.current()
    if context is None or not context.enabled:
        raise RecipeError(
            "A model sharded with gather_in_fp8 runs inside autocast only; shard it without, or evaluate inside one."
        )
    recipe = context.recipe
    if any(recipe.override_linear_precision[:2]):
        raise RecipeError(
            f"override_linear_precision={recipe.override_linear_precision} needs weights in high precision for fprop or "
            "dgrad, but gather_in_fp8 gathers FP8 codes; leave one of them out."
        )
    one_scale(context, mesh.get_group(), "gather_in_fp8")
    return context


def gather_in_fp8(module: nn.Module) -> nn.Module:
    """Let FSDP2 all-gather the weights of every `Linear` inside `module` in FP8; call before `fully_shard`.

    For delayed recipes and current ones with a scale per tensor; anything else is refused with RecipeError in the
    forward pass. Returns module.
    """
    layers = [layer for layer in module.modules() if type(layer) is Linear]
    peers = Peers(layers)
    shared: dict[int, nn.Parameter] = {}
    for layer in layers:
        weight = layer.weight
        if id(weight) not in shared:
            made = ShardedWeight(weight.detach(), peers)
            shared[id(weight)] = nn.Parameter(made, requires_grad=weight.requires_grad)
        layer.weight = shared[id(weight)]
    return module
