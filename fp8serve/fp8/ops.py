"""The ops: one schema, the reference as default kernel, a fake kernel, and the C++ kernels where they were built.

Dispatch, not an `if`, chooses the kernel: the reference is registered as CompositeExplicitAutograd, which answers for
every device that has no kernel of its own. `backends()` says who answers, so a fallback is never silent. The libraries
are plain shared objects next to the package (`libfp8serve_cpu.so`, `libfp8serve_cuda.so`), looked up along the
package's `__path__` because an editable install has two places.

An op is declared here and nowhere else: `torch.library` is imported by this module only.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.library
from torch import Tensor

import fp8serve
from fp8serve.errors import RecipeError
from fp8serve.fp8 import reference, reference_fused, reference_packed, reference_sampling
from fp8serve.fp8.reference import BLOCK

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
GranularityName = Literal["tensor", "row", "block1x128", "block128x128"]

_LIBRARY: Any = cast(Any, torch.library.Library)("fp8serve", "DEF")  # torch leaves the class untyped
OPS: list[str] = []  # every op that has a kernel per device
COMPOSED: list[str] = []  # fused ops that are put together from those until a device has a kernel for them
CPU_ONLY = ["pack_weight", "packed_mm"]  # of OPS: on a GPU nothing is gained by an order of its own
MEASURED = ["scaled_mm_by"]  # CUDA only: the same work by a kernel that the caller names, to find out which is fastest


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], composed: bool = False) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    # Like the C++ kernels, the reference is not differentiable: gradients are the business of autograd functions.
    _LIBRARY.impl(name, torch.no_grad()(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8serve::{name}", fake, lib=_LIBRARY)
    (COMPOSED if composed else OPS).append(name)


def blocks(size: int) -> int:
    """How many blocks of 128 cover `size`."""
    return -(-size // BLOCK)


def _fake_quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty((), dtype=torch.float32)


def _fake_transpose(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, amax = _fake_quantize(x, scale, dtype)
    return q, q.new_empty((x.shape[1], x.shape[0])), amax


def _quantize_transpose(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Without a kernel of its own the op is put together from `quantize`, which may have one."""
    q, amax = torch.ops.fp8serve.quantize(x, scale, dtype)
    return q, q.t().clone(memory_format=torch.contiguous_format), amax


def _fake_rmsnorm(x: Tensor, weight: Tensor, eps: float, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _fake_quantize(x, scale, dtype)


def _rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    y = torch.ops.fp8serve.rms_norm(x, weight, eps)
    return cast(tuple[Tensor, Tensor], torch.ops.fp8serve.quantize(y, scale, dtype))


def _fake_layernorm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return _fake_quantize(x, scale, dtype)


def _layer_norm_quantize(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    y = reference.layer_norm(x, weight, bias, eps)
    return cast(tuple[Tensor, Tensor], torch.ops.fp8serve.quantize(y, scale, dtype))


def _fake_silu_mul(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _fake_quantize(gate, scale, dtype)


def _silu_mul_quantize(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    y = torch.ops.fp8serve.silu_mul(gate, up)
    return cast(tuple[Tensor, Tensor], torch.ops.fp8serve.quantize(y, scale, dtype))


def _fake_current(x: Tensor, dtype: torch.dtype, power_2: bool) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty((), dtype=torch.float32)


def _fake_rowwise(x: Tensor, dtype: torch.dtype, power_2: bool) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty((x.shape[0], 1), dtype=torch.float32)


def _fake_block(x: Tensor, dtype: torch.dtype, block_rows: int, power_2: bool) -> tuple[Tensor, Tensor]:
    shape = (-(-x.shape[0] // block_rows), blocks(x.shape[1]))
    return torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty(shape, dtype=torch.float32)


def _fake_scaled_mm(a: Tensor, b: Tensor, a_s: Tensor, b_s: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out)


def _fake_mm_quantize(
    a: Tensor, b: Tensor, a_s: Tensor, b_s: Tensor, bias: Tensor | None, out_scale: Tensor, out: torch.dtype
) -> tuple[Tensor, Tensor]:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out), a.new_empty((), dtype=torch.float32)


def _scaled_mm_quantize(
    a: Tensor, b: Tensor, a_s: Tensor, b_s: Tensor, bias: Tensor | None, out_scale: Tensor, out: torch.dtype
) -> tuple[Tensor, Tensor]:
    y = torch.ops.fp8serve.scaled_mm(a, b, a_s, b_s, bias, torch.float32)
    return cast(tuple[Tensor, Tensor], torch.ops.fp8serve.quantize(y, out_scale, out))


def _fake_nothing(*args: Any) -> None:
    return None


def _fake_paged(q: Tensor, *args: Any, **options: Any) -> Tensor:
    return torch.empty_like(q)


_define(
    "quantize(Tensor x, Tensor scale, ScalarType dtype) -> (Tensor q, Tensor amax)",
    reference.quantize,
    _fake_quantize,
)
_define(
    "quantize_transpose(Tensor x, Tensor scale, ScalarType dtype) -> (Tensor q, Tensor q_t, Tensor amax)",
    _quantize_transpose,
    _fake_transpose,
    composed=True,
)
_define(
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, Tensor scale, ScalarType dtype) -> (Tensor q, Tensor amax)",
    _rms_norm_quantize,
    _fake_rmsnorm,
    composed=True,
)
_define(
    "layer_norm_quantize(Tensor x, Tensor weight, Tensor? bias, float eps, Tensor scale, ScalarType dtype)"
    " -> (Tensor q, Tensor amax)",
    _layer_norm_quantize,
    _fake_layernorm,
    composed=True,
)
_define(
    "silu_mul_quantize(Tensor gate, Tensor up, Tensor scale, ScalarType dtype) -> (Tensor q, Tensor amax)",
    _silu_mul_quantize,
    _fake_silu_mul,
    composed=True,
)
_define(
    "quantize_current(Tensor x, ScalarType dtype, bool power_2) -> (Tensor q, Tensor scale_inv)",
    reference.quantize_current,
    _fake_current,
)
_define(
    "quantize_rowwise(Tensor x, ScalarType dtype, bool power_2) -> (Tensor q, Tensor scale_inv)",
    reference.quantize_rowwise,
    _fake_rowwise,
)
_define(
    "quantize_block(Tensor x, ScalarType dtype, int block_rows, bool power_2) -> (Tensor q, Tensor scale_inv)",
    reference.quantize_block,
    _fake_block,
)
_define(
    "scaled_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, ScalarType out_dtype)"
    " -> Tensor",
    reference.scaled_mm,
    _fake_scaled_mm,
)
_define(
    "scaled_mm_quantize(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, Tensor out_scale,"
    " ScalarType out_dtype) -> (Tensor q, Tensor amax)",
    _scaled_mm_quantize,
    _fake_mm_quantize,
    composed=True,
)
_LIBRARY.define(
    "scaled_mm_by(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, ScalarType out_dtype,"
    " str kernel, int swizzle) -> Tensor"
)
_define(
    "delayed_update(Tensor(a!)[] scales, Tensor(b!)[] amax_histories, Tensor(c!)[] nonfinite, Tensor(d!)[] steps,"
    " float[] fp8_maxes, int margin, int interval, str algo) -> ()",
    reference.delayed_update,
    _fake_nothing,
)
_define(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor context_lens,"
    " Tensor query_starts, Tensor? k_scale_inv, Tensor? v_scale_inv, float softmax_scale,"
    " int? window=None, float? softcap=None, Tensor? sinks=None) -> Tensor",
    reference.paged_attention,
    _fake_paged,
)
_define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor? k_scale,"
    " Tensor? v_scale) -> ()",
    reference.write_kv,
    _fake_nothing,
)

# Book-keeping of delayed scaling inside compiled graphs; the kernel is Python, see autocast.py.
_LIBRARY.define("record_amax(Tensor(a!) history, Tensor amax, int module, int rule, str direction) -> ()")
_LIBRARY.define("expect_backward(Tensor(a!) history, int rule) -> ()")  # "changes" it: else a graph would drop the op
for _name in ("record_amax", "expect_backward"):
    torch.library.register_fake(f"fp8serve::{_name}", _fake_nothing, lib=_LIBRARY)


def implement(name: str, kernel: Callable[..., Any]) -> None:
    """Give an op that is declared here the kernel that another module has."""
    _LIBRARY.impl(name, torch.no_grad()(kernel), "CompositeExplicitAutograd")


_define(
    "scaled_mm_add(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, Tensor residual)"
    " -> Tensor",
    reference_fused.scaled_mm_add,
    lambda a, b, a_s, b_s, bias, residual: torch.empty_like(residual, memory_format=torch.contiguous_format),
)
_define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    reference.rms_norm,
    lambda x, weight, eps: torch.empty_like(x, memory_format=torch.contiguous_format),
)
_define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, float eps) -> (Tensor d_x, Tensor d_weight)",
    reference_fused.rms_norm_backward,
    lambda grad, x, weight, eps: (torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)),
)
_define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    reference.silu_mul,
    lambda gate, up: torch.empty_like(gate, memory_format=torch.contiguous_format),
)
_define(
    "silu_mul_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor d_gate, Tensor d_up)",
    reference_fused.silu_mul_backward,
    lambda grad, *sources: tuple(torch.empty_like(s, memory_format=torch.contiguous_format) for s in sources),
)
_define(
    "rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    reference_fused.rotary,
    lambda x, cos, sin: torch.empty_like(x, memory_format=torch.contiguous_format),
)
_define(
    "mm(Tensor a, Tensor b, Tensor? bias, ScalarType out_dtype) -> Tensor",
    reference_fused.mm,
    lambda a, b, bias, out_dtype: a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype),
)
_define(
    "pack_weight(Tensor weight, Tensor(a!) out) -> ()",
    reference_packed.pack_weight,
    _fake_nothing,
)
_define(
    "packed_mm(Tensor a, Tensor b, Tensor? a_scale_inv, Tensor? b_scale_inv, Tensor? bias, Tensor? residual,"
    " ScalarType out_dtype) -> Tensor",
    reference_packed.packed_mm,
    lambda a, b, a_s, b_s, bias, residual, out_dtype: a.new_empty((a.shape[0], 16 * b.shape[0]), dtype=out_dtype),
)
_define(
    "rotary_write_kv(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor slots, Tensor? k_scale, Tensor? v_scale) -> Tensor",
    reference_fused.rotary_write_kv,
    lambda q, *rest: torch.empty_like(q, memory_format=torch.contiguous_format),
)
_define(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform) -> Tensor",
    reference_sampling.sample,
    lambda logits, *rest: logits.new_empty((logits.shape[0],), dtype=torch.int64),
)
_define(
    "transpose_codes(Tensor q) -> Tensor",
    lambda q: q.t().clone(memory_format=torch.contiguous_format),
    lambda q: q.new_empty((q.shape[1], q.shape[0])),
    composed=True,
)
_define(
    "count_saturated(Tensor x, Tensor? other, float? eps, Tensor scale, Tensor amax, Tensor(a!) seen,"
    " Tensor(b!) saturated, Tensor? rows) -> ()",
    reference_fused.count_saturated,
    _fake_nothing,
    composed=True,
)
# The instruction set of the CPU library, which a test may cap ("portable" .. "avx512bf16", "best"); "" only asks.
_LIBRARY.define("cpu_isa(str cap) -> str")


def library_path(stem: str) -> Path | None:
    """Where a library of kernels lies, whether it can be loaded here or not."""
    paths = (Path(folder) / f"lib{stem}.so" for folder in fp8serve.__path__)
    return next((path for path in paths if path.exists()), None)


def _load(stem: str) -> Path | None:
    path = library_path(stem)
    if path is not None:
        cast(Any, torch.ops).load_library(str(path))
    return path


# A CUDA library cannot be loaded by a torch that was built without CUDA, so it is not even tried there.
LIBRARIES = {"cpu": _load("fp8serve_cpu"), "cuda": _load("fp8serve_cuda") if torch.version.cuda else None}


def _has_kernel(op: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"fp8serve::{op}", key))


def cpu_isa() -> str | None:
    """The instruction set of the CPU library ("avx512bf16", "avx512", "avx2", "portable"); None without it."""
    if not _has_kernel("cpu_isa", "CompositeExplicitAutograd"):
        return None
    return cast(str, torch.ops.fp8serve.cpu_isa(""))


def backends(device: str = "cpu") -> dict[str, str]:
    """Which kernel serves each op on a device: "cpu kernel (avx512bf16)", "cuda kernel", "reference" or "composed".

    A composed op runs as a sequence of the other ops.
    """
    detail = f" ({cpu_isa()})" if device == "cpu" and cpu_isa() else ""
    kernels = dict.fromkeys(OPS, "reference") | dict.fromkeys(COMPOSED, "composed")
    return {op: f"{device} kernel{detail}" if _has_kernel(op, device.upper()) else kernels[op] for op in kernels}


def _dtype(fmt: str) -> torch.dtype:
    if fmt not in DTYPES:
        raise RecipeError(f"There is no FP8 format {fmt!r}; use 'e4m3' or 'e5m2'.")
    return DTYPES[fmt]


def _with_scale(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    if scale.dim() != 0:
        raise ValueError(f"A given scale must be one number (shape []), found shape {list(scale.shape)}.")
    if not 0 < float(scale) < math.inf:  # NaN fails both; this waits for a device, which the op itself does not
        raise ValueError(f"A given scale must be positive and finite, found {float(scale)}.")
    q, _ = torch.ops.fp8serve.quantize(x, scale, dtype)
    return q, scale.reciprocal()


def _by_rows(x: Tensor, op: Callable[..., Any], *args: Any) -> tuple[Tensor, Tensor]:
    """Apply a two-dimensional op to [..., K] by folding the leading dimensions."""
    q, scale_inv = op(x.reshape(-1, x.shape[-1]), *args)
    return q.view(x.shape), scale_inv.view(*x.shape[:-1], scale_inv.shape[-1])


def quantize(
    x: Tensor,
    fmt: str = "e4m3",
    granularity: GranularityName = "tensor",
    scale: Tensor | float | None = None,
    power_2_scale: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantize x [..., K] of FP32, BF16 or FP16 to FP8: (q of x's shape, scale_inv FP32).

    scale_inv is [] per tensor, [..., 1] per row, [..., ceil(K/128)] for "block1x128" and [ceil(M/128), ceil(K/128)] for
    "block128x128" (x must be [M, K]). With `scale` (FP32 [], multiplies) the tensor is quantized by it; otherwise the
    scale comes from x itself. Raises RecipeError for an unknown format or granularity, ValueError for a wrong shape.
    """
    dtype = _dtype(fmt)
    if scale is not None:
        if granularity != "tensor" or power_2_scale:
            raise ValueError(
                "A given scale is for the whole tensor; leave granularity and power_2_scale at their defaults."
            )
        return _with_scale(x, scale, dtype)
    if granularity == "tensor":
        return cast(tuple[Tensor, Tensor], torch.ops.fp8serve.quantize_current(x, dtype, power_2_scale))
    if granularity == "row":
        return _by_rows(x, torch.ops.fp8serve.quantize_rowwise, dtype, power_2_scale)
    if granularity == "block1x128":
        return _by_rows(x, torch.ops.fp8serve.quantize_block, dtype, 1, power_2_scale)
    if granularity == "block128x128":
        if x.dim() != 2:
            raise ValueError(f"128x128 blocks need a matrix [M, K], found shape {list(x.shape)}.")
        return cast(tuple[Tensor, Tensor], torch.ops.fp8serve.quantize_block(x, dtype, BLOCK, power_2_scale))
    raise RecipeError(f"There is no granularity {granularity!r}; use tensor, row, block1x128 or block128x128.")


def _check_scale(name: str, scale_inv: Tensor, rows: int, cols: int) -> None:
    allowed = [(), (rows, 1), (rows, blocks(cols)), (blocks(rows), blocks(cols))]
    if tuple(scale_inv.shape) not in allowed:
        shapes = ", ".join(str(list(s)) for s in allowed)
        raise ValueError(
            f"{name} of a [{rows}, {cols}] matrix must have one of the shapes {shapes}, found {list(scale_inv.shape)}."
        )


def dequantize(q: Tensor, scale_inv: Tensor) -> Tensor:
    """FP8 q [..., K] and its scale_inv, of any granularity of `quantize`, back to FP32."""
    if scale_inv.dim() == 0:
        return reference.dequantize(q, scale_inv)
    flat = q.reshape(-1, q.shape[-1])
    folded = scale_inv.reshape(-1, scale_inv.shape[-1])
    _check_scale("scale_inv", folded, *flat.shape)
    return reference.dequantize(flat, folded).view(q.shape)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """FP8 [M, K] x FP8 [N, K] -> [M, N] in out_dtype, accumulated in FP32, plus bias [N].

    Any mix of E4M3 and E5M2, any sizes, each scale_inv of any granularity of `quantize`. Raises ValueError for shapes
    that do not fit.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"scaled_mm needs a [M, K] and b [N, K], found {list(a.shape)} and {list(b.shape)}.")
    if a.dtype not in reference.FP8_MAX or b.dtype not in reference.FP8_MAX:
        raise ValueError(f"scaled_mm needs FP8 operands, found {a.dtype} and {b.dtype}; quantize them first.")
    if bias is not None and tuple(bias.shape) != (b.shape[0],):
        raise ValueError(f"bias must have shape [{b.shape[0]}], found {list(bias.shape)}.")
    _check_scale("a_scale_inv", a_scale_inv, *a.shape)
    _check_scale("b_scale_inv", b_scale_inv, *b.shape)
    return cast(Tensor, torch.ops.fp8serve.scaled_mm(a, b, a_scale_inv, b_scale_inv, bias, out_dtype))
