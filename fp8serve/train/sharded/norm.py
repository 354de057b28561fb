"""The norm of gradients that several processes hold, with the bits that one process finds (`optimizer.global_norm`).

That one is a sum over the norms of all rows. Every process sends the norms of its rows, and all of what has one
dimension only: a few numbers for each row. Only of a gradient whose squares are beyond FP32 the parts' own norms are
added instead; such a norm may differ in the last bit of FP64.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from fp8serve.train.optimizer import norm_of_rows, row_norms
from fp8serve.train.sharded.rows import Shards


def sharded_norm(shards: Shards, grads: Mapping[str, Tensor]) -> float:
    """The norm of all gradients as one vector; every process calls it with its parts of the same ones."""
    mine = [grad if len(shards.shapes[name]) == 1 else row_norms(grad) for name, grad in grads.items()]
    wholes = _joined(shards, list(grads), mine)
    norm = norm_of_rows([row_norms(t) if len(shards.shapes[name]) == 1 else t for name, t in wholes.items()])
    return norm if math.isfinite(norm) else _in_fp64(list(grads.values()))


def _joined(shards: Shards, names: list[str], mine: list[Tensor]) -> dict[str, Tensor]:
    """The parts of all processes, put together: one exchange of parts that are padded to equal length."""
    lengths = {name: _lengths(shards, name) for name in names}
    widths = {name: max(found) for name, found in lengths.items()}
    sent = torch.cat([pad(part, (0, widths[name] - len(part))) for name, part in zip(names, mine, strict=True)])
    received = sent.new_empty(shards.ranks.size, len(sent))
    dist.all_gather(list(received.unbind()), sent)
    columns = zip(names, torch.split(received, list(widths.values()), 1), strict=True)
    return {name: torch.cat([p[:n] for p, n in zip(parts, lengths[name], strict=True)]) for name, parts in columns}


def _lengths(shards: Shards, name: str) -> list[int]:
    """How many numbers each process sends of a parameter."""
    shape = shards.shapes[name]
    whole = shape[0] if len(shape) == 1 else math.prod(shape[:-1])
    cuts = [shards.cut(name, whole, rank) for rank in range(shards.ranks.size)]
    return [end - begin for begin, end in cuts]


def _in_fp64(grads: list[Tensor]) -> float:
    squares = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]).square().sum()
    dist.all_reduce(squares)
    return float(squares.sqrt())
