"""FrozenLinear, the linear layer of serving: FP8 weights and a stored or computed input scale, without training. A
weight may also have 4 bits (ops/e2m1.py); its input is then BF16, or in NVFP4 too (ops/nvfp4.py).

It computes the forward pass of `Linear` in the same order, so with the scales from the end of training it gives the
same bits. It also monitors its input: `amax` is the largest magnitude since `reset_counters`, and `saturated` is the
number of elements that were cut off at +-448. The cast op counts them. This costs one comparison per call, and a pass
over the values only in the rare call that saturates.

The gradient with respect to the input uses the FP8 weight (`input_gradient`); training an adapter needs it (lora.py).
The gradient of the cast is the identity, as in `Linear`.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Optional, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8serve.errors import ScalesError
from fp8serve.fp8.casting import QuantizedWeight, cast_weight, current_cast_op, rowwise_scale_options
from fp8serve.fp8.layer_inputs import check_whole_blocks
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.ops.arithmetic import E8M0, dequantize
from fp8serve.fp8.ops.four_bit import BLOCK_OF, pack_4bit_into
from fp8serve.fp8.ops.microscaling import dequantize_to_bf16
from fp8serve.fp8.ops.packing import GROUP, RUN, pack_into, pack_state_dict_weight
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.spec import QuantSpec, format_shapes, weight_specs

if TYPE_CHECKING:
    from fp8serve.fp8.lora import ServedAdapters
    from fp8serve.fp8.sharded import Shard

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn

# The overloads are looked up once, because a call through torch.ops takes a microsecond longer.
_mm = torch.ops.fp8serve.mm.default
_mm_4bit = torch.ops.fp8serve.mm_4bit.default
_mx_mm = torch.ops.fp8serve.mx_mm.default
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
_stored_gated_mm = torch.ops.fp8serve.stored_gated_mm.default
_stored_mm = torch.ops.fp8serve.stored_mm.default
_transpose = torch.ops.fp8serve.transpose_fp8.default
_transpose_half = torch.ops.fp8serve.transpose_half.default
_watched_mm_add = torch.ops.fp8serve.watched_mm_add.default


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _validate_scale(name: str, scale: Tensor) -> Tensor:
    scale = scale.detach().to(torch.float32)
    if scale.numel() != 1 or not bool(torch.isfinite(scale) & (scale > 0)):
        raise ScalesError(
            f"{name} must be one positive finite number, found {scale.tolist()}; calibrate the model again."
        )
    return scale.reshape(()).clone()


def _delayed_scale(linear: nn.Linear, name: str, scale: Tensor | None) -> Tensor:
    """Returns the given scale, or if it is None the scale of the layer's own scaling state."""
    if scale is None:
        state = linear.scaling.get(name) if isinstance(linear, Linear) else None
        if state is None:
            raise ScalesError(
                f"DelayedScaling needs a stored {name} scale and this layer has none; calibrate the model first."
            )
        scale = state.scale
    return _validate_scale(f"the {name} scale", scale)


def _quantize_weight(linear: nn.Linear, spec: QuantSpec, scale: Tensor | None) -> QuantizedWeight:
    weight = linear.weight.detach()
    if spec.source == "delayed":
        scale = _delayed_scale(linear, "weight", scale).to(weight.device)
        return QuantizedWeight(torch.ops.fp8serve.quantize(weight, scale, E4M3)[0], scale.reciprocal())
    return cast_weight(weight, spec)


def _is_mx(scale_inv: Tensor | None) -> bool:
    return scale_inv is not None and scale_inv.dtype is E8M0


class Operands(NamedTuple):
    """The arguments with which a GPU's ops for stored weights begin and end.

    If there are arguments of a norm, the first of the matrices is BF16 and the op casts its norm.
    """

    matrices: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # [M, K], [N, K], the scale_inv of each, the bias
    norm: tuple[Any, ...]

    def multiply(self) -> Tensor:
        """Returns the product, BF16 [M, N]."""
        return _stored_mm(*self.matrices, BF16, *self.norm)  # type: ignore[no-any-return]


class FrozenLinear(nn.Module):
    """A linear layer [..., K] -> [..., N] with FP8 weights, for serving.

    Args:
        weight_q: E4M3 [N, K], or packed [N / 16, K / 8, 128] (see `pack`), or uint8 [N, K / 2] (two E2M1 codes a byte).
        weight_scale_inv: FP32 [], [N, 1] or [ceil(N/128), ceil(K/128)], or E8M0 [N, K/32] (MX blocks). Of E2M1 codes
            E8M0 [N, K/32] (MXFP4) or E4M3 [N, K/16] (NVFP4).
        bias: [N] or None.
        input_scale: FP32 [], by which the input is multiplied to quantize it.
        input_spec: How the input is quantized: with the stored `input_scale`, with current scaling, or not at all
            (BF16). By default with `input_scale` if it is given, else with current scaling per tensor.
        out_dtype: The dtype of the output; None is the dtype of the input.
        weight_global_scale: FP32 [] or, if the layer is part of a joined one, [N]. Only NVFP4 has it.
        pre_quant_scale: FP32 [K], by which the input is multiplied, or None. Only a 4-bit weight may have it.
    """

    adapters: Optional["ServedAdapters"] = None
    input_shard: Optional["Shard"] = None  # if the layer has the columns of one rank (sharded.py)
    shares_weight_scale = False  # whether other layers have the same weight_scale_inv [] (joined.py)

    weight_q: Tensor
    weight_scale_inv: Tensor
    weight_global_scale: Tensor | None
    pre_quant_scale: Tensor | None
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
        weight_global_scale: Tensor | None = None,
        pre_quant_scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        _check_weight(weight_q, weight_scale_inv, weight_global_scale)
        self.out_dtype = out_dtype
        self.set_input_spec(input_spec or QuantSpec(source="current" if input_scale is None else "stored"))
        _check_scale_source(self.input_spec, input_scale)
        _check_input_spec(self.input_spec, weight_q, weight_global_scale)
        self.out_features, self.in_features = _features_of(weight_q)
        self.register_buffer("weight_q", weight_q)
        self.register_buffer("weight_scale_inv", weight_scale_inv)
        self.register_buffer("weight_global_scale", weight_global_scale)
        if pre_quant_scale is not None and (
            weight_q.dtype is not torch.uint8 or len(pre_quant_scale) != self.in_features
        ):
            raise ValueError("pre_quant_scale is [K], for layers with 4-bit weights.")
        self.register_buffer("pre_quant_scale", pre_quant_scale)
        self.register_buffer("bias", None if bias is None else bias.detach())
        scale = None if input_scale is None else _validate_scale("the input scale", input_scale).to(weight_q.device)
        self.register_buffer("input_scale", scale)
        self.register_buffer("input_scale_inv", None if scale is None else scale.reciprocal(), persistent=False)
        self.register_buffer("amax", torch.zeros((), device=weight_q.device), persistent=False)
        self.register_buffer("saturated", torch.zeros((), dtype=torch.int64, device=weight_q.device), persistent=False)
        self.is_watched = True  # whether amax and saturated are updated; False if threads share the layer
        self.live_rows: Tensor | None = None  # int64 []: the number of input rows before padding; None: no padding

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        recipe: Recipe,
        input_scale: Tensor | None = None,
        weight_scale: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> "FrozenLinear":
        """Freezes a linear layer for a recipe.

        DelayedScaling uses the given scales, or without them the scales of the layer's scaling states. Raises
        ScalesError if such a scale is missing, zero, negative or not finite, or if scales are given for another recipe.
        """
        specs = recipe.specs.linear
        check_whole_blocks(recipe, linear.in_features)
        if specs["input"].source == "delayed":
            input_scale = _delayed_scale(linear, "input", input_scale)
        elif input_scale is not None or weight_scale is not None:
            raise ScalesError(f"{type(recipe).__name__} computes its scales from the data; do not give stored ones.")
        q, scale_inv, global_scale = _quantize_weight(linear, specs["weight"], weight_scale)
        return cls(q, scale_inv, linear.bias, input_scale, specs["input"].for_serving(), out_dtype, global_scale)

    def forward(self, input: Tensor) -> Tensor:
        """Returns the output [..., N] for an input [..., K]. It is differentiable with respect to the input."""
        if input.requires_grad and torch.is_grad_enabled():
            return cast(Tensor, _FrozenLinearFunction.apply(input, self))  # type: ignore[no-untyped-call]
        y = self._run(input)
        return y if self.adapters is None else self.adapters.add(y, input)

    @torch.no_grad()
    def _run(self, x: Tensor) -> Tensor:
        y = self.product(*self.cast(x.reshape(-1, self.in_features)), self.out_dtype or x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """The quantized weight, under the name that other linear layers use."""
        return self.weight_q

    @property
    def is_4bit(self) -> bool:
        return self.weight_q.dtype is torch.uint8

    @property
    def needs_input_scale(self) -> bool:
        """Whether a product needs the scale_inv of `cast`. A 4-bit weight and inputs in BF16 do not."""
        return self.input_spec.is_quantized or not self.is_4bit

    @property
    def quantized_weight(self) -> QuantizedWeight:
        """The weight with its scales. If an FP8 weight is packed, `dequantize` does not support it."""
        return QuantizedWeight(self.weight_q, self.weight_scale_inv, self.weight_global_scale)

    @property
    def is_packed(self) -> bool:
        return self.weight_q.dim() == 3

    def pack(self, out: Tensor) -> None:
        """Packs the weight into `out`, a tensor with its dtype and number of elements, for serving on a CPU."""
        if self.is_4bit:
            self.weight_q, self.weight_scale_inv = pack_4bit_into(self.weight_q, self.weight_scale_inv, out)
        else:
            self.weight_q = pack_into(self.weight_q, out)

    def set_input_spec(self, spec: QuantSpec) -> None:
        """Sets how inputs are quantized. The cast op is chosen here and not in every call."""
        if spec.element == "e5m2":
            raise ValueError(f"A FrozenLinear quantizes its input to e4m3 or leaves it in BF16, found {spec}.")
        self.input_spec = spec
        self._current_cast_op, self._rowwise_options = current_cast_op(spec), rowwise_scale_options(spec)

    def make_rows_independent(self) -> None:
        """Replaces a current scale per tensor by one per row, so that a row does not depend on the batch."""
        self.set_input_spec(self.input_spec.independent_of_batch())

    def cast(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantizes x [M, K]. Returns FP8 data and their scale_inv, or without input quantization x in BF16 and 1."""
        tensors = self._buffers  # a lookup here is 20 times as fast as an attribute of the module
        scale = tensors["input_scale"]
        if scale is None:
            return self._cast_current(x)
        q = self._cast_and_count(x) if self.is_watched else _quantize(x, scale, E4M3)[0]
        return q, tensors["input_scale_inv"]  # type: ignore[return-value]  # not None, because input_scale is not

    def cast_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns `cast(rms_norm(x, weight, eps))`, in one op if the scale is stored. It has no gradient."""
        tensors = self._buffers
        scale = tensors["input_scale"]
        if scale is None:
            if self._rowwise_options is not None and not x.is_cuda:
                return _norm_rows(x, weight, eps, *self._rowwise_options)  # type: ignore[no-any-return]
            return self._cast_current(_norm(x, weight, eps))
        q = self._cast_and_count(x, weight, eps) if self.is_watched else _norm_quantize(x, weight, eps, scale, E4M3)[0]
        return q, tensors["input_scale_inv"]  # type: ignore[return-value]

    def cast_silu_mul(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `cast(silu(gate) * up)`, both [M, K], in one op if the scale is stored. It has no gradient."""
        tensors = self._buffers
        scale = tensors["input_scale"]
        if scale is None:
            if self._rowwise_options is not None and not gate.is_cuda:
                return _silu_mul_rows(gate, up, *self._rowwise_options)  # type: ignore[no-any-return]
            return self._cast_current(_silu_mul(gate, up))
        q = self._cast_and_count(gate, up) if self.is_watched else _silu_mul_quantize(gate, up, scale, E4M3)[0]
        return q, tensors["input_scale_inv"]  # type: ignore[return-value]

    def _cast_current(self, x: Tensor) -> tuple[Tensor, Tensor]:
        op, arguments = self._current_cast_op
        return op(self.scale_input(x), *arguments)

    def scale_input(self, x: Tensor) -> Tensor:
        """Returns x [M, K] times `pre_quant_scale`, in BF16, or x itself if the layer has none."""
        factors = self._buffers["pre_quant_scale"]
        return x if factors is None else (x.float() * factors).to(BF16)

    def product(self, q: Tensor, scale_inv: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Returns the product, [M, N] of `out_dtype`, of an input that `cast` has quantized and the weight."""
        tensors = self._buffers
        weight, weight_scale_inv, bias = tensors["weight_q"], tensors["weight_scale_inv"], tensors["bias"]
        global_scale = tensors["weight_global_scale"]
        input_scale = scale_inv if self.needs_input_scale else None
        return multiply(q, input_scale, weight, weight_scale_inv, bias, out_dtype, global_scale)  # type: ignore[arg-type]

    def product_add(self, residual: Tensor, q: Tensor, scale_inv: Tensor) -> Tensor:
        """Returns residual [M, N] + product(q, scale_inv), in one op. It has no gradient."""
        tensors = self._buffers
        weight, scales, bias = tensors["weight_q"], (scale_inv, tensors["weight_scale_inv"]), tensors["bias"]
        if weight.dtype is torch.uint8:  # type: ignore[union-attr]
            return residual + self.product(q, scale_inv, residual.dtype)
        if _is_mx(scales[1]):
            return _mx_mm(q, weight, *scales, bias, residual, residual.dtype)  # type: ignore[no-any-return]
        if weight.dim() == 3:  # type: ignore[union-attr]
            return _packed_mm(q, weight, *scales, bias, residual, residual.dtype)  # type: ignore[no-any-return]
        if q.is_cuda and q.dtype is torch.bfloat16:
            return residual + self.product(q, scale_inv, residual.dtype)
        return _scaled_mm_add(q, weight, *scales, bias, residual)  # type: ignore[no-any-return]

    def forward_add(self, residual: Tensor, x: Tensor) -> Tensor:
        """Returns residual [M, N] + forward(x [M, K]), on a GPU in one op if the scale is stored. No gradient."""
        tensors = self._buffers
        scale = tensors["input_scale"]
        if scale is None or not self.is_watched or not _is_on_gpu(x):
            return self.product_add(residual, *self.cast(x))
        counters = tensors["amax"], tensors["saturated"], self.live_rows
        weight = tensors["weight_q"], tensors["input_scale_inv"], tensors["weight_scale_inv"], tensors["bias"]
        return _watched_mm_add(x, scale, *counters, *weight, residual)  # type: ignore[no-any-return]

    def can_fuse_product(self, x: Tensor) -> bool:
        """Returns whether an op of a GPU may multiply inputs like x, in BF16, and do more with the product."""
        if not _is_on_gpu(x):
            return False
        tensors = self._buffers
        is_plain = tensors["weight_q"].dim() == 2 and not _is_mx(tensors["weight_scale_inv"])  # type: ignore[union-attr]
        is_bf16 = x.dtype is BF16 and self.out_dtype in (None, BF16)
        return is_bf16 and is_plain and self.input_spec.is_fp8

    def norm_arguments(self, weight: Tensor, eps: float) -> tuple[Any, ...]:
        """Returns the arguments with which a fused op casts a norm as the input of this layer, () if it cannot."""
        tensors = self._buffers
        if tensors["input_scale"] is None or not self.is_watched:
            return ()
        return weight, eps, tensors["input_scale"], tensors["amax"], tensors["saturated"], self.live_rows

    def can_cast_product(self, x: Tensor) -> bool:
        """Returns whether `cast_gated_product` supports this layer and activations like x."""
        return _is_on_gpu(x) and x.dtype is BF16 and self.is_watched and self._buffers["input_scale"] is not None

    def cast_gated_product(self, operands: Operands) -> tuple[Tensor, Tensor]:
        """Returns `cast_silu_mul(gate, up)` in one op, where gate and up are the halves of the product."""
        tensors = self._buffers
        counters = tensors["input_scale"], tensors["amax"], tensors["saturated"], self.live_rows
        cast = _stored_gated_mm(*operands.matrices, *counters, *operands.norm)
        return cast, tensors["input_scale_inv"]  # type: ignore[return-value]

    def can_fuse(self, x: Tensor) -> bool:
        """Returns whether the fused calls above are equivalent to calling the layer on activations like x.

        They are not if the layer has hooks, gradients are enabled, or a row of the step has an adapter.
        """
        if self._forward_hooks or self._forward_pre_hooks or torch.is_grad_enabled():
            return False
        if self.adapters is not None and self.adapters.is_active:
            return False
        return self.out_dtype is None or self.out_dtype == x.dtype

    def _cast_and_count(self, x: Tensor, other: Tensor | None = None, eps: float | None = None) -> Tensor:
        """Quantizes x, rms_norm(x, other, eps) or silu(x) * other by `quantize_watched`, which updates the counters."""
        tensors = self._buffers
        counters = tensors["amax"], tensors["saturated"]
        return _quantize_watched(x, other, eps, tensors["input_scale"], *counters, self.live_rows)  # type: ignore[no-any-return]

    def reset_counters(self) -> None:
        """Sets `amax` and `saturated` to 0."""
        self.amax.zero_()
        self.saturated.zero_()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Loads a state dict; first packs the weight and expands its scale to rows if this layer has that layout.

        Other layers may share this layer's scales (joined.py). So the input scale is replaced and not written in place,
        and so is a shared weight scale that differs from the loaded one.
        """
        scale, input_scale = (state_dict.get(prefix + name) for name in ("weight_scale_inv", "input_scale"))
        if self.is_packed and not self.is_4bit:  # codes and scales are packed together (engine/weights.py)
            pack_state_dict_weight(state_dict, f"{prefix}weight_q")
        if scale is not None and scale.dim() == 0 and self.weight_scale_inv.shape == (self.out_features, 1):
            state_dict[f"{prefix}weight_scale_inv"] = scale.expand(self.out_features, 1).clone()
        if scale is not None and self.shares_weight_scale and not torch.equal(scale, self.weight_scale_inv.to(scale)):
            self.weight_scale_inv, self.shares_weight_scale = scale.to(self.weight_scale_inv, copy=True), False
        if input_scale is not None and self.input_scale is not None:
            self.input_scale = _validate_scale(f"{prefix}input_scale", input_scale).to(self.input_scale.device)
            self.input_scale_inv = self.input_scale.reciprocal()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        kind, granularity = "dynamic" if self.input_scale is None else "static", self.input_spec.granularity
        kind = kind if self.input_spec.is_quantized else "unquantized"
        return f"in_features={self.in_features}, out_features={self.out_features}, input={kind} {granularity}"


def make_rows_independent(model: nn.Module) -> None:
    """Makes every FrozenLinear of `model` quantize each row of its input independently of the other rows."""
    for module in model.modules():
        if isinstance(module, FrozenLinear):
            module.make_rows_independent()


class _FrozenLinearFunction(torch.autograd.Function):
    """A FrozenLinear in an autograd graph. It saves no input, because the weight needs no gradient."""

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
    """Returns dX [M, K] = dY [M, N] W in BF16, computed with the FP8 weight. Raises ValueError for a packed weight.

    dY stays in BF16, because there is no state with a scale for it; on a CPU the product is as fast as one of two FP8
    operands. The transposed weight, one byte per element, exists only during this product. A weight scale per row
    belongs to the dimension that this product contracts, so dY is multiplied by it.
    """
    if layer.is_packed:
        raise ValueError("A packed weight has no transpose; load the model anew to train on it.")
    dy, scale = dy.to(torch.bfloat16), layer.weight_scale_inv
    if layer.is_4bit:  # W becomes BF16 without its global scale, exactly
        global_scale = layer.weight_global_scale
        weight = layer.quantized_weight._replace(global_scale=None).dequantize().to(torch.bfloat16)
        dy = dy if global_scale is None else (dy * global_scale).to(torch.bfloat16)
        return layer.scale_input(_mm(dy, _transpose_half(weight), None, torch.bfloat16))
    if _is_mx(scale):  # blocks along K, which this product does not contract: W becomes BF16, exactly
        return _mm(dy, _transpose_half(dequantize_to_bf16(layer.weight_q, scale)), None, torch.bfloat16)  # type: ignore[no-any-return]
    if tuple(scale.shape) == (layer.out_features, 1):
        dy, scale = (dy * scale.t()).to(torch.bfloat16), torch.ones((), device=dy.device)
    one = torch.ones((), device=dy.device)
    return multiply(dy, one, _transpose(layer.weight_q), scale.t().contiguous(), None, torch.bfloat16)


def multiply(
    q: Tensor,
    scale_inv: Tensor | None,
    weight: Tensor,
    weight_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Returns the product [M, N] of q [M, K] and the weight of a FrozenLinear, packed or not.

    `scale_inv` may be None for a 4-bit weight and unquantized q. The product of a 4-bit weight is rounded to BF16
    before it is cast to `out_dtype`.
    """
    if weight.dtype is torch.uint8:
        return _mm_4bit(q, weight, weight_scale_inv, global_scale, bias, scale_inv).to(out_dtype)  # type: ignore[no-any-return]
    if _is_mx(weight_scale_inv):
        return _mx_mm(q, weight, scale_inv, weight_scale_inv, bias, None, out_dtype)  # type: ignore[no-any-return]
    if weight.dim() == 3:
        return _packed_mm(q, weight, scale_inv, weight_scale_inv, bias, None, out_dtype)  # type: ignore[no-any-return]
    if q.is_cuda and q.dtype is torch.bfloat16:
        return _multiply_unquantized(q, weight, weight_scale_inv, bias, out_dtype)
    product = _stored_mm if _is_on_gpu(q) else _scaled_mm
    return product(q, weight, scale_inv, weight_scale_inv, bias, out_dtype)  # type: ignore[no-any-return]


def _multiply_unquantized(
    x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Returns the product of x [M, K] in BF16 and an FP8 weight on a GPU.

    GPU kernels multiply operands of one type only, so the weight is cast to BF16 for this call: the FP8 weight saves
    memory but no time.
    """
    if weight_scale_inv.dim() and len(weight_scale_inv) != len(weight):  # blocks
        return _mm(x, dequantize(weight, weight_scale_inv).to(torch.bfloat16), bias, out_dtype)  # type: ignore[no-any-return]
    sums: Tensor = _mm(x, weight.to(torch.bfloat16), None, torch.float32) * weight_scale_inv.t()
    return (sums if bias is None else sums + bias.float()).to(out_dtype)


def _features_of(weight_q: Tensor) -> tuple[int, int]:
    """Returns (out_features, in_features) of a weight, packed or not."""
    rows, cols = weight_q.shape[:2]
    if weight_q.dim() == 3:
        return GROUP * rows, RUN * cols
    return rows, 2 * cols if weight_q.dtype is torch.uint8 else cols


def _check_weight(weight_q: Tensor, weight_scale_inv: Tensor, global_scale: Tensor | None) -> None:
    if weight_q.dtype is torch.uint8:
        _check_4bit_weight(weight_q, weight_scale_inv, global_scale)
        return
    if global_scale is not None:
        raise ValueError("Only a weight in NVFP4 has a weight_global_scale.")
    if weight_q.dtype != E4M3 or weight_q.dim() not in (2, 3):
        raise ValueError(f"weight_q must be float8_e4m3fn [N, K], found {weight_q.dtype} {list(weight_q.shape)}.")
    rows, cols = _features_of(weight_q)
    shapes = [spec.scale_shape(rows, cols) for spec in weight_specs(_is_mx(weight_scale_inv))]
    if tuple(weight_scale_inv.shape) not in shapes:
        raise ValueError(
            f"weight_scale_inv of a [{rows}, {cols}] weight must be {format_shapes(shapes)}, found"
            f" {list(weight_scale_inv.shape)}."
        )


def _check_4bit_weight(weight_q: Tensor, weight_scale_inv: Tensor, global_scale: Tensor | None) -> None:
    rows, cols = _features_of(weight_q)
    if weight_scale_inv.dtype not in (E4M3, E8M0) or weight_q.dim() != 2:
        raise ValueError(
            "A 4-bit weight must be uint8 [N, K / 2] with scales in E4M3 or E8M0, found "
            f"{list(weight_q.shape)} and {weight_scale_inv.dtype}."
        )
    block = BLOCK_OF[weight_scale_inv.dtype]
    if cols % block or tuple(weight_scale_inv.shape) != (rows, cols // block):
        raise ValueError(
            f"weight_scale_inv of a 4-bit [{rows}, {cols}] weight must be [N, K / {block}], found "
            f"{list(weight_scale_inv.shape)}."
        )
    if (global_scale is None) is (weight_scale_inv.dtype is E4M3):
        raise ValueError("A weight in NVFP4 needs a weight_global_scale, and one in MXFP4 has none.")


def _check_input_spec(spec: QuantSpec, weight_q: Tensor, weight_global_scale: Tensor | None) -> None:
    if weight_q.dtype is torch.uint8 and spec.is_fp8:
        raise ValueError(f"The input of a layer with 4-bit weights stays in BF16 or has 4 bits, found {spec}.")
    if spec.is_4bit and (not spec.is_nvfp4 or weight_global_scale is None):
        raise ValueError(f"Inputs of 4 bits are in NVFP4, and so is the weight of their layer, found {spec}.")


def _check_scale_source(spec: QuantSpec, input_scale: Tensor | None) -> None:
    if (spec.source == "stored") is (input_scale is None):
        raise ValueError(f'Give an input_scale if the source of input_spec is "stored", and only then; found {spec}.')
