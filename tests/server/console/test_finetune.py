"""Fine-tuning from the page: data, a dry run, live losses, checkpoints, serving the result and rolling back."""

import json
from pathlib import Path

import pytest

from tests.engine.tiny import write_model
from tests.server.console.browser import Browser
from tests.server.console.canned import answer_with
from tests.server.console.test_chat import IDLE
from tests.server.console.test_frame import ready, show_view
from tests.server.process import Process, serving

pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=alert(1)>.jsonl"
ROWS = "\n".join(json.dumps({"prompt": f"{i} is", "completion": f" {i}."}) for i in range(4))


def drop_file(browser: Browser, name: str, text: str) -> None:
    """Chooses a file, as the dialog of the browser does."""
    browser.run(
        """const [name, text] = arguments, given = new DataTransfer();
        given.items.add(new File([text], name)); const field = document.getElementById("file");
        field.files = given.files; field.dispatchEvent(new Event("change", { bubbles: true }))""",
        name,
        text,
    )


def test_a_file_becomes_a_model_that_serves(browser: Browser, server: Process, tmp_path: Path) -> None:
    ready(browser, server.url + "/#/finetune")
    browser.until("document.querySelector('#job-recipe')")
    drop_file(browser, HOSTILE, ROWS)
    browser.until("document.getElementById('file-note').textContent.endsWith('is on the server.')")
    assert browser.count("main img") == 0
    file = browser.run("return document.getElementById('data-source').value")
    browser.choose("#validation-source", file)
    browser.click("#check")
    browser.until("document.getElementById('tune-note').textContent.startsWith('4 rows')")
    assert browser.count("mark") > 0
    for name, value in {"learning_rate": "0.003", "max_steps": "6"}.items():
        browser.fill(f"#job-{name}", value)
    browser.press("More options")
    browser.fill("#job-eval_every", "2")
    browser.fill("#job-save_every", "3")
    browser.click("#start")
    browser.until("document.getElementById('job-status').textContent.startsWith('Done')")
    browser.until("document.querySelectorAll('#job .chart polyline').length === 2")  # training and validation
    browser.until("document.querySelectorAll('#job .chart circle.second').length === 3")
    browser.until("document.querySelectorAll('#job table tbody tr').length === 2")
    browser.shoot(tmp_path / "job.png", whole=True)
    browser.press("Serve it")
    browser.until("document.getElementById('job-status').textContent.endsWith('and serving.')")
    browser.until("document.getElementById('notice').textContent.startsWith('Now serving ft:tiny:')")
    browser.until("document.querySelectorAll('#job-actions a').length === 1")
    browser.press("Compare in chat")
    browser.until("document.querySelectorAll('.column').length === 2")
    show_view(browser, "Models")
    browser.until("document.querySelectorAll('#available tbody tr').length === 2")
    assert "ft:tiny:" in browser.text("#served")
    browser.press("Roll back to tiny")
    browser.until("document.getElementById('notice').textContent === 'Now serving tiny.'")
    browser.until("document.querySelector('#served dd').textContent === 'tiny'")
    compare_beside_its_base(browser)
    show_view(browser, "Fine-tune")
    browser.press("Delete this file")
    browser.until("document.getElementById('file-note').textContent.startsWith('The file was deleted')")
    assert browser.complaints() == []


def compare_beside_its_base(browser: Browser) -> None:
    browser.press("Load beside")
    browser.until("document.querySelectorAll('#served tbody tr').length === 2")
    name = browser.run("return document.querySelector('#served tbody tr:last-child th').textContent")
    assert name.startswith("tuned-")
    browser.run("location.hash = `#/chat?model=${arguments[0]}`", name)
    browser.until("document.getElementById('chat-other').value.startsWith('tuned-')")
    browser.fill("#prompt", "1 is")
    browser.type("Enter")
    browser.until(IDLE)
    weights = browser.run("return [...document.querySelectorAll('.facts-line')].map((one) => one.textContent)")
    assert "weights base-" in weights[0]
    assert "weights ftjob-" in weights[1]
    assert browser.text(".composer p") == ""
    show_view(browser, "Models")
    browser.press("Unload")
    browser.until("document.querySelectorAll('#served tbody tr').length === 0")


def test_invalid_training_data_is_refused_with_a_sentence(browser: Browser, server: Process) -> None:
    ready(browser, server.url + "/#/finetune")
    browser.until("document.querySelector('#job-recipe')")
    browser.fill("#rows", '{"prompt": "a", "completion": " b"}\n{"prompt": ')
    browser.click("#start")
    browser.until("document.getElementById('tune-note').textContent.startsWith('Line 2 is not JSON')")
    browser.fill("#rows", '{"messages": "none"}')
    browser.click("#check")
    browser.until("document.querySelector('#tune-note.error')?.textContent.includes('messages')")
    browser.fill("#rows", "one text\nanother text")
    browser.fill("#job-epochs", "0")
    browser.click("#start")
    browser.until("document.getElementById('tune-note').textContent.includes('epochs')")
    drop_file(browser, "empty.jsonl", "")
    browser.until("document.getElementById('file-note').textContent.includes('empty')")
    browser.fill("#job-epochs", "1")
    browser.click("#check")
    browser.until("document.getElementById('tune-note').textContent.startsWith('2 rows')")
    assert all("status of 4" in message for message in browser.complaints())  # the browser's own notes on refusals


def test_the_page_stays_whole_while_a_job_has_the_device(browser: Browser, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    options = {"model": str(tmp_path / "tiny"), "data_dir": str(tmp_path / "data"), "recipe": "current"}
    with serving(tmp_path / "log", **options, train_on="pause") as process:
        process.client.post("/finetune", json={"data": [{"text": "abc " * 30}] * 40, "epochs": 1000})
        ready(browser, process.url + "/#/finetune", "paused")
        assert "A fine-tune job has the device" in browser.text("#notice")
        browser.until("document.getElementById('job-status').textContent.startsWith('Running, step')")
        browser.until("document.querySelectorAll('#job .chart polyline').length === 1")
        show_view(browser, "Scales")
        browser.until("document.querySelectorAll('.map td[role]').length === 14")
        show_view(browser, "Chat")
        browser.until("document.querySelector('#prompt') !== null")
        browser.fill("#prompt", "Why?")
        browser.type("Enter")
        browser.until("document.querySelector('.facts-line.error')?.textContent.includes('Serving is paused')")
        show_view(browser, "Fine-tune")
        browser.press("Pause")
        browser.until("document.getElementById('job-status').textContent.startsWith('Paused, step')")
        browser.until("document.getElementById('state').textContent === 'ready'")  # the device is free meanwhile
        browser.press("Go on from the last checkpoint")
        browser.until("document.getElementById('job-status').textContent.startsWith('Running, step')")
        browser.until("document.getElementById('state').textContent === 'paused'")
        waiting = process.client.post("/finetune", json={"data": [{"text": "abc"}]}).json()["id"]
        process.client.post(f"/finetune/{waiting}/cancel")
        browser.press("Cancel")
        browser.until("document.getElementById('state').textContent === 'ready'")
        browser.until("document.getElementById('job-status').textContent.startsWith('Cancelled')")
        browser.until("document.getElementById('notice').hidden")
        browser.run(f"location.hash = '#/finetune/{waiting}'")
        browser.until("document.getElementById('job-status').textContent === 'Cancelled.'")  # there is no checkpoint
        assert all("503" in message for message in browser.complaints())  # the browser's own notes on health


def test_the_address_of_an_unknown_job_shows_an_error(browser: Browser, server: Process) -> None:
    ready(browser, server.url + "/#/finetune/ftjob-of-nobody")
    browser.until("document.querySelector('.finetune > .error').textContent.includes('no fine-tune job with that id')")
    browser.until("document.querySelector('#job-recipe')")
    assert all("404" in message for message in browser.complaints())  # the browser's own notes


def test_a_server_that_refuses_jobs_offers_no_start(browser: Browser, scaled: Process) -> None:
    reason = scaled.client.get("/info").json()["training_refused"]
    refused = scaled.client.post("/finetune", json={"data": [{"text": "abc"}]})
    assert (refused.status_code, refused.json()["error"]) == (409, reason)
    ready(browser, scaled.url + "/#/finetune")
    browser.until("document.getElementById('start').disabled")
    assert browser.text("#refusal") == (
        f"{reason} Start the server with --train-on share, --train-on pause or --train-device to run jobs."
    )
    browser.until("document.querySelector('#job-suffix')")
    browser.run("document.querySelector('form.card').requestSubmit()")  # as Enter in a field does
    browser.press("Check only")
    browser.until("document.getElementById('tune-note').textContent.includes('2 rows')")
    assert scaled.client.get("/finetune").json()["jobs"] == []
    job = {"id": "ftjob-0", "status": "paused", "progress": {}, "config": {}, "base_model": "tiny", "active": False}
    answer_with(browser, "/finetune", {"jobs": [job]})
    answer_with(browser, "/finetune/ftjob-0", job)
    answer_with(browser, "/checkpoints", {"checkpoints": []})
    browser.until("[...document.querySelectorAll('#job-actions button:disabled')].length === 1")
    assert browser.text("#job-actions button:disabled") == "Go on from the last checkpoint"
    browser.complaints()


@pytest.mark.smoke
def test_a_server_that_runs_jobs_offers_a_start(browser: Browser, server: Process) -> None:
    assert server.client.get("/info").json()["training_refused"] is None
    ready(browser, server.url + "/#/finetune")
    browser.until("document.querySelector('#job-recipe')")
    assert browser.run("return document.getElementById('start').disabled") is False
    assert browser.run("return document.getElementById('refusal').hidden") is True
