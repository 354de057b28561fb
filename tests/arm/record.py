"""Records the arguments and the results of every op of the CPU library, for tests/arm/replay.cpp on another processor.

    python -m tests.arm.record FILE

The record has the schemas of the ops, then the cases of fp8/ops and the edges of tests/csrc/numerics_rows.py, each with
its op, its name, its numerics class, its arguments and what the best level of this machine with that class computed.
The class is the one of the portable kernel, which every processor has. All numbers are little-endian.
"""

import struct
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8 import ops
from fp8serve.fp8.ops import LEVELS, cases
from tests.csrc.numerics_rows import edge_cases, row_of

CODES = {  # of torch's ScalarType
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.bool: 11, torch.bfloat16: 15, torch.float8_e5m2: 23, torch.float8_e4m3fn: 24,
    torch.uint16: 27, torch.uint32: 28, torch.uint64: 29, torch.float8_e8m0fnu: 44,
}  # fmt: skip


def encode_text(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


def encode_tensor(tensor: Tensor) -> bytes:
    """Returns the dtype, sizes and strides, and all bytes from the first element to the last."""
    span = (
        0 if tensor.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    )
    memory = tensor.as_strided((span,), (1,)).view(torch.uint8).numpy().tobytes()
    layout = struct.pack(f"<iI{2 * tensor.dim()}q", CODES[tensor.dtype], tensor.dim(), *tensor.shape, *tensor.stride())
    return layout + struct.pack("<Q", len(memory)) + memory


def encode(value: Any, kind: Any) -> bytes:
    """Returns an argument of a type in an op's schema, with a letter that says which it is."""
    if isinstance(kind, torch.OptionalType):
        return b"n" if value is None else b"o" + encode(value, kind.getElementType())
    if isinstance(kind, torch.ListType):
        items = [encode(item, kind.getElementType()) for item in value]
        return b"l" + struct.pack("<I", len(items)) + b"".join(items)
    if isinstance(value, torch.dtype):
        return b"d" + struct.pack("<i", CODES[value])
    if isinstance(value, Tensor):
        return b"t" + encode_tensor(value)
    if isinstance(value, str):
        return b"s" + encode_text(value)
    if isinstance(kind, torch.BoolType):
        return b"b" + struct.pack("<?", value)
    return b"f" + struct.pack("<d", value) if isinstance(kind, torch.FloatType) else b"i" + struct.pack("<q", value)


def encode_case(op: str, name: str, numerics: str, arguments: tuple[Any, ...]) -> bytes:
    schema = getattr(torch.ops.fp8serve, op).default._schema
    values = [*arguments, *(argument.default_value for argument in schema.arguments[len(arguments) :])]
    encoded = [encode(value, argument.type) for value, argument in zip(values, schema.arguments, strict=True)]
    record = encode_text(op) + encode_text(name) + encode_text(numerics)
    record += struct.pack("<I", len(encoded)) + b"".join(encoded)
    result = getattr(torch.ops.fp8serve, op)(*arguments)
    outputs = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    results = [*outputs, *(item for item in flat if isinstance(item, Tensor))]
    return record + struct.pack("<II", len(outputs), len(results)) + b"".join(map(encode_tensor, results))


def main(path: Path) -> None:
    names = sorted(ops.compiled_for("cpu"))
    present = [level for level in LEVELS if torch.ops.fp8serve.cpu_isa(level) == level]
    schemas = [str(getattr(torch.ops.fp8serve, op).default._schema).removeprefix("fp8serve::") for op in names]
    schemas += ["cpu_isa(str cap) -> str", "cpu_kernels() -> str"]
    records = []
    for op, case in [(name, case) for name in names for case in [*cases(name), *edge_cases(name)]]:
        cells = row_of(op, case.make()).cells
        level = [level for level in present if cells[level] == cells["portable"]][-1]
        torch.ops.fp8serve.cpu_isa(level)
        records.append(encode_case(op, case.name, cells["portable"], case.make()))
    content = [struct.pack("<I", len(schemas)), *map(encode_text, schemas), struct.pack("<I", len(records)), *records]
    path.write_bytes(b"".join(content))
    torch.ops.fp8serve.cpu_isa("best")
    print(f"{len(records)} cases of {len(names)} ops, recorded at {ops.cpu_isa()}, are in {path}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
