"""Plans the KV cache: computes its number of blocks and the maximum sequence length from the model, the options and the
free memory.

On a CPU, the plan is made before the weights are loaded. The cache gets a fraction of the free memory, because the
memory-mapped weights must also stay in memory.

On a GPU, the plan is made after the weights are loaded. The cache gets the free memory, less three amounts:

* the memory that other processes may use (`gpu_memory` is the fraction of the GPU's memory for this process);
* the memory of the largest step, which is run once to measure it;
* the memory of CUDA graphs: the memory of the largest captured step, also measured, and the logits of every size.

Options of the step that are None are derived here, too (defaults.py): a largest step that takes too much memory is
halved, the largest number of sequences follows the cache, and the largest step is run again to measure its time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from fp8serve.engine.defaults import (
    MAX_STEP_FRACTION,
    SHARED_GPU_MEMORY_FRACTION,
    fitting_num_seqs,
    graph_sizes,
    halved_step,
    prefill_tokens,
    prompt_sizes,
    step_limits,
)
from fp8serve.engine.graphs import can_replay_prompts
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.scheduler import MAX_DRAFT_ROWS
from fp8serve.errors import MachineError, RequestError
from fp8serve.fp8 import ops as ops  # registers the op called below
from fp8serve.model.building import Model
from fp8serve.model.config.model_config import AnyConfig, ModelConfig
from fp8serve.model.network.rotary import Heads, Rotation
from fp8serve.model.storage.memory import free_memory

CPU_CACHE_FRACTION = 0.25  # of free memory; memory-mapped weights need the rest
ATTENTION_WORKSPACE_BYTES = 128 << 20  # the largest workspace of csrc/cuda/attention_mma.cu
_sample = torch.ops.fp8serve.sample.default


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The maximum sequence length and the size of the KV cache."""

    max_model_len: int  # tokens
    num_blocks: int
    block_bytes: int  # of one block, over all layers
    draft_block_bytes: int = 0  # of one block of the draft model's cache

    @property
    def cache_bytes(self) -> int:
        """The size of the cache, including the draft model's."""
        return self.num_blocks * (self.block_bytes + self.draft_block_bytes)


def plan_cache(
    config: ModelConfig,
    options: EngineOptions,
    cache_dtype: torch.dtype,
    budget: int | None = None,
    draft: ModelConfig | None = None,
) -> CachePlan:
    """Plans a cache of at most `budget` bytes, which include the cache of the `draft` model. If `budget` is None, the
    option kv_cache_bytes or this machine's free memory decides.

    Raises RequestError if the options exceed the model's maximum length, and MachineError if memory does not suffice.
    """
    model_length = check_length(config, options)
    block_bytes = cache_bytes(config, options.block_size, cache_dtype)
    draft_bytes = 0 if draft is None else cache_bytes(draft, options.block_size, torch.bfloat16)
    total_bytes = block_bytes + draft_bytes
    max_length = options.max_model_len or model_length
    if budget is None:
        budget = options.kv_cache_bytes or cpu_cache_budget()
    if options.num_blocks and options.kv_cache_bytes and options.num_blocks * total_bytes > options.kv_cache_bytes:
        raise MachineError(
            f"A cache of {options.num_blocks} blocks needs {options.num_blocks * total_bytes:,} bytes, more than the "
            f"{options.kv_cache_bytes:,} that it may take; lower num_blocks, or leave it out."
        )
    blocks = options.num_blocks or _num_blocks(options, -(-max_length // options.block_size), total_bytes, budget)
    length = options.max_model_len or min(model_length, blocks * options.block_size)
    return CachePlan(length, blocks, block_bytes, draft_bytes)


def check_length(config: AnyConfig, options: EngineOptions) -> int:
    """Returns the model's maximum sequence length. Raises RequestError if the option max_model_len is larger."""
    model_length = config.max_length
    if options.max_model_len is not None and options.max_model_len > model_length:
        raise RequestError(
            f"max_model_len {options.max_model_len} is beyond the {model_length} tokens of this model's "
            "trained context; lower it."
        )
    return model_length


def cache_bytes(config: ModelConfig, tokens: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the keys and values of `tokens` tokens, over all layers."""
    tensors = 1 if config.latent else 2
    return tensors * config.num_layers * tokens * config.num_kv_heads * config.head_dim * dtype.itemsize


def _num_blocks(options: EngineOptions, blocks_per_sequence: int, block_bytes: int, budget: int) -> int:
    """Returns the number of blocks for max_num_seqs sequences of the maximum length, or as many as fit in `budget`.
    Raises MachineError if one sequence of the requested max_model_len does not fit."""
    fitting = budget // block_bytes
    required = blocks_per_sequence if options.max_model_len else 1
    if fitting < required:
        raise MachineError(
            f"The KV cache for one sequence of {required * options.block_size} tokens needs {required * block_bytes:,} "
            f"bytes, but only {fitting * block_bytes:,} fit in memory; lower max_model_len or use an FP8 cache."
        )
    return min(options.num_seqs * blocks_per_sequence, fitting)


def weight_bytes(*modules: nn.Module) -> int:
    """Returns the bytes of all parameters and buffers. Tensors that share memory are counted once."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def cpu_cache_budget() -> int:
    """Returns the bytes that the cache may use on a CPU if no option says otherwise."""
    return int(free_memory() * CPU_CACHE_FRACTION)


def gpu_cache_budget(device: torch.device, options: EngineOptions, step_bytes: int, graph_bytes: int) -> int:
    """Returns the bytes that the cache may use on a GPU after the weights were loaded. `step_bytes` is the memory of
    the largest step, and `graph_bytes` that of CUDA graphs. Raises MachineError if no memory is left."""
    free, total = gpu_memory_info(device)
    fraction = SHARED_GPU_MEMORY_FRACTION if options.gpu_memory is None else options.gpu_memory
    working = ATTENTION_WORKSPACE_BYTES + step_bytes + graph_bytes
    available = min(free - int(total * (1 - fraction)) - working, options.kv_cache_bytes or free)
    if available <= 0:
        raise MachineError(
            f"No memory is left for the KV cache on {device}: {free:,} of its {total:,} bytes are free after loading "
            f"the weights, {1 - fraction:.0%} of the total is reserved for other processes, and a step needs "
            f"{working:,} bytes. Raise gpu_memory, lower max_batch_tokens, or use a larger GPU."
        )
    return available


def gpu_memory_info(device: torch.device) -> tuple[int, int]:
    """Returns the free and the total bytes of a GPU. Unused memory in torch's caching allocator counts as free."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def gpu_peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Returns by how much `run` increases the allocated GPU memory at its peak."""
    allocated = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - allocated


def gpu_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds that the GPU and the host need for `run`."""
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def plan_gpu_cache(
    model: Model, config: ModelConfig, options: EngineOptions, dtype: torch.dtype, draft: ModelConfig | None = None
) -> tuple[CachePlan, EngineOptions]:
    """Plans the cache of a loaded model from the memory that its weights, the weights of the `draft` model, and the
    largest step leave free.

    Returns the plan, and the options with values for max_num_seqs, max_batch_tokens and max_prefill_tokens.
    """
    check_length(config, options)
    device = cast(Tensor, model.head.weight).device
    limits, step_bytes = _fitting_step(model, options, device)
    graph_bytes = 0 if options.cuda_graphs is False else _graph_bytes(model, limits, device)
    budget = gpu_cache_budget(device, limits, step_bytes, graph_bytes)
    cache_plan = plan_cache(config, limits, dtype, budget, draft)
    if options.max_num_seqs is None:
        cache_tokens = cache_plan.num_blocks * options.block_size
        num_seqs = fitting_num_seqs(limits.num_seqs, cache_tokens, cache_plan.max_model_len)
        limits = replace(limits, max_num_seqs=num_seqs)
    if options.max_prefill_tokens is None:
        seconds = gpu_seconds(lambda: run_largest_step(model, limits), device)
        limits = replace(limits, max_prefill_tokens=prefill_tokens(limits.step_tokens, seconds))
    return cache_plan, limits


def _fitting_step(model: Model, options: EngineOptions, device: torch.device) -> tuple[EngineOptions, int]:
    """Returns the options with values for max_num_seqs and max_batch_tokens, and the memory of the largest step. A
    derived max_batch_tokens is halved while the step takes too much memory. Raises MachineError if no step fits."""
    _, gpu_bytes = gpu_memory_info(device)
    limits: EngineOptions | None = step_limits(options, gpu_bytes)
    while limits is not None:
        smaller = halved_step(limits) if options.max_batch_tokens is None else None
        step_bytes = _step_bytes(model, limits, device)
        if step_bytes is not None and (smaller is None or step_bytes <= MAX_STEP_FRACTION * gpu_bytes):
            return limits, step_bytes
        tokens, limits = limits.step_tokens, smaller
    raise MachineError(
        f"A step of {tokens} tokens does not fit in the memory of {device} beside the weights; lower max_batch_tokens, "
        "or use a larger GPU."
    )


def _step_bytes(model: Model, options: EngineOptions, device: torch.device) -> int | None:
    """Returns the memory of the largest step, or None if the GPU has less."""
    try:
        return gpu_peak_bytes(lambda: run_largest_step(model, options), device)
    except torch.cuda.OutOfMemoryError:
        return None


def _graph_bytes(model: Model, options: EngineOptions, device: torch.device) -> int:
    """Returns the memory of CUDA graphs. They share the memory of the largest graph. Only the FP32 logits of decoding
    steps are separate."""
    tokens = options.num_seqs
    if can_replay_prompts(model):
        tokens = max(tokens, prompt_sizes(options.step_tokens, options.num_seqs, model.config.max_length)[-1])
    largest = replace(options, max_batch_tokens=tokens)
    logits = sum(graph_sizes(options.num_seqs)) * model.config.vocab_size * torch.float32.itemsize
    return gpu_peak_bytes(lambda: run_largest_step(model, largest), device) + ATTENTION_WORKSPACE_BYTES + logits


@torch.inference_mode()
def run_largest_step(model: Model, options: EngineOptions) -> Tensor:
    """Runs a step with the largest number of tokens and sequences. Every sequence is sampled and needs
    log-probabilities.

    Returns the log-probabilities, FP32 [sequences, vocab], because the sampler (sampler.py) also holds them while it
    samples from a copy of the logits. Attention is replaced by a copy of the query, which has the size of its output.
    ATTENTION_WORKSPACE_BYTES accounts for the workspace of attention.
    """
    device = cast(Tensor, model.head.weight).device
    tokens = torch.arange(options.step_tokens, device=device) % model.config.vocab_size  # so that several experts run
    positions = torch.zeros_like(tokens)
    last = positions[: max(options.num_seqs, MAX_DRAFT_ROWS if options.drafted_tokens else 0)]
    logits = model.logits(model(tokens, positions, _no_attention, last))
    logprobs, copied = torch.log_softmax(logits, -1), logits.clone()
    one = torch.ones(len(logits), dtype=torch.float64, device=device)
    _sample(copied, one, one.long(), 0.5 * one, 0 * one, 0 * one)
    return logprobs


def _no_attention(layer: int, heads: Heads, rotation: Rotation, last: Tensor | None) -> Tensor:
    q, _, _ = heads
    return q.clone() if last is None else q[last]
