"""FSDP2 with its all-gather in FP8: one byte a weight element instead of BF16's two or FP32's four.

    convert(model)
    gather_in_fp8(model)                         # before fully_shard
    for block in model.blocks: fully_shard(block)
    fully_shard(model)
    with autocast(recipe=recipe): loss = model(x)

Each rank holds its rows of a weight in high precision. Before an all-gather it casts them with the scale of the *whole*
weight, so the gathered data equal those of a single process, bit for bit:

* delayed: the scale is known beforehand and equal on all ranks, because the amaxes are reduced over the group of the
  `autocast`; it must span the ranks that share the weight. The cast finds the shard's own amax in the same read. It is
  gathered with the data, four bytes, or reduced where the rows are uneven, so that any rank on which the layer runs
  stages the amax of the whole weight: an expert of a mixture may run on one rank only, or in one microbatch.
* current: the scale needs the amax of the whole weight. The first gather of a forward pass takes the amaxes of all
  shards of the model and reduces them with a single MAX (and one more over a tensor-parallel group). Each amax is used
  once: when a weight is gathered a second time, all are computed again.

The FP8 data are kept with the shard (1 / ranks bytes an element) for the all-gather of the backward pass, which must
send the data of the forward pass although the scale has changed by then, and for the following microbatches if the
`autocast` announces them (microbatch.py). Two forward passes before one backward pass share FSDP's only buffer: the
first's gradients are then computed with the second's data and scale.

FSDP2's extension points are methods of a tensor, so this module needs two tensor subclasses: a rank holds a
`ShardedWeight`, and a layer sees a `GatheredWeight`. The latter has FP8 data in FSDP's own buffer (which FSDP frees and
refills, also under the tensors that autograd has saved) and no high-precision values. Everything that needs such values
is refused with an error: row-wise and block recipes, whose two directions would gather two sets of data, high-precision
fprop or dgrad, and a forward pass outside of `autocast`. FSDP itself, without `gather_in_fp8`, serves them all in high
precision.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from fp8serve.errors import RecipeError
from fp8serve.fp8 import autocast as contexts
from fp8serve.fp8.casting import Operand, Quantized, cast_by_amax, cast_delayed
from fp8serve.fp8.distributed import one_scale
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.microbatch import Retained
from fp8serve.fp8.ops import arithmetic
from fp8serve.fp8.recipe import Recipe, delayed
from fp8serve.fp8.steps import Step
from fp8serve.fp8.torch_private import backward_pass, map_tensors, plain_torch_function, preserving_version, wrapper

# The functions that FSDP2, DTensor and `nn.Module` call to shard, move and load a parameter: the result is again a
# shard.
_KEEP = {
    getattr(torch.ops.aten, name).default
    for name in ("detach", "clone", "empty_like", "new_zeros", "view", "as_strided", "_to_copy", "_pin_memory")
} | {torch.ops.aten.slice.Tensor, torch.ops.aten.split.Tensor}


class WholeAmax(NamedTuple):
    """The amax [] of a whole weight that no cast has used yet; found by the ranks in one step."""

    value: Tensor
    step: "weakref.ref[Step]"


class Peers:
    """The layers whose weights are gathered together; they find their amaxes in one collective."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        self._layers = [weakref.ref(layer) for layer in layers]

    @classmethod
    def of(cls, module: nn.Module) -> "Peers":
        """Every `Linear` inside `module`."""
        return cls([layer for layer in module.modules() if isinstance(layer, Linear)])

    def _shards(self, mesh: DeviceMesh) -> list["ShardedWeight"]:
        """The shards over `mesh` at this moment; the same ones on every rank."""
        weights = [layer.weight for layer in (ref() for ref in self._layers) if layer is not None]
        over_mesh = [w for w in weights if isinstance(w, DTensor) and w.device_mesh == mesh]
        shards = {id(w): w._local_tensor for w in over_mesh}  # a shared weight counts once
        return [s for s in shards.values() if isinstance(s, ShardedWeight)]

    def _sharers(self) -> list[Any]:
        """The tensor-parallel groups that divide weights before FSDP2 divides them; the same ones on every rank."""
        groups = {id(g): g for layer in (ref() for ref in self._layers) if (g := getattr(layer, "group", None))}
        return list(groups.values())

    def whole_amax(self, shard: "ShardedWeight", mesh: DeviceMesh, group: dist.ProcessGroup) -> Tensor:
        """The amax of the shard's whole weight; the first to ask in a pass finds those of all shards over `mesh`.

        Each amax is handed out once. Gathers are collectives themselves, so all ranks compute new amaxes at the same
        time.
        """
        step = contexts.step()
        if shard.whole is None or shard.whole.step() is not step:
            shards = self._shards(mesh)
            amaxes = torch.stack([arithmetic.amax(s.seen) for s in shards])
            for members in (group, *self._sharers()):
                dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=members)
            for other, amax in zip(shards, amaxes.unbind(), strict=True):
                other.whole = WholeAmax(amax, weakref.ref(step))
        whole, shard.whole = cast(WholeAmax, shard.whole), None
        return whole.value


class Cast(NamedTuple):
    """FP8 data [rows, K] and their scale_inv []; the amax [] of a shard, if it is still to be staged."""

    q: Tensor
    scale_inv: Tensor
    amax: Tensor | None


class ShardedWeight(torch.Tensor):
    """A rank's rows [n, K] of a weight, in high precision (`hp`), that FSDP2 gathers in FP8.

    through: the dtype that rows are rounded to before they are quantized; None: they are not.
    """

    hp: Tensor
    peers: Peers
    through: torch.dtype | None
    whole: WholeAmax | None
    sent: Cast | None  # by the last forward pass
    retained: Retained[Cast]  # by the first microbatch
    unstaged: Tensor | None  # the whole weight's amax in that cast, until the layer has run here in some microbatch

    @staticmethod
    def __new__(cls, hp: Tensor, peers: Peers, through: torch.dtype | None = None) -> "ShardedWeight":
        place = {"strides": hp.stride(), "storage_offset": hp.storage_offset()}
        kind = {"dtype": hp.dtype, "device": hp.device, "requires_grad": hp.requires_grad}
        return wrapper(cls, hp.size(), **place, **kind)  # type: ignore[no-any-return]

    def __init__(self, hp: Tensor, peers: Peers, through: torch.dtype | None = None) -> None:
        self.hp, self.peers, self.through = hp, peers, through
        self.whole = self.sent = self.unstaged = None
        self.retained = Retained()

    __torch_function__ = plain_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute on `hp`; the result of a reshape, move or copy is a shard again."""
        out = func(*map_tensors(_plain, args), **map_tensors(_plain, kwargs or {}))
        first = args[0] if args else None
        if not isinstance(first, ShardedWeight):
            return out
        if out is first.hp:  # in place
            return first
        return map_tensors(lambda t: ShardedWeight(t, first.peers, first.through), out) if func in _KEEP else out

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.hp!r})"

    @property
    def seen(self) -> Tensor:
        """The rows as the quantizer sees them."""
        return self.hp if self.through is None else self.hp.to(self.through)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[torch.Size, Cast, bool]]:
        """This rank's rows, quantized, as uint8 [ceil(N / ranks), K]: in a backward pass those of the forward pass.
        Where all ranks have as many rows, also the four bytes of their amax."""
        in_backward = backward_pass() is not None
        sent = self.sent
        if sent is None or not in_backward:
            sent = self._quantized(mesh, cast(Linear, module))
            self.sent = sent._replace(amax=None)  # the layer stages it once
        is_retained = not in_backward and _usable(mesh).is_first_microbatch is not None
        about = outer_size, sent, is_retained
        data, missing = sent.q.view(torch.uint8), -(-outer_size[0] // mesh.size()) - len(sent.q)
        if outer_size[0] % mesh.size() == 0:
            amax = torch.zeros((), device=data.device) if sent.amax is None else sent.amax
            return (data, amax.reshape(1).view(torch.uint8)), about
        if sent.amax is not None:  # FSDP2 takes nothing but the rows where they are uneven
            dist.all_reduce(sent.amax, dist.ReduceOp.MAX, mesh.get_group())
        return (F.pad(data, (0, 0, 0, missing)),), about

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], sent: tuple[torch.Size, Cast, bool], dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight that the layer sees; `out` is that of an earlier gather, whose data FSDP has just refilled."""
        size, mine, is_retained = sent
        if mine.amax is not None and len(outputs) > 1:
            mine = mine._replace(amax=outputs[1].view(torch.float32).max().view_as(mine.amax))
        if is_retained:
            self.unstaged = self.unstaged if mine.amax is None else mine.amax
            mine = mine._replace(amax=self.unstaged)
        if out is not None:
            out.renew(mine)
            return None
        q = outputs[0].view(mine.q.dtype)[: size[0]]
        return GatheredWeight(Cast(q, mine.scale_inv.clone(), mine.amax), dtype, self), ()

    def _quantized(self, mesh: DeviceMesh, layer: Linear) -> Cast:
        """Cast now, or use the first microbatch's cast; only a new cast has an amax to stage."""
        context, fresh = _usable(mesh), []

        def make() -> Cast:
            fresh.append(self._cast_rows(mesh, layer, context.recipe))
            return fresh[0]._replace(amax=None)

        # DTensor counts the writes that are made through it; the shard below does not see them all.
        about = (context.recipe, layer.weight._version)
        retained = self.retained.get(self.hp, about, context.is_first_microbatch, make)
        return fresh[0] if fresh else retained

    def _cast_rows(self, mesh: DeviceMesh, layer: Linear, recipe: Recipe) -> Cast:
        spec = recipe.specs.linear["weight"]
        if (rules := delayed(recipe)) is not None:
            operand, amax = cast_delayed(self.seen, spec, layer.delayed_states(rules)["weight"].scale, columnwise=False)
            return Cast(*cast(Quantized, operand.rowwise), amax)
        amax = self.peers.whole_amax(self, cast(DTensor, layer.weight).device_mesh, mesh.get_group())
        return Cast(*cast_by_amax(self.seen, amax, spec), None)


class GatheredWeight(torch.Tensor):
    """A whole weight [N, K] that exists in FP8 only; its dtype is that of its gradient."""

    quantized: Cast  # q [N, K] in FSDP's buffer; amax of all rows, until it is staged
    shard: ShardedWeight

    @staticmethod
    def __new__(cls, quantized: Cast, dtype: torch.dtype, shard: ShardedWeight) -> "GatheredWeight":
        return wrapper(cls, quantized.q.size(), dtype=dtype, device=quantized.q.device)  # type: ignore[no-any-return]

    def __init__(self, quantized: Cast, dtype: torch.dtype, shard: ShardedWeight) -> None:
        self.quantized, self.shard = quantized, shard

    def renew(self, sent: Cast) -> None:
        """Take the scale of data that FSDP has just gathered; unseen by autograd, like FSDP's refilling of `q`."""
        with preserving_version(self.quantized.scale_inv):
            self.quantized.scale_inv.copy_(sent.scale_inv)
        self.quantized = self.quantized._replace(amax=sent.amax)

    def received_quantized(self, recording: bool) -> tuple[Operand, Tensor | None]:
        """The weight for both directions (a view, so that FSDP's buffer stays the only copy) and an amax to stage."""
        q, scale_inv, amax = self.quantized
        if recording:
            self.quantized = self.quantized._replace(amax=None)
            self.shard.unstaged = None
        return Operand(Quantized(q, scale_inv), Quantized(q.t(), scale_inv)), amax

    __torch_function__ = plain_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The calls of FSDP and `nn.Parameter` on an unsharded parameter; it has no values for anything else."""
        self = next(a for a in args if isinstance(a, GatheredWeight))
        if func in (torch.ops.aten.detach.default, torch.ops.aten.as_strided.default):
            return GatheredWeight(self.quantized, self.dtype, self.shard)
        if func is torch.ops.aten.zeros_like.default:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        raise RecipeError(
            f"This weight was gathered in FP8 and has no high-precision values for {func}; run the layer inside an "
            "autocast with a delayed or current recipe, or shard the model without gather_in_fp8."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({self.quantized!r})"


def _plain(value: Any) -> Any:
    return value.hp if isinstance(value, ShardedWeight) else value


def _usable(mesh: DeviceMesh) -> contexts.Frame:
    """The context in force, which must quantize weights with one scale a tensor that the ranks of `mesh` share."""
    context = contexts.current()
    if context is None or not context.enabled:
        raise RecipeError(
            "A model sharded with gather_in_fp8 runs inside autocast only; shard it without, or evaluate inside one."
        )
    recipe = context.recipe
    if any(recipe.override_linear_precision[:2]):
        raise RecipeError(
            f"override_linear_precision={recipe.override_linear_precision} needs high-precision weights for fprop or "
            "dgrad, but gather_in_fp8 gathers FP8 data; leave one of them out."
        )
    one_scale(recipe, context.group, mesh.get_group(), "gather_in_fp8")
    return context


def gather_in_fp8(module: nn.Module, peers: Peers | None = None, through: torch.dtype | None = None) -> nn.Module:
    """Let FSDP2 all-gather the weights of every `Linear` inside `module` in FP8; call before `fully_shard`.

    Divide tensor-parallel layers first (`parallelize`); FSDP2 then shards them over the other dimension of the mesh.

    For delayed recipes and current ones with a scale per tensor; anything else is refused with RecipeError in the
    forward pass. peers: of a model whose modules are handed in one after the other, those of all. `through`: weights
    are rounded to this dtype before they are quantized, as those of a BF16 model are. Returns module.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, Linear)]
    peers = Peers(layers) if peers is None else peers
    shared: dict[int, nn.Parameter] = {}
    for layer in layers:
        weight = layer.weight
        if id(weight) not in shared:
            sharded = ShardedWeight(weight.detach(), peers, through)
            shared[id(weight)] = nn.Parameter(sharded, requires_grad=weight.requires_grad)
        layer.weight = shared[id(weight)]
    return module


def local_rows(divided: Tensor) -> Tensor:
    """This rank's rows of a parameter that FSDP2 has divided, or of its gradient: a plain tensor in high precision, in
    the same memory.

    FSDP2 may move them at the first forward pass, but not later.
    """
    rows = divided.detach()
    return cast(Tensor, _plain(rows._local_tensor if isinstance(rows, DTensor) else rows))


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a sharded model with whole tensors, as the unsharded model has it; a collective."""
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}


def load_whole_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load what `whole_state`, or the `state_dict` of the unsharded model, gave; every rank calls it with the same."""
    places = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
    model.load_state_dict(
        {
            n: distribute_tensor(v, places[n].device_mesh, places[n].placements) if n in places else v
            for n, v in state.items()
        }
    )
