"""The console in a real browser, spoken to in WebDriver: a prompt streams, a job runs, a curve is drawn, scales show.

Skipped where chromium and chromedriver are not installed. The screenshot lies in the test's temporary directory.
"""

import base64
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.tiny import write_model
from tests.patience import PATIENCE, until
from tests.server.process import Process, serving

pytestmark = pytest.mark.browser
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1300,1400"]


WATCH_NOTES = """
window.notes = [];
const note = document.getElementById("weights-note");
new MutationObserver(() => window.notes.push(note.textContent)).observe(note, { childList: true });
"""


class Browser:
    """One browser session."""

    def __init__(self, port: int, profile: Path) -> None:
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE)
        options = {"args": [*ARGUMENTS, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.session = f"/session/{self.ask('/session', {'capabilities': {'alwaysMatch': wanted}})['sessionId']}"

    def ask(self, path: str, body: Any = None) -> Any:
        answer = self.client.get(path) if body is None else self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def open(self, url: str) -> None:
        """A page, without the complaints of the one before, whose server may have ended."""
        self.ask(f"{self.session}/url", {"url": "about:blank"})
        self.complaints()
        self.ask(f"{self.session}/url", {"url": url})

    def find(self, css: str) -> str:
        element = self.ask(f"{self.session}/element", {"using": "css selector", "value": css})[ELEMENT]
        return f"{self.session}/element/{element}"

    def text(self, css: str) -> str:
        return str(self.ask(f"{self.find(css)}/text"))

    def click(self, css: str) -> None:
        self.ask(f"{self.find(css)}/click", {})

    def fill(self, css: str, text: str) -> None:
        self.ask(f"{self.find(css)}/clear", {})
        self.ask(f"{self.find(css)}/value", {"text": text})

    def run(self, script: str) -> Any:
        return self.ask(f"{self.session}/execute/sync", {"script": script, "args": []})

    def size(self, width: int, height: int) -> None:
        """Of the page, as a phone has it; 0, 0 is the window's own."""
        if width:
            values = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
            self.ask(
                f"{self.session}/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": values}
            )
        else:
            self.ask(f"{self.session}/goog/cdp/execute", {"cmd": "Emulation.clearDeviceMetricsOverride", "params": {}})

    def complaints(self) -> list[Any]:
        return [
            entry for entry in self.ask(f"{self.session}/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"
        ]

    def shoot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask(f"{self.session}/screenshot")))

    def until(self, script: str) -> None:
        until(lambda: self.run("return " + script), script)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    if driver is None or shutil.which("chromium") is None:
        pytest.skip("no chromium with chromedriver here; Debian has both: apt-get install chromium chromium-driver")
    log = tmp_path_factory.mktemp("driver") / "log"  # it takes a port of its own choice and says which
    with log.open("w") as said:
        process = subprocess.Popen([driver, "--port=0"], stdout=said, stderr=said)
    try:
        until(lambda: re.search(r"on port (\d+)\.\n", log.read_text()), "chromedriver's port")
        (port,) = re.findall(r"on port (\d+)\.\n", log.read_text())
        made = Browser(int(port), tmp_path_factory.mktemp("profile"))
        yield made
        made.client.delete(made.session)
        made.client.close()
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    path = tmp_path_factory.mktemp("console")
    write_model(path / "tiny")
    options = {"model": str(path / "tiny"), "data_dir": str(path / "data"), "recipe": "current", "train_on": "share"}
    with serving(path / "log", **options) as process:
        yield process
        assert process.stop() == 0


def test_the_console_does_the_main_job(browser: Browser, server: Process, tmp_path: Path) -> None:
    browser.open(server.url + "/")
    browser.until("document.getElementById('state').textContent === 'ready'")
    browser.fill("#tokens", "20")
    browser.click("#go")
    browser.until("document.getElementById('answer-facts').textContent.startsWith('20 tokens')")
    assert browser.text("#answer").startswith("Once upon a time")
    browser.fill("#rows", "one text\nanother text")
    browser.click("#check")
    browser.until("document.getElementById('tune-note').textContent.startsWith('2 rows')")
    browser.fill("#rate", "0.003")
    browser.click("#tune .row button:not([type])")
    browser.until("document.querySelector('#jobs b')?.textContent === 'succeeded'")
    browser.until("document.querySelectorAll('#curve polyline').length === 1")
    browser.run("[...document.querySelectorAll('#jobs button')].find((b) => b.textContent === 'Serve it').click()")
    browser.until("document.querySelector('#jobs b').textContent === 'serving'")
    browser.until("document.querySelectorAll('#scales tbody tr').length === 14")
    browser.click("#go")
    browser.until("document.querySelector('#scales td:nth-child(2)').textContent !== '–'")
    browser.shoot(tmp_path / "console.png")
    browser.run("const s = document.getElementById('weights'); s.value = 'base'; s.dispatchEvent(new Event('change'))")
    browser.until("!document.getElementById('serve').disabled")
    browser.run(WATCH_NOTES)
    browser.click("#serve")
    browser.until("document.getElementById('weights-note').textContent === 'Now serving tiny.'")
    browser.until("document.getElementById('weights').selectedOptions[0].textContent === 'tiny (base model): serving'")
    browser.until("document.querySelector('#jobs b').textContent === 'succeeded'")
    notes = browser.run("return window.notes")
    assert any(note.startswith("Loading tiny (base model)") for note in notes)
    assert browser.complaints() == []


@pytest.fixture
def phone(browser: Browser) -> Iterator[Browser]:
    browser.size(390, 844)
    yield browser
    browser.size(0, 0)


def test_on_a_phone_every_number_of_a_layer_is_in_sight(phone: Browser, server: Process, tmp_path: Path) -> None:
    phone.open(server.url + "/")
    phone.until("document.querySelectorAll('#scales tbody tr').length === 14")
    phone.shoot(tmp_path / "phone.png")
    phone.run("document.getElementById('h-scales').scrollIntoView()")
    phone.shoot(tmp_path / "phone-scales.png")
    assert phone.run("return document.documentElement.scrollWidth") <= 390
    boxes = phone.run(
        "return [...document.querySelectorAll('#scales tbody td')].map((d) => d.getBoundingClientRect())"
        ".map((b) => [b.left, b.right, b.width, b.height])"
    )
    assert len(boxes) == 14 * 5
    assert all(left >= 0 and right <= 390 and width > 0 and height > 0 for left, right, width, height in boxes)


def test_colours_are_kept_for_what_matters(browser: Browser, server: Process) -> None:
    """A scale that fits calibration data cuts off a few values of other data: 0.01 % of them is no news."""
    browser.open(server.url + "/")
    browser.until("document.querySelectorAll('#scales tbody tr').length === 14")
    shares = {0: "", 1e-4: "", 9e-4: "", 2e-3: "some", 2e-2: "many"}
    for share, level in shares.items():
        layer = f"{{name: 'x', amax: 450, scale: 1, headroom: 0.99, saturation: {share}}}"
        assert browser.run(f"return scaleRow({layer}).lastChild.className") == level
        assert browser.run(f"return [...scaleRow({layer}).children].filter((d) => d.className).length") == bool(level)
    layers = "[{name: 'a', scale: 1, saturation: 0.002}, {name: 'b', scale: 1, saturation: 0.03}]"
    assert browser.run(f"return scalesNote({layers})") == (
        "2 of 2 layers cut off 0.1 % or more of their input, b the most: 3 %."
    )


def test_the_page_stays_whole_while_a_job_has_the_device(browser: Browser, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    options = {"model": str(tmp_path / "tiny"), "data_dir": str(tmp_path / "data"), "recipe": "current"}
    with serving(tmp_path / "log", **options, train_on="pause") as process:
        job = process.client.post("/finetune", json={"data": [{"text": "abc " * 30}] * 40, "epochs": 1000}).json()["id"]
        browser.open(process.url + "/")
        browser.until("document.getElementById('state').textContent === 'paused'")
        browser.until("document.querySelector('#jobs .grow')?.textContent.startsWith('step ')")
        browser.until("document.querySelectorAll('#curve polyline').length === 1")
        browser.until("document.querySelectorAll('#scales tbody tr').length === 14")
        assert "A fine-tune job has the device" in browser.text("#page-note")
        assert browser.text("#model").startswith("tiny")
        browser.shoot(tmp_path / "paused.png")
        process.client.post(f"/finetune/{job}/cancel")
        browser.until("document.getElementById('state').textContent === 'ready'")
        browser.until("document.getElementById('page-note').textContent === ''")
        assert all("503" in entry["message"] for entry in browser.complaints())  # the browser's own note on health


def test_an_error_is_shown_as_a_sentence(browser: Browser, server: Process) -> None:
    browser.open(server.url + "/")
    browser.until("document.getElementById('state').textContent === 'ready'")
    browser.fill("#tokens", "100000")
    browser.click("#go")
    browser.until("document.getElementById('answer-facts').classList.contains('error')")
    assert "context holds" in browser.text("#answer-facts")
    assert all("422" in entry["message"] for entry in browser.complaints())  # the browser's own note on the refusal


def test_the_reference_lists_every_route(browser: Browser, server: Process) -> None:
    browser.open(server.url + "/docs")
    browser.until("document.querySelectorAll('dl.routes dt').length > 30")
    assert "/v1/chat/completions" in browser.text("#groups")
    assert browser.complaints() == []
