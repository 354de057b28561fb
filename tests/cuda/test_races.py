"""The hand-written CUDA kernels have no data race within a block, and each of their barriers is necessary.

race_run.py runs the kernels on the emulated GPU under ThreadSanitizer (emulator/cuda/races.h).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda import emulated, race_run

SITE = re.compile(
    r"__syncthreads\(\)|__syncwarp\(\)|(copy|wgmma)_wait<[^>]+>\(\)|^ +(after_earlier_kernels|fence_async_proxy)\(\)"
    r"|^ +wgmma_(fence|commit)\(\)"
)
OPTIONS = "ignore_noninstrumented_modules=1 halt_on_error=1 die_after_fork=0 history_size=7"


def thread_sanitizer() -> Path | None:
    """Returns the path of ThreadSanitizer's runtime library, which must be preloaded into a process, or None."""
    if emulated.COMPILER is None or shutil.which("setarch") is None:
        return None
    command = [emulated.COMPILER, "-print-file-name=libtsan.so"]
    path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    return path.resolve() if path.is_absolute() else None


RUNTIME = thread_sanitizer()
pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(RUNTIME is None, reason="needs a C++ compiler with ThreadSanitizer, and setarch"),
]


def run_mode(mode: str) -> str:
    """Runs race_run in one of its modes; returns its standard output. ThreadSanitizer needs `setarch -R`, which
    disables the randomization of addresses."""
    emulated.build(race_run.THREAD_SANITIZER)  # before, since compilers do not run with the preloaded runtime
    command = ["setarch", "-R", sys.executable, "-m", "tests.cuda.race_run", mode]
    settings = {"LD_PRELOAD": str(RUNTIME), "TSAN_OPTIONS": OPTIONS}
    done = subprocess.run(command, cwd=emulated.ROOT, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sites_in_sources() -> set[str]:
    """Returns every barrier and wait of the kernels that run on the emulator, as "file:line"."""
    sources, sites = [*emulated.KERNELS, *(emulated.ROOT / "csrc/cuda").glob("*.h")], set[str]()
    for path in sources:
        if path.name in {"device.h", "wgmma.h", "cooperative.h", "mbarrier.h"}:  # their definitions
            continue
        kernel = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "__global__" in line:
                kernel = line
            # the kernel `repeat` prepares operands for cuBLASLt, which is not emulated
            if SITE.search(line) and " repeat(" not in kernel:
                sites.add(f"{path.name}:{number}")
    return sites


@pytest.fixture(scope="module")
def barriers() -> str:
    return run_mode("barriers")


def test_no_kernel_has_a_race_and_all_barriers_are_reached(barriers: str) -> None:
    reached = re.search(r"^MET (.*)$", barriers, re.MULTILINE)
    assert reached is not None
    assert set(reached[1].split()) == sites_in_sources()


def test_removing_any_barrier_is_detected(barriers: str) -> None:
    outcomes = dict(re.findall(r"^WITHOUT (\S+) .*: ([^:]*)$", barriers, re.MULTILINE))
    assert set(outcomes) == sites_in_sources()
    assert [site for site, how in outcomes.items() if how == "not found"] == []


def test_reading_weights_of_an_earlier_kernel_too_early_is_detected() -> None:
    """Ops for stored weights may read weights before they wait for earlier kernels. The kernel for many rows does not,
    so its case has no race."""
    outcomes = re.findall(r"^WRITTEN (\S+) .*: ([^:]*)$", run_mode("written-weights"), re.MULTILINE)
    assert {op for op, how in outcomes if how == "race"} == set(race_run.STORED_WEIGHTS)
