"""FrozenLinear, the layer that serving runs: FP8 weights, an input scale stored or computed per call, nothing to train.

It computes what the forward pass of `Linear` computes, in the same order: with the scales from the end of training it
gives the same bits. It also watches its input: `amax` is the largest magnitude since `reset_counters`, `saturated` the
number of elements that were cut off at +-448. The cast itself counts: that costs a comparison per call, and a pass over
the values only in the rare call that saturates.

The gradient of an input goes through the FP8 weight; training an adapter (lora.py) needs it: see `input_gradient`. The
cast counts as the identity, as in `Linear`.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Optional, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8serve.errors import ScalesError
from fp8serve.fp8.casting import content_cast, content_strips
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.ops.arithmetic import dequantize
from fp8serve.fp8.ops.packing import GROUP, RUN, is_packable, packed_shape
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.spec import WEIGHTS, QuantSpec, listed

if TYPE_CHECKING:
    from fp8serve.fp8.served_adapters import ServedAdapters

E4M3 = torch.float8_e4m3fn

# overloads are looked up once: through torch.ops a call takes a microsecond longer
_mm = torch.ops.fp8serve.mm.default
_norm = torch.ops.fp8serve.rms_norm.default
_norm_rows = torch.ops.fp8serve.rms_norm_quantize_rows.default
_norm_quantize = torch.ops.fp8serve.rms_norm_quantize.default
_packed_mm = torch.ops.fp8serve.packed_mm.default
_quantize = torch.ops.fp8serve.quantize.default
_quantize_watched = torch.ops.fp8serve.quantize_watched.default
_scaled_mm = torch.ops.fp8serve.scaled_mm.default
_scaled_mm_add = torch.ops.fp8serve.scaled_mm_add.default
_silu_mul = torch.ops.fp8serve.silu_mul.default
_silu_mul_rows = torch.ops.fp8serve.silu_mul_quantize_rows.default
_silu_mul_quantize = torch.ops.fp8serve.silu_mul_quantize.default
_transpose = torch.ops.fp8serve.transpose_fp8.default
_watched_mm_add = torch.ops.fp8serve.watched_mm_add.default


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _valid_scale(name: str, scale: Tensor) -> Tensor:
    scale = scale.detach().to(torch.float32)
    if scale.numel() != 1 or not bool(torch.isfinite(scale) & (scale > 0)):
        raise ScalesError(
            f"{name} must be one positive finite number, found {scale.tolist()}; calibrate the model again."
        )
    return scale.reshape(()).clone()


def _scale_or_own(linear: nn.Linear, name: str, scale: Tensor | None) -> Tensor:
    if scale is None:
        state = linear.scaling.get(name) if isinstance(linear, Linear) else None
        if state is None:
            raise ScalesError(
                f"DelayedScaling needs a stored {name} scale and this layer has none; calibrate the model first."
            )
        scale = state.scale
    return _valid_scale(f"the {name} scale", scale)


def _quantized_weight(linear: nn.Linear, spec: QuantSpec, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """(weight_q, weight_scale_inv) by a recipe's spec of weights."""
    weight = linear.weight.detach()
    if spec.source == "delayed":
        scale = _scale_or_own(linear, "weight", scale)
        return torch.ops.fp8serve.quantize(weight, scale, E4M3)[0], scale.reciprocal()
    op, arguments = content_cast(spec)
    return op(weight, *arguments)


class FrozenLinear(nn.Module):
    """[..., K] -> [..., N] from FP8 weights.

    weight_q: E4M3 [N, K], or packed (see `pack`) [N / 16, K / 8, 128]. weight_scale_inv: FP32 [], [N, 1] or
    [ceil(N/128), ceil(K/128)]. bias: [N] or None. input_scale: FP32 [], multiplies to quantize the input. input_spec:
    how inputs are quantized: by the stored `input_scale`, each by its own content, or not at all (BF16); None: with one
    scale per tensor. out_dtype: of the output; None for the input's. adapters: those that are served with it.
    """

    adapters: Optional["ServedAdapters"] = None

    weight_q: Tensor
    weight_scale_inv: Tensor
    bias: Tensor | None
    input_scale: Tensor | None
    input_scale_inv: Tensor | None
    amax: Tensor
    saturated: Tensor

    def __init__(
        self,
        weight_q: Tensor,
        weight_scale_inv: Tensor,
        bias: Tensor | None = None,
        input_scale: Tensor | None = None,
        input_spec: QuantSpec | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_weight(weight_q, weight_scale_inv)
        self.out_dtype = out_dtype
        self.quantize_input_by(input_spec or QuantSpec(source="current" if input_scale is None else "stored"))
        _check_source(self.input_spec, input_scale)
        self.out_features, self.in_features = _features(weight_q)
        self.register_buffer("weight_q", weight_q)
        self.register_buffer("weight_scale_inv", weight_scale_inv)
        self.register_buffer("bias", None if bias is None else bias.detach())
        scale = None if input_scale is None else _valid_scale("the input scale", input_scale).to(weight_q.device)
        self.register_buffer("input_scale", scale)
        self.register_buffer("input_scale_inv", None if scale is None else scale.reciprocal(), persistent=False)
        self.register_buffer("amax", torch.zeros((), device=weight_q.device), persistent=False)
        self.register_buffer("saturated", torch.zeros((), dtype=torch.int64, device=weight_q.device), persistent=False)
        self.is_watched = True  # not where threads share the layer: they would race on its counters
        self.live_rows: Tensor | None = None  # int64 []: rows of the input that are not padding; None: all

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        recipe: Recipe,
        input_scale: Tensor | None = None,
        weight_scale: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> "FrozenLinear":
        """Freeze a linear by a recipe. DelayedScaling takes the given scales or the layer's own delayed states.

        Raises ScalesError if a delayed scale is missing, zero, negative or not finite.
        """
        specs = recipe.specs.linear
        if specs["input"].source == "delayed":
            input_scale = _scale_or_own(linear, "input", input_scale)
        elif input_scale is not None or weight_scale is not None:
            raise ScalesError(f"{type(recipe).__name__} computes its scales from the data; do not give stored ones.")
        weight_q, weight_scale_inv = _quantized_weight(linear, specs["weight"], weight_scale)
        return cls(weight_q, weight_scale_inv, linear.bias, input_scale, specs["input"].at_rest(), out_dtype)

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] -> [..., N]; differentiable with respect to input."""
        if input.requires_grad and torch.is_grad_enabled():
            return cast(Tensor, _ThroughFrozen.apply(input, self))  # type: ignore[no-untyped-call]
        y = self._run(input)
        return y if self.adapters is None else self.adapters.add(y, input)

    @torch.no_grad()
    def _run(self, x: Tensor) -> Tensor:
        y = self.product(*self.cast(x.reshape(-1, self.in_features)), self.out_dtype or x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """weight_q, under the name that other linears give their weight."""
        return self.weight_q

    @property
    def is_packed(self) -> bool:
        return self.weight_q.dim() == 3

    def pack(self, out: Tensor) -> None:
        """Move the weight, packed, into `out`, E4M3 of as many elements. For serving on a CPU."""
        self.weight_q = packed(self.weight_q, out)

    def quantize_input_by(self, spec: QuantSpec) -> None:
        """Quantize inputs from now on by `spec`, which is evaluated here and not in every call."""
        if spec.element == "e5m2":
            raise ValueError(f"A FrozenLinear quantizes its input to e4m3 or leaves it in BF16, found {spec}.")
        self.input_spec = spec
        self._content_cast, self._strips = content_cast(spec), content_strips(spec)

    def make_rows_independent(self) -> None:
        """Quantize every row of an input by its own content where one scale would be found for the whole input."""
        if self.input_spec.depends_on_batch:
            self.quantize_input_by(replace(self.input_spec, granularity="row"))

    def cast(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, K] -> the operand that this layer multiplies: FP8 data and their scale_inv, or x in BF16 and 1."""
        tensors = self._buffers  # looking one up here is certain, and 20 times as fast as through the module
        scale = tensors["input_scale"]
        if scale is None:
            return self._cast_by_content(x)
        q = self._watched(x) if self.is_watched else _quantize(x, scale, E4M3)[0]
        return q, tensors["input_scale_inv"]  # type: ignore[return-value]  # there, because input_scale is

    def cast_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`cast` of rms_norm(x, weight, eps), in one op where the scale is known; no gradient."""
        tensors = self._buffers
        scale = tensors["input_scale"]
        if scale is None:
            if self._strips is not None and not x.is_cuda:
                return _norm_rows(x, weight, eps, *self._strips)  # type: ignore[no-any-return]
            return self._cast_by_content(_norm(x, weight, eps))
        q = self._watched(x, weight, eps) if self.is_watched else _norm_quantize(x, weight, eps, scale, E4M3)[0]
        return q, tensors["input_scale_inv"]  # type: ignore[return-value]

    def cast_silu_mul(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """`cast` of silu(gate) * up, both [M, K], in one op where the scale is known; no gradient."""
        tensors = self._buffers
        scale = tensors["input_scale"]
        if scale is None:
            if self._strips is not None and not gate.is_cuda:
                return _silu_mul_rows(gate, up, *self._strips)  # type: ignore[no-any-return]
            return self._cast_by_content(_silu_mul(gate, up))
        q = self._watched(gate, up) if self.is_watched else _silu_mul_quantize(gate, up, scale, E4M3)[0]
        return q, tensors["input_scale_inv"]  # type: ignore[return-value]

    def _cast_by_content(self, x: Tensor) -> tuple[Tensor, Tensor]:
        op, arguments = self._content_cast
        return op(x, *arguments)

    def product(self, q: Tensor, scale_inv: Tensor, out_dtype: torch.dtype) -> Tensor:
        """The result of `cast` times the weight: [M, N] of `out_dtype`."""
        tensors = self._buffers
        weight, weight_scale_inv, bias = tensors["weight_q"], tensors["weight_scale_inv"], tensors["bias"]
        return multiply(q, scale_inv, weight, weight_scale_inv, bias, out_dtype)  # type: ignore[arg-type]

    def product_onto(self, residual: Tensor, q: Tensor, scale_inv: Tensor) -> Tensor:
        """residual [M, N] + product(q, scale_inv), in one op; no gradient."""
        tensors = self._buffers
        weight, scales, bias = tensors["weight_q"], (scale_inv, tensors["weight_scale_inv"]), tensors["bias"]
        if weight.dim() == 3:  # type: ignore[union-attr]
            return _packed_mm(q, weight, *scales, bias, residual, residual.dtype)  # type: ignore[no-any-return]
        if q.is_cuda and q.dtype is torch.bfloat16:
            return residual + self.product(q, scale_inv, residual.dtype)
        return _scaled_mm_add(q, weight, *scales, bias, residual)  # type: ignore[no-any-return]

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [M, N] + the product of x [M, K]; no gradient. On a GPU in one op where the scale is known."""
        tensors = self._buffers
        scale = tensors["input_scale"]
        if scale is None or not self.is_watched or not _is_on_gpu(x):
            return self.product_onto(residual, *self.cast(x))
        counters = tensors["amax"], tensors["saturated"], self.live_rows
        weight = tensors["weight_q"], tensors["input_scale_inv"], tensors["weight_scale_inv"], tensors["bias"]
        return _watched_mm_add(x, scale, *counters, *weight, residual)  # type: ignore[no-any-return]

    def fuses(self, x: Tensor) -> bool:
        """Whether the fused calls above do what calling the layer on activations like x does: no hook, no gradient, and
        no row of the step with an adapter."""
        is_plain = not (self._forward_hooks or self._forward_pre_hooks) and not torch.is_grad_enabled()
        if self.adapters is not None and self.adapters.is_active:
            return False
        return is_plain and (self.out_dtype is None or self.out_dtype == x.dtype)

    def _watched(self, x: Tensor, other: Tensor | None = None, eps: float | None = None) -> Tensor:
        """x, or what `quantize_watched` computes from these, cast by the input scale and counted."""
        tensors = self._buffers
        counters = tensors["amax"], tensors["saturated"]
        return _quantize_watched(x, other, eps, tensors["input_scale"], *counters, self.live_rows)  # type: ignore[no-any-return]

    def reset_counters(self) -> None:
        """Start watching anew."""
        self.amax.zero_()
        self.saturated.zero_()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accepts a weight in rows where this layer's is packed, and one scale where this layer has one for every row.

        The input's scale is replaced, not written to: other layers may share it (joined.py).
        """
        scale, input_scale = (state_dict.get(prefix + name) for name in ("weight_scale_inv", "input_scale"))
        if self.is_packed:
            pack_loaded(state_dict, f"{prefix}weight_q")
        if scale is not None and scale.dim() == 0 and self.weight_scale_inv.shape == (self.out_features, 1):
            state_dict[f"{prefix}weight_scale_inv"] = scale.expand(self.out_features, 1).clone()
        if input_scale is not None and self.input_scale is not None:
            self.input_scale = _valid_scale(f"{prefix}input_scale", input_scale).to(self.input_scale.device)
            self.input_scale_inv = self.input_scale.reciprocal()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        kind, granularity = "dynamic" if self.input_scale is None else "static", self.input_spec.granularity
        kind = kind if self.input_spec.is_fp8 else "unquantized"
        return f"in_features={self.in_features}, out_features={self.out_features}, input={kind} {granularity}"


class _ThroughFrozen(torch.autograd.Function):
    """A frozen layer in a graph: keeps nothing of its input, because the weight needs no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return layer._run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        layer: FrozenLinear = ctx.layer
        dx = input_gradient(layer, dy.reshape(-1, layer.out_features)).to(ctx.dtype)
        return dx.view(*dy.shape[:-1], layer.in_features), None


def input_gradient(layer: FrozenLinear, dy: Tensor) -> Tensor:
    """dX [M, K] = dY [M, N] W, both in BF16, with the FP8 weight as it is.

    dY stays in BF16: no state gives it a scale, and on a CPU the product takes as long as one of two FP8 operands and
    needs no cast. The transposed weight, a byte an element, lives for this product only; a scale for each of its
    columns, which this product contracts, multiplies dY instead. ValueError for a packed weight.
    """
    if layer.is_packed:
        raise ValueError("A packed weight has no transpose; load the model anew to train on it.")
    dy, scale = dy.to(torch.bfloat16), layer.weight_scale_inv
    if tuple(scale.shape) == (layer.out_features, 1):
        dy, scale = (dy * scale.t()).to(torch.bfloat16), torch.ones((), device=dy.device)
    one = torch.ones((), device=dy.device)
    return multiply(dy, one, _transpose(layer.weight_q), scale.t().contiguous(), None, torch.bfloat16)


def multiply(
    q: Tensor, scale_inv: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """q [M, K] times a frozen layer's weight, packed or not -> [M, N]."""
    if weight.dim() == 3:
        return _packed_mm(q, weight, scale_inv, weight_scale_inv, bias, None, out_dtype)  # type: ignore[no-any-return]
    if q.is_cuda and q.dtype is torch.bfloat16:
        return _multiply_unquantized(q, weight, weight_scale_inv, bias, out_dtype)
    return _scaled_mm(q, weight, scale_inv, weight_scale_inv, bias, out_dtype)  # type: ignore[no-any-return]


def _multiply_unquantized(
    x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """x [M, K] in BF16 times an FP8 weight on a GPU, whose kernels multiply only operands of the same type: the weight
    is widened for this call. Saves memory, not time."""
    if weight_scale_inv.dim() and len(weight_scale_inv) != len(weight):  # blocks
        return _mm(x, dequantize(weight, weight_scale_inv).to(torch.bfloat16), bias, out_dtype)  # type: ignore[no-any-return]
    sums: Tensor = _mm(x, weight.to(torch.bfloat16), None, torch.float32) * weight_scale_inv.t()
    return (sums if bias is None else sums + bias.float()).to(out_dtype)


def packed(weight: Tensor, out: Tensor) -> Tensor:
    """`out`, a vector, as [N / 16, K / 8, 128] and filled with weight [N, K], in the order that packed_mm reads."""
    out = out.view(packed_shape(*weight.shape))
    torch.ops.fp8serve.pack_weight(weight.detach(), out)
    return out


def pack_loaded(state_dict: dict[str, Any], key: str) -> None:
    """Pack the weight under `key` if it is in rows [N, K], for a layer whose own weight is packed."""
    weight = state_dict.get(key)
    if weight is not None and weight.dim() == 2 and is_packable(weight):
        state_dict[key] = packed(weight, torch.empty_like(weight).view(-1))


def _features(weight_q: Tensor) -> tuple[int, int]:
    """(out, in) of a weight, packed or not."""
    rows, cols = weight_q.shape[:2]
    return (GROUP * rows, RUN * cols) if weight_q.dim() == 3 else (rows, cols)


def _check_weight(weight_q: Tensor, weight_scale_inv: Tensor) -> None:
    if weight_q.dtype != E4M3 or weight_q.dim() not in (2, 3):
        raise ValueError(f"weight_q must be float8_e4m3fn [N, K], found {weight_q.dtype} {list(weight_q.shape)}.")
    rows, cols = _features(weight_q)
    shapes = [spec.scale_shape(rows, cols) for spec in WEIGHTS]
    if tuple(weight_scale_inv.shape) not in shapes:
        raise ValueError(
            f"weight_scale_inv of a [{rows}, {cols}] weight must be {listed(shapes)}, found"
            f" {list(weight_scale_inv.shape)}."
        )


def _check_source(spec: QuantSpec, input_scale: Tensor | None) -> None:
    if (spec.source == "stored") is (input_scale is None):
        raise ValueError(f"An input scale goes with a spec whose source is stored, and with no other; found {spec}.")
