"""Opens a GGUF file with the `gguf` package, and adds checks that the package does not have.

The package maps the file and reads the header in a loop that trusts every count. A truncated file would give empty
arrays, and a hostile count an endless loop. `BoundedReader` overrides the method that all reads use. It raises
ValueError for a read beyond the end of the file, and after more reads than any model's header needs.
"""

import struct
from pathlib import Path
from typing import Any, TypeVar

from fp8serve.errors import ModelError, one_line, shown
from fp8serve.model.storage.opening import is_regular_file, open_file

MAGIC = b"GGUF"
# A header with a vocabulary of 262,144 tokens with scores and types, and 514,906 merges, takes two million reads.
_MAX_HEADER_READS = 2**22
# The names of the GGML types that `gguf.dequantize` supports.
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
         "MXFP4", "IQ4_NL", "IQ4_XS")  # fmt: skip

Kind = TypeVar("Kind")


def is_gguf(path: Path) -> bool:
    """Returns whether `path` is a GGUF file, according to its first bytes or its name."""
    if not is_regular_file(path):
        return False
    with open_file(path) as file:
        return path.suffix == ".gguf" or file.read(4) == MAGIC


class GgufFile:
    """An open GGUF file: typed metadata, and memory-mapped tensors (`gguf.ReaderTensor`) by name.

    Raises ModelError if the file is no GGUF file, damaged or one of several parts, or if the package is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not is_regular_file(path):
            raise ModelError(f"{path} is not a regular file; give the path of a GGUF file.")
        reader = _read(path)
        self._fields = reader.fields
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        if (self.get("split.count", int) or 1) > 1:
            raise ModelError(
                f"{path} is one part of a model in several files; join them with llama-gguf-split --merge."
            )
        for tensor in self.tensors.values():
            if tensor.tensor_type.name not in TYPES:
                raise ModelError(
                    f"{path}: {shown(tensor.name)} has the type {tensor.tensor_type.name}, which is not supported; "
                    f"supported are {', '.join(TYPES)}."
                )

    @property
    def keys(self) -> list[str]:
        return [key for key in self._fields if not key.startswith("GGUF.")]

    def value(self, key: str) -> Any:
        """Returns the number, text, truth value or list under the key, or None if the file does not have it."""
        try:
            return self._fields[key].contents() if key in self._fields else None
        except ValueError as e:  # text that is not UTF-8
            raise ModelError(f"{self.path}: {key} cannot be read: {one_line(e)}.") from None

    def get(self, key: str, kind: type[Kind]) -> Kind | None:
        """Same as `value`. Raises ModelError if the value has another type."""
        value = self.value(key)
        if value is None or (isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)):
            return value
        raise ModelError(f"{self.path}: {key} is {shown(value)}, which is not of the type {kind.__name__}.")

    def require(self, key: str, kind: type[Kind]) -> Kind:
        """Same as `get`. Raises ModelError if the file does not have the key."""
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.path} has no {key}; convert the model to GGUF again.")
        return value

    def get_list(self, key: str, kind: type[Kind]) -> list[Kind]:
        """Returns the list under the key, or an empty one. Raises ModelError if an item has another type."""
        values = self.get(key, list) or []
        if not all(isinstance(value, kind) for value in values):
            raise ModelError(f"{self.path}: {key} is not a list of the type {kind.__name__}.")
        return values


def _read(path: Path) -> Any:
    """Returns the package's reader of `path`. Raises ModelError if header or tensors exceed the file."""
    try:
        import gguf
    except ImportError:
        raise ModelError("A GGUF file is read by the package gguf; install it: pip install 'fp8serve[gguf]'.") from None

    class BoundedReader(gguf.GGUFReader):
        reads = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self.reads += 1
            values = super()._get(offset, dtype, count, override_order)
            if len(values) != count:
                raise ValueError("it ends before what its header promises")
            if self.reads > _MAX_HEADER_READS:
                raise ValueError("its header is larger than any model's")
            return values

    with open_file(path, error=ModelError) as file:
        start = file.read(8)
    if start[:4] != MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it does not begin with the letters GGUF.")
    if len(start) == 8 and not struct.unpack("<I", start[4:])[0] & 0xFFFF:
        raise ModelError(f"{path} is a big-endian GGUF file; convert it with gguf-convert-endian.")
    try:
        return BoundedReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, RecursionError, OSError) as e:
        raise ModelError(f"{path} is truncated or damaged: {one_line(e)}.") from None
