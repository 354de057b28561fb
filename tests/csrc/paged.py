"""Batches for paged attention, and a naive implementation whose error bounds that of a kernel."""

import torch
from torch import Tensor

from fp8serve.fp8.ops import reference
from tests.csrc.helpers import FORMATS

OPS = torch.ops.fp8serve
E4M3, E5M2 = FORMATS
BLOCK_SIZE = 16
CACHES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, E4M3),
    (torch.float32, E5M2),
]


class PagedBatch:
    """Sequences with random q, k and v in a shuffled paged cache.

    `sequences` are pairs (context length, new tokens). `options` are window, softcap and sinks of the op.
    """

    def __init__(self, sequences, heads, kv_heads, dim, q_dtype, cache_dtype, seed=0, **options):
        self.options = options
        make = torch.Generator().manual_seed(seed)
        width = max(-(-context // BLOCK_SIZE) for context, _ in sequences) + 1
        blocks = len(sequences) * width + 3
        self.tables = torch.randperm(blocks, generator=make)[: len(sequences) * width].view(-1, width).int()
        shape = (blocks, BLOCK_SIZE, kv_heads, dim)
        self.k = torch.randn(shape, generator=make).to(cache_dtype)
        self.v = torch.randn(shape, generator=make).to(cache_dtype)
        self.lengths = torch.tensor([context for context, _ in sequences], dtype=torch.int32)
        self.starts = torch.tensor([0] + [new for _, new in sequences]).cumsum(0).int()
        self.q = torch.randn(int(self.starts[-1]), heads, dim, generator=make).to(q_dtype)
        fp8 = cache_dtype in FORMATS
        self.k_scale = torch.tensor(0.7) if fp8 else None
        self.v_scale = torch.tensor(1.3) if fp8 else None

    def run(self) -> Tensor:
        return OPS.paged_attention(*self.args(), **self.options)

    def truth(self) -> Tensor:
        """Returns the result of the reference in FP64."""
        return reference.paged_attention(self.q.double(), *self.args()[1:], **self.options)

    def args(self):
        scale = self.q.shape[2] ** -0.5
        return (self.q, self.k, self.v, self.tables, self.lengths, self.starts, self.k_scale, self.v_scale, scale)

    def part(self, sequence: int, first: int, last: int) -> Tensor:
        """Runs query tokens [first, last) of one sequence as a batch of their own, without the later tokens."""
        start, end = (int(s) for s in self.starts[sequence : sequence + 2])
        context = self.lengths[sequence : sequence + 1] - (end - start - last)
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        tables = self.tables[sequence : sequence + 1]
        q, scale = self.q[start + first : start + last], self.q.shape[2] ** -0.5
        args = (q, self.k, self.v, tables, context, starts, self.k_scale, self.v_scale, scale)
        return OPS.paged_attention(*args, **self.options)


def naive(batch: PagedBatch) -> Tensor:
    """Returns softmax attention computed with plain torch ops in the dtype of q."""
    high = batch.q.dtype
    out = torch.empty_like(batch.q)
    for i, length in enumerate(batch.lengths.tolist()):
        rows = slice(int(batch.starts[i]), int(batch.starts[i + 1]))
        k, v = (
            (cache[batch.tables[i].long()].flatten(0, 1)[:length].float() * (1.0 if s is None else s)).to(high)
            for cache, s in ((batch.k, batch.k_scale), (batch.v, batch.v_scale))
        )
        group = batch.q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1).transpose(0, 1), v.repeat_interleave(group, 1).transpose(0, 1)
        q = batch.q[rows].transpose(0, 1)
        scores = q @ k.transpose(1, 2) * batch.q.shape[2] ** -0.5
        position = torch.arange(length - q.shape[1], length)
        ahead = torch.arange(length) - position.unsqueeze(1)
        hidden = (ahead > 0) | (ahead <= -batch.options.get("window", length))
        if cap := batch.options.get("softcap"):
            scores = cap * (scores / cap).tanh()
        scores = scores.masked_fill(hidden, -torch.inf)
        if (sinks := batch.options.get("sinks")) is not None:
            scores = torch.cat([scores, sinks.to(high).view(-1, 1, 1).expand(*scores.shape[:2], 1)], -1)
        out[rows] = (scores.softmax(-1)[..., :length] @ v).transpose(0, 1)
    return out


LONG = [(1400, 1), (53, 53), (513, 40), (1024, 1), (1025, 2), (300, 1)]  # kernels split sequences after every 512 keys
