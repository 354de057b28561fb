"""Several models and adapters in one server, as the page shows, loads, compares and unloads them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.console.accessibility import nameless
from tests.server.console.browser import Browser
from tests.server.console.test_frame import ready, show_view
from tests.server.fakes import model_dir
from tests.server.process import Process, serving

pytestmark = pytest.mark.browser


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Process]:
    """A server that can load a second model, and an adapter beside either."""
    model_dir(tmp_path / "more" / "second")
    (tmp_path / "more" / "tutor").mkdir()
    (tmp_path / "more" / "tutor" / "adapter_config.json").write_text("{}")
    options = {"model": str(model_dir(tmp_path / "first")), "models_dir": str(tmp_path / "more")}
    with serving(tmp_path / "log", **options, data_dir=str(tmp_path / "data"), fake=True) as process:
        yield process


def an_adapter_is_loaded_chosen_and_unloaded(browser: Browser, tmp_path: Path) -> None:
    """Loads, uses and unloads an adapter of the second of two models, by keyboard."""
    browser.until("document.getElementById('adapter-base').options.length === 2")
    browser.choose("#adapter-base", "second")
    browser.fill("#adapter-name", "tutor")
    browser.fill("#adapter-path", "nowhere")
    browser.type("Enter")
    browser.until("document.querySelector('#notice.error')?.textContent.startsWith('There is no such adapter.')")
    assert all("404" in message for message in browser.complaints())  # the browser's own note on the refusal
    browser.fill("#adapter-path", "tutor")
    browser.type("Enter")
    browser.until("document.querySelectorAll('#adapters tbody tr').length === 1")
    cells = browser.run("return [...document.querySelectorAll('#adapters tr > *')].map((cell) => cell.textContent)")
    assert cells[8:] == ["tutor", "second", "LoRA", "4", "tutor", "0", "100 B", "Unload"]
    assert browser.text("#notice") == "The adapter tutor serves now."
    for width in (1300, 360):
        browser.size(width, 740)
        browser.until(f"innerWidth === {width}")
        assert nameless(browser) == []
        assert browser.run("return document.documentElement.scrollWidth") <= width
        browser.run("scrollTo(0, 0)")
        browser.shoot(tmp_path / f"adapters-{width}.png", whole=True)
    browser.run("scrollTo(0, document.documentElement.scrollHeight)")
    assert browser.run("return scrollY > 0 && document.getElementById('notice').getBoundingClientRect().top") == 0
    browser.size(0, 0)
    show_view(browser, "Scales")
    assert browser.run("return [...document.getElementById('scales-model').options].map((one) => one.value)") == [
        "first", "second",
    ]  # fmt: skip
    show_view(browser, "Chat")
    browser.until("[...document.getElementById('chat-model').options].some((one) => one.value === 'tutor')")
    browser.choose("#chat-model", "tutor")
    browser.fill("#prompt", "abc")
    browser.type("Enter")
    browser.until("document.querySelector('.facts-line')?.textContent.includes('+000000000000')")  # its digest
    show_view(browser, "Models")
    browser.run("document.querySelector('[aria-label=\"Unload the adapter tutor\"]').focus()")
    browser.type("Enter")
    browser.until("document.querySelectorAll('#adapters tbody tr').length === 0")
    assert browser.text("#notice") == "The adapter tutor is no longer served."


def test_a_model_is_loaded_beside_the_first_and_unloaded(browser: Browser, several: Process, tmp_path: Path) -> None:
    ready(browser, several.url + "/#/models")
    browser.until("document.querySelectorAll('#available tbody tr').length === 2")
    browser.click("[aria-label='Load second beside the others']")
    browser.until("document.querySelectorAll('#served tbody tr').length === 2")
    assert "first (default)" in browser.text("#served")
    show_view(browser, "Scales")
    browser.until("document.getElementById('scales-model').options.length === 2")
    browser.choose("#scales-model", "second")
    browser.until("document.querySelectorAll('.map td[role]').length === 1")
    browser.run("location.hash = '#/chat?model=second'")
    browser.until("document.getElementById('chat-other').value === 'second'")
    show_view(browser, "Models")
    an_adapter_is_loaded_chosen_and_unloaded(browser, tmp_path)
    browser.press("Unload")
    browser.until("document.querySelector('#served dd')?.textContent === 'first'")
    show_view(browser, "Chat")
    browser.until("document.querySelectorAll('.column').length === 1")  # the second column goes with its model
    assert browser.complaints() == []


def test_a_model_that_cannot_be_loaded_changes_nothing_that_is_served(
    browser: Browser, several: Process, tmp_path: Path
) -> None:
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
