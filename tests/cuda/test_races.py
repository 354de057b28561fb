"""The hand-written CUDA kernels have no data race within a block, and none of their barriers is there for nothing.

ThreadSanitizer watches the emulated GPU (emulator/cuda/races.h); race_run.py is what runs under it.
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
    """The compiler's runtime, which a process must have loaded before Python."""
    if emulated.COMPILER is None or shutil.which("setarch") is None:
        return None
    asked = [emulated.COMPILER, "-print-file-name=libtsan.so"]
    found = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    return found.resolve() if found.is_absolute() else None


RUNTIME = thread_sanitizer()
pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(RUNTIME is None, reason="needs a C++ compiler with ThreadSanitizer, and setarch"),
]


def run(what: str) -> str:
    """Standard output of race_run. ThreadSanitizer needs addresses where it expects them: setarch -R."""
    emulated.build(race_run.THREAD_SANITIZER)  # here: compilers do not run under its runtime
    command = ["setarch", "-R", sys.executable, "-m", "tests.cuda.race_run", what]
    settings = {"LD_PRELOAD": str(RUNTIME), "TSAN_OPTIONS": OPTIONS}
    done = subprocess.run(command, cwd=emulated.ROOT, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sites_in_sources() -> set[str]:
    """Every barrier and wait of the kernels that run on the emulator, as "file:line"."""
    sources, sites = [*emulated.KERNELS, *(emulated.ROOT / "csrc/cuda").glob("*.h")], set[str]()
    for path in sources:
        if path.name in {"device.h", "wgmma.h"}:  # where they are defined
            continue
        kernel = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "__global__" in line:
                kernel = line
            # `repeat` makes operands for cuBLASLt, which is not emulated
            if SITE.search(line) and " repeat(" not in kernel:
                sites.add(f"{path.name}:{number}")
    return sites


def test_no_kernel_has_a_race() -> None:
    met = re.search(r"^MET (.*)$", run("as-they-are"), re.MULTILINE)
    assert met is not None
    assert set(met[1].split()) == sites_in_sources()


def test_every_barrier_that_is_left_out_is_found() -> None:
    found = dict(re.findall(r"^WITHOUT (\S+) .*: ([^:]*)$", run("left-out"), re.MULTILINE))
    assert set(found) == sites_in_sources()
    assert [site for site, how in found.items() if how == "not found"] == []


def test_an_op_that_takes_written_weights_for_stored_ones_is_found() -> None:
    """Only a product on tensor cores reads them early, so that the case of many rows has no race."""
    found = re.findall(r"^WRITTEN (\S+) .*: ([^:]*)$", run("written-weights"), re.MULTILINE)
    assert {op for op, how in found if how == "race"} == set(race_run.STORED_WEIGHTS)
