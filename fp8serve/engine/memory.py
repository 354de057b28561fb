"""How long a sequence may be and how many cache blocks there are, from the model, the options and the free memory.

On a CPU this is known before the weights are read: they are memory-mapped and must stay in the page cache. On a GPU it
is measured once they are loaded: the free memory, less what must stay free for others (`gpu_memory` is the share of all
its memory that this process may use), less what the largest step takes, which is run once to measure it. CUDA
graphs take at most as much memory again, so the step is counted twice. The rest becomes the cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from fp8serve.engine.options import EngineOptions
from fp8serve.engine.scheduler import MOST_DRAFTED
from fp8serve.errors import MachineError, RequestError
from fp8serve.fp8 import ops as ops  # registers the op called below
from fp8serve.model.building import Model
from fp8serve.model.config.model_config import AnyConfig, ModelConfig
from fp8serve.model.network.rotary import Heads, Rotation
from fp8serve.model.storage.memory import free_memory

CPU_SHARE = 4  # the cache takes at most a quarter of free memory: weights are mapped, and need room to stay there
GPU_SHARE = 0.9
_sample = torch.ops.fp8serve.sample.default
ATTENTION_PARTS = 128 << 20  # csrc/cuda/attention_mma.cu: bytes it takes at most beside its output


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Sizes of the cache."""

    max_model_len: int  # tokens
    num_blocks: int
    block_bytes: int  # of one block, in all layers
    draft_block_bytes: int = 0  # of the same block in the draft model's cache

    @property
    def cache_bytes(self) -> int:
        """The size of both caches together."""
        return self.num_blocks * (self.block_bytes + self.draft_block_bytes)


def plan(
    config: ModelConfig,
    options: EngineOptions,
    cache_dtype: torch.dtype,
    memory: int | None = None,
    draft: ModelConfig | None = None,
) -> CachePlan:
    """Sizes for a cache, and for that of a `draft` model, of at most `memory` bytes together; None: the bytes that the
    options allow, or that this machine has free.

    RequestError when the options ask for more than the model can do, MachineError for more than fits in memory.
    """
    longest = check_length(config, options)
    block_bytes = _block_bytes(config, options.block_size, cache_dtype)
    draft_bytes = 0 if draft is None else _block_bytes(draft, options.block_size, torch.bfloat16)
    both = block_bytes + draft_bytes
    length_limit = options.max_model_len or longest
    allowed = options.kv_cache_bytes or cache_memory(options.device) if memory is None else memory
    if options.num_blocks and options.kv_cache_bytes:
        _check_blocks(options.num_blocks, both, options.kv_cache_bytes)
    blocks = options.num_blocks or _fitting(options, -(-length_limit // options.block_size), both, allowed)
    length = options.max_model_len or min(longest, blocks * options.block_size)
    return CachePlan(length, blocks, block_bytes, draft_bytes)


def check_length(config: AnyConfig, options: EngineOptions) -> int:
    """The longest sequence of the model; RequestError when the options ask for a longer one."""
    longest = config.max_length
    if options.max_model_len is not None and options.max_model_len > longest:
        raise RequestError(
            f"max_model_len {options.max_model_len} is beyond the {longest} tokens of this model's "
            "trained context; ask for less."
        )
    return longest


def _block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    tensors = 1 if config.latent else 2
    return tensors * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


def _fitting(options: EngineOptions, per_sequence: int, block_bytes: int, memory: int) -> int:
    """Blocks for all sequences at full length, or as many as memory allows, but at least enough for one sequence at the
    length asked for."""
    allowed = memory // block_bytes
    least = per_sequence if options.max_model_len else 1
    if allowed < least:
        raise MachineError(
            f"The cache for one sequence of {least * options.block_size} tokens needs {least * block_bytes:,} bytes, "
            f"more than the {allowed * block_bytes:,} that memory allows; lower max_model_len or use an FP8 cache."
        )
    return min(options.max_num_seqs * per_sequence, allowed)


def _check_blocks(blocks: int, block_bytes: int, allowed: int) -> None:
    if blocks * block_bytes > allowed:
        raise MachineError(
            f"A cache of {blocks} blocks needs {blocks * block_bytes:,} bytes, more than the {allowed:,} that it may "
            "take; lower num_blocks, or leave it out."
        )


def weight_bytes(*modules: nn.Module) -> int:
    """The bytes of all parameters and buffers; those that share memory are counted once."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def cache_memory(device: str) -> int:
    """Bytes that the cache may take on a CPU."""
    return free_memory() // CPU_SHARE


def gpu_cache_memory(device: torch.device, options: EngineOptions, step_bytes: int) -> int:
    """Bytes that the cache may take on a GPU where the weights lie, and the largest step takes `step_bytes` more.

    MachineError when nothing is left.
    """
    free, total = gpu_memory_info(device)
    share = GPU_SHARE if options.gpu_memory is None else options.gpu_memory
    working = ATTENTION_PARTS + step_bytes * (1 if options.cuda_graphs is False else 2)
    left = min(free - int(total * (1 - share)) - working, options.kv_cache_bytes or free)
    if left <= 0:
        raise MachineError(
            f"Nothing is left for the cache on {device}: of its {total:,} bytes {free:,} are free with the weights "
            f"loaded, {1 - share:.0%} of all stay free for others, and a step takes {working:,}; use a higher "
            "gpu_memory, a lower max_batch_tokens, or a larger GPU."
        )
    return left


def gpu_memory_info(device: torch.device) -> tuple[int, int]:
    """(free, all) bytes of a GPU; memory that torch has cached and does not use counts as free."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def gpu_bytes_of(run: Callable[[], object], device: torch.device) -> int:
    """The most memory that `run` holds at a time, beyond what is held before."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def plan_on_gpu(
    model: Model, config: ModelConfig, options: EngineOptions, dtype: torch.dtype, draft: ModelConfig | None = None
) -> CachePlan:
    """The cache's sizes from the memory that the weights, a `draft` model's included, and the model's largest step
    leave free."""
    check_length(config, options)
    device = cast(Tensor, model.head.weight).device
    step_bytes = gpu_bytes_of(lambda: largest_step(model, options), device)
    return plan(config, options, dtype, gpu_cache_memory(device, options, step_bytes), draft)


@torch.inference_mode()
def largest_step(model: Model, options: EngineOptions) -> Tensor:
    """Runs a step with the largest number of tokens and sequences; every sequence samples and needs log-probabilities.

    Returns the log-probabilities, FP32 [sequences, vocab], which the sampler (sampler.py) holds while it draws from a
    copy of the rows. Attention is replaced by a copy of the query, which has the size of its output; its workspace is
    the constant ATTENTION_PARTS.
    """
    device = cast(Tensor, model.head.weight).device
    tokens = torch.zeros(options.step_tokens, dtype=torch.long, device=device)
    last = tokens[: max(options.max_num_seqs, MOST_DRAFTED if options.drafted_tokens else 0)]
    logits = model.logits(model(tokens, tokens, _no_attention, last))
    ranked, chosen = torch.log_softmax(logits, -1), logits.clone()
    one = torch.ones(len(logits), dtype=torch.float64, device=device)
    _sample(chosen, one, one.long(), 0.5 * one, 0 * one, 0 * one)
    return ranked


def _no_attention(layer: int, heads: Heads, rotation: Rotation, last: Tensor | None) -> Tensor:
    return heads[0].clone() if last is None else heads[0][last]
