"""Compares the resources of every CUDA kernel with a record: python tests/cuda/resources.py LIBRARY [--record]

The resources are registers of a thread, bytes of its stack, and bytes of declared shared memory, for every instance of
a kernel and every architecture. The assembler (ptxas) counts them, and cuobjdump reads them from the library. Registers
spill to the stack, so a kernel without a stack does not spill. Exits with status 1 if a kernel needs more than the
record (csrc/cuda/resources.json), has another number of instances, or is new. --record writes a new record.

The record is of one compiler version. With another version, resources are printed but not compared.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # also as a script

from tests.cuda import sass  # noqa: E402

RECORD = ROOT / "csrc/cuda/resources.json"
DECLARED_SHARED = 48 * 1024  # bytes that a kernel may declare on any chip; a launch must opt in to more
REGISTERS = 255
_ARCHITECTURE = re.compile(r"^arch = (sm_\w+)$", re.MULTILINE)
_SOURCE = re.compile(r"^identifier = (\S+)$", re.MULTILINE)
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")
_NVCC = re.compile(rb"fp8serve-cuda-runtime=([\d.]+);")


class Usage(NamedTuple):
    """Resources of one instance of a kernel: registers and stack bytes of a thread, shared bytes of a block."""

    registers: int
    stack: int
    shared: int


Kernels = dict[str, dict[str, list[Usage]]]  # by architecture and "file: kernel", the instances in order


def measured(binary: Path, tool: Path) -> Kernels:
    """Returns the resources of the kernels in a library or an object file."""
    command = [tool, "--dump-resource-usage", binary]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels_of_arch: Kernels = {}
    for part in re.split(r"^Fatbin elf code:$", text, flags=re.MULTILINE)[1:]:
        arch, source, usages = _ARCHITECTURE.search(part), _SOURCE.search(part), _USAGE.findall(part)
        if not usages:
            continue
        assert arch is not None
        # Only CUTLASS's sources are compiled without line numbers; each is for one architecture.
        file = Path(source[1]).name if source else f"gemm_{arch[1].rstrip('af').replace('_', '')}.cu"
        kernels = kernels_of_arch.setdefault(arch[1], {})
        for symbol, *numbers in usages:
            kernels.setdefault(f"{file}: {_name(symbol)}", []).append(Usage(*map(int, numbers)))
    return {
        arch: {name: sorted(kernels[name]) for name in sorted(kernels)}
        for arch, kernels in sorted(kernels_of_arch.items())
    }


def _name(symbol: str) -> str:
    """Returns the name of a function without namespaces and types. (c++filt fails on CUTLASS's names.)"""
    name, rest = symbol, symbol.removeprefix("_Z").removeprefix("N")
    while length := re.match(r"\d+", rest):  # length of the next part of the name
        end = length.end() + int(length[0])
        name, rest = rest[length.end() : end], rest[end:]
    return name


def compiler(library: Path) -> str:
    """Returns the version of nvcc that the library was compiled by, as embedded in it."""
    match = _NVCC.search(library.read_bytes())
    return match[1].decode() if match else "unknown"


def recorded(path: Path = RECORD) -> tuple[str, Kernels]:
    """Returns (nvcc version, kernels) of the record."""
    content: dict[str, Any] = json.loads(path.read_text())
    kernels = {
        arch: {name: [Usage(*usage) for usage in usages] for name, usages in of_arch.items()}
        for arch, of_arch in content["kernels"].items()
    }
    return content["nvcc"], kernels


def record(nvcc: str, kernels: Kernels, path: Path = RECORD) -> None:
    """Writes the record, a line for each kernel."""
    parts = []
    for arch, of_arch in kernels.items():
        lines = [f"   {json.dumps(name)}: {json.dumps(usages)}" for name, usages in of_arch.items()]
        parts.append(f'  "{arch}": {{\n' + ",\n".join(lines) + "\n  }")
    about = '"of each instance": ["registers", "stack bytes", "declared shared bytes"]'
    path.write_text(f'{{\n "nvcc": "{nvcc}",\n {about},\n "kernels": {{\n' + ",\n".join(parts) + "\n }\n}\n")


def complaints(actual: Kernels, expected: Kernels) -> list[str]:
    """Returns a message for every kernel that differs from the record, for the architectures in `actual`."""
    return [
        f"{arch} {name}: {message}"
        for arch, kernels in actual.items()
        for name in sorted(kernels | expected.get(arch, {}))
        if (message := _compared(kernels.get(name, []), expected.get(arch, {}).get(name, [])))
    ]


def _compared(actual: list[Usage], expected: list[Usage]) -> str | None:
    """Compares the sorted numbers of all instances, separately for each resource; returns a message or None."""
    if len(actual) != len(expected):
        return f"{len(actual)} instances, on record are {len(expected)}"
    for kind in Usage._fields:
        now, before = (sorted(getattr(usage, kind) for usage in usages) for usages in (actual, expected))
        if more := [(a, b) for a, b in zip(now, before, strict=True) if a > b]:
            return f"{more[-1][0]} {kind} where {more[-1][1]} are on record"
    return None


def main(arguments: list[str]) -> int:
    tool = sass.cuobjdump()
    if not arguments or tool is None:
        print(__doc__ if tool else "cuobjdump was not found; pip install nvidia-cuda-cuobjdump")
        return 2
    library, nvcc = Path(arguments[0]), compiler(Path(arguments[0]))
    kernels_of_arch = measured(library, tool)
    for arch, kernels in kernels_of_arch.items():
        every = [usage for usages in kernels.values() for usage in usages]
        with_stack = sum(usage.stack > 0 for usage in every)
        most = max(usage.registers for usage in every)
        print(f"{arch:8}  {len(every)} kernels, at most {most} registers, {with_stack} with a stack")
    if "--record" in arguments:
        record(nvcc, kernels_of_arch)
        return 0
    known_by, expected = recorded()
    worse = complaints(kernels_of_arch, expected) if known_by == nvcc else []
    print(*worse, sep="\n", end="\n" if worse else "")
    if known_by != nvcc:
        print(f"compiled by nvcc {nvcc}; the record is of {known_by}, so nothing is compared")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
