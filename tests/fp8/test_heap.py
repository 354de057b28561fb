"""Freed memory stays: the second of two large temporaries touches no new page."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from fp8serve.fp8.heap import keep_freed_memory

print(keep_freed_memory() if {keep} else False)
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.full((64 << 20,), 1, dtype=torch.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool) -> tuple[bool, int]:
    """(was the allocator told, page faults of a 64 MB temporary after others of its size)."""
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(keep=keep)], capture_output=True, text=True, check=True)
    told, count = done.stdout.split()
    return told == "True", int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_large_temporaries_are_reused() -> None:
    told, kept = faults(True)
    if not told:
        pytest.skip("this C library has no mallopt")
    assert kept < 1000
    assert faults(False)[1] > 10 * kept
