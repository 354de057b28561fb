"""FP32 tensors inside pickles and small torch.save files, without torch's unpickler.

    in a pickle      _rebuild_tensor_v2(_load_from_bytes(B), offset, size, stride, ...), where B is a storage as torch
                     wrote it before zip files: pickles of a magic number, the protocol, the byte order, the storage's
                     description and the list of keys, then for each key a count (int64) and the elements
    torch.save       a zip file of stored (uncompressed) members: NAME/data.pkl, NAME/data/KEY

The pickles are read as data (`pickle_data`), and the elements are copied out of the bytes after every size was compared
with the bytes that are there. So no more is allocated than the file holds, and nothing is called. Only FP32 is read,
because scaling states are FP32.
"""

import io
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8serve.errors import ScalesError
from fp8serve.model.formats.pickle_data import Call, Global, Persistent, read_pickle

_MAGIC = 0x1950A86A20F9469CFC6C
_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_FROM_BYTES = Global("torch.storage", "_load_from_bytes")
_FLOAT = Global("torch", "FloatStorage")
_ZIP = b"PK\x03\x04"
_MAX_MEMBERS = 64
# what `zipfile` raises for a directory that points nowhere, names that are not text, encryption, an early end
_DAMAGED = (zipfile.BadZipFile, ValueError, OverflowError, LookupError, struct.error, RuntimeError, EOFError, OSError)

Storages = Mapping[str, bytes]


def is_zip(data: bytes) -> bool:
    return data.startswith(_ZIP)


def read_torch_file(data: bytes) -> tuple[Any, Storages]:
    """What `torch.save` wrote as a zip file: (the value as `read_pickle` gives it, bytes of its storages by key)."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_members(archive, len(data))
            files = {info.filename: archive.read(info) for info in archive.infolist()}
    except _DAMAGED as error:
        raise ScalesError(f"The torch.save file is damaged ({type(error).__name__}: {str(error)[:120]}).") from None
    root = next((name.removesuffix("data.pkl") for name in files if name.endswith("/data.pkl")), None)
    if root is None or files.get(f"{root}byteorder", b"little") != b"little":
        raise ScalesError("The torch.save file holds no data.pkl, or was written by a big-endian machine.")
    prefix = f"{root}data/"
    return read_pickle(files[f"{root}data.pkl"]), {
        name.removeprefix(prefix): content for name, content in files.items() if name.startswith(prefix)
    }


def _check_members(archive: zipfile.ZipFile, length: int) -> None:
    """torch stores members as they are; a compressed one could be a thousand times larger than the file."""
    members = archive.infolist()
    if len(members) > _MAX_MEMBERS or any(m.compress_type != zipfile.ZIP_STORED for m in members):
        raise ScalesError("The torch.save file is not one that torch wrote: compressed or very many members.")
    if sum(m.file_size for m in members) > length:
        raise ScalesError("The torch.save file announces more bytes than it has.")


def tensor(value: Any, storages: Storages, what: str) -> Tensor:
    """The FP32 tensor that a record describes, as a copy. ScalesError when it is anything else; `what` is named."""
    if not isinstance(value, Call) or value.function != _REBUILD or len(value.args) < 4:
        raise ScalesError(f"{what} is {kind(value)} where a tensor was expected.")
    storage, offset, size, stride = value.args[:4]
    elements = _elements(storage, storages, what)
    if not _fits(len(elements) // 4, offset, size, stride):
        raise ScalesError(f"{what} does not lie inside the bytes that were stored for it.")
    whole = torch.frombuffer(bytearray(elements), dtype=torch.float32) if elements else torch.empty(0)
    return whole.as_strided(size, stride, offset).clone(memory_format=torch.contiguous_format)


def kind(value: Any) -> str:
    """For messages: the kind of a record, never its contents, which may be endless."""
    if isinstance(value, Call):
        return f"a call of {_name(value.function)}"
    return _name(value)


def _name(value: Any) -> str:
    return repr(str(value)[:80]) if isinstance(value, Global) else type(value).__name__


def _fits(elements: int, offset: Any, size: Any, stride: Any) -> bool:
    """A view whose elements are distinct and inside the storage, so that a copy is no larger than what was stored."""
    shape_ok = isinstance(size, tuple) and isinstance(stride, tuple) and len(size) == len(stride) <= 2
    if not shape_ok or not all(type(n) is int and 0 <= n < 2**31 for n in (offset, *size, *stride)):
        return False
    count = 1
    for n in size:
        count *= n
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return count == 0 or (count <= elements and last < elements)


def _elements(storage: Any, storages: Storages, what: str) -> bytes:
    if isinstance(storage, Persistent):
        key, count = _described(storage, what)
        return _counted(storages.get(key, b""), count, what)
    if isinstance(storage, Call) and storage.function == _FROM_BYTES and len(storage.args) == 1:
        return _legacy(storage.args[0], what)
    raise ScalesError(f"{what} has {kind(storage)} where torch stores elements.")


def _described(storage: Persistent, what: str) -> tuple[str, int]:
    """(key, number of elements) of ("storage", FloatStorage, key, device, count, ...)."""
    match storage.value:
        case ("storage", Global() as dtype, str(key), str(), int(count), *_) if dtype == _FLOAT and count >= 0:
            return key, count
        case ("storage", Global() as dtype, *_) if dtype != _FLOAT:
            raise ScalesError(f"{what} is stored as {kind(dtype)} where torch.FloatStorage (FP32) was expected.")
    raise ScalesError(f"{what} has a storage that torch does not write.")


def _counted(raw: bytes, count: int, what: str) -> bytes:
    if len(raw) < 4 * count:
        raise ScalesError(f"{what} announces {count} elements and has {len(raw) // 4}.")
    return raw[: 4 * count]


def _legacy(data: Any, what: str) -> bytes:
    if not isinstance(data, bytes):
        raise ScalesError(f"{what} has {kind(data)} where the bytes of a storage were expected.")
    stream = io.BytesIO(data)
    magic, protocol, system, storage, keys = (read_pickle(stream) for _ in range(5))
    little = isinstance(system, dict) and system.get("little_endian") is True
    if magic != _MAGIC or protocol != 1001 or not little or not isinstance(storage, Persistent):
        raise ScalesError(f"{what} has a storage that torch does not write, or of a big-endian machine.")
    key, count = _described(storage, what)
    header = stream.read(8)
    if keys != [key] or len(header) != 8 or struct.unpack("<q", header)[0] != count:
        raise ScalesError(f"{what} has a storage whose description and contents differ.")
    return _counted(stream.read(4 * count if 4 * count <= len(data) else 0), count, what)
