"""The hand-written CUDA kernels have no data race within a block, and each of their barriers is necessary.

race_run.py runs the kernels on the emulated GPU under ThreadSanitizer (emulator/cuda/races.h).
"""

import os
import re
import subprocess
import sys

import pytest

from tests.cuda import emulated, race_run

SITE = re.compile(
    r"__syncthreads\(\)|__syncwarp\(\)|(copy|wgmma)_wait<[^>]+>\(\)|^ +(after_earlier_kernels|fence_async_proxy)\(\)"
    r"|^ +wgmma_(fence|commit)\(\)"
)


pytestmark = [pytest.mark.emulator, emulated.needs_thread_sanitizer]


def run_mode(mode: str) -> str:
    """Runs race_run in one of its modes; returns its standard output. ThreadSanitizer needs `setarch -R`, which
    disables the randomization of addresses."""
    emulated.build(emulated.RACES)  # before, since compilers do not run with the preloaded runtime
    command = ["setarch", "-R", sys.executable, "-m", "tests.cuda.race_run", mode]
    sanitizer = {"LD_PRELOAD": str(emulated.thread_sanitizer()), "TSAN_OPTIONS": emulated.THREAD_SANITIZER_OPTIONS}
    done = subprocess.run(command, cwd=emulated.ROOT, env={**os.environ, **sanitizer}, capture_output=True, text=True)
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
