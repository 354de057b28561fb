"""Rows laid end to end: a flattened microbatch, never padded.

Positions start again at 0 with each document, and `lengths` tells the attention where documents end, so that no
document attends to another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fp8serve.train.data import Row


@dataclass(frozen=True)
class PackedBatch:
    """A flattened microbatch of T tokens; all tensors int64.

    token_ids [T], positions [T]; lengths: tokens per document; predict [P]: where the next token carries loss, and
    targets [P]: that token.
    """

    token_ids: Tensor
    positions: Tensor
    lengths: list[int]
    predict: Tensor
    targets: Tensor


def collate(rows: Sequence[Row], device: str) -> PackedBatch:
    """Lay `rows` end to end on `device`."""
    lengths = [row.tokens for row in rows]
    token_ids = np.concatenate([row.ids[:-1] for row in rows])
    positions = np.concatenate([np.arange(n) for n in lengths])
    predict = np.flatnonzero(np.concatenate([row.loss[1:] for row in rows]))
    targets = np.concatenate([row.ids[1:] for row in rows])[predict]
    as_tensor = [torch.from_numpy(a.astype(np.int64)).to(device) for a in (token_ids, positions, predict, targets)]
    return PackedBatch(as_tensor[0], as_tensor[1], lengths, as_tensor[2], as_tensor[3])
