"""Whether another model fits in memory beside those that are served, and how much memory its cache may take.

The first engine plans for itself. Each next one is compared with the free memory less what the others will still
take: pages of a cache are taken when they are first written, and weights are mapped until they are packed
(engine/packing.py). What weights take depends on their recipe (model/resident.py). On a GPU the engine measures by
itself, and `gpu_memory` divides the memory.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fp8serve.errors import MachineError
from fp8serve.model.resident import resident
from fp8serve.model.storage.memory import free_memory
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
    """The most that the weights take, of the draft model, too, which is read as it is stored."""
    options, draft = source.options, source.options.draft_model
    peak = resident(source.directory, options.recipe, options.head_dtype, options.scales).peak
    return peak if draft is None else peak + resident(Path(draft), "stored", options.head_dtype).peak


def _said(size: int) -> str:
    """Bytes in a readable unit."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
