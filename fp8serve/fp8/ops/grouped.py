"""Products of experts: rows sorted by expert, each expert's rows times its own weight.

    offsets        int32 [E], where the rows of each expert end; the last is T, and an expert without rows ends where
                   the one before does
    a              [T, K], rows of expert 0, then of expert 1, ...
    b              [E, N, K], the experts' weights

`grouped_mm` is by definition a loop of `scaled_mm` over the experts, to the last bit. Kernels do all experts at once,
because at decoding most have one row or none. Scales come in one more shape than elsewhere: [E], one for each expert.

`grouped_wgrad` is the product for a weight's gradient, where the contracted dimension is divided by expert: columns of
expert 0, then of expert 1, ... of a [N, T] and b [K, T] -> [E, N, K].
"""

from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import BLOCK, FP8_MAX, amax, blocks, saturate
from fp8serve.fp8.ops.inputs import quantized, tiles
from fp8serve.fp8.ops.packing import GROUP, pack_weight, packed_shape
from fp8serve.fp8.ops.registry import Case, define, reference


def spans(offsets: Tensor) -> list[tuple[int, int]]:
    """(begin, end) of each expert's rows."""
    return list(pairwise([0, *offsets.tolist()]))


def expert_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """int64 [rows]: the expert of each row, computed without waiting for the device."""
    places = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, places, right=True).clamp(max=max(len(offsets) - 1, 0))


def _part(scale_inv: Tensor, expert: int, begin: int, end: int) -> Tensor:
    """The scales of one expert's rows."""
    if scale_inv.dim() == 1:
        return scale_inv[expert]
    return scale_inv[begin:end] if scale_inv.dim() == 2 else scale_inv


def _looped(ops: Any) -> Any:
    """grouped_mm as products of one expert after the other, with the products of `ops`."""

    def grouped_mm(
        a: Tensor,
        b: Tensor,
        a_scale_inv: Tensor,
        b_scale_inv: Tensor,
        offsets: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """a [T, K] x b [E, N, K] -> [T, N]. a: FP8 or BF16. a_scale_inv: [], [E], [T, 1] or [T, ceil(K/128)].
        b_scale_inv: [E], [E, N, 1] or [E, ceil(N/128), ceil(K/128)]. bias: [E, N]. On a CPU b may be packed, and it may
        be BF16 where a is."""
        out = a.new_empty((len(a), _columns(b)), dtype=out_dtype)
        for expert, (begin, end) in enumerate(spans(offsets)):
            if begin < end:
                scales = _part(a_scale_inv, expert, begin, end), b_scale_inv[expert]
                more = None if bias is None else bias[expert]
                if b.dim() == 4:
                    out[begin:end] = ops.packed_mm(a[begin:end], b[expert], *scales, more, None, out_dtype)
                else:
                    out[begin:end] = ops.scaled_mm(a[begin:end], b[expert], *scales, more, out_dtype)
        return out

    return grouped_mm


def _columns(b: Tensor) -> int:
    return int(b.shape[1]) * (GROUP if b.dim() == 4 else 1)


def _fake_grouped(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return a.new_empty((a.shape[0], _columns(b)), dtype=rest[-1])


_OFFSETS = {  # of 5 experts
    "even": (3, 6, 9, 12, 15),
    "some idle": (0, 1, 1, 9, 9),
    "one row": (0, 0, 0, 1, 1),
    "many rows": (40, 41, 111, 111, 130),
    "no row": (0, 0, 0, 0, 0),
}
_KINDS = ("expert", "tensor, row", "row", "block")


def _shapes(kind: str, rows: int, experts: int, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the scales of a [rows, k] and b [experts, n, k]."""
    if kind == "block":
        return (rows, blocks(k)), (experts, blocks(n), blocks(k))
    if kind == "expert":
        return (experts,), (experts,)
    return ((rows, 1) if kind == "row" else ()), (experts, n, 1)


def grouped_case(
    where: str, kind: str, shape: tuple[int, int], a: torch.dtype, packed: bool, out: torch.dtype
) -> tuple[Any, ...]:
    (n, k), offsets = shape, torch.tensor(_OFFSETS[where], dtype=torch.int32)
    rows, experts = int(offsets[-1]), len(offsets)
    noise = torch.Generator().manual_seed(3)
    scales = [torch.exp2(torch.randn(size, generator=noise)) for size in _shapes(kind, rows, experts, n, k)]
    x = tiles(rows, k, torch.bfloat16) if a == torch.bfloat16 else quantized(rows, k, a, 1)
    weights = [quantized(n, k, torch.float8_e4m3fn, 5 + i) for i in range(experts)]
    b = torch.stack([_packed(w) if packed else w for w in weights])
    bias = None if n % 2 == 0 else torch.linspace(-2, 2, experts * n).view(experts, n)
    return x, b, *scales, offsets, bias, out


def _packed(weight: Tensor) -> Tensor:
    out = torch.empty(packed_shape(*weight.shape), dtype=weight.dtype)
    pack_weight(weight, out)
    return out


def _cases() -> list[Case]:
    e4m3, e5m2 = FP8_MAX
    grid = [
        *product(_OFFSETS, _KINDS, [(33, 200)], [e4m3], [False], [torch.float32]),
        *product(["some idle"], _KINDS, [(144, 264)], [e5m2, torch.bfloat16], [False, True], [torch.bfloat16]),
    ]
    return [
        Case(f"{w}, {kind}, {s} {a} packed {p}", partial(grouped_case, w, kind, s, a, p, out))
        for w, kind, s, a, p, out in grid
    ]


define(
    "grouped_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor offsets, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor",
    _looped(reference),
    composition=_looped(torch.ops.fp8serve),
    fake=_fake_grouped,
    cases=_cases,
)


def _looped_wgrad(ops: Any) -> Any:
    """grouped_wgrad as products of one expert after the other, with the products of `ops`."""

    def grouped_wgrad(
        a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, offsets: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        """a [N, T] x b [K, T], FP8, columns sorted by expert -> [E, N, K]; zeros for an expert without columns.
        Scales: [], [E], [E, N or K, 1], or [N or K, blocks], with ceil(columns / 128) blocks for each expert."""
        out = a.new_zeros((len(offsets), len(a), len(b)), dtype=out_dtype)
        first = 0
        for expert, (begin, end) in enumerate(spans(offsets)):
            past = first + blocks(end - begin)
            if begin < end:
                of_a, of_b = (_part_of_columns(scale, expert, first, past) for scale in (a_scale_inv, b_scale_inv))
                out[expert] = ops.scaled_mm(a[:, begin:end], b[:, begin:end], of_a, of_b, None, out_dtype)
            first = past
        return out

    return grouped_wgrad


def _part_of_columns(scale_inv: Tensor, expert: int, first: int, past: int) -> Tensor:
    """The scales of one expert's columns, whose blocks these are."""
    if scale_inv.dim() == 2:
        return scale_inv[:, first:past]
    return scale_inv[expert] if scale_inv.dim() else scale_inv


def _fake_wgrad(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return a.new_empty((len(rest[2]), a.shape[0], b.shape[0]), dtype=rest[-1])


def wgrad_case(where: str, kind: str, n: int, k: int, a: torch.dtype, out: torch.dtype) -> tuple[Any, ...]:
    offsets = torch.tensor(_OFFSETS[where], dtype=torch.int32)
    columns, experts = int(offsets[-1]), len(offsets)
    pieces = sum(blocks(end - begin) for begin, end in spans(offsets))
    noise = torch.Generator().manual_seed(4)

    def scales(rows: int, kind: str) -> Tensor:
        shape = {"tensor": (), "expert": (experts,), "row": (experts, rows, 1), "block": (rows, pieces)}[kind]
        return torch.exp2(torch.randn(shape, generator=noise))

    of_a, _, of_b = kind.partition(", ")
    x, y = quantized(n, columns, a, 1), quantized(k, columns, torch.float8_e4m3fn, 2)
    return x, y, scales(n, of_a), scales(k, of_b or of_a), offsets, out


def _wgrad_cases() -> list[Case]:
    kinds = ("expert", "row", "block", "tensor, expert", "block, row")
    grid = [
        *product(_OFFSETS, kinds, [(33, 70)], [torch.float8_e4m3fn], [torch.float32]),
        *product(["many rows"], kinds, [(144, 130)], [torch.float8_e5m2], [torch.bfloat16]),
    ]
    return [
        Case(f"{w}, {kind}, {n}x{k} {a} {out}", partial(wgrad_case, w, kind, n, k, a, out))
        for w, kind, (n, k), a, out in grid
    ]


define(
    "grouped_wgrad(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor offsets, ScalarType out_dtype)"
    " -> Tensor",
    _looped_wgrad(reference),
    composition=_looped_wgrad(torch.ops.fp8serve),
    fake=_fake_wgrad,
    cases=_wgrad_cases,
    kernels=("cuda",),
)


def grouped_quantize(x: Tensor, scale: Tensor, offsets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize x [T, K], rows sorted by expert, by each expert's scale [E]: (q, amax [E] of each expert's rows)."""
    expert = expert_of_rows(offsets, len(x))
    largest = x.new_zeros(len(scale), dtype=torch.float32).scatter_reduce(0, expert, amax(x, (1,)), "amax")
    return saturate(x.float() * scale[expert].unsqueeze(1), dtype), largest


def _fake_grouped_cast(x: Tensor, scale: Tensor, offsets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty(scale.shape, dtype=torch.float32)


def _cast_case(where: str, cols: int, dtype: torch.dtype, out: torch.dtype) -> tuple[Any, ...]:
    offsets = torch.tensor(_OFFSETS[where], dtype=torch.int32)
    x = tiles(int(offsets[-1]), cols, dtype)
    return x, torch.exp2(torch.arange(len(offsets)).float() - 2), offsets, out


def _cast_cases() -> list[Case]:
    grid = product(_OFFSETS, (64, BLOCK + 3), (torch.float32, torch.bfloat16, torch.float16), FP8_MAX)
    return [Case(f"{w}, {c} columns {d} {o}", partial(_cast_case, w, c, d, o)) for w, c, d, o in grid]


define(
    "grouped_quantize(Tensor x, Tensor scale, Tensor offsets, ScalarType dtype) -> (Tensor q, Tensor amax)",
    grouped_quantize,
    composition=grouped_quantize,
    fake=_fake_grouped_cast,
    cases=_cast_cases,
)
