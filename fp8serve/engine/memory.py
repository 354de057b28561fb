"""How long a sequence may be and how many cache blocks there are, from the model, the options and the free memory."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from fp8serve.engine.options import EngineOptions
from fp8serve.errors import MachineError, RequestError
from fp8serve.model.config import ModelConfig

CPU_SHARE = 4  # the cache takes at most a quarter of free memory: weights are mapped, and need room to stay there
CUDA_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of the cache."""

    max_model_len: int  # tokens
    num_blocks: int
    block_bytes: int  # of one block, in all layers


def plan(config: ModelConfig, options: EngineOptions, cache_dtype: torch.dtype) -> Plan:
    """RequestError when the options ask for more than the model can do, MachineError for more than fits in memory."""
    longest = config.max_full_attention_len
    if options.max_model_len is not None and options.max_model_len > longest:
        raise RequestError(
            f"max_model_len {options.max_model_len} is beyond the {longest} tokens on which this model is exact here "
            "(its trained context, or its attention window); ask for less."
        )
    block_bytes = _block_bytes(config, options.block_size, cache_dtype)
    wanted = options.max_model_len or longest
    blocks = options.num_blocks or _fitting(options, _blocks(wanted, options), block_bytes)
    return Plan(options.max_model_len or min(longest, blocks * options.block_size), blocks, block_bytes)


def _block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


def _blocks(tokens: int, options: EngineOptions) -> int:
    return -(-tokens // options.block_size)


def _fitting(options: EngineOptions, per_sequence: int, block_bytes: int) -> int:
    """Blocks for all sequences at full length, or as many as memory allows, but for one at the length asked for."""
    allowed = cache_memory(options.device) // block_bytes
    least = per_sequence if options.max_model_len else 1
    if allowed < least:
        raise MachineError(
            f"The cache for one sequence of {least * options.block_size} tokens needs {least * block_bytes:,} bytes, "
            f"more than the {allowed * block_bytes:,} that memory allows; lower max_model_len or use an FP8 cache."
        )
    return min(options.max_num_seqs * per_sequence, allowed)


def cache_memory(device: str) -> int:
    """Bytes that the cache may take."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
    return _free_memory() // CPU_SHARE


def _free_memory() -> int:
    """What the machine has free, or what the container (control group version 2) is still allowed, if that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, int(limit[0]) - int(used[0]))
    return max(free, 0)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
