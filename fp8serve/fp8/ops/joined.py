"""The product of stacked weights, such as q, k and v of a layer, with separate block scales for each weight.

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

from fp8serve.fp8.ops.arithmetic import blocks
from fp8serve.fp8.ops.inputs import random_fp8
from fp8serve.fp8.ops.packing import GROUP, pack_weight, packed_shape
from fp8serve.fp8.ops.registry import Case, define_composed


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


def _fake(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0] * (GROUP if b.dim() == 3 else 1)), dtype=rest[-1])


def _case(
    rows: int, widths: tuple[int, ...], k: int, a: torch.dtype, packed: bool, out: torch.dtype
) -> tuple[Any, ...]:
    noise = torch.Generator().manual_seed(6)
    a_scale = torch.exp2(torch.randn(rows, blocks(k), generator=noise))
    b_scale = torch.exp2(torch.randn(sum(map(blocks, widths)), blocks(k), generator=noise))
    n = sum(widths)
    x = random_fp8(rows, k, torch.float8_e4m3fn, 1)
    x = x.to(a) if a == torch.bfloat16 else x
    b = random_fp8(n, k, torch.float8_e4m3fn, 2)
    if packed:
        weight, b = b, torch.empty(packed_shape(n, k), dtype=b.dtype)
        pack_weight(weight, b)
    bias = torch.linspace(-2, 2, n) if out == torch.float32 else None
    return x, b, a_scale, b_scale, torch.tensor(widths).cumsum(0).to(torch.int32), bias, out


def _cases() -> list[Case]:
    grid = product((1, 7, 40), ((144, 48, 48), (16, 256, 160)), (264, 1160), (False, True))
    fp8 = [(m, w, k, torch.float8_e4m3fn, p, torch.bfloat16) for m, w, k, p in grid]
    others = [(3, (48, 80), 200, dtype, True, torch.float32) for dtype in (torch.float8_e4m3fn, torch.bfloat16)]
    return [Case(" ".join(map(str, case)), partial(_case, *case)) for case in (*fp8, *others)]


define_composed(
    "joined_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor ends, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor",
    joined_mm,
    fake=_fake,
    cases=_cases,
    kernel_devices=("cpu",),
)
