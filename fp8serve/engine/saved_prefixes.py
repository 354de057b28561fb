"""Saves the prefix cache to disk, so that it survives a restart. The most recently used blocks are stored in a
safetensors file in `cache_dir`.

The engine writes the file when it shuts down cleanly and, while it runs, after a step, at most once in
`cache_dir_seconds`. Requests wait only while the blocks are copied, which takes some tenths of a second for a gigabyte;
a thread then writes the copy. An engine that starts with the same model and options restores the blocks. Tenants stay
separated, because a block's hash depends on its tenant.

Keys and values depend on the weights, scales, recipe, cache dtype and kernels. A fingerprint of all of these is stored
in the file. To keep the start fast, the weights are identified by the names, sizes and modification times of their
files and by samples of their contents. So a copy of the model with other modification times starts with an empty cache.
If the fingerprint differs, the engine logs a warning, ignores the file and overwrites it later. Scales that follow the
traffic (`roll_history`) have no fingerprint, so EngineOptions refuses this option together with `cache_dir`.

    hashes  uint8 [blocks, 16]       the hashes of the cached blocks (kv_cache.py), the most recently used first
    k, v    [layers, blocks, ...]    keys and values in the dtype of the cache; latent attention has only k

The file is written atomically and is validated when it is read. Its metadata contains the fingerprint and a digest of
the tensors, so a truncated or modified file is refused. Only the file's owner may read it, because keys and values
reveal the prompts.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Thread

import torch
from safetensors import SafetensorError
from torch import Tensor

import fp8serve
from fp8serve.engine.kv_cache import HASH_BYTES, BlockPool
from fp8serve.engine.memory import CachePlan
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.runner import Runner
from fp8serve.errors import MachineError, ModelError, RequestError, one_line
from fp8serve.fp8 import ops
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.config.rope import LongRope
from fp8serve.model.formats.scales import fingerprint as weights_fingerprint
from fp8serve.model.storage.files import fsync, present
from fp8serve.model.storage.opening import is_regular_file
from fp8serve.model.storage.shards import load_tensors, read_header, save_tensors

SUFFIX = ".prefixes.safetensors"
log = logging.getLogger("fp8serve.engine")
DEFAULT_MAX_BYTES, DEFAULT_SAVE_SECONDS = 2**30, 300.0  # of the options cache_dir_bytes and cache_dir_seconds


@dataclass(frozen=True)
class Prefixes:
    """Cached blocks, the most recently used first. `tensors` are [layers, blocks, ...] each, on the CPU."""

    hashes: list[bytes]
    tensors: Mapping[str, Tensor]


def write(path: Path, prefixes: Prefixes, fingerprint: str, model: str) -> None:
    """Writes the file atomically. Raises OSError if it cannot be written; then an existing file is unchanged."""
    hashes = torch.frombuffer(bytearray(b"".join(prefixes.hashes)), dtype=torch.uint8).view(-1, HASH_BYTES)
    tensors = {"hashes": hashes, **prefixes.tensors}
    temporary = path.with_name(f".{path.name}.tmp-{os.urandom(4).hex()}-{os.getpid()}")
    try:
        save_tensors(temporary, tensors, {"fingerprint": fingerprint, "digest": _digest_of(tensors), "model": model})
        temporary.chmod(0o600)
        fsync(temporary)
        temporary.rename(path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path, fingerprint: str, like: Mapping[str, Tensor]) -> Prefixes:
    """Reads a file that `write` wrote. The tensors must have the dtypes and shapes of the caches in `like`, except for
    the number of blocks.

    Raises ModelError if the file is damaged or belongs to another engine; its message is a clause with the reason.
    Raises OSError if the file cannot be read.
    """
    try:
        entries, metadata = read_header(path)
        if metadata.get("fingerprint") != fingerprint:
            raise ModelError("it was written by another version, or with other weights, scales or options")
        tensors = load_tensors(path)
    except (SafetensorError, UnicodeDecodeError) as problem:
        raise ModelError("it is not a valid safetensors file") from problem
    hashes = entries.get("hashes")
    blocks = hashes.shape[0] if hashes is not None and hashes.shape else 0
    shapes = {name: ((t.size(0), blocks, *t.shape[2:]), t.dtype) for name, t in like.items()}
    shapes["hashes"] = (blocks, HASH_BYTES), torch.uint8
    if {name: (entry.shape, entry.dtype) for name, entry in entries.items()} != shapes:
        raise ModelError("its tensors do not match this model's KV cache")
    if _digest_of(tensors) != metadata.get("digest"):
        raise ModelError("its contents do not match its digest")
    return Prefixes([bytes(row) for row in tensors.pop("hashes").numpy()], tensors)


def remove_stale_files(folder: Path) -> None:
    """Removes the files of models whose directory no longer exists, and the temporary files of killed processes."""
    for path in folder.glob(f".*{SUFFIX}.tmp-*"):
        with suppress(OSError):
            pid = path.name.rpartition("-")[2]
            if not (pid.isdecimal() and Path("/proc", pid).exists()):
                path.unlink()
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(ModelError, OSError):
            model = read_header(path)[1].get("model")
            if model is not None and not Path(model).exists():
                path.unlink()


def _digest_of(tensors: Mapping[str, Tensor]) -> str:
    digest = blake2b(digest_size=HASH_BYTES)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class SavedPrefixes:
    """Saves and restores the prefix cache of one engine. The engine calls `restore` before the first request,
    `save_if_due` between steps, and `save` when it shuts down."""

    def __init__(self, path: Path, model_dir: Path, fingerprint: str, max_bytes: int, seconds: float) -> None:
        self._path, self._model, self._fingerprint = path, str(model_dir.resolve()), fingerprint
        self._max_bytes, self._seconds = max_bytes, seconds
        self._last_save_time = time.monotonic()
        self._saved_hashes: list[bytes] = []  # of the blocks in the file
        self._thread: Thread | None = None

    def restore(self, pool: BlockPool, runner: Runner) -> None:
        """Restores as many blocks of the file as fit in the pool. A file that cannot be used is ignored."""
        remove_stale_files(self._path.parent)
        if not present(self._path):
            return
        try:
            prefixes = read(self._path, self._fingerprint, runner.caches())
        except (ModelError, OSError) as problem:
            reason = str(problem).rstrip(".")
            log.warning("The prefix cache starts empty, because the file %s cannot be used: %s.", self._path, reason)
            return
        blocks = pool.restore(prefixes.hashes)
        runner.restore_blocks(blocks, prefixes.tensors)
        self._saved_hashes = prefixes.hashes
        log.info("The prefix cache starts with %d blocks, which were read from %s.", len(blocks), self._path)

    def save_if_due(self, pool: BlockPool, runner: Runner) -> None:
        """Starts to save the prefix cache if the last save is `seconds` ago and cached blocks have changed."""
        is_writing = self._thread is not None and self._thread.is_alive()
        if time.monotonic() - self._last_save_time < self._seconds or is_writing:
            return
        self._last_save_time = time.monotonic()
        self._start_save(pool, runner)

    def save(self, pool: BlockPool, runner: Runner) -> None:
        """Saves the prefix cache and waits until the file is written."""
        self._wait()
        self._start_save(pool, runner)
        self._wait()

    def _start_save(self, pool: BlockPool, runner: Runner) -> None:
        """Copies the most recently used blocks and starts the thread that writes them."""
        recent = pool.cached_blocks()[: self._max_bytes // runner.block_bytes]
        hashes = [key for key, _ in recent]
        if not hashes or hashes == self._saved_hashes:
            return
        try:
            prefixes = Prefixes(hashes, runner.copy_blocks([block for _, block in recent]))
        except (RuntimeError, MemoryError) as problem:  # there is no memory for the copy; the cache itself is valid
            log.warning("The prefix cache was not saved, because memory is short: %s.", one_line(problem))
            return
        self._thread = Thread(target=self._write, args=(prefixes,), daemon=True)
        self._thread.start()

    def _write(self, prefixes: Prefixes) -> None:
        try:
            write(self._path, prefixes, self._fingerprint, self._model)
            self._saved_hashes = prefixes.hashes
        except OSError as problem:
            log.warning("The prefix cache cannot be saved to %s: %s.", self._path, problem.strerror or problem)

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


def open_prefixes(
    model_dir: Path, config: ModelConfig, options: EngineOptions, cache_plan: CachePlan
) -> SavedPrefixes | None:
    """Returns the saved prefix cache of an engine with these options, or None if they have no cache_dir.

    Raises RequestError if cache_dir_bytes is less than a block, and MachineError if the directory cannot be created.
    """
    if options.cache_dir is None:
        return None
    folder, max_bytes = Path(options.cache_dir), options.cache_dir_bytes or DEFAULT_MAX_BYTES
    if max_bytes < cache_plan.block_bytes:
        raise RequestError(
            f"cache_dir_bytes ({max_bytes:,}) is less than the size of one block ({cache_plan.block_bytes:,}); raise "
            "it."
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise MachineError(
            f"{folder} cannot be created for the prefix cache: {problem.strerror}; choose a writable cache_dir."
        ) from None
    settings = {name: getattr(options, name) for name in ("recipe", "kv_cache_dtype", "block_size")}
    settings["scales"] = None if options.scales is None else str(Path(options.scales).resolve())
    # The length depends on free memory, so it counts only if the angles of keys depend on it.
    is_long = any(isinstance(rope.scaling, LongRope) for rope in config.layer_ropes if rope)
    settings["length"] = cache_plan.max_model_len if is_long else None
    settings |= {"invariant": True} if options.invariant else {}  # it changes the bits of keys and values
    key = _digest({"model": str(model_dir.resolve()), **settings})
    path = folder / f"{model_dir.resolve().name[:64]}-{key[:12]}{SUFFIX}"
    fingerprint = _digest({**settings, **_describe_weights(model_dir, options), **_describe_machine(options)})
    return SavedPrefixes(path, model_dir, fingerprint, max_bytes, options.cache_dir_seconds or DEFAULT_SAVE_SECONDS)


def _describe_weights(model_dir: Path, options: EngineOptions) -> dict[str, object]:
    files = {path.name: path for pattern in ("*.safetensors", "*.json") for path in model_dir.glob(pattern)}
    files |= {} if options.scales is None else {"scales of the options": Path(options.scales)}
    stats = {name: path.stat() for name, path in files.items() if is_regular_file(path)}
    sizes_and_times = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
    return {"weights": weights_fingerprint(model_dir), "files": sizes_and_times}


def _describe_machine(options: EngineOptions) -> dict[str, object]:
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "version": fp8serve.__version__,
        "torch": torch.__version__,
        "kernels": ops.backends(device.type),
        "device": name,
    }


def _digest(values: object) -> str:
    return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
