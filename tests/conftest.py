"""The common setup of all tests.

torch uses one thread, here and in every process that a test starts. This is set before torch is imported. The suite
often shares its machine with other work, where threads that wait for each other cost minutes. The number of threads
does not change any result.

Hypothesis draws the same examples in every run and stores none, so that every run of a test has the same result.
`make test-random` sets the profile "random" instead, which draws new examples.

tests/selection.py selects which of the collected tests run.
"""

import gc
import os
import signal
from pathlib import Path

import pytest

from tests.durations import Durations
from tests.selection import (  # noqa: F401 (hooks of pytest)
    add_options,
    find_affected,
    pytest_collection_modifyitems,
    pytest_configure_node,
    pytest_deselected,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)

try:
    from hypothesis import settings
except ImportError:  # `make gpu` needs nothing but torch and pytest
    pass
else:
    settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
    settings.register_profile("random", derandomize=False, deadline=None, print_blob=True)
    settings.load_profile("fixed")

DRIVER, VISIBLE_GPUS = "libcuda.so.1", os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)
    parser.addoption("--durations-file", metavar="FILE", help="write how long tests take as JSON")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Hides all GPUs from a test without the mark `gpu`, and from its child processes: `device="auto"` is the CPU."""
    import torch

    from fp8serve.fp8 import cuda_support

    if not torch.cuda.is_available():
        return
    torch.cuda.init()
    torch.cuda.device_count()  # torch caches the count, so that this process keeps its GPUs
    is_hidden = item.get_closest_marker("gpu") is None
    cuda_support.DRIVER = "no driver" if is_hidden else DRIVER
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if is_hidden or VISIBLE_GPUS is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = "" if is_hidden else str(VISIBLE_GPUS)


def pytest_configure(config: pytest.Config) -> None:
    find_affected(config)
    if config.option.durations_file and not hasattr(config, "workerinput"):  # under xdist one process reports
        config.pluginmanager.register(Durations(Path(config.option.durations_file)))


def pytest_collection_finish() -> None:
    """Excludes the million objects of all tests and modules from garbage collection. Every training run collects, which
    would take half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test draws the same numbers whatever ran before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def smollm2_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives `find_model("smollm2")` an empty cache. Skips the test if the weights are not installed."""
    from fp8serve.model import gguf

    if gguf.missing_package() is not None:
        pytest.skip("SmolLM2's weights are not installed: make weights")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop that runs `async def test_...`."""
    return "asyncio"
