"""The draw of a token in plain PyTorch: temperature, top_k, top_p, min_p and one random number for each row. Before it,
logits of tokens that may not come next become -inf; a bit for each token says which may (engine/grammar.py).

The three filters each keep the most probable tokens down to some rank, so together they are one number per row: how
many tokens stay. Ties at the border go to the smaller token ids.

Everything works on a row alone (softmax, cumsum, sort); element-wise transcendental functions over the whole batch are
avoided on purpose, because torch computes the elements at the end of a tensor with another routine than those before.
Sums and exponentials are FP64: a kernel that adds in another order draws another token only where the random number is
within about 1e-15 of the boundary between two.
"""

from functools import partial
from itertools import product
from typing import Any

import numpy as np
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


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """FP32 logits [rows, vocab] -> int64 token ids [rows], by the inverse of each row's cumulative distribution.

    `temperature` FP64 [rows], above 0; `top_k` int64 [rows], 0 for all; `top_p` FP64 [rows] in (0, 1] of what top_k
    left; `min_p` FP64 [rows], of the largest probability; `uniform` FP64 [rows] in [0, 1). A logit may be -inf, and at
    least one of a row must be finite.
    """
    probs = torch.softmax(logits.double() / temperature[:, None], -1)
    has_filter = (top_k > 0) | (top_p < 1) | (min_p > 0)
    if not _on_cpu(probs):  # to see which rows asked for it would mean waiting for the device
        probs = torch.where(has_filter[:, None], filtered(probs, top_k, top_p, min_p), probs)
    elif bool(has_filter.any()):
        probs[has_filter] = filtered(probs[has_filter], top_k[has_filter], top_p[has_filter], min_p[has_filter])
    mass = probs.cumsum(-1)
    total = mass[:, -1:].contiguous()
    # below the total, so that the search ends on a token of positive probability
    at = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(mass, at, right=True)[:, 0]


def filtered(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`probs` FP64 [rows, vocab] with zero for every token outside top_k, top_p and min_p (each [rows])."""
    vocab = probs.shape[-1]
    largest = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)[:, None]
    ordered = _descending(probs)
    mass = ordered.cumsum(-1)
    retained = torch.arange(vocab, device=probs.device) < largest
    within = mass - ordered < top_p[:, None] * mass.gather(-1, largest - 1)  # of what top_k left
    retained &= within | (top_p >= 1)[:, None]  # 1 keeps all tokens, also those too small to change a sum
    retained &= ordered >= min_p[:, None] * ordered[:, :1]
    count = retained.sum(-1, keepdim=True).clamp(min=1)
    threshold = ordered.gather(-1, count - 1)
    above, tied = probs > threshold, probs == threshold
    room = count - above.sum(-1, keepdim=True)
    return probs * (above | (tied & (tied.cumsum(-1) <= room)))


def _descending(probs: Tensor) -> Tensor:
    """On a CPU by NumPy, whose vectorised sort takes 0.1 ms for 32,000 values where torch's takes 3.5."""
    if not _on_cpu(probs):
        return probs.sort(-1, descending=True).values
    return torch.from_numpy(np.sort(probs.numpy(), axis=-1)).flip(-1)


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _fake_sample(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


def _sample_case(rows: int, vocab: int, filters: bool) -> tuple[Any, ...]:
    """Logits with ties and with forbidden tokens; if there are filters, every row has different ones."""
    noise = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocab, generator=noise).mul(3).bfloat16().float()
    logits[:, 3::7] = -torch.inf
    turn = torch.arange(rows)
    temperature, uniform = torch.rand(2, rows, dtype=torch.float64, generator=noise)
    top_k = turn % 4 * 5 if filters else torch.zeros_like(turn)
    top_p = 1 - turn % 3 * 0.3 if filters else torch.ones(rows)
    min_p = turn % 2 * 0.05 if filters else torch.zeros(rows)
    return logits, 0.5 + temperature, top_k, top_p.double(), min_p.double(), uniform


def _sample_cases() -> list[Case]:
    grid = product((1, 12), (1, 37, 3000), (False, True))
    return [Case(f"{r} x {v}, filters {f}", partial(_sample_case, r, v, f)) for r, v, f in grid]


define(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform) -> Tensor",
    sample,
    fake=_fake_sample,
    cases=_sample_cases,
)
