"""Logits of tokens that may not come next become -inf; a bit for each token says which may (engine/grammar.py)."""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.registry import Case, define

WORD = 32


def keep_allowed(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """Row rows[i] of `logits`, FP32 [R, vocab], keeps the tokens whose bit is set in row i of `allowed`.

    `rows` int64 [M], each once. `allowed` int32 [M, ceil(vocab / 32)], the lowest bit of a word first.
    """
    bits = allowed.unsqueeze(-1) >> torch.arange(WORD, dtype=torch.int32, device=allowed.device) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)


def _fake(logits: Tensor, rows: Tensor, allowed: Tensor) -> None: ...


def _case(count: int, vocab: int) -> tuple[Any, ...]:
    """Words of all kinds: no bit set, every bit, and some."""
    noise = torch.Generator().manual_seed(vocab)
    words = -(-vocab // WORD)
    allowed = torch.randint(-(1 << 31), 1 << 31, (count, words), generator=noise).to(torch.int32)
    allowed[:, ::3], allowed[:, 1::5] = 0, -1
    return torch.randn(count + 2, vocab, generator=noise), torch.arange(count).flip(0) + 1, allowed


def _cases() -> list[Case]:
    return [Case(f"{m} x {v}", partial(_case, m, v)) for m, v in product((0, 1, 5), (1, 32, 1000, 4103))]


define(
    "keep_allowed(Tensor(a!) logits, Tensor rows, Tensor allowed) -> ()",
    keep_allowed,
    fake=_fake,
    cases=_cases,
    kernels=("cpu",),
)
