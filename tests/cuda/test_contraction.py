"""Promised bits do not depend on whether the compiler makes one operation of a product and a sum."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda import emulated


def fuses() -> bool:
    """Whether this processor has such an operation, and a compiler for it is there."""
    features = Path("/proc/cpuinfo")
    return emulated.COMPILER is not None and features.exists() and " fma " in features.read_text()


pytestmark = [pytest.mark.emulator, pytest.mark.skipif(not fuses(), reason="needs a C++ compiler and FMA of x86")]


def run(how: str) -> tuple[int, int]:
    """(cases of rotary in FP32 whose bits are wrong, all of them)"""
    command = [sys.executable, "-m", "tests.cuda.contraction_run", how]
    done = subprocess.run(command, cwd=emulated.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong, of = done.stdout.split()
    return int(wrong), int(of)


def test_rotary_has_the_references_bits_where_products_and_sums_are_one_operation() -> None:
    wrong, of = run("careful")
    assert (wrong, of > 0) == (0, True)


def test_products_that_are_not_rounded_by_name_are_found() -> None:
    wrong, _ = run("careless")
    assert wrong > 0
