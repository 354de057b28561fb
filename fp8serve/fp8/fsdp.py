"""FSDP2 with an FP8 all-gather of weights: one byte per element instead of two in BF16 or four in FP32.

    convert(model)
    gather_in_fp8(model)                         # before fully_shard
    for block in model.blocks: fully_shard(block)
    fully_shard(model)
    with autocast(recipe=recipe): loss = model(x)

Each rank holds its rows of a weight in high precision. Before an all-gather it casts them with the scale of the *whole*
weight, so the gathered data are bit-equal to those of a single process:

* Delayed scaling: the scale is equal on all ranks, because amaxes are reduced over the group of the `autocast`, which
  must contain all ranks that share the weight. The cast computes the amax of the shard in the same read. The four bytes
  of the amax are gathered with the data, or all-reduced if the rows are uneven. So every rank on which the layer runs
  stages the amax of the whole weight, even if the layer (an expert of a mixture, for example) runs on one rank only or
  in one microbatch only.
* Current scaling: the scale needs the amax of the whole weight. The first gather of a forward pass computes the amaxes
  of all shards of the model and reduces them with one MAX (and one more over a tensor-parallel group). Each amax is
  used once: when a weight is gathered a second time, all amaxes are computed again.

The shard holds its FP8 data (1 / ranks bytes per element) for two purposes. The all-gather of the backward pass must
send the data of the forward pass, although the scale may have changed. And the following microbatches use them if the
`autocast` has `is_first_microbatch=False` (microbatch.py). Two forward passes before one backward pass share FSDP's
only buffer: the gradients of the first pass are then computed with the data and the scale of the second.

FSDP2's extension points are methods of a tensor, so this module has two tensor subclasses: a rank holds a
`ShardedWeight`, and a layer reads a `GatheredWeight`. A GatheredWeight has FP8 data in FSDP's own buffer and no
high-precision values. FSDP frees and refills this buffer even if autograd has saved tensors that use it. Whatever needs
high-precision values raises an error: row-wise and block recipes (whose two directions would need two sets of data),
high-precision fprop or dgrad, and a forward pass outside of `autocast`. FSDP2 without `gather_in_fp8` supports these in
high precision.
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
from fp8serve.fp8.casting import Operand, Quantized, cast_delayed, cast_with_amax
from fp8serve.fp8.distributed import check_shared_scale
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.microbatch import QuantizedWeightCache
from fp8serve.fp8.ops import arithmetic
from fp8serve.fp8.recipe import Recipe, as_delayed
from fp8serve.fp8.steps import Step
from fp8serve.fp8.torch_private import backward_pass, map_tensors, plain_torch_function, preserving_version, wrapper

# FSDP2, DTensor and `nn.Module` call these functions to shard, move and load a parameter. Their result is again a
# ShardedWeight.
_SHARD_PRESERVING = {
    getattr(torch.ops.aten, name).default
    for name in ("detach", "clone", "empty_like", "new_zeros", "view", "as_strided", "_to_copy", "_pin_memory")
} | {torch.ops.aten.slice.Tensor, torch.ops.aten.split.Tensor}


class WholeAmax(NamedTuple):
    """The amax [] of a whole weight, computed in `step`, that no cast has used yet."""

    value: Tensor
    step: "weakref.ref[Step]"


class Peers:
    """The layers of one model, whose amaxes are reduced in one collective."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        self._layers = [weakref.ref(layer) for layer in layers]

    @classmethod
    def of(cls, module: nn.Module) -> "Peers":
        """Returns the peers of a model: every `Linear` inside `module`."""
        return cls([layer for layer in module.modules() if isinstance(layer, Linear)])

    def _shards(self, mesh: DeviceMesh) -> list["ShardedWeight"]:
        """Returns the weights that are sharded over `mesh` at present, the same ones on every rank."""
        weights = [layer.weight for layer in (ref() for ref in self._layers) if layer is not None]
        over_mesh = [w for w in weights if isinstance(w, DTensor) and w.device_mesh == mesh]
        shards = {id(w): w._local_tensor for w in over_mesh}  # a shared weight counts once
        return [s for s in shards.values() if isinstance(s, ShardedWeight)]

    def _tensor_parallel_groups(self) -> list[Any]:
        """Returns the groups over which weights were sharded before FSDP2 sharded them, the same ones on every rank."""
        groups = {id(g): g for layer in (ref() for ref in self._layers) if (g := getattr(layer, "group", None))}
        return list(groups.values())

    def take_whole_amax(self, shard: "ShardedWeight", mesh: DeviceMesh, group: dist.ProcessGroup) -> Tensor:
        """Returns the amax of the shard's whole weight. The first call in a step computes those of all shards.

        Each amax is returned once. A gather is itself a collective, so all ranks compute new amaxes at the same time.
        """
        step = contexts.current_step()
        if shard.whole_amax is None or shard.whole_amax.step() is not step:
            shards = self._shards(mesh)
            amaxes = torch.stack([arithmetic.amax(s.rounded_rows) for s in shards])
            for amax_group in (group, *self._tensor_parallel_groups()):
                dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=amax_group)
            for other_shard, amax in zip(shards, amaxes.unbind(), strict=True):
                other_shard.whole_amax = WholeAmax(amax, weakref.ref(step))
        whole_amax, shard.whole_amax = cast(WholeAmax, shard.whole_amax), None
        return whole_amax.value


class QuantizedRows(NamedTuple):
    """FP8 data [rows, K] and their scale_inv [], and an amax [] if it was not staged yet."""

    q: Tensor
    scale_inv: Tensor
    amax: Tensor | None


class ShardedWeight(torch.Tensor):
    """A rank's rows [n, K] of a weight, in high precision (`hp`), which FSDP2 gathers in FP8.

    `quantize_from` is the dtype to which rows are rounded before they are quantized; None leaves them as they are.
    """

    hp: Tensor
    peers: Peers
    quantize_from: torch.dtype | None
    whole_amax: WholeAmax | None
    sent_rows: QuantizedRows | None  # the rows that the last forward pass sent
    row_cache: QuantizedWeightCache[QuantizedRows]  # the rows of the first microbatch
    unstaged_amax: Tensor | None  # of the whole weight in the first microbatch, until the layer has run on this rank

    @staticmethod
    def __new__(cls, hp: Tensor, peers: Peers, quantize_from: torch.dtype | None = None) -> "ShardedWeight":
        memory = {"strides": hp.stride(), "storage_offset": hp.storage_offset()}
        options = {"dtype": hp.dtype, "device": hp.device, "requires_grad": hp.requires_grad}
        return wrapper(cls, hp.size(), **memory, **options)  # type: ignore[no-any-return]

    def __init__(self, hp: Tensor, peers: Peers, quantize_from: torch.dtype | None = None) -> None:
        self.hp, self.peers, self.quantize_from = hp, peers, quantize_from
        self.whole_amax = self.sent_rows = self.unstaged_amax = None
        self.row_cache = QuantizedWeightCache()

    __torch_function__ = plain_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Computes on `hp`. The result of a reshape, move or copy is again a ShardedWeight."""
        out = func(*map_tensors(_to_plain, args), **map_tensors(_to_plain, kwargs or {}))
        first = args[0] if args else None
        if not isinstance(first, ShardedWeight):
            return out
        if out is first.hp:  # an in-place function
            return first
        if func not in _SHARD_PRESERVING:
            return out
        return map_tensors(lambda t: ShardedWeight(t, first.peers, first.quantize_from), out)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.hp!r})"

    @property
    def rounded_rows(self) -> Tensor:
        """The rows in the dtype from which they are quantized."""
        return self.hp if self.quantize_from is None else self.hp.to(self.quantize_from)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[torch.Size, QuantizedRows, bool]]:
        """Returns this rank's FP8 rows as uint8 [ceil(N / ranks), K], and metadata for `fsdp_post_all_gather`.

        A backward pass sends the rows of the forward pass. If all ranks have equally many rows, the four bytes of the
        amax are gathered with them.
        """
        is_backward = backward_pass() is not None
        rows = self.sent_rows
        if rows is None or not is_backward:
            rows = self._quantize_rows(mesh, cast(Linear, module))
            self.sent_rows = rows._replace(amax=None)  # the amax is staged only once
        is_cached = not is_backward and _checked_frame(mesh).is_first_microbatch is not None
        metadata = outer_size, rows, is_cached
        data, num_missing = rows.q.view(torch.uint8), -(-outer_size[0] // mesh.size()) - len(rows.q)
        if outer_size[0] % mesh.size() == 0:
            amax = torch.zeros((), device=data.device) if rows.amax is None else rows.amax
            return (data, amax.reshape(1).view(torch.uint8)), metadata
        if rows.amax is not None:  # with uneven rows FSDP2 gathers only one tensor
            dist.all_reduce(rows.amax, dist.ReduceOp.MAX, mesh.get_group())
        return (F.pad(data, (0, 0, 0, num_missing)),), metadata

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: tuple[torch.Size, QuantizedRows, bool],
        dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Returns the weight for the layer, or updates `out`, the weight of an earlier gather into the same buffer."""
        size, rows, is_cached = metadata
        if rows.amax is not None and len(outputs) > 1:
            rows = rows._replace(amax=outputs[1].view(torch.float32).max().view_as(rows.amax))
        if is_cached:
            self.unstaged_amax = self.unstaged_amax if rows.amax is None else rows.amax
            rows = rows._replace(amax=self.unstaged_amax)
        if out is not None:
            out.update_scale(rows)
            return None
        q = outputs[0].view(rows.q.dtype)[: size[0]]
        return GatheredWeight(QuantizedRows(q, rows.scale_inv.clone(), rows.amax), dtype, self), ()

    def _quantize_rows(self, mesh: DeviceMesh, layer: Linear) -> QuantizedRows:
        """Returns the quantized rows, possibly those of the first microbatch. Only new ones have an amax to stage."""
        frame, new_rows = _checked_frame(mesh), []

        def quantize() -> QuantizedRows:
            new_rows.append(self._cast_rows(mesh, layer, frame.recipe))
            return new_rows[0]._replace(amax=None)

        # The DTensor's version counts writes through the DTensor, some of which do not change the version of `hp`.
        dependencies = (frame.recipe, layer.weight._version)
        cached_rows = self.row_cache.get(self.hp, dependencies, frame.is_first_microbatch, quantize)
        return new_rows[0] if new_rows else cached_rows

    def _cast_rows(self, mesh: DeviceMesh, layer: Linear, recipe: Recipe) -> QuantizedRows:
        spec, rows = recipe.specs.linear["weight"], self.rounded_rows
        if (delayed := as_delayed(recipe)) is not None:
            layer.prepare(delayed.amax_history_len)
            operand, amax = cast_delayed(rows, spec, layer.scaling["weight"].scale, columnwise=False)
            return QuantizedRows(*cast(Quantized, operand.rowwise), amax)
        amax = self.peers.take_whole_amax(self, cast(DTensor, layer.weight).device_mesh, mesh.get_group())
        return QuantizedRows(*cast_with_amax(rows, amax, spec), None)


class GatheredWeight(torch.Tensor):
    """A whole weight [N, K] that has only FP8 data. Its dtype is the dtype of its gradient."""

    quantized: QuantizedRows  # all rows, in FSDP's buffer; their amax until it is staged
    shard: ShardedWeight

    @staticmethod
    def __new__(cls, quantized: QuantizedRows, dtype: torch.dtype, shard: ShardedWeight) -> "GatheredWeight":
        return wrapper(cls, quantized.q.size(), dtype=dtype, device=quantized.q.device)  # type: ignore[no-any-return]

    def __init__(self, quantized: QuantizedRows, dtype: torch.dtype, shard: ShardedWeight) -> None:
        self.quantized, self.shard = quantized, shard

    def update_scale(self, rows: QuantizedRows) -> None:
        """Sets the scale and amax of data that FSDP has just gathered, without a version change that autograd sees."""
        with preserving_version(self.quantized.scale_inv):
            self.quantized.scale_inv.copy_(rows.scale_inv)
        self.quantized = self.quantized._replace(amax=rows.amax)

    def received_quantized(self, is_recording: bool) -> tuple[Operand, Tensor | None]:
        """Returns the operand, whose columnwise data are a view of FSDP's buffer, and an amax to stage or None."""
        q, scale_inv, amax = self.quantized
        if is_recording:
            self.quantized = self.quantized._replace(amax=None)
            self.shard.unstaged_amax = None
        return Operand(Quantized(q, scale_inv), Quantized(q.t(), scale_inv)), amax

    __torch_function__ = plain_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Supports what FSDP and `nn.Parameter` call on an unsharded parameter. Raises RecipeError for other calls."""
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


def _to_plain(value: Any) -> Any:
    return value.hp if isinstance(value, ShardedWeight) else value


def _checked_frame(mesh: DeviceMesh) -> contexts.Frame:
    """Returns the current frame. Raises RecipeError unless it quantizes a weight with one scale for all ranks of
    `mesh`."""
    frame = contexts.current_frame()
    if frame is None or not frame.enabled:
        raise RecipeError(
            "A model sharded with gather_in_fp8 runs only inside an enabled autocast; shard the model without it, or "
            "run the model inside autocast."
        )
    recipe = frame.recipe
    if any(recipe.override_linear_precision[:2]):
        raise RecipeError(
            f"override_linear_precision={recipe.override_linear_precision} needs high-precision weights for fprop or "
            "dgrad, but gather_in_fp8 gathers FP8 data; leave one of them out."
        )
    check_shared_scale(recipe, frame.group, mesh.get_group(), "gather_in_fp8")
    return frame


def gather_in_fp8(module: nn.Module, peers: Peers | None = None, quantize_from: torch.dtype | None = None) -> nn.Module:
    """Makes FSDP2 all-gather the weights of every `Linear` inside `module` in FP8, and returns `module`.

    Call `parallelize` for tensor-parallel layers first, then this, then `fully_shard`. The forward pass raises
    RecipeError unless the recipe is delayed, or current with a scale per tensor.

    Args:
        peers: The peers of the whole model, if its modules are passed one after the other.
        quantize_from: The dtype to which weights are rounded before they are quantized, such as BF16 to get the FP8
            weights of a BF16 model.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, Linear)]
    peers = Peers(layers) if peers is None else peers
    shared: dict[int, nn.Parameter] = {}
    for layer in layers:
        weight = layer.weight
        if id(weight) not in shared:
            sharded = ShardedWeight(weight.detach(), peers, quantize_from)
            shared[id(weight)] = nn.Parameter(sharded, requires_grad=weight.requires_grad)
        layer.weight = shared[id(weight)]
    return module


def local_rows(sharded: Tensor) -> Tensor:
    """Returns this rank's rows of a parameter that FSDP2 has sharded, or of its gradient.

    The result is a plain tensor in high precision that shares the memory of the rows. The first forward pass may move
    the rows to other memory.
    """
    rows = sharded.detach()
    return cast(Tensor, _to_plain(rows._local_tensor if isinstance(rows, DTensor) else rows))


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict of a sharded model with whole tensors. All ranks must call it."""
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}


def load_whole_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads a state dict with whole tensors into a sharded model. All ranks must call it with equal tensors."""
    sharded = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
    model.load_state_dict(
        {
            n: distribute_tensor(v, sharded[n].device_mesh, sharded[n].placements) if n in sharded else v
            for n, v in state.items()
        }
    )
