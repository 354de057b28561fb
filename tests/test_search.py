"""The site in a real browser: the first hit of its search answers ten questions of users, and pages fit the screen of a
phone.

The site is built with the packages of `make docs`; without them, or without a browser, the tests are skipped.
"""

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote_plus

import pytest

from tests.patience import PATIENCE
from tests.server.console.browser import MISSING, Browser, browsing, is_installed

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "build/docs-packages"
QUESTIONS = {
    "How do I keep a layer in BF16?": "questions.html#how-do-i-keep-a-layer-in-bf16",
    "What does margin do?": "questions.html#what-does-margin-do",
    "Why is my answer different from transformers'?": "questions.html#why-is-my-answer-different-from-transformers",
    "How do I add a Gemma-like architecture?": "questions.html#how-do-i-add-a-gemma-like-architecture",
    "How do I fine-tune with LoRA?": "tutorials/lora.html",
    "Which recipe should I choose?": "choosing-a-recipe.html",
    "Can vLLM read a checkpoint?": "questions.html#can-vllm-read-a-checkpoint-that-fp8serve-writes",
    "How do I resume an interrupted fine-tune?": "questions.html#how-do-i-resume-a-fine-tune",
    "How do I limit the rate of requests?": "operating.html#rate-limits",
    "Does it support speculative decoding?": "operating.html#speculative-decoding",
}


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without logging."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the built site."""
    if not (PACKAGES / "complete").exists():
        pytest.skip("Sphinx is not installed here: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--doctree-dir", str(folder / "doctrees"), str(ROOT / "docs")]
    environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
    subprocess.run([*command, str(folder / "html")], cwd=ROOT, env=environment, timeout=PATIENCE, check=True)
    handler = functools.partial(Quiet, directory=str(folder / "html"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(site: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not is_installed():
        pytest.skip(MISSING)
    with browsing(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.mark.slow  # builds the site
@pytest.mark.browser
@pytest.mark.parametrize(("question", "answer"), QUESTIONS.items())
def test_the_first_hit_answers(question: str, answer: str, site: str, browser: Browser) -> None:
    browser.open(f"{site}/search.html?q={quote_plus(question)}")
    browser.until("/finished|did not match/.test(document.querySelector('#search-results').textContent)")
    hits = browser.run(
        """return [...document.querySelectorAll("#search-results ul.search > li > a")]
        .map((hit) => hit.getAttribute("href"))"""
    )
    assert hits[0] == answer, hits[:5]


@pytest.mark.slow
@pytest.mark.browser
def test_the_page_of_options_fits_the_screen_of_a_phone(site: str, browser: Browser) -> None:
    """Neither the longest page nor any of its tables is wider than the screen."""
    browser.size(390, 844)
    browser.open(f"{site}/options.html")
    wider = """return [...document.querySelectorAll(".table-wrapper, html")]
        .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent.trim().slice(0, 80))"""
    browser.until("document.querySelectorAll('section#options td').length > 1000")
    assert browser.run(wider) == []
    assert browser.complaints() == []
