"""The kernels' own threads: they end with the work, do not survive a fork, and callers do not wait for each other."""

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

def at_rest():
    before = time.process_time()
    time.sleep(0.2)
    return time.process_time() - before < 0.01

until(at_rest, "rest")
"""


def test_idle_threads_sleep():
    """In a process of their own, whose processor time is theirs alone. Threads that kept looking for work would take
    some of every fifth of a second, beside whatever else runs."""
    subprocess.run([sys.executable, "-c", IDLE], check=True)


def test_callers_do_not_disturb_each_other(threads):
    torch.set_num_threads(2)
    expected = {rows: product(rows) for rows in (1, 5, 64)}
    wrong: list[int] = []

    def many(rows: int) -> None:
        wrong.extend(rows for _ in range(40) if not torch.equal(product(rows), expected[rows]))

    callers = [threading.Thread(target=many, args=(rows,)) for rows in expected]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


FORKING = """
import os, signal, torch
from fp8serve.fp8 import ops
from tests.csrc.test_threads import ONE, OPS, PATIENCE, operands
torch.set_num_threads(2)
a, b = operands(8)  # here, for torch's own threads do not survive a fork
expected = OPS.scaled_mm(a, b, ONE, ONE, None, torch.float32)
child = os.fork()
if child == 0:
    signal.alarm(int(PATIENCE / 2))  # a child that waits for threads it does not have is killed, and its status says so
    os._exit(0 if OPS.scaled_mm(a, b, ONE, ONE, None, torch.float32).tolist() == expected.tolist() else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_has_threads_of_its_own():
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.strip() == "0", done.stderr
