"""One browser for all tests of the console, and the servers that they look at."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.engine.tiny import write_model, write_scales
from tests.server.console.browser import MISSING, Browser, browsing, is_installed
from tests.server.process import Process, serving
from tests.tiny import write_tiny_model


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not is_installed():
        pytest.skip(MISSING)
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(session: Browser) -> Iterator[Browser]:
    """The browser, which is reset after each test. A violation of the page's security policy fails the test."""
    yield session
    assert session.violations() == []
    session.forget()
    session.size(0, 0)
    session.dark(False)


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A tiny model that holds conversations, scaled as it runs."""
    path = tmp_path_factory.mktemp("console")
    write_tiny_model(path / "tiny")
    options = {"model": str(path / "tiny"), "data_dir": str(path / "data"), "recipe": "current", "train_on": "share"}
    with serving(path / "log", **options) as process:
        yield process
        assert process.stop() == 0


@pytest.fixture(scope="package")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A tiny model with stored scales, which has no chat template."""
    path = tmp_path_factory.mktemp("scaled")
    write_model(path / "tiny")
    scales = write_scales(path / "tiny", path / "made-up")
    with serving(path / "log", model=str(path / "tiny"), data_dir=str(path / "data"), scales=str(scales)) as process:
        yield process


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A tiny model with speculative tokens by prompt lookup."""
    path = tmp_path_factory.mktemp("drafting")
    write_model(path / "tiny")
    options = {"model": str(path / "tiny"), "data_dir": str(path / "data"), "recipe": "current"}
    with serving(path / "log", speculative_tokens=4, **options) as process:
        yield process


@pytest.fixture(scope="package")
def echoing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server that answers with the prompt."""
    with serving_echoes(tmp_path_factory.mktemp("echoing"), delay=0.02) as process:
        yield process


@pytest.fixture(scope="package")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server that answers with the prompt, slowly enough to be stopped by a browser on a busy machine."""
    with serving_echoes(tmp_path_factory.mktemp("slow"), delay=0.25) as process:
        yield process


def serving_echoes(path: Path, delay: float) -> AbstractContextManager[Process]:
    from tests.server.fakes import model_dir

    options = {"model": str(model_dir(path / "echo")), "data_dir": str(path / "data")}
    return serving(path / "log", **options, fake=True, delay=delay)
