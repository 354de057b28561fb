"""One step's work becomes tensors, goes through the model, and comes back as logits.

All sequences of a step are flattened into one row of tokens: the model sees `[tokens]`, the paged attention op is told
where each sequence begins (`query_starts` [S+1]), how long it is with its new tokens (`context_lens` [S]) and where its
keys and values lie (`block_tables` [S, most blocks], `slots` [tokens]). Prefill chunks and decoding tokens mix freely.

Where `fused` could make a FusedDecoder of the model that one runs, else the decoder itself: same logits, fewer ops.

The cache is one tensor of keys and one of values per layer, [blocks, block_size, kv_heads, head_dim], in the model's
own type or in E4M3 with one scale each per layer.
"""

import itertools
import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fp8serve.engine.fused import FusedDecoder
from fp8serve.engine.scheduler import Work
from fp8serve.engine.transfer import to_device
from fp8serve.fp8 import attention
from fp8serve.model.decoder import Decoder

# overloads are looked up once: through torch.ops a call takes a microsecond longer
_rotary_write_kv = torch.ops.fp8serve.rotary_write_kv.default
_paged_attention = torch.ops.fp8serve.paged_attention.default


@dataclass(frozen=True, slots=True)
class KvScale:
    """Multipliers of one layer's FP8 cache: `scale` FP32 [] to quantize, and its reciprocal."""

    k: Tensor
    v: Tensor
    k_inv: Tensor
    v_inv: Tensor


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step as the ops want it; integers, on the model's device."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: block * block_size + offset
    query_starts: Tensor  # int32 [S + 1]
    context_lens: Tensor  # int32 [S]
    block_tables: Tensor  # int32 [S, most blocks], rows filled up with 0
    last: Tensor  # int64 [samples]: rows whose logits are wanted


def flatten(work: list[Work], block_size: int, device: torch.device) -> StepTensors:
    """The tensors of one step."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, last = [0], []
    for item in work:
        span = range(item.start, item.start + item.count)
        table = item.seq.block_table
        token_ids += item.seq.token_ids[item.start : item.start + item.count]
        positions += span
        slots += [table[i // block_size] * block_size + i % block_size for i in span]
        starts.append(len(token_ids))
        if item.samples:
            last.append(len(token_ids) - 1)
    most = max(len(item.seq.block_table) for item in work)
    tables = [item.seq.block_table + [0] * (most - len(item.seq.block_table)) for item in work]
    lengths = [item.start + item.count for item in work]

    wide = _parts([token_ids, positions, slots, last], torch.long, device)
    narrow = _parts([starts, lengths, [block for table in tables for block in table]], torch.int32, device)
    return StepTensors(*wide[:3], *narrow[:2], narrow[2].view(len(tables), most), wide[3])


def _parts(lists: list[list[int]], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Each list as a tensor; all of them in one copy."""
    whole = to_device(list(itertools.chain.from_iterable(lists)), dtype, device)
    return whole.split([len(part) for part in lists])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU memory that the system hands out, zeroed, where it is first touched: an idle cache costs nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class Runner:
    """The model with its cache."""

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        cache_dtype: torch.dtype,
        scales: list[KvScale] | None = None,
        fused: FusedDecoder | None = None,
    ) -> None:
        """`scales`: one for each layer, when and only when `cache_dtype` is FP8. `fused`: runs instead of `model`."""
        config = model.config
        self.model = model
        self.block_size = block_size
        self.device = next(model.parameters()).device
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.k_cache, self.v_cache = (_zeros(shape, cache_dtype, self.device) for _ in range(2))
        self.fused = fused
        self._caches = list(zip(self.k_cache, self.v_cache, strict=True))  # of each layer
        self._scales = scales

    @torch.inference_mode()
    def run(self, work: list[Work]) -> Tensor:
        """Writes the keys and values of `work`; FP32 logits [samples, vocab] for the work that samples, in order."""
        step = flatten(work, self.block_size, self.device)

        if self.fused is not None:
            hidden = self.fused(step.token_ids, step.positions, step.last, partial(self._rotate_and_attend, step))
        else:
            hidden = self.model(step.token_ids, step.positions, partial(self._attend, step))[step.last]
        return self.model.logits(hidden)

    def _attend(self, step: StepTensors, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = self._scales[layer] if self._scales else None
        scales = (scale.k, scale.v) if scale else (None, None)
        attention.write_kv(k, v, *self._caches[layer], step.slots, *scales)
        return self._paged(step, layer, q)

    def _rotate_and_attend(
        self, step: StepTensors, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        scale = self._scales[layer] if self._scales else None
        scales = (scale.k, scale.v) if scale else (None, None)
        q = _rotary_write_kv(q, k, v, cos, sin, *self._caches[layer], step.slots, *scales)
        return self._paged(step, layer, q)

    def _paged(self, step: StepTensors, layer: int, q: Tensor) -> Tensor:
        """q [T, heads, head_dim] over what is in the cache by now -> like q."""
        scale = self._scales[layer] if self._scales else None
        scales = (scale.k_inv, scale.v_inv) if scale else (None, None)
        tables = step.block_tables, step.context_lens, step.query_starts
        softmax_scale = self.model.config.softmax_scale
        return _paged_attention(q, *self._caches[layer], *tables, *scales, softmax_scale)  # type: ignore[no-any-return]
