"""Compares the resources of every CUDA kernel with a record: python tests/cuda/resources.py LIBRARY [--record]

Registers of a thread, bytes of its stack and bytes of shared memory that a kernel declares, for every instance of a
kernel and every architecture, as the assembler (ptxas) counted them and cuobjdump reads them from the library. Spilled
registers lie on the stack: a kernel without one spills nothing. Exits with 1 where a kernel takes more than the record
(csrc/cuda/resources.json) says, has one instance more or less, or is new; --record writes the record anew.

The figures are those of one compiler. With another, they are shown but not checked.
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
DECLARED_SHARED = 48 * 1024  # bytes that a kernel of any chip may declare; beyond them a launch has to ask
REGISTERS = 255
_ARCHITECTURE = re.compile(r"^arch = (sm_\w+)$", re.MULTILINE)
_SOURCE = re.compile(r"^identifier = (\S+)$", re.MULTILINE)
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")
_NVCC = re.compile(rb"fp8serve-cuda-runtime=([\d.]+);")


class Usage(NamedTuple):
    """Of one instance of a kernel: per thread, per thread in bytes, per block in bytes."""

    registers: int
    stack: int
    shared: int


Kernels = dict[str, dict[str, list[Usage]]]  # by architecture and "file: kernel", the instances in order


def measured(binary: Path, tool: Path) -> Kernels:
    """The resources of the kernels in a library, or in an object of one."""
    command = [tool, "--dump-resource-usage", binary]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: Kernels = {}
    for part in re.split(r"^Fatbin elf code:$", text, flags=re.MULTILINE)[1:]:
        arch, source, usages = _ARCHITECTURE.search(part), _SOURCE.search(part), _USAGE.findall(part)
        if not usages:
            continue
        assert arch is not None
        # Only the kernels of CUTLASS, which are of one architecture each, are compiled without line numbers.
        file = Path(source[1]).name if source else f"gemm_{arch[1].rstrip('af').replace('_', '')}.cu"
        kernels = found.setdefault(arch[1], {})
        for symbol, *numbers in usages:
            kernels.setdefault(f"{file}: {_name(symbol)}", []).append(Usage(*map(int, numbers)))
    return {arch: {name: sorted(kernels[name]) for name in sorted(kernels)} for arch, kernels in sorted(found.items())}


def _name(symbol: str) -> str:
    """The name of a function in its source, without namespaces and types. (c++filt gives up on CUTLASS's names.)"""
    name, rest = symbol, symbol.removeprefix("_Z").removeprefix("N")
    while length := re.match(r"\d+", rest):  # of the next part of the name
        end = length.end() + int(length[0])
        name, rest = rest[length.end() : end], rest[end:]
    return name


def compiler(library: Path) -> str:
    """The version of nvcc that compiled a library, as it says itself."""
    found = _NVCC.search(library.read_bytes())
    return found[1].decode() if found else "unknown"


def recorded(path: Path = RECORD) -> tuple[str, Kernels]:
    """(nvcc, kernels) of the record."""
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


def complaints(found: Kernels, known: Kernels) -> list[str]:
    """The differences from the record of the kernels of the architectures in `found`, and those that take more."""
    return [
        f"{arch} {name}: {said}"
        for arch, kernels in found.items()
        for name in sorted(kernels | known.get(arch, {}))
        if (said := _compared(kernels.get(name, []), known.get(arch, {}).get(name, [])))
    ]


def _compared(found: list[Usage], known: list[Usage]) -> str | None:
    """The instances in order of their registers, then each kind of number in an order of its own."""
    if len(found) != len(known):
        return f"{len(found)} instances, on record are {len(known)}"
    for kind in Usage._fields:
        now, before = (sorted(getattr(usage, kind) for usage in usages) for usages in (found, known))
        if more := [(a, b) for a, b in zip(now, before, strict=True) if a > b]:
            return f"{more[-1][0]} {kind} where {more[-1][1]} are on record"
    return None


def main(arguments: list[str]) -> int:
    tool = sass.cuobjdump()
    if not arguments or tool is None:
        print(__doc__ if tool else "cuobjdump was not found; pip install nvidia-cuda-cuobjdump")
        return 2
    library, nvcc = Path(arguments[0]), compiler(Path(arguments[0]))
    found = measured(library, tool)
    for arch, kernels in found.items():
        every = [usage for usages in kernels.values() for usage in usages]
        with_stack = sum(usage.stack > 0 for usage in every)
        most = max(usage.registers for usage in every)
        print(f"{arch:8}  {len(every)} kernels, at most {most} registers, {with_stack} with a stack")
    if "--record" in arguments:
        record(nvcc, found)
        return 0
    known_by, known = recorded()
    worse = complaints(found, known) if known_by == nvcc else []
    print(*worse, sep="\n", end="\n" if worse else "")
    if known_by != nvcc:
        print(f"compiled by nvcc {nvcc}; the record is of {known_by}, so that nothing is compared")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
