"""Reads FP32 tensors from pickles and small torch.save files without importing or calling anything.

    in a pickle      _rebuild_tensor_v2(_load_from_bytes(B), offset, size, stride, ...), where B is a storage as torch
                     wrote it before zip files: pickles of a magic number, the protocol, the byte order, the storage's
                     description and the list of keys, then for each key a count (int64) and the elements
    torch.save       a zip file of stored (uncompressed) members: NAME/data.pkl, NAME/data/KEY

The module runs Python's pure-Python unpickler with only the opcodes that scaling states need. It returns inert records:
`Global` for a name that the pickle would import, and `Call` for a call or an object. So `os.system` in a pickle stays
two strings. The caller decides what each record means.

Memory is bounded by the length of the input. The memo is a dictionary, sizes are compared with the available bytes
before elements are copied, and nothing recurses. Dictionary keys must be text, because hashing a tuple recurses. Shared
references stay shared, so a small input can describe a huge tree: callers must not walk a result without a bound.
"""

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp8serve.errors import ScalesError

Storages = Mapping[str, bytes]


@dataclass(frozen=True)
class Global:
    """A name that unpickling would import."""

    module: str
    name: str

    def __call__(self, *args: Any) -> "Call":
        return Call(self, args)


@dataclass(eq=False)
class Call:
    """The call `function(*args)` that unpickling would make, and the state that its result would get."""

    function: Global
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, eq=False)
class Persistent:
    """A reference to an object outside of the pickle, such as a storage of torch."""

    value: Any


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler. The one in C would allocate memory for any length or memo index in the input."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]]
    stack: list[Any]
    metastack: list[list[Any]]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Global:
        return Global(module, name)

    def persistent_load(self, value: Any) -> Persistent:
        return Persistent(value)

    def load_build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Call):
            raise TypeError("a state for a value that is no object")
        self.stack[-1].state = state

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self.set_items(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def load_setitems(self) -> None:
        self.set_items(self.pop_mark())

    def set_items(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not dict or not all(type(key) is str for key in items[::2]):
            raise TypeError("a dictionary whose keys are not text")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))


_INHERITED_OPCODES = (
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET"),
    *("BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1"),
    *("LONG4", "FLOAT", "BINFLOAT", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES"),
    *("BINBYTES", "BINBYTES8", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "APPEND"),
    *("APPENDS", "EMPTY_DICT", "GLOBAL", "STACK_GLOBAL", "BINPERSID", "REDUCE"),
)
_Unpickler.dispatch = {
    **{code: pickle._Unpickler.dispatch[code] for name in _INHERITED_OPCODES for code in getattr(pickle, name)},
    pickle.NEWOBJ[0]: pickle._Unpickler.dispatch[pickle.REDUCE[0]],  # a `Call` instead of an object
    pickle.BUILD[0]: _Unpickler.load_build,
    pickle.DICT[0]: _Unpickler.load_dict,
    pickle.SETITEM[0]: _Unpickler.load_setitem,
    pickle.SETITEMS[0]: _Unpickler.load_setitems,
}


def read_pickle(data: bytes | io.BytesIO) -> Any:
    """Returns the value in one pickle: None, bool, int, float, str, bytes, tuple, list, dict and records.

    Reads a stream up to the end of the pickle. Raises ScalesError if the pickle is damaged, or has an opcode that
    scaling states do not need.
    """
    reader = _Unpickler(io.BytesIO(data) if isinstance(data, bytes) else data)
    try:
        value = reader.load()
        if reader.stack or reader.metastack:
            raise ValueError("the stack does not hold one value at the end")
    except (pickle.UnpicklingError, ValueError, TypeError, LookupError, AttributeError, OverflowError, EOFError,
            struct.error) as error:  # fmt: skip
        problem = f"{type(error).__name__}: {str(error)[:120]}"
        raise ScalesError(f"The pickle is damaged or uses what scaling states do not need ({problem}).") from None
    return value


_MAGIC = 0x1950A86A20F9469CFC6C
_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_FROM_BYTES = Global("torch.storage", "_load_from_bytes")
_FLOAT = Global("torch", "FloatStorage")
_ZIP = b"PK\x03\x04"
_MAX_MEMBERS = 64
# What `zipfile` raises for invalid directories, names that are not text, encryption and truncated files.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    ValueError,
    OverflowError,
    LookupError,
    struct.error,
    RuntimeError,
    EOFError,
    OSError,
)


def read_state(data: bytes) -> tuple[Any, Storages]:
    """Returns the value in a pickle or a torch.save zip file, as `read_pickle` does, and its storages by key."""
    if not data.startswith(_ZIP):
        return read_pickle(data), {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            # torch does not compress members; a compressed one could be a thousand times larger than the file.
            if len(members) > _MAX_MEMBERS or any(m.compress_type != zipfile.ZIP_STORED for m in members):
                raise ScalesError("The torch.save file is not one that torch wrote: compressed or very many members.")
            if sum(m.file_size for m in members) > len(data):
                raise ScalesError("The torch.save file announces more bytes than it has.")
            files = {info.filename: archive.read(info) for info in members}
    except _ZIP_ERRORS as error:
        raise ScalesError(f"The torch.save file is damaged ({type(error).__name__}: {str(error)[:120]}).") from None
    root = next((name.removesuffix("data.pkl") for name in files if name.endswith("/data.pkl")), None)
    if root is None or files.get(f"{root}byteorder", b"little") != b"little":
        raise ScalesError("The torch.save file holds no data.pkl, or was written by a big-endian machine.")
    prefix = f"{root}data/"
    storages = {name.removeprefix(prefix): content for name, content in files.items() if name.startswith(prefix)}
    return read_pickle(files[f"{root}data.pkl"]), storages


def read_tensor(value: Any, storages: Storages, name: str) -> Tensor:
    """Returns a copy of the FP32 tensor in the record `value`. Raises ScalesError, with `name`, for other values."""
    if not isinstance(value, Call) or value.function != _REBUILD or len(value.args) < 4:
        raise ScalesError(f"{name} is {describe_record(value)} where a tensor was expected.")
    storage, offset, size, stride = value.args[:4]
    if isinstance(storage, Persistent):
        key, count = _key_and_count(storage, name)
        elements = storages.get(key, b"")
    elif isinstance(storage, Call) and storage.function == _FROM_BYTES and len(storage.args) == 1:
        count, elements = _legacy_storage(storage.args[0], name)
    else:
        raise ScalesError(f"{name} has {describe_record(storage)} where torch stores elements.")
    if len(elements) < 4 * count:
        raise ScalesError(f"{name} announces {count} elements and has {len(elements) // 4}.")
    if not _is_valid_view(count, offset, size, stride):
        raise ScalesError(f"{name} does not lie inside the bytes that were stored for it.")
    flat = torch.frombuffer(bytearray(elements[: 4 * count]), dtype=torch.float32) if count else torch.empty(0)
    return flat.as_strided(size, stride, offset).clone(memory_format=torch.contiguous_format)


def describe_record(value: Any) -> str:
    """Returns the kind of a record for messages, without its contents, which may be endless."""
    record = value.function if isinstance(value, Call) else value
    name = repr(f"{record.module}.{record.name}"[:80]) if isinstance(record, Global) else type(record).__name__
    return f"a call of {name}" if isinstance(value, Call) else name


def _is_valid_view(elements: int, offset: Any, size: Any, stride: Any) -> bool:
    """Returns whether a view is inside its storage and has no more elements, so that a copy is not larger."""
    is_shape = isinstance(size, tuple) and isinstance(stride, tuple) and len(size) == len(stride) <= 2
    if not is_shape or not all(type(n) is int and 0 <= n < 2**31 for n in (offset, *size, *stride)):
        return False
    count: int = math.prod(size)
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return count == 0 or bool(count <= elements and last < elements)


def _key_and_count(storage: Persistent, name: str) -> tuple[str, int]:
    """Returns (key, number of elements) of ("storage", FloatStorage, key, device, count, ...)."""
    match storage.value:
        case ("storage", Global() as dtype, str(key), str(), int(count), *_) if dtype == _FLOAT and count >= 0:
            return key, count
        case ("storage", Global() as dtype, *_) if dtype != _FLOAT:
            raise ScalesError(
                f"{name} is stored as {describe_record(dtype)} where torch.FloatStorage (FP32) was expected."
            )
    raise ScalesError(f"{name} has a storage that torch does not write.")


def _legacy_storage(data: Any, name: str) -> tuple[int, bytes]:
    """Returns (number of elements, bytes) of a storage that torch wrote outside of a zip file."""
    if not isinstance(data, bytes):
        raise ScalesError(f"{name} has {describe_record(data)} where the bytes of a storage were expected.")
    stream = io.BytesIO(data)
    magic, protocol, system, storage, keys = (read_pickle(stream) for _ in range(5))
    little = isinstance(system, dict) and system.get("little_endian") is True
    if magic != _MAGIC or protocol != 1001 or not little or not isinstance(storage, Persistent):
        raise ScalesError(f"{name} has a storage that torch does not write, or of a big-endian machine.")
    key, count = _key_and_count(storage, name)
    header = stream.read(8)
    if keys != [key] or len(header) != 8 or struct.unpack("<q", header)[0] != count:
        raise ScalesError(f"{name} has a storage whose description and contents differ.")
    return count, stream.read()
