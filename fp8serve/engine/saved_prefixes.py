"""The prefix cache across restarts: the blocks used last, kept in a safetensors file of `cache_dir`.

They are written when the engine ends cleanly, and, while it runs, after a step, at most every `cache_dir_seconds`.
Requests wait only while the blocks are copied (some tenths of a second for a gigabyte); a thread writes the copy. An
engine with the same model and options finds them when it starts, and its requests hit them as they would have hit its
predecessor's. Tenants stay separate, because hashes begin with the tenant.

Keys and values depend on weights, scales, recipe, cache type and kernels: all of these are in the fingerprint. Weights
are identified by the names, sizes and times of their files and a sample of their contents, so that a start does not
read gigabytes first; a copy of the model whose files have other times begins with an empty cache. A file that does not
match is ignored with one line in the log, and overwritten later. Scales that follow the traffic (`roll_history`) have
no fingerprint: EngineOptions refuses them together with `cache_dir`.

    hashes  uint8 [blocks, 16]       what each block is published under (kv_cache.py), the most recently used first
    k, v    [layers, blocks, ...]    the contents of the cache, in its own type; for latent attention only k

The file is written whole or not at all, and read without trust: its metadata hold the fingerprint and a digest of the
contents, and a file with another fingerprint, a truncated one and one with a flipped bit are refused. Only its owner
may read it, because keys and values reveal as much as the prompts from which they were computed.
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
from safetensors.torch import save_file
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
from fp8serve.model.formats.scales import fingerprint as sampled
from fp8serve.model.storage.files import fsync, present
from fp8serve.model.storage.opening import regular_file
from fp8serve.model.storage.shards import load_tensors, read_header

SUFFIX = ".prefixes.safetensors"
log = logging.getLogger("fp8serve.engine")
DEFAULT_BYTES, DEFAULT_SECONDS = 2**30, 300.0


@dataclass(frozen=True)
class Prefixes:
    """Blocks, the most recently used first; `tensors`: [layers, blocks, ...] each, on the CPU."""

    hashes: list[bytes]
    tensors: Mapping[str, Tensor]


def write(path: Path, prefixes: Prefixes, fingerprint: str, model: str) -> None:
    """Replaces the file at `path`. OSError: there is no room, or no permission; the old one stays then."""
    hashes = torch.frombuffer(bytearray(b"".join(prefixes.hashes)), dtype=torch.uint8).view(-1, HASH_BYTES)
    tensors = {"hashes": hashes, **prefixes.tensors}
    temporary = path.with_name(f".{path.name}.tmp-{os.urandom(4).hex()}-{os.getpid()}")
    try:
        save_file(tensors, temporary, {"fingerprint": fingerprint, "digest": _digest_of(tensors), "model": model})
        temporary.chmod(0o600)
        fsync(temporary)
        temporary.rename(path)
        fsync(path.parent)
    except SafetensorError as problem:  # how the library says that the disk is full
        raise OSError(str(problem)) from None
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path, fingerprint: str, like: Mapping[str, Tensor]) -> Prefixes:
    """Reads what `write` wrote; `like`: caches whose shapes and types, except the number of blocks, the tensors must
    have.

    ModelError, worded as a clause that follows the file's name: it was made from something else, or is damaged.
    OSError: it cannot be read.
    """
    try:
        entries, metadata = read_header(path)
        if metadata.get("fingerprint") != fingerprint:
            raise ModelError("which another version wrote, or an engine of other weights, scales or options")
        tensors = load_tensors(path)
    except (SafetensorError, UnicodeDecodeError) as problem:
        raise ModelError("which is damaged") from problem
    named = entries.get("hashes")
    blocks = named.shape[0] if named is not None and named.shape else 0
    shapes = {name: ((t.size(0), blocks, *t.shape[2:]), t.dtype) for name, t in like.items()}
    shapes["hashes"] = (blocks, HASH_BYTES), torch.uint8
    if {name: (entry.shape, entry.dtype) for name, entry in entries.items()} != shapes:
        raise ModelError("whose tensors do not match this model's cache")
    if _digest_of(tensors) != metadata.get("digest"):
        raise ModelError("whose contents differ from what was written")
    return Prefixes([bytes(row) for row in tensors.pop("hashes").numpy()], tensors)


def remove_left_overs(folder: Path) -> None:
    """Removes files of models whose directory is gone, and files that a killed process had begun to write."""
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
    """Of names, shapes, types and bytes."""
    digest = blake2b(digest_size=HASH_BYTES)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class SavedPrefixes:
    """The file of one engine. Call `restore` before the first request, `save_if_due` between steps, `save` at last."""

    def __init__(self, path: Path, model_dir: Path, fingerprint: str, most_bytes: int, seconds: float) -> None:
        self._path, self._model, self._fingerprint = path, str(model_dir.resolve()), fingerprint
        self._most_bytes, self._seconds = most_bytes, seconds
        self._last = time.monotonic()
        self._written: list[bytes] = []  # hashes of what was written last
        self._thread: Thread | None = None

    def restore(self, pool: BlockPool, runner: Runner) -> None:
        """Publishes the blocks of the file, as many as fit; a file that cannot be used is ignored."""
        remove_left_overs(self._path.parent)
        if not present(self._path):
            return
        try:
            prefixes = read(self._path, self._fingerprint, runner.caches())
        except (ModelError, OSError) as problem:
            log.warning("The prefix cache starts empty, without %s, %s.", self._path, str(problem).rstrip("."))
            return
        blocks = pool.restore(prefixes.hashes)
        runner.fill(blocks, prefixes.tensors)
        self._written = prefixes.hashes
        log.info("The prefix cache starts with %d blocks of %s.", len(blocks), self._path)

    def save_if_due(self, pool: BlockPool, runner: Runner) -> None:
        """Starts to write if enough time has passed and something has changed."""
        writing = self._thread is not None and self._thread.is_alive()
        if time.monotonic() - self._last < self._seconds or writing:
            return
        self._last = time.monotonic()
        self._begin(pool, runner)

    def save(self, pool: BlockPool, runner: Runner) -> None:
        """Writes, and waits until it is done."""
        self._wait()
        self._begin(pool, runner)
        self._wait()

    def _begin(self, pool: BlockPool, runner: Runner) -> None:
        chosen = pool.recent()[: self._most_bytes // runner.block_bytes]
        hashes = [key for key, _ in chosen]
        if not hashes or hashes == self._written:
            return
        try:
            prefixes = Prefixes(hashes, runner.copies([block for _, block in chosen]))
        except (RuntimeError, MemoryError) as problem:  # memory is short; the cache itself is valid
            log.warning("The prefix cache was not saved, because memory is short: %s.", one_line(problem))
            return
        self._thread = Thread(target=self._write, args=(prefixes,), daemon=True)
        self._thread.start()

    def _write(self, prefixes: Prefixes) -> None:
        try:
            write(self._path, prefixes, self._fingerprint, self._model)
            self._written = prefixes.hashes
        except OSError as problem:
            log.warning("The prefix cache cannot be saved in %s: %s.", self._path, problem.strerror or problem)

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


def open_prefixes(
    model_dir: Path, config: ModelConfig, options: EngineOptions, sizes: CachePlan
) -> SavedPrefixes | None:
    """The kept prefixes of an engine with these options, if they ask for it.

    RequestError: the limit is less than a block. MachineError: the directory cannot be made.
    """
    if options.cache_dir is None:
        return None
    folder, most_bytes = Path(options.cache_dir), options.cache_dir_bytes or DEFAULT_BYTES
    if most_bytes < sizes.block_bytes:
        raise RequestError(
            f"cache_dir_bytes ({most_bytes:,}) is less than one block of the cache ({sizes.block_bytes:,}); allow more."
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise MachineError(
            f"{folder} cannot hold the prefix cache: {problem.strerror}; give a directory that can be written."
        ) from None
    chosen = {name: getattr(options, name) for name in ("recipe", "kv_cache_dtype", "block_size")}
    chosen["scales"] = None if options.scales is None else str(Path(options.scales).resolve())
    # only if the angles of keys depend on it: the length may depend on free memory, and differ at every start
    is_long = any(isinstance(rope.scaling, LongRope) for rope in config.layer_ropes if rope)
    chosen["length"] = sizes.max_model_len if is_long else None
    key = _digest({"model": str(model_dir.resolve()), **chosen})
    path = folder / f"{model_dir.resolve().name[:64]}-{key[:12]}{SUFFIX}"
    fingerprint = _digest({**chosen, **_of_weights(model_dir, options), **_of_machine(options)})
    return SavedPrefixes(path, model_dir, fingerprint, most_bytes, options.cache_dir_seconds or DEFAULT_SECONDS)


def _of_weights(model_dir: Path, options: EngineOptions) -> dict[str, object]:
    """What identifies the model, down to the times of its files."""
    files = {path.name: path for kind in ("*.safetensors", "*.json") for path in model_dir.glob(kind)}
    files |= {} if options.scales is None else {"scales of the options": Path(options.scales)}
    states = {name: path.stat() for name, path in files.items() if regular_file(path)}
    known = {name: (state.st_size, state.st_mtime_ns) for name, state in states.items()}
    return {"weights": sampled(model_dir), "files": known}


def _of_machine(options: EngineOptions) -> dict[str, object]:
    """What identifies the kernels and libraries that compute."""
    kind = torch.device(options.device)
    device = torch.cuda.get_device_name(kind) if kind.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "version": fp8serve.__version__,
        "torch": torch.__version__,
        "kernels": ops.backends(kind.type),
        "device": device,
    }


def _digest(facts: object) -> str:
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
