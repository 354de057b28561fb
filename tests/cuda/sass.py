"""Which tensor instructions the CUDA library holds, per architecture: python tests/cuda/sass.py LIBRARY.

Disassembles with cuobjdump: from PATH, or from the nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm packages, or from
triton's. Exits with 1 if an architecture in the library lacks an instruction that its kernels are for: a GEMM that
fell back to FP16 multiplication gives the right numbers and is twice too slow, and nothing else would tell.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

# QMMA: warp-level FP8; QGMMA, HGMMA: Hopper's warpgroups, FP8 and BF16 (attention); UTCQMMA: tcgen05 FP8.
EXPECTED = {"sm_89": ["QMMA"], "sm_90a": ["QGMMA", "HGMMA"]}
# A family's code (sm_100f) is listed under the chip's plain name.
EXPECTED |= {"sm_100a": ["UTCQMMA"], "sm_100": ["UTCQMMA"], "sm_120a": ["QMMA"], "sm_120": ["QMMA"]}
INSTRUCTION = re.compile(r"\b(UTCQMMA|QGMMA|QMMA|HGMMA|HMMA)\b")
DIVISION = {"s": re.compile(r"__cuda_sm\d+_(div|rem)_s64"), "u": re.compile(r"__cuda_sm\d+_(div|rem)_u64")}
# Loads, stores and atomics of memory that other kernels see; not the arguments' (LDC) nor the block's own (LDS).
ACCESS = re.compile(r"\b(LDG?|STG?|ATOMG?|RED|LDGSTS|UBLKCP|UTMALDG)\b[.\w]*")
ARCHITECTURE = re.compile(r"arch = (sm_\w+)")
PACKAGED = {"nvidia": "cu13/bin", "triton": "backends/nvidia/bin"}


def cuobjdump() -> Path | None:
    """The disassembler, or None where none is installed."""
    if found := shutil.which("cuobjdump"):
        return Path(found)
    for package, folder in PACKAGED.items():
        spec = find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec else []:
            if (path := Path(place) / folder / "cuobjdump").is_file():
                return path
    return None


def architectures(library: Path, tool: Path) -> list[str]:
    listing = subprocess.run([tool, "--list-elf", library], capture_output=True, text=True, check=True).stdout
    return sorted(set(re.findall(r"\.(sm_\w+)\.cubin", listing)))


def instructions(library: Path, tool: Path, arch: str) -> Counter[str]:
    """How often each tensor instruction occurs in the code of one architecture."""
    path = {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}  # it calls the nvdisasm beside it
    command = [str(tool), "-sass", "-arch", arch, str(library)]
    counts: Counter[str] = Counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **path}) as process:
        for line in process.stdout or ():
            counts.update(INSTRUCTION.findall(line))
    return counts


def long_divisions(binary: Path, tool: Path, kind: str) -> set[str]:
    """The sources whose kernels, on some architecture, divide integers of 64 bits, which takes a function. kind: "s",
    with a sign, or "u", without, as the compiler divides to know how often a loop runs that it
    unrolls. Sources that were compiled without line numbers (CUTLASS's) are "".
    """
    found, source = set(), ""
    command = [str(tool), "-elf", str(binary)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout or ():
            if line.startswith("Fatbin"):
                source = ""
            elif named := re.match(r"identifier = (\S+)", line):
                source = Path(named[1]).name
            elif DIVISION[kind].search(line):
                found.add(source)
    return found


def early_accesses(binary: Path, tool: Path) -> dict[str, list[str]]:
    """Of every function, over all architectures, that waits for earlier kernels: what it does to memory before that."""
    path = {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}
    found: dict[str, list[str]] = {}
    function, before = "", []
    with subprocess.Popen(
        [str(tool), "-sass", str(binary)], stdout=subprocess.PIPE, text=True, env={**os.environ, **path}
    ) as process:
        for line in process.stdout or ():
            if named := re.search(r"Function : (\S+)", line):
                function, before = named[1], []
            elif access := ACCESS.search(line):
                before.append(access[0])
            elif "ACQBULK" in line:
                found[f"{function} {len(found)}"] = list(before)
    return found


def fused_in(binary: Path, tool: Path, kernel: str) -> dict[str, int]:
    """How many fused multiply-adds of FP32 each function has whose name contains `kernel`, over all architectures."""
    path = {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [tool, "-sass", binary], capture_output=True, text=True, check=True, env={**os.environ, **path}
    )
    functions = re.split(r"Function : ", done.stdout)[1:]
    named = ((text.split(None, 1)[0], text) for text in functions)
    return {name: len(re.findall(r"\bFFMA2?\b", text)) for name, text in named if kernel in name}


def main(arguments: list[str]) -> int:
    tool = cuobjdump()
    if len(arguments) != 1 or tool is None:
        print(__doc__ if tool else "cuobjdump was not found; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
        return 2
    missing = 0
    for arch in architectures(library := Path(arguments[0]), tool):
        counts = instructions(library, tool, arch)
        missing += sum(counts[wanted] == 0 for wanted in EXPECTED.get(arch, []))
        print(f"{arch:8}  {'  '.join(f'{name} {counts[name]}' for name in sorted(counts)) or 'no tensor instructions'}")
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
