"""The CUDA kernels on an emulated GPU: the same sources, compiled by the C++ compiler (emulator/cuda/device.h).

`ops()` returns them as `torch.ops.fp8serve_emulated`, with the schemas of the real ops, for CPU tensors. device.h
states what the emulator can show and what it cannot. A library is in build/NAME; one process at a time rebuilds it if a
source has changed.
"""

import ctypes
import fcntl
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8serve.fp8.ops import compiled_for
from fp8serve.fp8.ops.libraries import OFF_BY_DEFAULT

ROOT = Path(__file__).parents[2]
HEADERS = [*(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc/cuda").glob("*.h")]
EMULATOR = ROOT / "tests/cuda/emulator"
KERNELS = [path for path in sorted((ROOT / "csrc/cuda").glob("*.cu")) if path.stem[-3:] not in {"m90", "100", "120"}]
COMPILER = shutil.which("c++")
CACHE = [ccache] if (ccache := shutil.which("ccache")) else []
TORCH = Path(torch.__file__).parent
FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]
DEFINITIONS = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DFP8SERVE_HAVE_wgmma=1"]
SOURCES = [*KERNELS, *sorted(EMULATOR.glob("*.cpp"))]


@dataclass(frozen=True)
class Build:
    """A library of emulated kernels, or a program that runs some without torch: its folder below build/, the compiler
    flags, and the source files."""

    name: str
    flags: Sequence[str]
    sources: Sequence[Path] = tuple(SOURCES)
    is_program: bool = False

    @property
    def folder(self) -> Path:
        return ROOT / "build" / self.name

    @property
    def target(self) -> Path:
        return self.folder / ("program" if self.is_program else "libemulated.so")

    @property
    def link_options(self) -> list[str]:
        if self.is_program:
            return []
        return ["-shared", f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-Wl,--no-undefined"]


PLAIN = Build("emulator", ["-O1"])
THREAD_SANITIZER = ["-O1", "-g1", "-fsanitize=thread"]
THREAD_SANITIZER_OPTIONS = "ignore_noninstrumented_modules=1 halt_on_error=1 die_after_fork=0 history_size=7"
RACES = Build("emulator-races", THREAD_SANITIZER)


def build(config: Build) -> Path:
    config.folder.mkdir(parents=True, exist_ok=True)
    with (config.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(config)


def _build(config: Build) -> Path:
    for pair in zip(config.sources[::2], [*config.sources[1::2], None], strict=False):  # two at a time
        for running in [_compile(config, source) for source in pair if source is not None]:
            if running is not None and (error := running.communicate()[1]) and running.returncode:
                raise RuntimeError(f"the emulated kernels do not compile:\n{error}")
    objects = [config.folder / f"{source.stem}.o" for source in config.sources]
    if config.target.exists() and config.target.stat().st_mtime > max(path.stat().st_mtime for path in objects):
        return config.target
    fresh = config.folder / "fresh"  # a process that has loaded the old library keeps it
    link = [str(COMPILER), *config.flags, *map(str, objects), *config.link_options]
    subprocess.run([*link, "-o", str(fresh)], check=True)
    fresh.replace(config.target)
    return config.target


def _compile(config: Build, source: Path) -> subprocess.Popen[str] | None:
    """Starts the compiler if the object file is older than its sources; returns the process, or None."""
    target = config.folder / f"{source.stem}.o"
    newest = max(path.stat().st_mtime for path in [source, *HEADERS, *EMULATOR.rglob("*.h")])
    if target.exists() and target.stat().st_mtime > newest:
        return None
    places = [f"-I{EMULATOR}", f"-I{ROOT / 'csrc'}", "-isystem", str(TORCH / "include")]
    command = [*CACHE, str(COMPILER), *FLAGS, *config.flags, *places, *DEFINITIONS]
    return subprocess.Popen(
        [*command, "-x", "c++", "-c", str(source), "-o", str(target)], stderr=subprocess.PIPE, text=True
    )


class Emulator:
    """A loaded library of emulated kernels: its ops, and the settings of its GPU."""

    def __init__(self, library: Path) -> None:
        self._schemas = torch.library.Library(
            "fp8serve_emulated", "DEF"
        )  # the definitions exist as long as this object
        for name in compiled_for("cuda"):
            schema = getattr(torch.ops.fp8serve, name).default._schema
            self._schemas.define(str(schema).removeprefix("fp8serve::"))
        torch.ops.load_library(str(library))
        self.ops = torch.ops.fp8serve_emulated
        self._library = ctypes.CDLL(str(library))
        for function in ("take_reached_sites", "launches", "launch_impatient"):
            getattr(self._library, f"emulator_{function}").restype = ctypes.c_char_p
        self._declared, self._kernels = shared_memory(library), functions(library)
        for memory in self._declared.values():
            self._library.emulator_declare(*map(ctypes.c_size_t, memory))

    def restore_switches(self) -> None:
        """Switches off the kernels that are off by default, and all others on."""
        self.ops.gemm_kernels(torch.zeros(1), OFF_BY_DEFAULT)

    def set_chip(self, capability: int, multiprocessors: int, shared_bytes: int) -> None:
        """Emulates this chip; the default is an Ada with four multiprocessors."""
        self._library.emulator_set_chip(capability, multiprocessors, shared_bytes)

    def run_backwards(self, backwards: bool) -> None:
        """Makes the threads of a block run in reverse order, or in order again."""
        self._library.emulator_run_backwards(ctypes.c_bool(backwards))

    def capture(self, capturing: bool) -> None:
        """Starts or ends the capture of launches as a graph."""
        self._library.emulator_capture(ctypes.c_bool(capturing))

    def leave_out(self, site: str) -> None:
        """Makes all kernels ignore the barrier or wait at "file.cu:line"; "" restores all of them."""
        self._library.emulator_leave_out(site.encode())

    def take_reached_sites(self) -> set[str]:
        """Returns the barriers and waits that kernels have reached since the last call."""
        return set(self._library.emulator_take_reached_sites().decode().split())

    def launches(self) -> list[tuple[str, int]]:
        """Returns (kernel, declared and dynamic bytes of shared memory of a block) for every launch since the last
        call, in order. A memset is listed as the kernel "memset"."""
        launches = []
        for kernel, dynamic, _, _ in self._launched():
            declared = sum(size for name, (_, size) in self._declared.items() if name.rpartition("::")[0] == kernel)
            launches.append((kernel, declared + dynamic))
        return launches

    def starts(self) -> list[tuple[str, bool]]:
        """Returns (kernel, whether it may start before earlier ones end) for every launch, like `launches`."""
        return [(kernel, early) for kernel, _, early, _ in self._launched()]

    def blocks(self) -> list[int]:
        """Returns the number of blocks of every launch, like `launches`."""
        return [blocks for *_, blocks in self._launched()]

    def _launched(self) -> Iterator[tuple[str, int, bool, int]]:
        for line in self._library.emulator_launches().decode().splitlines():
            at, dynamic, early, blocks = line.split()
            yield self._kernels[int(at, 16)] if int(at, 16) else "memset", int(dynamic), early == "1", int(blocks)

    def launch_impatient(self) -> str:
        """Launches a kernel early that never waits for earlier ones; returns the emulator's error, or ""."""
        return str(self._library.emulator_launch_impatient().decode())

    def write_earlier(self, tensors: Sequence[torch.Tensor]) -> None:
        """Treats these tensors as results of an earlier kernel, which every later early launch must wait for."""
        self._library.emulator_add_earlier_write(None, ctypes.c_size_t(0))
        for memory in (tensor.untyped_storage() for tensor in tensors if tensor.numel()):
            self._library.emulator_add_earlier_write(
                ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes())
            )

    def mma(self, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Runs an mma instruction of one warp. By lane: a int32 [32, 4], b int32 [32, 2], result FP32 [32, 4]."""
        c = torch.zeros(32, 4)
        self._library.emulator_mma(name.encode(), *(ctypes.c_void_p(t.data_ptr()) for t in (a, b, c)))
        return c

    def ldmatrix(self, transposed: bool, rows: torch.Tensor) -> torch.Tensor:
        """Runs ldmatrix on 32 rows of 16 bytes; returns int32 [32, 4], by lane."""
        out = torch.zeros(32, 4, dtype=torch.int32)
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (rows, out))
        self._library.emulator_ldmatrix(ctypes.c_bool(transposed), *pointers)
        return out

    def wgmma(self, columns: int, memory: torch.Tensor, registers: torch.Tensor | None, a: int, b: int) -> torch.Tensor:
        """Runs a wgmma instruction with 64 rows and 64 or 128 columns; returns FP32 [128, columns / 2], by thread.

        `memory` is the shared memory from address 1024 on. `a` and `b` are descriptors; if `registers` (int32 [128, 4],
        by thread) is given, it replaces `a`.
        """
        c = torch.zeros(128, columns // 2)
        words = ctypes.c_void_p(None if registers is None else registers.data_ptr())
        size, at = ctypes.c_size_t(memory.nbytes), ctypes.c_void_p(memory.data_ptr())
        accumulators = ctypes.c_void_p(c.data_ptr())
        self._library.emulator_wgmma(columns, at, size, words, ctypes.c_uint64(a), ctypes.c_uint64(b), accumulators)
        return c


def _symbols(library: Path) -> list[tuple[int, str, int, str]]:
    """Returns (offset, section, bytes, name) of every symbol in the library."""
    listed = subprocess.run(["objdump", "--syms", "--demangle", library], capture_output=True, text=True, check=True)
    line = re.compile(r"^([0-9a-f]+) .{7} (\.\w+)\t([0-9a-f]+)\s+(?:\.hidden )?(.*)$", re.MULTILINE)
    return [(int(at, 16), section, int(size, 16), name) for at, section, size, name in line.findall(listed.stdout)]


def functions(library: Path) -> dict[int, str]:
    """Returns the names of the functions in the library, by their offset."""
    return {at: name.removeprefix("void ") for at, section, _, name in _symbols(library) if section == ".text"}


def shared_memory(library: Path) -> dict[str, tuple[int, int]]:
    """Returns (offset, bytes) of every `__shared__` variable, by symbol; in the emulator they are static variables."""
    kernels = set(functions(library).values())
    return {
        name: (at, size)
        for at, section, size, name in _symbols(library)
        if section == ".bss" and name.startswith("fp8serve::") and name.rpartition("::")[0] in kernels
    }


@cache
def emulator() -> Emulator:
    return Emulator(build(PLAIN))


def ops() -> Any:
    return emulator().ops


@cache
def thread_sanitizer() -> Path | None:
    """Returns the path of ThreadSanitizer's runtime library, which must be preloaded into a process, or None."""
    if COMPILER is None or shutil.which("setarch") is None:
        return None
    command = [COMPILER, "-print-file-name=libtsan.so"]
    path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    return path.resolve() if path.is_absolute() else None


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
needs_thread_sanitizer = pytest.mark.skipif(
    thread_sanitizer() is None, reason="needs a C++ compiler with ThreadSanitizer, and setarch"
)
