"""Rotary position embedding, alone and fused with the write into the KV cache."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.attention import write_kv
from fp8serve.fp8.ops.inputs import fake_like_first, random_normal, row_cases
from fp8serve.fp8.ops.registry import define


def _write_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    dim = cols // 2 * 2
    q, k, v = (random_normal(rows, heads * dim, dtype, heads).view(rows, heads, dim) for heads in (4, 2, 2))
    angle = random_normal(rows, dim // 2, torch.float32).repeat(1, 2).unsqueeze(1)
    caches = [torch.zeros(2, 4, 2, dim, dtype=dtype) for _ in range(2)]
    return q, k, v, angle.cos().to(dtype), angle.sin().to(dtype), *caches, torch.arange(rows), None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [T, heads, D] by cos and sin [T, 1, D]; dimension i of a head forms a pair with dimension i + D / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _rotary_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    q, _, _, cos, sin, *_ = _write_case(dtype, rows, cols)
    return q, cos, sin


define(
    "rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    rotary,
    fake=fake_like_first,
    cases=partial(row_cases, _rotary_case),
)


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """Rotates q [T, heads, D] and k [T, kv_heads, D], writes k and v to the cache, and returns the rotated q."""
    write_kv(rotary(k, cos, sin), v, k_cache, v_cache, slots, k_scale, v_scale)
    return rotary(q, cos, sin)


define(
    "rotary_write_kv(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor slots, Tensor? k_scale, Tensor? v_scale) -> Tensor",
    rotary_write_kv,
    fake=fake_like_first,
    cases=partial(row_cases, _write_case),
)
