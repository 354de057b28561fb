"""FrozenLinear: what serving runs. FP8 weights at rest, an input scale stored or computed per call, no gradient.

It calls the same ops as the forward pass of `Linear`, in the same order: with the scales that training ended with, it
gives the same bits. It also watches its input: `amax` is the largest magnitude since `reset_counters`, `saturated` how
many elements were cut off at +-448. Watching costs a comparison per call, and a pass over the values only in the
rare call that saturates; on a GPU, where looking would mean waiting, a kernel compares and decides.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8serve.errors import ScalesError
from fp8serve.fp8.casting import content_cast
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.ops.packing import GROUP, RUN, packed_shape
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.spec import WEIGHTS, QuantSpec, listed

E4M3 = torch.float8_e4m3fn
_count_saturated = torch.ops.fp8serve.count_saturated.default  # looked up once: it is called for every input


def _valid_scale(name: str, scale: Tensor) -> Tensor:
    scale = scale.detach().to(torch.float32)
    if scale.numel() != 1 or not bool(torch.isfinite(scale) & (scale > 0)):
        raise ScalesError(
            f"{name} must be one positive finite number, found {scale.tolist()}; calibrate the model again."
        )
    return scale.reshape(()).clone()


def _given_scale(linear: nn.Linear, name: str, scale: Tensor | None) -> Tensor:
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
        scale = _given_scale(linear, "weight", scale)
        return torch.ops.fp8serve.quantize(weight, scale, E4M3)[0], scale.reciprocal()
    op, arguments = content_cast(spec)
    return cast(tuple[Tensor, Tensor], op(weight, *arguments))


class FrozenLinear(nn.Module):
    """[..., K] -> [..., N] from FP8 weights.

    weight_q: E4M3 [N, K], or packed (see `pack`) [N / 16, K / 8, 128]. weight_scale_inv: FP32 [], [N, 1] or
    [ceil(N/128), ceil(K/128)]. bias: [N] or None. input_scale: FP32 [], multiplies to quantize the input. input_spec:
    how inputs are quantized, by the stored `input_scale` or each by its own content; None: with one scale a tensor.
    out_dtype: of the output; None for the input's.
    """

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
        self.live_rows: Tensor | None = None  # int64 []: how many rows of the input are not padding; None: all

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
            input_scale = _given_scale(linear, "input", input_scale)
        elif input_scale is not None or weight_scale is not None:
            raise ScalesError(f"{type(recipe).__name__} computes its scales from the data; do not give stored ones.")
        weight_q, weight_scale_inv = _quantized_weight(linear, specs["weight"], weight_scale)
        return cls(weight_q, weight_scale_inv, linear.bias, input_scale, specs["input"].at_rest(), out_dtype)

    @classmethod
    def from_quantized(
        cls,
        weight_q: Tensor,
        weight_scale_inv: Tensor,
        bias: Tensor | None,
        input_scale: Tensor | None,
        input_spec: QuantSpec | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> "FrozenLinear":
        """A layer from the tensors of an FP8 checkpoint; input_scale multiplies to quantize, None is dynamic."""
        return cls(weight_q, weight_scale_inv, bias, input_scale, input_spec, out_dtype)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        q, scale_inv = self.cast(x.reshape(-1, self.in_features))
        out_dtype, op = self.out_dtype or x.dtype, torch.ops.fp8serve
        scales = scale_inv, self.weight_scale_inv
        if self.is_packed:
            y = op.packed_mm(q, self.weight_q, *scales, self.bias, None, out_dtype)
        else:
            y = op.scaled_mm(q, self.weight_q, *scales, self.bias, out_dtype)
        return cast(Tensor, y).view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """weight_q, by the name that other linears give their weight."""
        return self.weight_q

    @property
    def is_packed(self) -> bool:
        return self.weight_q.dim() == 3

    def pack(self, out: Tensor) -> None:
        """Reads the weight from now on where it is packed: `out`, E4M3 of as many elements. For serving on a CPU."""
        self.weight_q = packed(self.weight_q, out)

    def quantize_input_by(self, spec: QuantSpec) -> None:
        """Quantize inputs from now on by `spec`; what that means is found here and not in every call."""
        if spec.element != "e4m3":
            raise ValueError(f"A FrozenLinear quantizes its input to e4m3, found {spec}.")
        self.input_spec = spec
        self._content_cast: Any = content_cast(spec)

    def make_rows_independent(self) -> None:
        """Quantize every row of an input by its own content where one scale would be found for the whole input."""
        spec = self.input_spec
        if (spec.source, spec.granularity) == ("current", "tensor"):
            self.quantize_input_by(replace(spec, granularity="row"))

    def cast(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, K] -> the FP8 data that this layer multiplies, and their scale_inv."""
        if self.input_scale is not None and self.input_scale_inv is not None:
            q, amax = torch.ops.fp8serve.quantize(x, self.input_scale, E4M3)
            self.watch(self.input_scale, amax, x)
            return q, self.input_scale_inv
        return self._cast_by_content(x)

    def _cast_by_content(self, x: Tensor) -> tuple[Tensor, Tensor]:
        op, arguments = self._content_cast
        return cast(tuple[Tensor, Tensor], op(x, *arguments))

    def watch(
        self, scale: Tensor, amax: Tensor, x: Tensor, other: Tensor | None = None, eps: float | None = None
    ) -> None:
        """Count an input that another op has cast by `scale`: x, or what `count_saturated` makes of these; amax []."""
        _count_saturated(x, other, eps, scale, amax, self.amax, self.saturated, self.live_rows)

    def reset_counters(self) -> None:
        """Start watching anew."""
        self.amax.zero_()
        self.saturated.zero_()

    def extra_repr(self) -> str:
        kind, granularity = "dynamic" if self.input_scale is None else "static", self.input_spec.granularity
        return f"in_features={self.in_features}, out_features={self.out_features}, input={kind} {granularity}"


def packed(weight: Tensor, out: Tensor) -> Tensor:
    """`out`, a vector, as [N / 16, K / 8, 128] and filled with weight [N, K], in the order that packed_mm reads."""
    out = out.view(packed_shape(*weight.shape))
    torch.ops.fp8serve.pack_weight(weight.detach(), out)
    return out


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
