"""Runs a step's tensors (step.py) through the model and returns logits; decoding steps by CUDA graphs.

Log-probabilities of a prompt's tokens come from the logits of the tokens before them. Such logits of a long prompt
would be the largest tensor of all, [tokens, vocabulary] in FP32, so they are computed some rows at a time and only the
requested values are returned. A row's values depend only on its prompt, as in the sampler.

The cache is one tensor of keys and one of values per layer, [blocks, block_size, kv_heads, head_dim], in the model's
own type or in E4M3 with one scale each per layer. Where attention is over latent vectors
(model/network/latent_attention.py) both are one tensor, and have the keys' scale.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fp8serve.engine.adapters import Adapters
from fp8serve.engine.options import MAX_LORA_RANK, EngineOptions
from fp8serve.engine.output import TokenLogprob
from fp8serve.engine.sampling_params import MAX_LOGPROBS
from fp8serve.engine.scheduler import Work
from fp8serve.engine.sequence import Sequence
from fp8serve.engine.step import (
    Buffers,
    Capture,
    CudaCapture,
    GraphedDecode,
    GraphReport,
    Queries,
    Recorded,
    StepTensors,
    flatten,
    to_device,
)
from fp8serve.errors import MachineError
from fp8serve.fp8 import ops as ops  # registers the ops called below
from fp8serve.fp8.elementwise import rotary
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.served_adapters import NONE
from fp8serve.fp8.served_attention import KvScale
from fp8serve.model.building import Model
from fp8serve.model.network.rotary import Heads, Rotation

ROWS = 256  # of logits at a time
# overloads are looked up once: through torch.ops a call takes a microsecond longer
_rotary_write_kv = torch.ops.fp8serve.rotary_write_kv.default
_write_kv = torch.ops.fp8serve.write_kv.default
_paged_attention = torch.ops.fp8serve.paged_attention.default


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, memory that the system provides, zeroed, when it is first touched: an idle cache costs nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _bytes(x: Tensor) -> Tensor:
    """FP8 cannot be indexed everywhere; bytes can."""
    return x.view(torch.uint8)


class Runner:
    """The model with its cache."""

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        block_size: int,
        cache_dtype: torch.dtype,
        scales: list[KvScale] | None = None,
        max_lora_rank: int = MAX_LORA_RANK,
    ) -> None:
        """`scales`: one for each layer, when and only when `cache_dtype` is FP8."""
        config = model.config
        self.model = model
        self.block_size = block_size
        self.device = next(model.parameters()).device
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.k_cache = _zeros(shape, cache_dtype, self.device)
        self.v_cache = self.k_cache if config.latent else _zeros(shape, cache_dtype, self.device)
        self._caches = list(zip(self.k_cache, self.v_cache, strict=True))  # of each layer
        self._scales = scales
        self.adapters = Adapters(model, max_lora_rank)
        self.graphs: GraphedDecode | None = None
        self._recorded: Recorded | None = None
        self._captured_by: tuple[Capture, int, int] | None = None

    @torch.inference_mode()
    def run(self, work: list[Work]) -> Tensor:
        """Writes the keys and values of `work`; FP32 logits [samples, vocab] for the work that samples, in order.

        They may lie in a buffer that the next step overwrites.
        """
        if self.graphs is None or not self.graphs.takes(work) or any(item.seq.adapter for item in work):
            return self.model.logits(self._hidden_of(work))
        logits = self.graphs.run(work)
        if self._recorded is not None and not self._recorded.is_current():
            self.use_graphs(*self._captured_by)  # type: ignore[misc]  # there with the graphs
            logits = self.graphs.run(work)
        return logits

    @torch.inference_mode()
    def run_scoring(self, work: list[Work]) -> tuple[Tensor, list[tuple[Sequence, list[TokenLogprob]]]]:
        """(the result of `run`, new log-probabilities of the prompts that want them)."""
        hidden = self._hidden_of(work)  # [rows whose logits are needed, hidden]
        scores, sampling, end = [], list[int](), 0
        for item in work:
            start, end = end, end + item.num_logits
            sampling += range(end - item.drawn, end)
            if positions := item.scored:
                tokens = item.seq.token_ids[positions.start + 1 : positions.stop + 1]
                rows = hidden[start : start + len(positions)]
                scores.append((item.seq, self._scores(rows, tokens, item.seq.params.prompt_logprobs or 0)))
        return self.model.logits(hidden[to_device(sampling, torch.long, self.device)]), scores

    def _scores(self, hidden: Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
        """The log-probabilities of `tokens`, each by the row before it."""
        scores: list[TokenLogprob] = []
        for rows in torch.split(hidden, ROWS):
            part = tokens[len(scores) : len(scores) + len(rows)]
            table = torch.log_softmax(self.model.logits(rows), -1)
            chosen = table.gather(1, to_device(part, torch.long, table.device)[:, None])
            best = table.topk(min(MAX_LOGPROBS, table.shape[-1]), -1)
            columns = (part, chosen[:, 0].tolist(), best.indices.tolist(), best.values.tolist())
            scores += [TokenLogprob.ranked(*row, top) for row in zip(*columns, strict=True)]
        return scores

    def capture_decoding(
        self, options: EngineOptions, max_model_len: int, capture: Capture | None = None
    ) -> GraphReport:
        """Captures decoding steps if that is requested and possible. `capture`: CUDA's, unless a test passes its own.

        MachineError: the options request it, and it is not possible.
        """
        if options.cuda_graphs is False:
            return GraphReport(reason="switched off")
        if capture is None and self.device.type != "cuda":
            return GraphReport(reason="the device is no GPU")
        try:
            self.use_graphs(capture or CudaCapture(self.device), options.max_num_seqs, max_model_len)
        except RuntimeError as problem:
            reason = (str(problem).splitlines() or [type(problem).__name__])[0]
            if options.cuda_graphs:
                raise MachineError(f"Decoding steps cannot be captured as CUDA graphs: {reason}") from problem
            return GraphReport(reason=reason)
        return GraphReport(tuple(self.graphs.sizes if self.graphs else ()))

    @torch.inference_mode()
    def use_graphs(self, capture: Capture, max_num_seqs: int, max_model_len: int) -> None:
        """Replays decoding steps from now on. If `capture` raises, the error is raised and nothing is replayed."""
        self.graphs = self._recorded = None
        self._captured_by = capture, max_num_seqs, max_model_len
        buffers = Buffers(max_num_seqs, -(-max_model_len // self.block_size), self.device)
        with self._counting(buffers.live_rows):
            self.graphs = GraphedDecode(self._compute, capture, buffers, self.block_size)
        self._recorded = Recorded(self.model)

    def caches(self) -> dict[str, Tensor]:
        """The cache, by names: "k" and "v", or, where both are one tensor, "k"."""
        return {"k": self.k_cache} if self.v_cache is self.k_cache else {"k": self.k_cache, "v": self.v_cache}

    @property
    def block_bytes(self) -> int:
        """The bytes of one block, in all layers."""
        return sum(cache.nbytes for cache in self.caches().values()) // self.k_cache.size(1)

    def copies(self, blocks: list[int]) -> dict[str, Tensor]:
        """The contents of the blocks, on the CPU: [layers, len(blocks), block_size, kv_heads, head_dim] each.

        It copies layer by layer, because a GPU filled by the cache has no room for more.
        """
        index = torch.tensor(blocks, device=self.device)
        copies = {}
        for name, cache in self.caches().items():
            copies[name] = torch.empty((len(cache), len(blocks), *cache.shape[2:]), dtype=cache.dtype)
            for into, layer in zip(copies[name], cache, strict=True):
                _bytes(into).copy_(_bytes(layer).index_select(0, index))
        return copies

    def fill(self, blocks: list[int], tensors: Mapping[str, Tensor]) -> None:
        """Copies the first blocks of what `copies` returned into the blocks."""
        index = torch.tensor(blocks, device=self.device)
        for name, cache in self.caches().items():
            for layer, blocks_of_layer in zip(cache, tensors[name], strict=True):
                _bytes(layer).index_copy_(0, index, _bytes(blocks_of_layer[: len(blocks)]).to(self.device))

    @contextmanager
    def _counting(self, live_rows: Tensor) -> Iterator[None]:
        """Within it, FP8 layers leave the rows behind the first `live_rows` (padding) out of their statistics."""
        frozen = [layer for layer in self.model.modules() if isinstance(layer, FrozenLinear)]
        for layer in frozen:
            layer.live_rows = live_rows
        try:
            yield
        finally:
            for layer in frozen:
                layer.live_rows = None

    def _compute(self, step: StepTensors) -> Tensor:
        return self.model.logits(self._hidden(step))

    def _hidden_of(self, work: list[Work]) -> Tensor:
        """`_hidden` of a step's work, each sequence with its adapter."""
        step = flatten(work, self.block_size, self.device)
        if any(item.seq.adapter is not None for item in work):
            numbers = [NONE if item.seq.adapter is None else item.seq.adapter.number for item in work]
            counts = to_device([item.count for item in work], torch.long, self.device)
            rows = to_device(numbers, torch.long, self.device).repeat_interleave(counts)
            self.adapters.assignment.begin(rows, step.last)
        try:
            return self._hidden(step)
        finally:
            self.adapters.assignment.end()

    def _hidden(self, step: StepTensors) -> Tensor:
        """[R, hidden] of the rows whose logits are needed."""
        attend = partial(self._rotate_and_attend, step)
        return self.model(step.token_ids, step.positions, attend, step.last)  # type: ignore[no-any-return]

    def _rotate_and_attend(
        self, step: StepTensors, layer: int, heads: Heads, rotation: Rotation, last: Tensor | None
    ) -> Tensor:
        q = self._rotate_and_write(step, layer, heads, rotation)
        if last is None:
            return self._paged(step.queries, layer, q)
        return self._paged(step.last_queries, layer, q[last])

    def _rotate_and_write(self, step: StepTensors, layer: int, heads: Heads, rotation: Rotation) -> Tensor:
        """Rotates q, and writes keys and values to the cache."""
        scale = self._scales[layer] if self._scales else None
        scales = (scale.k, scale.v) if scale else (None, None)
        if self.model.config.latent is None:
            return _rotary_write_kv(*heads, *rotation, *self._caches[layer], step.slots, *scales)  # type: ignore[no-any-return]
        q, k = (rotary(x, *rotation) for x in heads[:2])
        _write_kv(k, k, *self._caches[layer], step.slots, scales[0], scales[0])  # into one cache, twice the same
        return q

    def _paged(self, queries: Queries, layer: int, q: Tensor) -> Tensor:
        """Attention of q [T, heads, head_dim], all of `queries`, over the present contents of the cache -> like q."""
        scale = self._scales[layer] if self._scales else None
        scales = (scale.k_inv, scale.k_inv if self.model.config.latent else scale.v_inv) if scale else (None, None)
        tables = queries.block_tables, queries.context_lens, queries.query_starts
        options = self.model.attention_options(layer)
        return _paged_attention(q, *self._caches[layer], *tables, *scales, *options)  # type: ignore[no-any-return]
