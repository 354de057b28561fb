"""Rules of all views: links, keyboard, sizes, colours, names, a lost connection, keys, the policy."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fp8serve.server.access.keys import format_key_line
from fp8serve.server.app import PAGES
from tests.server.console.accessibility import landmarks, low_contrast_texts, nameless
from tests.server.console.browser import Browser
from tests.server.console.canned import NO_HISTORY, answer_with, layer
from tests.server.fakes import model_dir
from tests.server.process import Process, serving

pytestmark = pytest.mark.browser
VIEWS = {"chat": "Chat", "scales": "Scales", "finetune": "Fine-tune", "models": "Models", "requests": "Requests"}
TROUBLED = {"weight_version": "base-0", "layers": [
    layer("model.layers.0.self_attn.q_proj", saturation=0.02), layer("model.layers.0.mlp.down_proj", saturation=0.002),
    layer("model.layers.1.self_attn.q_proj"), layer("model.layers.1.mlp.down_proj", headroom=None, amax=0.0),
]}  # fmt: skip


def ready(browser: Browser, url: str, state: str = "ready") -> None:
    """Opens a page, and waits until it knows the state of the server and its models."""
    browser.open(url)
    browser.until(f"document.getElementById('state').textContent === '{state}'")
    browser.until("document.getElementById('model').textContent !== ''")


def show_view(browser: Browser, name: str) -> None:
    """Follows the link of a view, and waits until the view is shown."""
    browser.press(name)
    browser.until(f"document.title === '{name} · fp8serve'")


@pytest.mark.smoke
def test_every_view_has_an_address_and_all_are_reached_by_keyboard(browser: Browser, server: Process) -> None:
    for view, name in VIEWS.items():
        ready(browser, f"{server.url}/#/{view}")
        browser.until(f"document.title === '{name} · fp8serve'")
        assert browser.text("a[aria-current=page]") == name
        assert browser.text("section:not([hidden]) > h2") == name
    browser.open(server.url + "/#/nothing-of-this-name")
    browser.until("document.title === 'Chat · fp8serve'")
    browser.type("Tab")
    assert browser.run("return document.activeElement.textContent") == "Skip to the content"
    browser.type("Enter")
    assert browser.run("return document.activeElement.id") == "main"
    browser.run("document.querySelector('.skip').focus()")
    browser.type("Tab", "Tab", "Enter")
    browser.until("document.title === 'Scales · fp8serve'")
    assert browser.run("return document.activeElement.textContent") == "Scales"  # the heading of the new view
    assert browser.complaints() == []


@pytest.fixture(params=[False, True], ids=["light", "dark"])
def coloured(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Browser]:
    browser.dark(request.param)
    return browser


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_accessible(coloured: Browser, server: Process, view: str, tmp_path: Path) -> None:
    ready(coloured, f"{server.url}/#/{view}")
    answer_with(coloured, "/scales", TROUBLED)
    answer_with(coloured, "/scales/history", NO_HISTORY)
    if view == "scales":
        coloured.until("document.querySelectorAll('.map td[role]').length === 4")
        coloured.click(".map td[role]")
    if view == "finetune":
        coloured.until("document.querySelector('#job-recipe')")
    coloured.run("document.querySelectorAll('main details').forEach((one) => { one.open = true; })")
    coloured.shoot(tmp_path / "desktop.png")
    assert nameless(coloured) == []
    assert landmarks(coloured) == {"banner", "navigation", "main", "contentinfo"}
    assert low_contrast_texts(coloured) == []
    coloured.size(360, 740)
    coloured.until("innerWidth === 360")
    coloured.shoot(tmp_path / "phone.png", whole=True)
    assert coloured.run("return document.documentElement.scrollWidth") <= 360
    assert coloured.complaints() == []


def test_a_lost_connection_is_shown_until_it_recovers(browser: Browser, echoing: Process) -> None:
    ready(browser, echoing.url + "/#/models")
    browser.until("document.querySelector('#served dd')?.textContent === 'echo'")
    browser.run("window.originalFetch = fetch; window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    browser.until("document.getElementById('state').textContent === 'no answer'")
    assert "does not answer" in browser.text("#notice")
    assert "echo" in browser.text("#served")  # what was there stays
    browser.run("window.fetch = window.originalFetch")
    browser.until("document.getElementById('state').textContent === 'ready'")
    assert browser.text("#notice") == "The server answers again."


def test_a_key_without_the_scope_of_a_route_gets_an_explanation(browser: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(format_key_line("reader", "research", ["generate"], "a-key") + "\n")
    keys.chmod(0o600)
    options = {"model": str(model_dir(tmp_path / "echo")), "data_dir": str(tmp_path / "data"), "api_keys": str(keys)}
    with serving(tmp_path / "log", **options, fake=True) as process:
        ready(browser, f"http://reader:a-key@127.0.0.1:{process.port}/#/chat")
        browser.open(f"{process.url}/#/scales")  # the browser remembers the key
        browser.until("document.querySelector('.scales .error').textContent !== ''")
        assert "do not open this route" in browser.text(".scales .error")


def test_pages_are_revalidated_by_their_etag(server: Process) -> None:
    for path, (_, media_type) in PAGES.items():
        answer = server.client.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        again = server.client.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"] == answer.headers["content-security-policy"]
        changed = server.client.get(path, headers={"If-None-Match": '"of another version"'})
        assert changed.content == answer.content
    assert httpx.get(server.url + "/console/../console/main.js").status_code in (200, 404)
    assert server.client.get("/console/nothing.js").status_code == 404


def test_the_reference_lists_every_route(browser: Browser, server: Process) -> None:
    browser.open(server.url + "/docs")
    browser.until("document.querySelectorAll('dl.routes dt').length > 30")
    assert "/v1/chat/completions" in browser.text("#groups")
    assert browser.complaints() == []
