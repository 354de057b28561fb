"""The decoder as serving runs it: ten ops a layer, and nothing between them but views.

    x     -> rms_norm_quantize -> scaled_mm (q, k, v as one matrix) -> rotary_write_kv -> paged_attention
          -> quantize -> scaled_mm_add (o, onto x)
          -> rms_norm_quantize -> scaled_mm (gate and up as one) -> silu_mul_quantize -> scaled_mm_add (down, onto x)

The plain decoder runs about forty, each with its own read and write of the activation, and at batch 1 each costs more
time to call than to compute. The ops round where the plain ones round, so logits are equal to the last bit, and with
them tokens. Where inputs are scaled dynamically, by row or block, the fused casts are two ops instead of one.

Logits are wanted of few rows: the last token of each prompt that is complete, and every decoding one. The last layer
writes the keys and values of all, and computes the rest for these rows alone, as do the final norm and the head; where
there are none, it ends there. Rows do not depend on each other, so that changes no bit, but the layer's o, gate, up and
down projections watch these inputs only: `pruned` names them for those who read the counters.

Projections that read the same input become one matrix [sum of rows, K]: where they lie side by side in the mapped file
(gate and up do) that is a view; else they are copied once (q, k and v), and the layers in the model become views of the
copy, so that nothing is in memory twice. Weight scales per tensor become one per row, which multiplies the same sum.
The layers keep their names and share one counter, because they see one input.

`fuse` takes what it can prove: every projection a FrozenLinear, and those joined quantized by one scale. Everything
else runs as the plain decoder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from fp8serve.fp8 import ops as ops  # registers the ops called below
from fp8serve.fp8.frozen import E4M3, FrozenLinear
from fp8serve.fp8.ops.arithmetic import BLOCK
from fp8serve.fp8.ops.packing import GROUP
from fp8serve.model.decoder import Decoder, Layer

Heads = tuple[Tensor, Tensor, Tensor]  # q [T, heads, D], k and v [T, kv_heads, D]
Rotation = tuple[Tensor, Tensor]  # cos, sin [T, 1, D]
# attend(layer, heads, rotation, last) -> [T, heads, D]: rotates q and k, writes k and v, and attends; where `last` [R]
# is not None only the queries of these rows do -> [R, heads, D]
Attend = Callable[[int, Heads, Rotation, Tensor | None], Tensor]

# overloads are looked up once: through torch.ops a call takes a microsecond longer
_norm = torch.ops.fp8serve.rms_norm.default
_norm_quantize = torch.ops.fp8serve.rms_norm_quantize.default
_silu_mul = torch.ops.fp8serve.silu_mul.default
_silu_mul_quantize = torch.ops.fp8serve.silu_mul_quantize.default
_quantize = torch.ops.fp8serve.quantize.default
_scaled_mm = torch.ops.fp8serve.scaled_mm.default
_packed_mm = torch.ops.fp8serve.packed_mm.default
_scaled_mm_add = torch.ops.fp8serve.scaled_mm_add.default


@dataclass(slots=True)
class Matrix:
    """A FrozenLinear with its tensors at hand: a module's attributes are looked up in three dictionaries.

    `parts`: the layers of the model that were joined to make it; none where it is one of them itself.
    """

    layer: FrozenLinear
    parts: list[FrozenLinear]
    weight: Tensor
    weight_scale_inv: Tensor
    bias: Tensor | None
    input_scale: Tensor | None
    input_scale_inv: Tensor | None
    is_packed: bool

    @classmethod
    def of(cls, layer: FrozenLinear, parts: Sequence[FrozenLinear] = ()) -> "Matrix":
        scales = layer.input_scale, layer.input_scale_inv
        return cls(layer, list(parts), layer.weight_q, layer.weight_scale_inv, layer.bias, *scales, layer.is_packed)

    def pack(self, out: Tensor) -> None:
        """Reads the weight from now on where it is packed; see FrozenLinear.pack."""
        self.layer.pack(out)
        self.weight, self.is_packed = self.layer.weight_q, True
        if self.parts:
            _share_weight(self.layer, self.parts)

    def cast(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.input_scale is None:
            return self.layer.cast(x)
        q, amax = _quantize(x, self.input_scale, E4M3)
        self.layer.watch(self.input_scale, amax, x)
        return q, self.input_scale_inv  # type: ignore[return-value]  # there, because input_scale is

    def cast_norm(self, x: Tensor, norm: "Norm") -> tuple[Tensor, Tensor]:
        if self.input_scale is None:
            return self.layer.cast(_norm(x, norm.weight, norm.eps))
        q, amax = _norm_quantize(x, norm.weight, norm.eps, self.input_scale, E4M3)
        self.layer.watch(self.input_scale, amax, x, norm.weight, norm.eps)
        return q, self.input_scale_inv  # type: ignore[return-value]

    def cast_silu_mul(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        if self.input_scale is None:
            return self.layer.cast(_silu_mul(gate, up))
        q, amax = _silu_mul_quantize(gate, up, self.input_scale, E4M3)
        self.layer.watch(self.input_scale, amax, gate, up)
        return q, self.input_scale_inv  # type: ignore[return-value]

    def product(self, q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
        if self.is_packed:
            scales = scale_inv, self.weight_scale_inv
            return _packed_mm(q, self.weight, *scales, self.bias, None, dtype)  # type: ignore[no-any-return]
        return _scaled_mm(q, self.weight, scale_inv, self.weight_scale_inv, self.bias, dtype)  # type: ignore[no-any-return]

    def product_onto(self, residual: Tensor, q: Tensor, scale_inv: Tensor) -> Tensor:
        if self.is_packed:
            scales = scale_inv, self.weight_scale_inv
            return _packed_mm(q, self.weight, *scales, self.bias, residual, residual.dtype)  # type: ignore[no-any-return]
        return _scaled_mm_add(q, self.weight, scale_inv, self.weight_scale_inv, self.bias, residual)  # type: ignore[no-any-return]


@dataclass(slots=True)
class Norm:
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K]."""
        return _norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)  # type: ignore[no-any-return]


@dataclass(slots=True)
class FusedLayer:
    """One decoder layer. `widths`: columns of q, k and v in the joined projection's output."""

    index: int
    head_dim: int
    widths: tuple[int, int, int]
    attention_norm: Norm
    mlp_norm: Norm
    q_norm: Norm | None
    k_norm: Norm | None
    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix

    def __call__(self, x: Tensor, rotation: Rotation, attend: Attend, last: Tensor | None = None) -> Tensor:
        """x [T, hidden] -> the same; where `last` [R] is not None, [R, hidden] of these rows."""
        mixed = attend(self.index, self._heads(x), rotation, last)
        if last is not None:
            x = x[last]
            if len(x) == 0:
                return x
        x = self.o.product_onto(x, *self.o.cast(mixed.view(len(x), -1)))
        both = self.gate_up.product(*self.gate_up.cast_norm(x, self.mlp_norm), x.dtype)
        return self.down.product_onto(x, *self.down.cast_silu_mul(*both.chunk(2, 1)))

    def _heads(self, x: Tensor) -> Heads:
        """Views of one product."""
        joined = self.qkv.product(*self.qkv.cast_norm(x, self.attention_norm), x.dtype)
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in joined.split_with_sizes(self.widths, 1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v


class FusedDecoder:
    """`decoder`, run by fused ops; its tensors are shared."""

    def __init__(self, decoder: Decoder, layers: list[FusedLayer]) -> None:
        self._decoder, self._layers = decoder, layers
        self._norm = _norm_of(decoder.model.norm)

    def __call__(self, token_ids: Tensor, positions: Tensor, last: Tensor | None, attend: Attend) -> Tensor:
        """token_ids, positions int64 [T] -> hidden [R, hidden] of the rows `last` int64 [R], after the final norm.

        None: of all T.
        """
        x = self._decoder.model.embed_tokens(token_ids)
        rotation = self._decoder.model.rotary.cos_sin(positions, x.dtype)
        *earlier, final = self._layers
        for layer in earlier:
            x = layer(x, rotation, attend)
        return self._norm(final(x, rotation, attend, last))

    def matrices(self) -> list[Matrix]:
        """All of them, in the order in which a step reads them, that can be packed: their parts in whole groups."""
        all_of_them = [m for i in self._layers for m in (i.qkv, i.o, i.gate_up, i.down)]
        return [m for m in all_of_them if not any(part.out_features % GROUP for part in m.parts)]

    def joined(self) -> dict[str, FrozenLinear]:
        """The layers that were made by joining others."""
        named = ((f"layers.{i.index}", i) for i in self._layers)
        return {f"{n}.{k}": m.layer for n, i in named for k, m in (("qkv", i.qkv), ("gate_up", i.gate_up))}

    def pruned(self) -> list[nn.Module]:
        """The model's layers that see, and count, no rows but those whose logits are wanted."""
        last = self._decoder.model.layers[-1]
        return [last.self_attn.o_proj, *last.mlp.children()]  # type: ignore[union-attr, list-item]


def fuse(decoder: Decoder) -> FusedDecoder | None:
    """None when a layer is not FP8, or reads its input through several scales: then nothing was changed."""
    plans = [_plan(layer) for layer in decoder.model.layers if isinstance(layer, Layer)]
    known = [plan for plan in plans if plan is not None]
    if len(known) < len(plans):
        return None
    head_dim = decoder.config.head_dim
    return FusedDecoder(decoder, [_fused(i, head_dim, *plan) for i, plan in enumerate(known)])


_Plan = tuple[Layer, list[FrozenLinear], list[FrozenLinear]]


def _plan(layer: Layer) -> _Plan | None:
    """The layer with its q, k, v and its gate, up, where they can be joined."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    gate_up = [mlp.gate_proj, mlp.up_proj]
    if not all(isinstance(part, FrozenLinear) for part in (*qkv, attention.o_proj, *gate_up, mlp.down_proj)):
        return None
    frozen: tuple[list[FrozenLinear], ...] = (qkv, gate_up)  # type: ignore[assignment]  # just looked at
    return (layer, *frozen) if all(map(_can_join, frozen)) else None  # type: ignore[return-value]


def _fused(index: int, head_dim: int, layer: Layer, qkv: list[FrozenLinear], gate_up: list[FrozenLinear]) -> FusedLayer:
    q, k, v = (part.out_features for part in qkv)
    attention = layer.self_attn
    return FusedLayer(
        index,
        head_dim,
        (q, k, v),
        _norm_of(layer.input_layernorm),
        _norm_of(layer.post_attention_layernorm),
        None if attention.q_norm is None else _norm_of(attention.q_norm),
        None if attention.k_norm is None else _norm_of(attention.k_norm),
        Matrix.of(_join(qkv), qkv),
        Matrix.of(attention.o_proj),  # type: ignore[arg-type]  # _plan looked
        Matrix.of(_join(gate_up), gate_up),
        Matrix.of(layer.mlp.down_proj),  # type: ignore[arg-type]
    )


def _norm_of(module: nn.Module) -> Norm:
    return Norm(module.weight.detach(), float(module.eps))  # type: ignore[operator, arg-type]


def _can_join(parts: Sequence[FrozenLinear]) -> bool:
    """All cast their input alike, and a scale of their own for each row, or whole blocks of rows, says it all."""
    first = parts[0]
    for part in parts:
        if (part.input_spec, part.out_dtype) != (first.input_spec, first.out_dtype):
            return False
        if not _equal(part.input_scale, first.input_scale) or (part.bias is None) != (first.bias is None):
            return False
    blocked = {_is_blocked(part) for part in parts}
    return len(blocked) == 1 and not (blocked.pop() and any(part.out_features % BLOCK for part in parts[:-1]))


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return torch.equal(a, b) if a is not None and b is not None else a is b


def _is_blocked(part: FrozenLinear) -> bool:
    scale = part.weight_scale_inv
    return scale.dim() == 2 and tuple(scale.shape) != (part.out_features, 1)


def _join(parts: Sequence[FrozenLinear]) -> FrozenLinear:
    """One layer for all; the parts become views of it and share its counters."""
    scales = [p.weight_scale_inv if p.weight_scale_inv.dim() else _per_row(p) for p in parts]
    biases = [part.bias for part in parts if part.bias is not None]
    first = parts[0]
    joined = FrozenLinear(
        _stack([part.weight_q for part in parts]),
        torch.cat(scales),
        torch.cat(biases) if biases else None,
        first.input_scale,
        first.input_spec,
        first.out_dtype,
    )
    _share_weight(joined, parts)
    for part in parts:
        part.amax, part.saturated = joined.amax, joined.saturated
    return joined


def _share_weight(joined: FrozenLinear, parts: Sequence[FrozenLinear]) -> None:
    """The parts' weights become views of the joined one, packed or not."""
    unit = GROUP if joined.is_packed else 1
    rows = [part.out_features // unit for part in parts]
    for part, weight in zip(parts, joined.weight_q.split_with_sizes(rows), strict=True):
        part.weight_q = weight


def _per_row(part: FrozenLinear) -> Tensor:
    return part.weight_scale_inv.expand(part.out_features, 1)


def _stack(weights: Sequence[Tensor]) -> Tensor:
    """Their rows under each other: a view where they lie so already, else a copy."""
    first, rows = weights[0], sum(map(len, weights))
    if all(_follows(a, b) for a, b in pairwise(weights)):
        return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))
    return torch.cat([w.view(torch.uint8) for w in weights]).view(first.dtype)


def _follows(a: Tensor, b: Tensor) -> bool:
    together = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return together and a.is_contiguous() and b.is_contiguous() and a.data_ptr() + a.nbytes == b.data_ptr()
