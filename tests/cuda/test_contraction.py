"""Rotary has the bits of the reference even if the compiler contracts products and sums to FMA."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda import emulated


def has_fma() -> bool:
    """Returns whether this processor has FMA and a C++ compiler is installed."""
    features = Path("/proc/cpuinfo")
    return emulated.COMPILER is not None and features.exists() and " fma " in features.read_text()


pytestmark = [pytest.mark.emulator, pytest.mark.skipif(not has_fma(), reason="needs a C++ compiler and FMA of x86")]


def run(how: str) -> tuple[int, int]:
    """Returns (FP32 cases of rotary that differ from the reference, number of FP32 cases)."""
    command = [sys.executable, "-m", "tests.cuda.contraction_run", how]
    process = subprocess.run(command, cwd=emulated.ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    differing, total = process.stdout.split()
    return int(differing), int(total)


def test_rotary_has_the_bits_of_the_reference_despite_contraction() -> None:
    differing, total = run("careful")
    assert (differing, total > 0) == (0, True)


def test_a_kernel_that_allows_contraction_is_detected() -> None:
    differing, _ = run("careless")
    assert differing > 0
