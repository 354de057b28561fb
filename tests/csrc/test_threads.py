"""The thread pool of the CPU kernels: idle threads sleep, a forked child has its own threads, and several callers may
use it at once."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from tests.patience import PATIENCE

OPS = torch.ops.fp8serve
E4M3 = torch.float8_e4m3fn
ONE = torch.ones(())


def operands(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 1024, generator=make).to(E4M3), torch.randn(1024, 1024, generator=make).to(E4M3)


def product(rows: int = 8) -> torch.Tensor:
    return OPS.scaled_mm(*operands(rows), ONE, ONE, None, torch.float32)


@pytest.mark.parametrize("count", [2, 3, 16])
def test_any_number_of_threads_gives_the_same(threads, count):
    torch.set_num_threads(1)
    expected = product()
    torch.set_num_threads(count)
    assert all(torch.equal(product(), expected) for _ in range(50))


IDLE = """
import time, torch
from fp8serve.fp8 import ops
from tests.csrc.test_threads import product
from tests.patience import until
torch.set_num_threads(3)
product()

def is_idle():
    before = time.process_time()
    time.sleep(0.2)
    return time.process_time() - before < 0.01

until(is_idle, "idle threads")
"""


def test_idle_threads_sleep():
    """Runs in a process of its own, so that its CPU time is that of the pool. Threads that polled for work would use
    CPU time in every interval of 0.2 seconds, whatever else runs on the machine."""
    subprocess.run([sys.executable, "-c", IDLE], check=True)


def test_concurrent_callers_get_correct_results(threads):
    torch.set_num_threads(2)
    expected = {rows: product(rows) for rows in (1, 5, 64)}
    failures: list[int] = []

    def multiply_repeatedly(rows: int) -> None:
        failures.extend(rows for _ in range(40) if not torch.equal(product(rows), expected[rows]))

    callers = [threading.Thread(target=multiply_repeatedly, args=(rows,)) for rows in expected]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert failures == []


FORK = """
import os, signal, torch
from fp8serve.fp8 import ops
from tests.csrc.test_threads import ONE, OPS, PATIENCE, operands
torch.set_num_threads(2)
a, b = operands(8)  # before the fork, since torch's own threads do not survive it
expected = OPS.scaled_mm(a, b, ONE, ONE, None, torch.float32)
child = os.fork()
if child == 0:
    signal.alarm(int(PATIENCE / 2))  # kills a child that waits for threads of its parent
    os._exit(0 if OPS.scaled_mm(a, b, ONE, ONE, None, torch.float32).tolist() == expected.tolist() else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_starts_its_own_threads():
    process = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=PATIENCE)
    assert process.stdout.strip() == "0", process.stderr
