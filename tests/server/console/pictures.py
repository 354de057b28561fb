"""Remakes the pictures of docs/console.md: `python -m tests.server.console.pictures [MODEL_DIR [EVERY_VIEW]]`.

MODEL_DIR: a calibrated model that holds conversations; without it a tiny model with random weights, which shows the
same pages with answers that mean nothing. Takes some minutes, nearly all of them for a fine-tune. EVERY_VIEW: a folder
for every view at both widths and in both colours, whole, to look at.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.engine.adapters import write_random_adapter
from tests.server.console.browser import Browser, browsing
from tests.server.console.test_chat import IDLE
from tests.server.console.test_frame import VIEWS, ready
from tests.server.process import Process, serving
from tests.tiny import write_tiny_model

DOCS = Path(__file__).resolve().parents[3] / "docs" / "pictures"
SIZE, PHONE = (1100, 800), (390, 780)
FACTS = {
    "What is a scale?": "The number that a tensor is multiplied by before it is cast to FP8.",
    "What is an amax?": "The largest absolute value of a tensor.",
    "What is a recipe?": "The rule that makes scales.",
    "What is headroom?": "How much larger an input may grow before values are cut off.",
}


def main(arguments: list[str]) -> None:
    DOCS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = Path(arguments[0]) if arguments else write_tiny_model(folder / "tiny")
        adapter = write_random_adapter(folder / "tutor", model, rank=8, only=("q_proj", "v_proj"))
        options = {"model": str(model), "data_dir": str(folder / "data"), "train_on": "share"}
        options |= {"adapters": [f"tutor={adapter}"]}
        with serving(folder / "log", **options) as process, browsing(folder) as browser:
            browser.size(*SIZE)
            finetune(browser, process)
            compare(browser)
            browser.until("document.getElementById('notice').hidden")
            scales(browser)
            models(browser)
            browser.press("Requests")
            browser.until("document.querySelectorAll('.requests .chart polyline').length === 2")
            if arguments[1:]:
                every_view(browser, Path(arguments[1]))
            browser.size(*PHONE)
            browser.dark(True)
            browser.press("Chat")
            shoot(browser, "console-phone")


def finetune(browser: Browser, process: Process) -> None:
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in FACTS.items()
    ]
    data = "\n".join(map(json.dumps, rows)).encode()
    form = {"file": ("facts.jsonl", data), "purpose": (None, "fine-tune")}
    file = process.client.post("/v1/files", files=form).json()["id"]
    settings = {"file_id": file, "validation_file_id": file, "eval_every": 4, "save_every": 8, "suffix": "facts"}
    job = process.client.post("/finetune", json={**settings, "max_steps": 16, "learning_rate": 2e-4}).json()
    ready(browser, f"{process.url}/#/finetune/{job['id']}")
    browser.until("document.getElementById('job-status').textContent.startsWith('Done')")
    browser.press("Load it beside its base")
    browser.until("document.querySelector('#notice').textContent.includes('serves now beside')")
    browser.run("document.getElementById('job').scrollIntoView()")
    shoot(browser, "console-finetune")


def compare(browser: Browser) -> None:
    browser.press("Compare in chat")
    browser.until("document.querySelectorAll('.column').length === 2")
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#chat-temperature", "0")
    browser.fill("#chat-tokens", "60")
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#prompt", "What is a scale?")
    browser.type("Enter")
    browser.until(IDLE)
    browser.run("scrollTo(0, 0)")
    browser.hover(".column:last-child .token:nth-child(4)")
    browser.until("!document.querySelector('.hover').hidden")
    shoot(browser, "console-chat")


def scales(browser: Browser) -> None:
    browser.press("Scales")
    browser.until("document.querySelectorAll('.map td[role]').length > 0")
    browser.click(".map tbody tr:nth-child(2) td:last-child")
    looks = "document.querySelector('#detail .chart polyline')?.getAttribute('points').split(' ').length"
    browser.until(f"{looks} > 4")
    shoot(browser, "console-scales")


def models(browser: Browser) -> None:
    browser.press("Models")
    browser.until("document.querySelectorAll('#adapters tbody tr').length === 1")
    browser.run("scrollTo(0, 0)")
    shoot(browser, "console-models")


def every_view(browser: Browser, out: Path) -> None:
    """Takes pictures of all views."""
    out.mkdir(parents=True, exist_ok=True)
    for name in VIEWS.values():
        browser.press(name)
        for width, height in (SIZE, PHONE):
            browser.size(width, height)
            for colour in ("light", "dark"):
                browser.dark(colour == "dark")
                browser.shoot(out / f"{name}-{width}-{colour}.png", whole=True)
        browser.size(*SIZE)
    browser.dark(False)


def shoot(browser: Browser, name: str) -> None:
    browser.shoot(DOCS / f"{name}.png")
    size = (DOCS / f"{name}.png").stat().st_size
    print(f"{name}.png: {size} bytes")
    assert size < 200_000


if __name__ == "__main__":
    main(sys.argv[1:])
