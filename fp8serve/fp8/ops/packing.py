"""Packed weights in PyTorch: the memory layout of csrc/cpu/gemm_packed.h as a permutation.

A weight [N, K], N a multiple of 16 and K of 8, becomes [N / 16, K / 8, 128]. The first dimension has groups of 16 rows.
Within a group are blocks of 1024 columns. Within a block, the columns k = 0 to 3 of every 8 come first, then k = 4 to
7, each for the 16 rows side by side.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import blocks as scale_blocks
from fp8serve.fp8.ops.gemm import mm, scaled_mm
from fp8serve.fp8.ops.inputs import fake_nothing, grid_cases, random_fp8, random_normal
from fp8serve.fp8.ops.registry import define

GROUP, RUN, BLOCK = 16, 8, 1024
_FOURS, _PAIRS, _ROWS = 4, 2, 2  # 16 rows are four groups of two pairs of rows
PACKABLE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16)  # and codes of 4 bits (four_bit.py)


def is_packable(weight: Tensor) -> bool:
    """Returns whether pack_weight, or pack_4bit for uint8, accepts the weight."""
    is_whole = weight.dim() == 2 and weight.shape[0] % GROUP == 0 and weight.shape[1] % RUN == 0
    return is_whole and weight.dtype in (*PACKABLE, torch.uint8) and weight.numel() > 0


def packed_shape(rows: int, columns: int) -> tuple[int, int, int]:
    """Returns the shape of a packed weight [rows, columns]."""
    return rows // GROUP, columns // RUN, GROUP * RUN


def _bits(x: Tensor) -> Tensor:
    """Returns FP8 data as bytes, because some torch ops do not support FP8, and BF16 data unchanged."""
    return x if _is_wide(x) else x.view(torch.uint8)


def _is_wide(x: Tensor) -> bool:
    """Returns whether x is BF16, for which the first pair of all groups of four rows comes before the second pair."""
    return x.dtype == torch.bfloat16


def pack_weight(weight: Tensor, out: Tensor) -> None:
    """Packs a weight [N, K], FP8 or BF16, into `out` [N / 16, K / 8, 128]. Raises ValueError for other shapes."""
    if not is_packable(weight) or out.shape != packed_shape(*weight.shape):
        raise ValueError(
            f"pack_weight needs [N, K], multiples of {GROUP} and {RUN}, and out [N / 16, K / 8, 128], found "
            f"{list(weight.shape)} and {list(out.shape)}."
        )
    target = _bits(out).view(len(out), -1)
    for begin in range(0, weight.shape[1], BLOCK):
        rows = _bits(weight)[:, begin : begin + BLOCK].reshape(len(out), _FOURS, _PAIRS, _ROWS, -1, 2, RUN // 2)
        block = rows.permute(0, 5, 4, 1, 2, 3, 6)  # groups, halves, runs, 16 rows, k
        block = (block.transpose(3, 4) if _is_wide(weight) else block).flatten(1)
        target[:, begin * GROUP :][:, : block.shape[1]] = block


def _weight(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    return random_normal(rows, cols, dtype, 3) if dtype == torch.bfloat16 else random_fp8(rows, cols, dtype, 3)


def packed_weight(weight: Tensor) -> Tensor:
    """Returns the weight packed by the reference."""
    out = torch.empty(packed_shape(*weight.shape), dtype=weight.dtype)
    pack_weight(weight, out)
    return out


def _pack_case(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Any, ...]:
    return _weight(*shape, dtype), torch.zeros(packed_shape(*shape)).to(dtype)


define(
    "pack_weight(Tensor weight, Tensor(a!) out) -> ()",
    pack_weight,
    fake=fake_nothing,
    cases=partial(grid_cases, "{} {}", _pack_case, ((16, 8), (48, 72), (32, 1024), (16, 2064)), PACKABLE),
    kernel_devices=("cpu",),  # packing has no benefit on a GPU
)


def pack_into(weight: Tensor, out: Tensor) -> Tensor:
    """Packs weight [N, K] into the vector `out` and returns `out` as [N / 16, K / 8, 128], the layout of packed_mm."""
    out = out.view(packed_shape(*weight.shape))
    torch.ops.fp8serve.pack_weight(weight.detach(), out)
    return out


def pack_state_dict_weight(state_dict: dict[str, Any], key: str) -> None:
    """Packs the weight under `key` in place, unless it is packed already or cannot be packed."""
    weight = state_dict.get(key)
    if weight is not None and weight.dim() == 2 and is_packable(weight):
        state_dict[key] = pack_into(weight, torch.empty_like(weight).view(-1))


def unpack_weight(packed: Tensor) -> Tensor:
    """Returns the weight [N, K] of a packed weight [N / 16, K / 8, 128]."""
    groups = len(packed)
    blocks = torch.split(_bits(packed).view(groups, -1), BLOCK * GROUP, 1)
    rows = [_unpack_block(block, _is_wide(packed)).reshape(groups * GROUP, -1) for block in blocks]
    return torch.cat(rows, 1).view(packed.dtype)


def _unpack_block(block: Tensor, is_wide: bool) -> Tensor:
    """Permutes [groups, halves * runs * 16 * 4] to [groups, fours, pairs, rows, runs, halves, 4]."""
    order = (_PAIRS, _FOURS, _ROWS) if is_wide else (_FOURS, _PAIRS, _ROWS)
    halves = block.reshape(len(block), 2, -1, *order, RUN // 2)
    return (halves.transpose(3, 4) if is_wide else halves).permute(0, 3, 4, 5, 2, 1, 6)


def packed_mm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor | None,
    b_scale_inv: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Returns scaled_mm, or mm without scales, of a [M, K] and the packed weight b, plus the optional residual."""
    weight = unpack_weight(b)
    if a_scale_inv is None or b_scale_inv is None:
        product = mm(a, weight, bias, out_dtype)
    else:
        product = scaled_mm(a, weight, a_scale_inv, b_scale_inv, bias, out_dtype)
    return product if residual is None else residual + product


def fake_packed_product(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    """Returns the shape of a product by a weight that may be packed; the last argument is the dtype of the result."""
    return a.new_empty((a.shape[0], b.shape[0] * (GROUP if b.dim() == 3 else 1)), dtype=rest[-1])


def _packed_mm_case(rows: int, dtype: torch.dtype, blocks: bool, has_residual: bool) -> tuple[Any, ...]:
    """Returns the arguments of a product of [rows, 1160] and a packed [144, 1160]."""
    n, k = 144, 1160
    packed = packed_weight(_weight(n, k, dtype))
    residual = random_normal(rows, n, torch.bfloat16, 5) if has_residual else None
    if dtype == torch.bfloat16:
        return _weight(rows, k, dtype), packed, None, None, random_normal(n, 1, torch.float32, 6)[:, 0], residual, dtype
    scales = (random_normal(size, scale_blocks(k), torch.float32, 8).abs() + 0.5 for size in (rows, scale_blocks(n)))
    a_scale, b_scale = scales if blocks else (torch.tensor(0.5), torch.tensor(0.25))
    return random_fp8(rows, k, torch.float8_e4m3fn, 4), packed, a_scale, b_scale, None, residual, torch.bfloat16


_BOTH = (False, True)
define(
    "packed_mm(Tensor a, Tensor b, Tensor? a_scale_inv, Tensor? b_scale_inv, Tensor? bias, Tensor? residual,"
    " ScalarType out_dtype) -> Tensor",
    packed_mm,
    fake=fake_packed_product,
    cases=partial(grid_cases, "{} rows {} blocks {} residual {}", _packed_mm_case, (1, 8, 70), PACKABLE, _BOTH, _BOTH),
    kernel_devices=("cpu",),
)
