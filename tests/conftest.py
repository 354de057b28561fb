"""The common setup of all tests.

One thread for torch here and in every process that a test starts, set before torch is imported: the suite also runs
beside other work, where threads that wait for each other cost minutes. Results do not depend on it.

Hypothesis draws the same examples in every run and keeps none between runs, so a test passes or fails whoever runs it
and whenever. `make test-random` loads the profile "random" instead, which draws new examples.

Without a CUDA device, tests marked `gpu` are deselected, and the summary has their number. `-m gpu` still collects
them.
"""

import os
import signal
from typing import Any

import pytest

try:
    from hypothesis import settings
except ImportError:  # `make gpu` needs nothing but torch and pytest
    pass
else:
    settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
    settings.register_profile("random", derandomize=False, deadline=None, print_blob=True)
    settings.load_profile("fixed")

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job, and its children
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test draws the same numbers whatever ran before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Where `async def test_...` runs."""
    return "asyncio"


GPU_TESTS = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what needs a GPU that is absent, unless the expression of -m names the mark."""
    import torch

    if torch.cuda.is_available() or "gpu" in config.option.markexpr:
        return
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=gpu_tests)
    config.stash[GPU_TESTS] = len(gpu_tests)
    if hasattr(config, "workeroutput"):  # under xdist each worker collects, and the controller writes the summary
        config.workeroutput["gpu_tests"] = len(gpu_tests)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Takes the number from a worker of xdist."""
    node.config.stash[GPU_TESTS] = getattr(node, "workeroutput", {}).get("gpu_tests", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash.get(GPU_TESTS, 0):
        terminalreporter.write_line(f"{count} tests need a CUDA device and were deselected: make gpu runs them")
