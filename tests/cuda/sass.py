"""Counts the tensor instructions of each architecture in the CUDA library: python tests/cuda/sass.py LIBRARY.

Disassembles with the cuobjdump of PATH, of the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, or of triton.
Exits with status 1 if an architecture lacks an instruction that its kernels should use. A GEMM that falls back to FP16
gives the right numbers at half the speed, so no other test would notice.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# QMMA: warp-level FP8; QGMMA, HGMMA: Hopper's warpgroups, FP8 and BF16 (attention); UTCQMMA: tcgen05 FP8.
EXPECTED = {"sm_89": ["QMMA"], "sm_90a": ["QGMMA", "HGMMA"]}
# A family's code (sm_100f) is listed under the chip's plain name.
EXPECTED |= {"sm_100a": ["UTCQMMA"], "sm_100": ["UTCQMMA"], "sm_120a": ["QMMA"], "sm_120": ["QMMA"]}
DIVISION = {"s": re.compile(r"__cuda_sm\d+_(div|rem)_s64"), "u": re.compile(r"__cuda_sm\d+_(div|rem)_u64")}
# Accesses: loads, stores and atomics of global memory; not of arguments (LDC) and not of shared memory (LDS).
RELEVANT = re.compile(
    r"\b(?P<tensor>(?:UTCQ|QG|Q|HG|H)MMA)\b"
    r"|\b(?P<access>(?:LDG?|STG?|ATOMG?|RED|LDGSTS|UBLKCP|UTMALDG)\b[.\w]*)"
    r"|(?P<wait>ACQBULK)|Function : (?P<function>\S+)|arch = (?P<arch>sm_\w+)"
)
PACKAGED = {"nvidia": "cu13/bin", "triton": "backends/nvidia/bin"}


def cuobjdump() -> Path | None:
    """Returns the path of the disassembler, or None if none is installed."""
    if program := shutil.which("cuobjdump"):
        return Path(program)
    for package, folder in PACKAGED.items():
        spec = find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec else []:
            if (path := Path(place) / folder / "cuobjdump").is_file():
                return path
    return None


def architectures(library: Path, tool: Path) -> list[str]:
    listing = subprocess.run([tool, "--list-elf", library], capture_output=True, text=True, check=True).stdout
    return sorted(set(re.findall(r"\.(sm_\w+)\.cubin", listing)))


@dataclass
class Code:
    """The results of disassembling a library once."""

    tensor_instructions: dict[str, Counter[str]]  # counts of each instruction, by architecture
    early_accesses: dict[
        str, list[str]
    ]  # by function with a wait for earlier kernels: its memory accesses before the wait


@cache
def disassembled(binary: Path, tool: Path) -> Code:
    """Disassembles all architectures, which takes minutes, or reads what `make cuda` stored beside the library."""
    stored = binary.with_suffix(".json")
    if stored.exists() and stored.stat().st_mtime > max(path.stat().st_mtime for path in (binary, Path(__file__))):
        fields = json.loads(stored.read_text())
        counts = {arch: Counter(instructions) for arch, instructions in fields["tensor_instructions"].items()}
        return Code(defaultdict(Counter, counts), fields["early_accesses"])
    code = disassemble(binary, tool)
    stored.write_text(json.dumps(vars(code)))
    return code


def disassemble(binary: Path, tool: Path) -> Code:
    path = {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}  # cuobjdump calls nvdisasm of the same folder
    code = Code(defaultdict(Counter), {})
    counts, function, before = Counter[str](), "", list[str]()
    with subprocess.Popen(
        [str(tool), "-sass", str(binary)], stdout=subprocess.PIPE, text=True, env={**os.environ, **path}
    ) as process:
        for line in process.stdout or ():
            if (
                line[8:9] == " " or (match := RELEVANT.search(line)) is None
            ):  # the second line of an instruction, or irrelevant
                continue
            kind, text = match.lastgroup, match[0]
            if kind == "tensor":
                counts[text] += 1
            elif kind == "access":
                before.append(text)
            elif kind == "wait":
                code.early_accesses[f"{function} {len(code.early_accesses)}"] = list(before)
            elif kind == "function":
                function, before = match["function"], []
            else:
                counts = code.tensor_instructions[
                    match["arch"].removesuffix("f")
                ]  # code of a family, as in architectures()
    return code


@cache
def long_divisions(binary: Path, tool: Path, kind: str) -> set[str]:
    """Returns the sources whose kernels call the slow function for divisions of 64-bit integers, on any architecture.

    `kind` is "s" for signed and "u" for unsigned integers; the compiler itself inserts unsigned divisions to count the
    iterations of unrolled loops. Sources without line numbers (CUTLASS's) are listed as "".
    """
    sources, source = set(), ""
    listing = subprocess.run([tool, "-symbols", binary], capture_output=True, text=True, check=True).stdout
    for line in listing.splitlines():
        if line.startswith("Fatbin"):
            source = ""
        elif named := re.match(r"identifier = (\S+)", line):
            source = Path(named[1]).name
        elif DIVISION[kind].search(line):
            sources.add(source)
    return sources


def fused_in(binary: Path, tool: Path, kernel: str) -> dict[str, int]:
    """Returns the numbers of FP32 fused multiply-adds in all functions whose names contain `kernel`."""
    path = {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}
    process = subprocess.run(
        [tool, "-sass", binary], capture_output=True, text=True, check=True, env={**os.environ, **path}
    )
    functions = re.split(r"Function : ", process.stdout)[1:]
    named = ((text.split(None, 1)[0], text) for text in functions)
    return {name: len(re.findall(r"\bFFMA2?\b", text)) for name, text in named if kernel in name}


def main(arguments: list[str]) -> int:
    tool = cuobjdump()
    if len(arguments) != 1 or tool is None:
        print(__doc__ if tool else "cuobjdump was not found; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
        return 2
    missing = 0
    for arch in architectures(library := Path(arguments[0]), tool):
        counts = disassembled(library, tool).tensor_instructions[arch]
        missing += sum(counts[instruction] == 0 for instruction in EXPECTED.get(arch, []))
        print(f"{arch:8}  {'  '.join(f'{name} {counts[name]}' for name in sorted(counts)) or 'no tensor instructions'}")
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
