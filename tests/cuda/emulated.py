"""The CUDA kernels on a GPU made of C++ (emulator/cuda/device.h): same sources, compiled by the C++ compiler, run here.

`ops()` gives them as `torch.ops.fp8serve_emulated`, with the schemas of the real ops, for CPU tensors. What it shows
and what it cannot is said in the emulator. The library lies in build/emulator and is built again when a source changes,
by one process at a time.
"""

import fcntl
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fp8serve.fp8.ops import compiled_for

ROOT = Path(__file__).parents[2]
HEADERS = [*(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc/cuda").glob("*.h")]
EMULATOR = ROOT / "tests/cuda/emulator"
KERNELS = [path for path in sorted((ROOT / "csrc/cuda").glob("*.cu")) if path.stem[-3:] not in {"m90", "100", "120"}]
COMPILER = shutil.which("c++")
TORCH = Path(torch.__file__).parent
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]


def _compile(source: Path, folder: Path) -> subprocess.Popen[str] | None:
    """Starts the compiler if the object is older than what it is made of."""
    target = folder / f"{source.stem}.o"
    newest = max(path.stat().st_mtime for path in [source, *HEADERS, *EMULATOR.rglob("*.h")])
    if target.exists() and target.stat().st_mtime > newest:
        return None
    places = [f"-I{EMULATOR}", f"-I{ROOT / 'csrc'}", "-isystem", str(TORCH / "include")]
    command = [str(COMPILER), *FLAGS, *places, "-DTORCH_TARGET_VERSION=0x020a000000000000", "-x", "c++", "-c"]
    return subprocess.Popen([*command, str(source), "-o", str(target)], stderr=subprocess.PIPE, text=True)


def build() -> Path:
    folder = ROOT / "build/emulator"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(folder)


def _build(folder: Path) -> Path:
    for pair in zip(KERNELS[::2], [*KERNELS[1::2], None], strict=False):  # two at a time
        for running in [_compile(source, folder) for source in pair if source is not None]:
            if running is not None and (error := running.communicate()[1]) and running.returncode:
                raise RuntimeError(f"the emulated kernels do not compile:\n{error}")
    library = folder / "libemulated.so"
    objects = [folder / f"{source.stem}.o" for source in KERNELS]
    if library.exists() and library.stat().st_mtime > max(path.stat().st_mtime for path in objects):
        return library
    fresh = folder / "fresh.so"  # a process that has the old one loaded keeps it
    link = [str(COMPILER), "-shared", *map(str, objects), f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-Wl,--no-undefined"]
    subprocess.run([*link, "-o", str(fresh)], check=True)
    fresh.replace(library)
    return library


@cache
def ops() -> Any:
    schemas = torch.library.Library("fp8serve_emulated", "DEF")
    for name in compiled_for("cuda"):
        schema = getattr(torch.ops.fp8serve, name).default._schema
        schemas.define(str(schema).removeprefix("fp8serve::"))
    torch.ops.load_library(str(build()))
    ops.library = schemas  # the definitions live as long as this
    return torch.ops.fp8serve_emulated
