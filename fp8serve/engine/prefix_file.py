"""Blocks of a prefix cache as one safetensors file: written whole or not at all, read without trust.

    hashes  uint8 [blocks, 16]       what each block is published under (kv_cache.py), the most recently used first
    k, v    [layers, blocks, ...]    the contents of the cache, in its own type; for latent attention only k

Its metadata hold a fingerprint of everything that the contents depend on, and a digest of the contents. A file with
another fingerprint, a truncated one and one with a flipped bit are refused; the prefixes are then computed again.
Only its owner may read it, because keys and values reveal as much as the prompts from which they were computed.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fp8serve.engine.kv_cache import HASH_BYTES
from fp8serve.errors import ModelError
from fp8serve.model.storage.files import fsync
from fp8serve.model.storage.shards import load_tensors, read_header

SUFFIX = ".prefixes.safetensors"


@dataclass(frozen=True)
class Prefixes:
    """Blocks, the most recently used first; `tensors`: [layers, blocks, ...] each, on the CPU."""

    hashes: list[bytes]
    tensors: Mapping[str, Tensor]


def write(path: Path, found: Prefixes, fingerprint: str, model: str) -> None:
    """Replaces the file at `path`. OSError: there is no room, or no permission; the old one stays then."""
    hashes = torch.frombuffer(bytearray(b"".join(found.hashes)), dtype=torch.uint8).view(-1, HASH_BYTES)
    tensors = {"hashes": hashes, **found.tensors}
    temporary = path.with_name(f".{path.name}.tmp-{os.urandom(4).hex()}-{os.getpid()}")
    try:
        save_file(tensors, temporary, {"fingerprint": fingerprint, "digest": _digest(tensors), "model": model})
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
        entries, said = read_header(path)
        if said.get("fingerprint") != fingerprint:
            raise ModelError("which another version wrote, or an engine of other weights, scales or options")
        tensors = load_tensors(path)
    except (SafetensorError, UnicodeDecodeError) as problem:
        raise ModelError(f"which is damaged ({problem})") from None
    named = entries.get("hashes")
    blocks = named.shape[0] if named is not None and named.shape else 0
    shapes = {name: ((t.size(0), blocks, *t.shape[2:]), t.dtype) for name, t in like.items()}
    shapes["hashes"] = (blocks, HASH_BYTES), torch.uint8
    if {name: (entry.shape, entry.dtype) for name, entry in entries.items()} != shapes:
        raise ModelError("whose tensors are not such as this model's cache has")
    if _digest(tensors) != said.get("digest"):
        raise ModelError("whose contents are not those that were written")
    return Prefixes([bytes(row) for row in tensors.pop("hashes").numpy()], tensors)


def remove_left_overs(folder: Path) -> None:
    """Removes files of models whose directory is gone, and files that a killed process had begun to write."""
    for path in folder.glob(f".*{SUFFIX}.tmp-*"):
        with suppress(OSError):
            if not _lives(path.name.rpartition("-")[2]):
                path.unlink()
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(ModelError, OSError):
            model = read_header(path)[1].get("model")
            if model is not None and not Path(model).exists():
                path.unlink()


def _lives(pid: str) -> bool:
    return pid.isdecimal() and Path("/proc", pid).exists()


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Of names, shapes, types and bytes."""
    digest = blake2b(digest_size=HASH_BYTES)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
