"""Several models in one server, as the page shows, loads, compares and unloads them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.console.browser import Browser
from tests.server.console.test_frame import ready
from tests.server.fakes import model_dir
from tests.server.process import Process, serving

pytestmark = pytest.mark.browser


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Process]:
    """A server that can load a second model."""
    model_dir(tmp_path / "more" / "second")
    options = {"model": str(model_dir(tmp_path / "first")), "models_dir": str(tmp_path / "more")}
    with serving(tmp_path / "log", **options, data_dir=str(tmp_path / "data"), fake=True) as process:
        yield process


def test_a_model_is_loaded_beside_the_first_and_unloaded(browser: Browser, several: Process) -> None:
    ready(browser, several.url + "/#/models")
    browser.until("document.querySelectorAll('#available tbody tr').length === 2")
    browser.click("[aria-label='Load second beside the others']")
    browser.until("document.querySelectorAll('#served tbody tr').length === 2")
    assert "first (default)" in browser.text("#served")
    browser.press("Scales")
    browser.until("document.getElementById('scales-model').options.length === 2")
    browser.choose("#scales-model", "second")
    browser.until("document.querySelectorAll('.map td[role]').length === 1")
    browser.run("location.hash = '#/chat?model=second'")
    browser.until("document.getElementById('chat-other').value === 'second'")
    browser.press("Models")
    browser.press("Unload")
    browser.until("document.querySelector('#served dd')?.textContent === 'first'")
    browser.press("Chat")
    browser.until("document.querySelectorAll('.column').length === 1")  # the second column goes with its model
    assert browser.complaints() == []


def test_what_cannot_be_loaded_is_told_and_nothing_is_lost(browser: Browser, several: Process, tmp_path: Path) -> None:
    ready(browser, several.url + "/#/models")
    browser.until("document.querySelectorAll('#available tbody tr').length === 2")
    (tmp_path / "more" / "second").rename(tmp_path / "elsewhere")
    browser.run("document.querySelector('[aria-label=\"Load second beside the others\"]')?.click()")
    browser.until("document.querySelectorAll('#available tbody tr').length === 1")
    assert browser.run("return document.querySelector('#served dd').textContent") == "first"
    (tmp_path / "elsewhere").rename(tmp_path / "more" / "second")
    several.client.post("/models/second/load", json={"source": "second"})
    browser.until("document.querySelectorAll('#served tbody tr').length === 2")  # loaded by somebody else
    several.client.post("/models/second/unload")
    browser.until("document.querySelectorAll('#served tbody tr').length === 0")
    assert all("404" in message for message in browser.complaints())  # the browser's own note on the refusal
