"""The view of requests: a live server's counts, and any metrics that Prometheus' format allows."""

import json

import pytest

from tests.patience import until
from tests.server.console.browser import Browser
from tests.server.console.canned import answer_with
from tests.server.console.test_frame import ready
from tests.server.process import Process

pytestmark = pytest.mark.browser


def test_live_numbers_of_a_server(browser: Browser, echoing: Process) -> None:
    ready(browser, echoing.url + "/#/requests")
    browser.until("document.querySelectorAll('#tiles li').length === 6")
    echoing.client.post("/generate", json={"inputs": "abc", "parameters": {"max_new_tokens": 8}})
    browser.until("/Ended: ok\\s*[1-9]/.test(document.querySelector('.requests').textContent)")
    browser.until("document.querySelectorAll('.requests .chart polyline').length === 2")
    browser.until("document.getElementById('tiles').textContent.includes('25 %')")  # of the cache, as the engine says
    assert browser.complaints() == []


def test_a_request_is_seen_and_ended(browser: Browser, slow: Process) -> None:
    ready(browser, slow.url + "/#/requests")
    browser.until("document.querySelector('#under-way')?.textContent.includes('No request.')")
    body = {"prompt": "abc", "max_tokens": 500, "stream": True}
    with slow.client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "the-long-one"}) as answer:
        browser.until("document.querySelector('#under-way tbody tr')?.textContent.startsWith('the-long-one')")
        browser.until("document.querySelector('#under-way tbody tr')?.textContent.includes('decode')")
        row = browser.run("return [...document.querySelectorAll('#under-way tbody td')].map((one) => one.textContent)")
        assert row[:3] == ["anonymous", "echo", "decode"]
        assert row[4].endswith(" of 500")
        browser.press("Cancel")
        assert '"request_cancelled"' in answer.read().decode()
    browser.until("document.querySelector('#under-way').textContent.includes('No request.')")
    browser.until("document.getElementById('notice').textContent === 'The request the-long-one was cancelled.'")
    assert browser.complaints() == []


def test_any_valid_prometheus_text_is_read(browser: Browser, server: Process) -> None:
    ready(browser, server.url + "/#/requests")
    tenants = [
        'fp8serve_tenant_requests_total{tenant="a\\"},<b>"} 7.0',
        'fp8serve_tenant_requests_total{tenant="b"} 3.0',
    ]
    seconds = [f'fp8serve_request_seconds_bucket{{le="{le}"}} {n}' for le, n in (("1.0", 0), ("2.0", 10), ("+Inf", 10))]
    lines = ["# HELP x y", 'fp8serve_requests_in_flight{model="a"} 2.0', 'fp8serve_requests_in_flight{model="b"} 3.0']
    answer_with(browser, "/metrics", "\n".join([*lines, *tenants, *seconds, "fp8serve_nothing NaN", ""]))
    browser.until("document.querySelector('#tiles .figure')?.textContent === '5'")
    for text in ('a"},<b>', "1.5 s"):
        browser.until(f"document.querySelector('.requests').textContent.includes({json.dumps(text)})")
    assert browser.complaints() == []


DRAFTS = "return [...document.querySelectorAll('#drafts tbody td, #drafts tbody th')].map((one) => one.textContent)"


def test_drafts_that_were_accepted_are_shown_by_model(browser: Browser, drafting: Process) -> None:
    ready(browser, drafting.url + "/#/requests")
    browser.until("document.querySelector('#drafts')?.hidden === false")
    assert browser.run(DRAFTS) == ["tiny", "0", "0", "0", "–"]
    body = {"prompt": "to be or not to be, to be or", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    assert drafting.client.post("/v1/completions", json=body).status_code == 200

    def counted() -> list[str]:
        names = ("drafts", "draft_tokens", "accepted_draft_tokens")
        drafts, proposed, accepted = (int(drafting.metric(f"fp8serve_{name}_total")) for name in names)
        share = f"{100 * accepted / proposed:.3g} %" if proposed else "–"
        return ["tiny", *(f"{n:,}" for n in (drafts, proposed, accepted)), share]

    until(lambda: counted()[3] != "0", "accepted tokens")
    until(lambda: browser.run(DRAFTS) == counted(), "the counts on the page")
    assert browser.complaints() == []


@pytest.mark.smoke
def test_a_server_without_drafts_shows_none(browser: Browser, server: Process) -> None:
    ready(browser, server.url + "/#/requests")
    browser.until("document.querySelectorAll('#tiles li').length === 6")
    assert browser.run("return document.querySelector('#drafts').hidden")
