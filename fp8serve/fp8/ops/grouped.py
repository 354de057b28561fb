"""Products of several weights in one op: of a mixture's experts, and of layers that have the same input.

`grouped_mm` multiplies the rows of each expert by the weight of this expert:

    offsets        int32 [E], the end of each expert's rows; the last is T, and the rows of an idle expert are empty
    a              [T, K], rows of expert 0, then of expert 1, and so on
    b              [E, N, K], the experts' weights

`grouped_mm` equals a loop of `scaled_mm` over the experts bit for bit. Kernels compute all experts at once, because
while decoding most experts have at most one row. In addition to the shapes of scales in other ops, scales may be [E],
one for each expert.

`grouped_wgrad` computes the gradients of the weights, for which the contracted dimension is split by expert: a [N, T]
and b [K, T], with columns of expert 0, then of expert 1, and so on, give [E, N, K].

`joined_mm` multiplies all rows by stacked weights, such as q, k and v of a layer, with separate block scales for each
weight:

    b            [N, K], the weights stacked along the rows
    ends         int32 [P], the end of the rows of each weight; the last is N
    b_scale_inv  [sum of ceil(N_i/128), ceil(K/128)], the scales of the weights stacked along the rows

If all weights but the last have a multiple of 128 rows, one `scaled_mm` of the stacked weight computes this. Otherwise
`joined_mm` equals one `scaled_mm` per weight bit for bit. There is a kernel if each weight has a multiple of 16 rows.
"""

from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import BLOCK, E8M0, FP8_MAX, amax, blocks, saturating_cast
from fp8serve.fp8.ops.inputs import grid_cases, random_fp8, random_mx_scales, tiled_noise
from fp8serve.fp8.ops.packing import GROUP, fake_packed_product, packed_weight
from fp8serve.fp8.ops.registry import Case, define, define_composed


def expert_row_ranges(offsets: Tensor) -> list[tuple[int, int]]:
    """Returns (begin, end) of each expert's rows."""
    return list(pairwise([0, *offsets.tolist()]))


def expert_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """Returns the expert of each row, int64 [rows], without waiting for the device."""
    indices = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, indices, right=True).clamp(max=max(len(offsets) - 1, 0))


def _expert_scales(scale_inv: Tensor, expert: int, begin: int, end: int) -> Tensor:
    if scale_inv.dim() == 1:
        return scale_inv[expert]
    return scale_inv[begin:end] if scale_inv.dim() == 2 else scale_inv


def grouped_mm(
    ops: Any,
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiplies a [T, K], FP8 or BF16, by b [E, N, K] and returns [T, N].

    a_scale_inv is [], [E], [T, 1] or [T, ceil(K/128)]. b_scale_inv is [E], [E, N, 1] or
    [E, ceil(N/128), ceil(K/128)]. In MX blocks they are E8M0 [T, ceil(K/32)] and [E, N, ceil(K/32)], and on a GPU
    there is no kernel. bias is [E, N]. On a CPU b may be packed, and b may be BF16 if a is BF16.
    """
    out = a.new_empty((len(a), _columns(b)), dtype=out_dtype)
    for expert, (begin, end) in enumerate(expert_row_ranges(offsets)):
        if begin < end:
            scales = _expert_scales(a_scale_inv, expert, begin, end), b_scale_inv[expert]
            expert_bias = None if bias is None else bias[expert]
            if E8M0 in (a_scale_inv.dtype, b_scale_inv.dtype):
                out[begin:end] = ops.mx_mm(a[begin:end], b[expert], *scales, expert_bias, None, out_dtype)
            elif b.dim() == 4:
                out[begin:end] = ops.packed_mm(a[begin:end], b[expert], *scales, expert_bias, None, out_dtype)
            else:
                out[begin:end] = ops.scaled_mm(a[begin:end], b[expert], *scales, expert_bias, out_dtype)
    return out


def _columns(b: Tensor) -> int:
    return int(b.shape[1]) * (GROUP if b.dim() == 4 else 1)


def _fake_grouped(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return a.new_empty((a.shape[0], _columns(b)), dtype=rest[-1])


OFFSETS = {  # of 5 experts
    "even": (3, 6, 9, 12, 15),
    "some idle": (0, 1, 1, 9, 9),
    "one row": (0, 0, 0, 1, 1),
    "many rows": (40, 41, 111, 111, 130),
    "no row": (0, 0, 0, 0, 0),
}
_KINDS = ("expert", "tensor, row", "row", "block", "mx")


def _shapes(kind: str, rows: int, experts: int, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of the scales of a [rows, k] and b [experts, n, k]."""
    if kind == "block":
        return (rows, blocks(k)), (experts, blocks(n), blocks(k))
    if kind == "expert":
        return (experts,), (experts,)
    return ((rows, 1) if kind == "row" else ()), (experts, n, 1)


def grouped_case(
    where: str, kind: str, shape: tuple[int, int], a: torch.dtype, packed: bool, out: torch.dtype
) -> tuple[Any, ...]:
    (n, k), offsets = shape, torch.tensor(OFFSETS[where], dtype=torch.int32)
    rows, experts = int(offsets[-1]), len(offsets)
    noise = torch.Generator().manual_seed(3)
    if kind == "mx":
        scales = [random_mx_scales(rows, k, 3), torch.stack([random_mx_scales(n, k, 4 + i) for i in range(experts)])]
        scales = [torch.tensor(0.5), scales[1]] if a == torch.bfloat16 else scales
    else:
        scales = [torch.exp2(torch.randn(size, generator=noise)) for size in _shapes(kind, rows, experts, n, k)]
    x = tiled_noise(rows, k, torch.bfloat16) if a == torch.bfloat16 else random_fp8(rows, k, a, 1)
    weights = [random_fp8(n, k, torch.float8_e4m3fn, 5 + i) for i in range(experts)]
    b = torch.stack([packed_weight(w) if packed else w for w in weights])
    bias = None if n % 2 == 0 else torch.linspace(-2, 2, experts * n).view(experts, n)
    return x, b, *scales, offsets, bias, out


def _cases() -> list[Case]:
    e4m3, e5m2 = FP8_MAX
    grid = [
        *product(OFFSETS, _KINDS, [(33, 200)], [e4m3], [False], [torch.float32]),
        *product(["some idle"], _KINDS, [(144, 288)], [e5m2, torch.bfloat16], [False, True], [torch.bfloat16]),
    ]
    return [
        Case(f"{w}, {kind}, {s} {a} packed {p}", partial(grouped_case, w, kind, s, a, p, out))
        for w, kind, s, a, p, out in grid
    ]


define_composed(
    "grouped_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor offsets, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor",
    grouped_mm,
    fake=_fake_grouped,
    cases=_cases,
)


def grouped_wgrad(
    ops: Any, a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Multiplies a [N, T] by b [K, T], FP8 with columns sorted by expert, and returns [E, N, K].

    An expert without columns gets zeros. Scales are [], [E], [E, N or K, 1], or [N or K, blocks], with
    ceil(columns / 128) blocks for each expert.
    """
    out = a.new_zeros((len(offsets), len(a), len(b)), dtype=out_dtype)
    first_block = 0
    for expert, (begin, end) in enumerate(expert_row_ranges(offsets)):
        end_block = first_block + blocks(end - begin)
        if begin < end:
            a_scale, b_scale = (
                _column_scales(scale, expert, first_block, end_block) for scale in (a_scale_inv, b_scale_inv)
            )
            out[expert] = ops.scaled_mm(a[:, begin:end], b[:, begin:end], a_scale, b_scale, None, out_dtype)
        first_block = end_block
    return out


def _column_scales(scale_inv: Tensor, expert: int, first_block: int, end_block: int) -> Tensor:
    """Returns the scales of one expert's columns, which have the blocks from `first_block` to `end_block`."""
    if scale_inv.dim() == 2:
        return scale_inv[:, first_block:end_block]
    return scale_inv[expert] if scale_inv.dim() else scale_inv


def _fake_wgrad(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return a.new_empty((len(rest[2]), a.shape[0], b.shape[0]), dtype=rest[-1])


def wgrad_case(where: str, kind: str, n: int, k: int, a: torch.dtype, out: torch.dtype) -> tuple[Any, ...]:
    offsets = torch.tensor(OFFSETS[where], dtype=torch.int32)
    columns, experts = int(offsets[-1]), len(offsets)
    num_blocks = sum(blocks(end - begin) for begin, end in expert_row_ranges(offsets))
    noise = torch.Generator().manual_seed(4)

    def scales(rows: int, kind: str) -> Tensor:
        shape = {"tensor": (), "expert": (experts,), "row": (experts, rows, 1), "block": (rows, num_blocks)}[kind]
        return torch.exp2(torch.randn(shape, generator=noise))

    a_kind, _, b_kind = kind.partition(", ")
    x, y = random_fp8(n, columns, a, 1), random_fp8(k, columns, torch.float8_e4m3fn, 2)
    return x, y, scales(n, a_kind), scales(k, b_kind or a_kind), offsets, out


def _wgrad_cases() -> list[Case]:
    kinds = ("expert", "row", "block", "tensor, expert", "block, row")
    grid = [
        *product(OFFSETS, kinds, [(33, 70)], [torch.float8_e4m3fn], [torch.float32]),
        *product(["many rows"], kinds, [(144, 130)], [torch.float8_e5m2], [torch.bfloat16]),
    ]
    return [
        Case(f"{w}, {kind}, {n}x{k} {a} {out}", partial(wgrad_case, w, kind, n, k, a, out))
        for w, kind, (n, k), a, out in grid
    ]


define_composed(
    "grouped_wgrad(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor offsets, ScalarType out_dtype)"
    " -> Tensor",
    grouped_wgrad,
    fake=_fake_wgrad,
    cases=_wgrad_cases,
    kernel_devices=("cuda",),
)


def grouped_quantize(x: Tensor, scale: Tensor, offsets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantizes x [T, K] with rows sorted by expert and scales [E]; returns (q, amax [E] of each expert's rows)."""
    expert = expert_of_rows(offsets, len(x))
    largest = x.new_zeros(len(scale), dtype=torch.float32).scatter_reduce(0, expert, amax(x, (1,)), "amax")
    return saturating_cast(x.float() * scale[expert].unsqueeze(1), dtype), largest


def _fake_grouped_cast(x: Tensor, scale: Tensor, offsets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty(scale.shape, dtype=torch.float32)


def _cast_case(where: str, cols: int, dtype: torch.dtype, out: torch.dtype) -> tuple[Any, ...]:
    offsets = torch.tensor(OFFSETS[where], dtype=torch.int32)
    x = tiled_noise(int(offsets[-1]), cols, dtype)
    return x, torch.exp2(torch.arange(len(offsets)).float() - 2), offsets, out


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
define(
    "grouped_quantize(Tensor x, Tensor scale, Tensor offsets, ScalarType dtype) -> (Tensor q, Tensor amax)",
    grouped_quantize,
    fake=_fake_grouped_cast,
    cases=partial(grid_cases, "{}, {} columns {} {}", _cast_case, OFFSETS, (64, BLOCK + 3), _DTYPES, FP8_MAX),
)


def joined_mm(
    ops: Any,
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    ends: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiplies a [M, K], FP8 or BF16 with scales as in scaled_mm, by b [N, K], which may be packed on a CPU."""
    is_packed, products, block = b.dim() == 3, [], 0
    for begin, end in pairwise([0, *ends.tolist()]):
        scales = b_scale_inv[block : block + blocks(end - begin)]
        block += blocks(end - begin)
        weight_bias = None if bias is None else bias[begin:end]
        if is_packed:
            weight = b[begin // GROUP : end // GROUP]
            products.append(ops.packed_mm(a, weight, a_scale_inv, scales, weight_bias, None, out_dtype))
        else:
            products.append(ops.scaled_mm(a, b[begin:end], a_scale_inv, scales, weight_bias, out_dtype))
    return torch.cat(products, 1)


def _joined_case(
    rows: int, widths: tuple[int, ...], k: int, a: torch.dtype, packed: bool, out: torch.dtype
) -> tuple[Any, ...]:
    noise = torch.Generator().manual_seed(6)
    a_scale = torch.exp2(torch.randn(rows, blocks(k), generator=noise))
    b_scale = torch.exp2(torch.randn(sum(map(blocks, widths)), blocks(k), generator=noise))
    n = sum(widths)
    x = random_fp8(rows, k, torch.float8_e4m3fn, 1)
    x = x.to(a) if a == torch.bfloat16 else x
    weight = random_fp8(n, k, torch.float8_e4m3fn, 2)
    b = packed_weight(weight) if packed else weight
    bias = torch.linspace(-2, 2, n) if out == torch.float32 else None
    return x, b, a_scale, b_scale, torch.tensor(widths).cumsum(0).to(torch.int32), bias, out


def _joined_cases() -> list[Case]:
    grid = product((1, 7, 40), ((144, 48, 48), (16, 256, 160)), (264, 1160), (False, True))
    fp8 = [(m, w, k, torch.float8_e4m3fn, p, torch.bfloat16) for m, w, k, p in grid]
    others = [(3, (48, 80), 200, dtype, True, torch.float32) for dtype in (torch.float8_e4m3fn, torch.bfloat16)]
    return [Case(" ".join(map(str, case)), partial(_joined_case, *case)) for case in (*fp8, *others)]


define_composed(
    "joined_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor ends, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor",
    joined_mm,
    fake=fake_packed_product,
    cases=_joined_cases,
    kernel_devices=("cpu",),
)
