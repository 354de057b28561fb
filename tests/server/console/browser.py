"""Controls a real browser by WebDriver as a person would: mouse, keyboard, the size of a phone, dark colours.

Uses Debian's chromium and chromedriver; if they are missing, the tests of the console are skipped.
"""

import base64
import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.patience import PATIENCE, until

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1300,1000"]
MISSING = "no chromium with chromedriver here; Debian has both: apt-get install chromium chromium-driver"
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c", "Space": "\ue00d", "Left": "\ue012", "Up": "\ue013",
        "Right": "\ue014", "Down": "\ue015"}  # fmt: skip
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


def is_installed() -> bool:
    return shutil.which("chromedriver") is not None and shutil.which("chromium") is not None


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator["Browser"]:
    """A browser with a fresh profile in `folder`."""
    log = folder / "driver.log"  # the driver chooses its port and logs it
    with log.open("w") as output:
        process = subprocess.Popen(["chromedriver", "--port=0"], stdout=output, stderr=output)
    try:
        until(lambda: re.search(r"on port (\d+)\.\n", log.read_text()), "chromedriver's port")
        (port,) = re.findall(r"on port (\d+)\.\n", log.read_text())
        browser = Browser(int(port), folder / "profile")
        yield browser
        browser.client.delete(browser.session)
        browser.client.close()
    finally:
        process.terminate()
        process.wait(PATIENCE)


class Browser:
    """One browser session."""

    def __init__(self, port: int, profile: Path) -> None:
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE)
        options = {"args": [*ARGUMENTS, f"--user-data-dir={profile}"]}
        capabilities = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.session = f"/session/{self.ask('/session', {'capabilities': {'alwaysMatch': capabilities}})['sessionId']}"
        self.cdp("Page.addScriptToEvaluateOnNewDocument", source=WATCH)

    def ask(self, path: str, body: Any = None) -> Any:
        answer = self.client.get(path) if body is None else self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def cdp(self, command: str, **params: Any) -> Any:
        """Sends a command of the Chrome DevTools protocol; returns its result."""
        return self.ask(f"{self.session}/goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, url: str) -> None:
        """Opens a page and drops the complaints about the previous one, whose server may have ended."""
        self.ask(f"{self.session}/url", {"url": "about:blank"})
        self.complaints()
        self.ask(f"{self.session}/url", {"url": url})
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def reload(self) -> None:
        """Reloads the page as F5 does, which aborts its requests before the page gets an event."""
        self.run("window.isStale = true")
        self.ask(f"{self.session}/refresh", {})
        self.until("!window.isStale && document.readyState === 'complete'")

    @contextlib.contextmanager
    def another_tab(self) -> Iterator[None]:
        """A second, empty tab, which has the focus until the end and is closed then."""
        first = self.ask(f"{self.session}/window")
        second = self.ask(f"{self.session}/window/new", {"type": "tab"})["handle"]
        self.ask(f"{self.session}/window", {"handle": second})
        try:
            yield
        finally:
            self.client.delete(f"{self.session}/window")
            self.ask(f"{self.session}/window", {"handle": first})

    def find(self, css: str) -> str:
        element = self.ask(f"{self.session}/element", {"using": "css selector", "value": css})[ELEMENT]
        return f"{self.session}/element/{element}"

    def text(self, css: str) -> str:
        return str(self.ask(f"{self.find(css)}/text"))

    def count(self, css: str) -> int:
        number = self.run("return document.querySelectorAll(arguments[0]).length", css)
        assert isinstance(number, int)
        return number

    def click(self, css: str) -> None:
        self.ask(f"{self.find(css)}/click", {})

    def press(self, name: str) -> None:
        """Clicks the visible button, link or summary with the text `name`."""
        script = """return [...document.querySelectorAll("button, a, summary")]
          .find((one) => one.textContent === arguments[0] && one.checkVisibility() && !one.disabled) ?? null"""
        until(lambda: self.run(script, name) is not None, f"something to press that says {name}")
        target = self.run(script, name)
        self.ask(f"{self.session}/element/{target[ELEMENT]}/click", {})

    def fill(self, css: str, text: str) -> None:
        self.ask(f"{self.find(css)}/clear", {})
        self.ask(f"{self.find(css)}/value", {"text": text})

    def choose(self, css: str, value: str) -> None:
        """Selects an option of a list by its value."""
        script = """const list = document.querySelector(arguments[0]);
          list.value = arguments[1]; list.dispatchEvent(new Event("change", { bubbles: true })); return list.value"""
        assert self.run(script, css, value) == value

    def type(self, *keys: str) -> None:
        """Sends keys, by name (KEYS) or as text, to the focused element."""
        actions = []
        for key in keys:
            for char in [KEYS[key]] if key in KEYS else key:
                actions += [{"type": "keyDown", "value": char}, {"type": "keyUp", "value": char}]
        self.ask(f"{self.session}/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def hover(self, css: str) -> None:
        origin = {ELEMENT: self.find(css).rpartition("/")[2]}
        move = {"type": "pointerMove", "duration": 0, "origin": origin, "x": 0, "y": 0}
        self.ask(f"{self.session}/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def run(self, script: str, *args: Any) -> Any:
        return self.ask(f"{self.session}/execute/sync", {"script": script, "args": list(args)})

    def size(self, width: int, height: int) -> None:
        """Sets the size of the page, as on a phone; 0, 0 is the window's own."""
        if width:
            values = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            self.cdp("Emulation.setDeviceMetricsOverride", **values)
        else:
            self.cdp("Emulation.clearDeviceMetricsOverride")

    def dark(self, is_dark: bool) -> None:
        value = "dark" if is_dark else "light"
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def forget(self) -> None:
        """Leaves the page and deletes its storage."""
        origin = self.run("return location.origin")
        self.ask(f"{self.session}/url", {"url": "about:blank"})
        self.cdp("Storage.clearDataForOrigin", origin=origin, storageTypes="local_storage")

    def complaints(self) -> list[str]:
        """Returns the browser's errors since the last call."""
        entries = self.ask(f"{self.session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def violations(self) -> list[str]:
        """Violations of the content security policy by the open page."""
        return list(self.run("return window.violations"))

    def shoot(self, path: Path, whole: bool = False) -> None:
        """Takes a picture of the window, or of the `whole` page."""
        if whole:
            data = self.cdp("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        else:
            data = self.ask(f"{self.session}/screenshot")
        path.write_bytes(base64.b64decode(data))

    def until(self, script: str) -> None:
        until(lambda: self.run("return " + script), script)
