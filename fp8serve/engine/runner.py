"""Runs the work of a step through the model and returns logits. Steps may run as CUDA graphs (graphs.py).

The log-probability of a prompt token is computed from the logits of the token before it. The logits of a long prompt,
FP32 [tokens, vocab], would be larger than any other tensor. So they are computed for a few rows at a time, and only the
requested values are returned.

The KV cache has a tensor of keys and a tensor of values for each layer, [blocks, block_size, kv_heads, head_dim], in
BF16 or in E4M3 with one scale for each tensor. With latent attention (model/network/latent_attention.py), keys and
values are the same tensor, which has the scale of the keys.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fp8serve.engine.adapters import Adapters
from fp8serve.engine.defaults import prompt_sizes
from fp8serve.engine.graphs import (
    Buffers,
    Capture,
    CudaCapture,
    GraphedDecode,
    GraphedPrompts,
    GraphReport,
    StepRows,
    can_replay_prompts,
)
from fp8serve.engine.options import MAX_LORA_RANK, EngineOptions
from fp8serve.engine.output import TokenLogprob
from fp8serve.engine.sampling_params import MAX_LOGPROBS
from fp8serve.engine.scheduler import StepWork, Work
from fp8serve.engine.sequence import Sequence
from fp8serve.engine.step import Queries, StepTensors, flatten, to_device
from fp8serve.errors import MachineError
from fp8serve.fp8 import ops as ops  # registers the ops called below
from fp8serve.fp8.attention import KvScale
from fp8serve.fp8.batch_invariant import log_softmax
from fp8serve.fp8.change_tracking import CapturedModel
from fp8serve.fp8.elementwise import rotary
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.model.building import Model
from fp8serve.model.network.rotary import Heads, PendingHeads, Rotation

SCORED_ROWS = 256  # rows of a prompt whose logits are computed at a time
# Looking up the overload of an op at every call would take a microsecond.
_rotary_write_kv = torch.ops.fp8serve.rotary_write_kv.default
_stored_rotary_mm = torch.ops.fp8serve.stored_rotary_mm.default
_write_kv = torch.ops.fp8serve.write_kv.default
_paged_attention = torch.ops.fp8serve.paged_attention.default


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of zeros. On a CPU, its pages are allocated when they are first written, so that an unused cache
    takes no memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _bytes(x: Tensor) -> Tensor:
    """Returns a view of bytes, because torch cannot index FP8 tensors on every device."""
    return x.view(torch.uint8)


class Runner:
    """A model with its KV cache and its adapters."""

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        block_size: int,
        cache_dtype: torch.dtype,
        scales: list[KvScale] | None = None,
        max_lora_rank: int = MAX_LORA_RANK,
        num_kv_heads: int | None = None,
    ) -> None:
        """`scales` has the scales of each layer if `cache_dtype` is FP8, and is None otherwise. `num_kv_heads` are the
        heads of keys and values, by default those of the configuration."""
        config = model.config
        self.model = model
        self.block_size = block_size
        self.device = next(model.parameters()).device
        shape = (config.num_layers, num_blocks, block_size, num_kv_heads or config.num_kv_heads, config.head_dim)
        self.k_cache = _zeros(shape, cache_dtype, self.device)
        self.v_cache = self.k_cache if config.latent else _zeros(shape, cache_dtype, self.device)
        self._layer_caches = list(zip(self.k_cache, self.v_cache, strict=True))
        self._scales = scales
        self.adapters = Adapters(model, max_lora_rank)
        self.graphs: GraphedDecode | None = None
        self.graphed_prompts: GraphedPrompts | None = None
        self._buffers: Buffers | None = None  # of the graphs
        self._samples: Tensor | None = None  # the tokens that the step in flight samples
        self._captured_model: CapturedModel | None = None
        self._capture_arguments: tuple[Capture | None, int, int, int] | None = None  # of the last call of `use_graphs`

    @torch.inference_mode()
    def run(self, work: StepWork) -> Tensor:
        """Computes a step and writes its keys and values to the cache. Returns the logits of all samples in the order
        of `work`, FP32 [samples, vocab]. The next step may overwrite them."""
        if self.graphs is None or self._uses_adapters(work):
            return self.model.logits(self._hidden_states(list(work)))
        rows = StepRows.of(work)
        logits = None if rows is None else self._replay(rows)
        if rows is None or logits is None:
            return self.model.logits(self._hidden_states(list(work)))
        if self._captured_model is not None and not self._captured_model.is_current():
            logits = None  # the memory of a graph is free only without it
            self.update_graphs()
            logits = self._replay(rows)
        return logits  # type: ignore[return-value]  # the same steps are captured again

    def update_graphs(self) -> None:
        """Captures all steps again if a module or tensor of the model was replaced since they were captured."""
        if self._captured_model is not None and not self._captured_model.is_current():
            self.use_graphs(*self._capture_arguments)  # type: ignore[misc]  # not None if there are graphs

    @torch.inference_mode()
    def keep_samples(self, samples: Tensor) -> None:
        """Keeps the sampled tokens of the step in flight, int64 [rows], for the next step, which names them by row. A
        negative one stands for a row that fails."""
        self._samples = samples
        if self._buffers is not None:
            torch.clamp(samples, min=0, out=self._buffers.samples[: len(samples)])

    def _uses_adapters(self, work: StepWork) -> bool:
        return self.adapters.has_adapters and any(seq.adapter is not None for seq in work.sequences)

    def _replay(self, rows: StepRows) -> Tensor | None:
        """Returns the logits of a step that was captured, or None."""
        if self.graphs is not None and self.graphs.supports(rows):
            return self.graphs.run(rows)
        if self.graphed_prompts is not None and self.graphed_prompts.supports(rows):
            return self.model.logits(self.graphed_prompts.run(rows))
        return None

    @torch.inference_mode()
    def run_scoring(self, work: StepWork) -> tuple[Tensor, list[tuple[Sequence, list[TokenLogprob]]]]:
        """Computes a step like `run`. Returns the logits, and the new log-probabilities of the prompts that request
        them."""
        items = list(work)
        hidden = self._hidden_states(items)
        scores, sample_rows, end = [], list[int](), 0
        for item in items:
            start, end = end, end + item.num_logits
            sample_rows += range(end - item.num_samples, end)
            if positions := item.scored_positions:
                tokens = item.seq.token_ids[positions.start + 1 : positions.stop + 1]
                rows = hidden[start : start + len(positions)]
                scores.append((item.seq, self._score(rows, tokens, item.seq.params.prompt_logprobs or 0)))
        return self._logits(hidden[to_device(sample_rows, torch.long, self.device)]), scores

    def _score(self, hidden: Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
        """Returns the log-probabilities of `tokens` from the hidden state of the token before each of them."""
        scores: list[TokenLogprob] = []
        for rows in torch.split(hidden, SCORED_ROWS):
            targets = tokens[len(scores) : len(scores) + len(rows)]
            logprobs = log_softmax(self._logits(rows))
            target_logprobs = logprobs.gather(1, to_device(targets, torch.long, logprobs.device)[:, None])
            best = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]), -1)
            columns = (targets, target_logprobs[:, 0].tolist(), best.indices.tolist(), best.values.tolist())
            scores += [TokenLogprob.ranked(*row, top) for row in zip(*columns, strict=True)]
        return scores

    def exchange_cache_scales(self, scales: list[KvScale] | None) -> list[KvScale] | None:
        """Writes the scales of other weights over those of an FP8 cache, at the same addresses, and returns the old
        ones. `scales` is None if the cache has no scales."""
        if scales is None or self._scales is None:
            return None
        previous = [KvScale.of(current.k.clone(), current.v.clone()) for current in self._scales]
        for current, new in zip(self._scales, scales, strict=True):
            for name in ("k", "v", "k_inv", "v_inv"):
                getattr(current, name).copy_(getattr(new, name))
        return previous

    def capture_steps(
        self, options: EngineOptions, max_model_len: int, capture: Capture | None = None, with_prompts: bool = True
    ) -> GraphReport:
        """Captures steps as CUDA graphs, unless the options or the device forbid it. Tests pass their own
        `capture`. Raises MachineError if the options require graphs and capturing fails."""
        if options.cuda_graphs is False:
            return GraphReport(reason="switched off")
        if capture is None and self.device.type != "cuda":
            return GraphReport(reason="the device is no GPU")
        reason = None
        for max_batch_tokens in (options.step_tokens, 0) if with_prompts else (0,):
            try:
                self.use_graphs(capture, options.num_seqs, max_model_len, max_batch_tokens)
                break
            except RuntimeError as problem:
                reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        if self.graphs is None and options.cuda_graphs:
            raise MachineError(f"Steps cannot be captured as CUDA graphs: {reason}")
        sizes, prompts = (() if graphs is None else graphs.sizes for graphs in (self.graphs, self.graphed_prompts))
        return GraphReport(tuple(sizes), tuple(prompts), reason)

    @torch.inference_mode()
    def use_graphs(
        self, capture: Capture | None, max_num_seqs: int, max_model_len: int, max_batch_tokens: int = 0
    ) -> None:
        """Captures decoding steps, and steps with prompts of up to `max_batch_tokens` tokens, which are replayed from
        now on. `capture` is a `CudaCapture` if it is None. If it raises, no graphs are used."""
        self.graphs = self.graphed_prompts = self._captured_model = self._buffers = None
        self._capture_arguments = capture, max_num_seqs, max_model_len, max_batch_tokens
        capture = capture or CudaCapture(self.device)  # a pool of memory of its own for each time
        sizes = prompt_sizes(max_batch_tokens, max_num_seqs, max_model_len) if max_batch_tokens else []
        width, largest = -(-max_model_len // self.block_size), max(sizes, default=0)
        buffers = Buffers(max_num_seqs, largest, width, self.block_size, self.device)
        prompts, live_rows = None, dict[nn.Module, Tensor].fromkeys(self._frozen(), buffers.live_rows)
        if sizes and can_replay_prompts(self.model):
            live_samples = dict.fromkeys(self.model.modules_of_output_rows(), buffers.live_samples)
            with self._without_padding_statistics(live_rows | live_samples):
                prompts = GraphedPrompts(self._run_model, capture, buffers, sizes)
        with self._without_padding_statistics(live_rows):
            self.graphs = GraphedDecode(self._compute, capture, buffers)
        self.graphed_prompts, self._buffers, self._captured_model = prompts, buffers, CapturedModel(self.model)
        if self._samples is not None:
            self.keep_samples(self._samples)

    def caches(self) -> dict[str, Tensor]:
        """Returns the KV cache by name: "k" and "v", or only "k" if keys and values are the same tensor."""
        return {"k": self.k_cache} if self.v_cache is self.k_cache else {"k": self.k_cache, "v": self.v_cache}

    @property
    def block_bytes(self) -> int:
        """The bytes of one block, over all layers."""
        return sum(cache.nbytes for cache in self.caches().values()) // self.k_cache.size(1)

    def copy_blocks(self, blocks: list[int]) -> dict[str, Tensor]:
        """Copies blocks to the CPU. Returns tensors [layers, len(blocks), block_size, kv_heads, head_dim] by name.
        Copies layer by layer, because a GPU that is filled by the cache has no memory for more."""
        index = torch.tensor(blocks, device=self.device)
        copies = {}
        for name, cache in self.caches().items():
            copies[name] = torch.empty((len(cache), len(blocks), *cache.shape[2:]), dtype=cache.dtype)
            for copy, layer in zip(copies[name], cache, strict=True):
                _bytes(copy).copy_(_bytes(layer).index_select(0, index))
        return copies

    def restore_blocks(self, blocks: list[int], tensors: Mapping[str, Tensor]) -> None:
        """Fills blocks with the first blocks of tensors that `copy_blocks` returned."""
        index = torch.tensor(blocks, device=self.device)
        for name, cache in self.caches().items():
            for layer, source in zip(cache, tensors[name], strict=True):
                _bytes(layer).index_copy_(0, index, _bytes(source[: len(blocks)]).to(self.device))

    def _frozen(self) -> list[FrozenLinear]:
        return [layer for layer in self.model.modules() if isinstance(layer, FrozenLinear)]

    @contextmanager
    def _without_padding_statistics(self, live_rows: Mapping[nn.Module, Tensor]) -> Iterator[None]:
        """Excludes the rows of each FP8 layer after the first `live_rows`, int64 [], from its statistics."""
        frozen = self._frozen()
        for layer in frozen:
            layer.live_rows = live_rows[layer]
        try:
            yield
        finally:
            for layer in frozen:
                layer.live_rows = None

    def _compute(self, step: StepTensors) -> Tensor:
        return self.model.logits(self._run_model(step))

    def _hidden_states(self, work: list[Work]) -> Tensor:
        """Runs the model, with the adapter of each sequence, and returns the hidden states of the tokens that need
        logits, [R, hidden]."""
        return self.run_step(flatten(work, self.block_size, self.device, self._samples))

    def run_step(self, step: StepTensors) -> Tensor:
        """Computes a step and returns the hidden states of the tokens that need logits, [R, hidden]."""
        if step.adapters is not None:
            self.adapters.assignment.begin(step.adapters, step.last)
        try:
            return self._run_model(step)
        finally:
            self.adapters.assignment.end()

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def _run_model(self, step: StepTensors) -> Tensor:
        attend = partial(self._rotate_and_attend, step)
        return self.model(step.token_ids, step.positions, attend, step.last)  # type: ignore[no-any-return]

    def _rotate_and_attend(
        self, step: StepTensors, layer: int, heads: Heads, rotation: Rotation, last: Tensor | None
    ) -> Tensor:
        q = self._rotate_and_write(step, layer, heads, rotation)
        if last is None:
            return self._attend(step.queries, layer, q)
        return self._attend(step.last_queries, layer, q[last])

    def _rotate_and_write(self, step: StepTensors, layer: int, heads: Heads, rotation: Rotation) -> Tensor:
        """Applies the rotary embedding, writes keys and values to the cache, and returns the rotated queries."""
        scale = self._scales[layer] if self._scales else None
        scales = (scale.k, scale.v) if scale else (None, None)
        if isinstance(heads, PendingHeads):
            matrices, norm = heads.operands
            cache = *self._layer_caches[layer], step.slots, *scales
            return _stored_rotary_mm(*matrices, *rotation, *cache, *norm)  # type: ignore[no-any-return]
        if self.model.config.latent is None:
            return _rotary_write_kv(*heads, *rotation, *self._layer_caches[layer], step.slots, *scales)  # type: ignore[no-any-return]
        q, k = (rotary(x, *rotation) for x in heads[:2])
        _write_kv(k, k, *self._layer_caches[layer], step.slots, scales[0], scales[0])  # keys and values are one tensor
        return q

    def _attend(self, queries: Queries, layer: int, q: Tensor) -> Tensor:
        """Computes the attention of q [T, heads, head_dim], the tokens of `queries`, over the cache. The result has the
        shape of q."""
        scale = self._scales[layer] if self._scales else None
        scales = (scale.k_inv, scale.k_inv if self.model.config.latent else scale.v_inv) if scale else (None, None)
        tables = queries.block_tables, queries.context_lens, queries.query_starts
        options = self.model.attention_options(layer)
        return _paged_attention(q, *self._layer_caches[layer], *tables, *scales, *options)  # type: ignore[no-any-return]
