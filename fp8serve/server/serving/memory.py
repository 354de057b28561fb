"""Whether another model fits in memory beside those that are served, and how much memory its cache may take.

The first engine plans for itself. Each next one is compared with the free memory less what the others will still
take: pages of a cache are taken when they are first written, and weights are mapped until they are packed
(engine/packing.py). On a GPU the engine measures by itself, and `gpu_memory` divides the memory.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fp8serve.errors import MachineError
from fp8serve.model.config.decoder import read_config
from fp8serve.model.network.memory import free_memory
from fp8serve.server.serving.served import EngineHandle, Source

PROCESS = 256 << 20  # bytes that an engine takes besides weights and cache
CACHE_SHARE = 4  # as engine/memory.py: a quarter of what is left


def fitted(source: Source, others: Iterable[EngineHandle]) -> Source:
    """`source` with a bound for its cache. Blocks. MachineError when it does not fit beside the `others`."""
    others, options = list(others), source.options
    if not others or not options.device.startswith("cpu"):
        return source
    free, weights = free_memory() - sum(map(_still_to_take, others)), _weight_bytes(source)
    left = free - weights - PROCESS
    cache = options.kv_cache_bytes or left // CACHE_SHARE
    if cache <= 0 or cache > left:
        wanted = f" and its cache {_said(options.kv_cache_bytes)}" if options.kv_cache_bytes else ""
        raise MachineError(
            f"The model does not fit: its weights take {_said(weights)}, its process {_said(PROCESS)}{wanted}, and "
            f"{_said(max(free, 0))} are free beside what the loaded models may take; unload one, or load a smaller one."
        )
    return replace(source, options=replace(options, kv_cache_bytes=cache))


def _still_to_take(engine: EngineHandle) -> int:
    draft = engine.info.get("draft_model") or {}
    planned = sum(part.get("weight_bytes", 0) for part in (engine.info, draft)) + engine.info.get("kv_cache_bytes", 0)
    return max(0, int(planned) - engine.resident_bytes) if engine.alive else 0


def _weight_bytes(source: Source) -> int:
    draft = source.options.draft_model
    directories = [source.directory, *([] if draft is None else [Path(draft)])]
    files = [path for each in directories for path in each.glob("*.safetensors") if path.name != "scales.safetensors"]
    return sum(path.stat().st_size for path in files) + sum(_cast_head_bytes(source, each) for each in directories)


def _cast_head_bytes(source: Source, directory: Path) -> int:
    """The bytes of a head that is cast when it is loaded: FP8 elements and an FP32 scale a row, beside the matrix of
    the file, which is read meanwhile. A BF16 head is in the files, as a matrix of its own or as the embedding.
    """
    if source.options.head_dtype == "bf16":
        return 0
    config = read_config(directory)
    return config.vocab_size * (config.hidden_size + 4)


def _said(size: int) -> str:
    """Bytes in a readable unit."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
