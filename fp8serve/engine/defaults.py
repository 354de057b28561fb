"""Chooses the engine options that are None. On a GPU, they follow from its memory, the model and the time of a step.

The device itself is chosen by model/device.py.

| option | GPU | CPU |
|---|---|---|
| max_num_seqs | 32 to 256 by memory; less if the KV cache holds fewer sequences of 512 tokens | 16 |
| max_batch_tokens | 2048 to 8192 by memory; less if a step would take 8 % of the memory | 512 |
| max_prefill_tokens | as many as the GPU computes in 25 ms | 128 |
| gpu_memory | 0.92; 0.9 beside other processes; 0.6 in a server that accepts fine-tune jobs | |
| kv_cache_dtype | fp8 if the model's configuration asks for it and it has calibrated scales | bf16 |
| threads | 2 in an engine's own process | one for each core |

The constants of a CPU are in options.py. Every rule here is a function of numbers, without torch. loading.py and
memory.py apply the rules: the first step limits are chosen before the weights are loaded (`step_limits`). Then the
largest step is run, which yields its memory and its time. A step that takes too much memory is halved
(`halved_step`). What remains is the KV cache, which limits the number of sequences (`fitting_num_seqs`).

`max_prefill_tokens` bounds the pause that a prompt causes in the streams of other requests. The time of a prompt token
is measured at load and not computed from the GPU's arithmetic, because it depends on the model, on the kernels, and for
small models on the host. Attention is not part of the measured step (memory.py), so prompts after a long context take
longer.
"""

from dataclasses import replace
from pathlib import Path

from fp8serve.engine.options import CPU_NUM_SEQS, EngineOptions

GIB = 1 << 30
STEP_LIMITS = ((70, 256, 8192), (36, 128, 8192), (20, 64, 4096), (0, 32, 2048))
"""Rows (smallest GPU memory in GiB, max_num_seqs, max_batch_tokens); the first row that fits is used. FP8 products are
fastest from 2048 tokens on, and a larger step computes more prompts together."""
MAX_STEP_FRACTION = 0.08  # of a GPU's memory, for the activations and logits of a step of a derived size
MIN_BATCH_TOKENS = 512  # a derived max_batch_tokens is not halved below this
TOKENS_PER_SEQUENCE = 512  # of the KV cache, for each of max_num_seqs sequences
PREFILL_SECONDS = 0.025  # that prompt tokens may add to a step while other requests are decoding
PREFILL_TOKENS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""The values of a derived max_prefill_tokens. They are few, so that repeated measurements mostly yield the same one."""
GPU_MEMORY_FRACTION = 0.92  # for an engine that has the GPU for itself
SHARED_GPU_MEMORY_FRACTION = 0.9  # beside other processes, whose memory may grow
TRAINING_GPU_MEMORY_FRACTION = 0.6  # leaves room for a fine-tune job, or for the engine that replaces this one
CONTEXT_BYTES = GIB  # a CUDA context with its libraries takes less; more memory in use belongs to other processes
GPU_WORKER_THREADS = 2  # an engine process on a GPU computes only small tensors on the CPU
GRAPH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
PROMPT_SIZES = (16, 32, *range(64, 512, 64), *range(512, 1024, 128), *range(1024, 2048, 256), *range(2048, 4097, 512))
"""Tokens of the steps with prompts that are captured as CUDA graphs. From 33 tokens on, less
than half of a padded step is padding, and from 257 on less than a fifth."""


def with_device(options: EngineOptions, model_dir: Path) -> EngineOptions:
    """Returns the options with the device that "auto" stands for. Raises ModelError if a weight file is damaged."""
    from fp8serve.model.device import resolve_device  # here, so that `fp8serve --help` is fast

    device = resolve_device(options.device, model_dir, options.recipe, options.head_dtype, options.scales)
    return replace(options, device=device)


def step_limits(options: EngineOptions, gpu_bytes: int) -> EngineOptions:
    """Returns the options with values for max_num_seqs and max_batch_tokens, for a GPU with `gpu_bytes` of memory."""
    num_seqs, tokens = next(limits for gib, *limits in STEP_LIMITS if gpu_bytes >= gib * GIB)
    tokens = options.max_batch_tokens or max(tokens, options.max_num_seqs or 0)
    return replace(options, max_num_seqs=options.max_num_seqs or min(num_seqs, tokens), max_batch_tokens=tokens)


def halved_step(options: EngineOptions) -> EngineOptions | None:
    """Returns the options with half of max_batch_tokens, or None if that would be too few."""
    tokens = options.step_tokens // 2
    return replace(options, max_batch_tokens=tokens) if tokens >= max(MIN_BATCH_TOKENS, options.num_seqs) else None


def fitting_num_seqs(num_seqs: int, cache_tokens: int, max_model_len: int) -> int:
    """Returns the largest graph size up to `num_seqs` for which a KV cache of `cache_tokens` holds 512 tokens, or the
    whole context if that is shorter, for every sequence. A smaller cache does not lower the result below the default of
    a CPU: if the cache is full, sequences are preempted."""
    fitting = max(CPU_NUM_SEQS, cache_tokens // min(TOKENS_PER_SEQUENCE, max_model_len))
    return num_seqs if fitting >= num_seqs else max(size for size in GRAPH_SIZES if size <= fitting)


def estimated_options(
    options: EngineOptions, gpu_bytes: int, weight_bytes: int, token_bytes: int, max_model_len: int
) -> EngineOptions:
    """Estimates, without loading a model, the options that an engine alone on a GPU will derive. A step is assumed to
    take MAX_STEP_FRACTION of the memory. max_prefill_tokens is left as it is, because it must be measured.

    Args:
        weight_bytes: the memory of the weights.
        token_bytes: the KV cache of a token.
    """
    options = step_limits(options, gpu_bytes)
    cache_bytes = int((GPU_MEMORY_FRACTION - MAX_STEP_FRACTION) * gpu_bytes) - weight_bytes
    num_seqs = fitting_num_seqs(options.num_seqs, max(0, cache_bytes) // token_bytes, max_model_len)
    return replace(options, max_num_seqs=num_seqs, gpu_memory=GPU_MEMORY_FRACTION, threads=GPU_WORKER_THREADS)


def prefill_tokens(step_tokens: int, step_seconds: float) -> int:
    """Returns max_prefill_tokens for a GPU that computes `step_tokens` in `step_seconds`: as many as it computes in
    PREFILL_SECONDS, rounded down to one of PREFILL_TOKENS."""
    affordable = step_tokens * min(1.0, PREFILL_SECONDS / step_seconds)
    return max(
        (tokens for tokens in PREFILL_TOKENS if tokens <= affordable), default=min(PREFILL_TOKENS[0], step_tokens)
    )


def gpu_memory_fraction(free: int, total: int) -> float:
    """Returns the option gpu_memory for a GPU with `free` of `total` bytes when the weights are not loaded yet."""
    return GPU_MEMORY_FRACTION if total - free <= CONTEXT_BYTES else SHARED_GPU_MEMORY_FRACTION


def worker_options(options: EngineOptions, model_dir: Path) -> EngineOptions:
    """Returns the options of an engine that has a process for itself: with its device, and with a value for threads on
    a GPU."""
    options = with_device(options, model_dir)
    is_on_gpu = options.device.startswith("cuda")
    return replace(options, threads=GPU_WORKER_THREADS) if is_on_gpu and options.threads is None else options


def prompt_sizes(max_batch_tokens: int, max_num_seqs: int, max_model_len: int) -> list[int]:
    """Returns the numbers of tokens for which steps with prompts are captured as CUDA graphs: PROMPT_SIZES up to the
    largest step."""
    limit = min(max_batch_tokens, max_num_seqs * max_model_len, PROMPT_SIZES[-1])
    return [size for size in PROMPT_SIZES if size < limit] + [limit]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Returns the batch sizes to capture as CUDA graphs: GRAPH_SIZES, multiples of 64 beyond, and `max_num_seqs`. A
    batch is padded to the next size, by less than half of its rows from 8 on."""
    sizes = *GRAPH_SIZES, *range(GRAPH_SIZES[-1] + 64, max_num_seqs, 64)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]
