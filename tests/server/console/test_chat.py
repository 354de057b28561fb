"""The chat: streams, probabilities, two columns, tools, what can be done with a conversation, and hostile text."""

import json
from pathlib import Path

import pytest

from tests.server.console.browser import Browser
from tests.server.console.canned import answer_with, chunk, token
from tests.server.console.test_frame import ready
from tests.server.fakes import model_dir
from tests.server.process import Process, serving

pytestmark = pytest.mark.browser
IDLE = (
    "document.querySelector('.turn') && [...document.querySelectorAll('.log')].every((log) => log.ariaBusy === 'false')"
)
TOOLS = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}])


def say(browser: Browser, text: str) -> None:
    browser.fill("#prompt", text)
    browser.type("Enter")
    browser.until(IDLE)


def test_an_answer_streams_with_the_probability_of_every_token(browser: Browser, server: Process) -> None:
    ready(browser, server.url + "/#/chat")
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#chat-tokens", "12")
    say(browser, "What is a scale?")
    assert browser.text(".said").endswith("What is a scale?")
    assert "12 tokens" in browser.text(".facts-line")
    assert "weights base-" in browser.text(".facts-line")
    assert browser.count(".answer .token") > 1
    browser.hover(".answer .token:first-child")
    browser.until("!document.querySelector('.hover').hidden")
    assert browser.count(".hover tr") >= 5
    assert browser.count(".hover .chosen") == 1
    browser.run("document.querySelector('.answer .text').focus()")
    browser.type("Right", "Right", "Left")
    assert browser.run("return document.querySelector('.current') === document.querySelector('.answer .token')")
    assert "%" in browser.run("return document.querySelector('p.unseen[role=status]').textContent")
    browser.type("Escape")
    assert browser.run("return document.querySelector('.hover').hidden")
    say(browser, "And why?")
    assert browser.count(".turn") == 2
    assert browser.complaints() == []


def test_two_columns_get_the_same_prompt_and_seed(browser: Browser, server: Process) -> None:
    ready(browser, server.url + "/#/chat?model=tiny")
    browser.until("document.querySelectorAll('.column').length === 2")
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#chat-tokens", "16")
    say(browser, "Why?")
    answers = browser.run("return [...document.querySelectorAll('.answer .text')].map((one) => one.textContent)")
    assert len(answers) == 2
    assert answers[0] == answers[1] != ""
    assert "answered by the same weights, base-" in browser.text(".composer p")
    browser.click("#again")
    browser.until(IDLE)
    other = browser.run("return [...document.querySelectorAll('.answer .text')].map((one) => one.textContent)")
    assert other[0] == other[1] != answers[0]  # the next seed
    assert "Answer 2 of 2" in browser.text(".variants")
    browser.click("[aria-label='Earlier answer']")
    assert browser.run("return document.querySelector('.answer .text').textContent") == answers[0]
    assert browser.complaints() == []


def test_an_answer_can_be_stopped_and_the_conversation_goes_on(browser: Browser, echoing: Process) -> None:
    ready(browser, echoing.url + "/#/chat")
    browser.fill("#prompt", "abc")
    browser.type("Enter")
    browser.until("document.querySelectorAll('.answer .token').length > 5")
    browser.click("#stop")
    browser.until("document.querySelector('.facts-line').textContent.startsWith('Stopped')")
    browser.until(IDLE)
    assert browser.run("return document.activeElement.id") == "prompt"
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#chat-tokens", "8")
    say(browser, "def")
    assert browser.count(".turn") == 2
    browser.click("#new")
    assert browser.count(".turn") == 0
    assert browser.complaints() == []


def test_a_conversation_outlives_a_reload_until_it_is_forgotten(browser: Browser, server: Process) -> None:
    kept = "return Object.keys(localStorage).length"
    ready(browser, server.url + "/#/chat")
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#chat-system", "Be <b>kind</b>.")
    browser.fill("#chat-tokens", "6")
    say(browser, "Why?")
    browser.click("#again")
    browser.until("document.querySelector('.variants')?.textContent.includes('Answer 2 of 2')")
    browser.until(IDLE)
    text = browser.text(".answer")
    answer_with(browser, "/v1/chat/completions", [
        chunk(tool_calls=[{"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": "{}"}}]),
        chunk(finish="tool_calls"),
    ])  # fmt: skip
    say(browser, "And here?")
    assert browser.run(kept) == 1
    ready(browser, server.url + "/#/chat")  # as a reload: nothing of the page is left
    assert browser.count(".turn") == 2
    assert browser.text(".answer") == text
    assert "Answer 2 of 2" in browser.text(".variants")
    browser.run(  # by a script: a model that learnt nothing writes characters without a width
        "document.querySelector('.answer .token').dispatchEvent(new PointerEvent('pointerover', { bubbles: true }))"
    )
    browser.until("document.querySelectorAll('.hover tr').length >= 5")
    answer_with(browser, "/v1/chat/completions", [chunk(content="Warm."), chunk(finish="stop")])
    browser.fill(".results textarea", "30 degrees")  # the call waits for its result, as before
    browser.press("Send results")
    browser.until("document.querySelectorAll('.turn').length === 3")
    browser.until(IDLE)
    sent = browser.run("return window.bodies.at(-1)")
    roles = [message["role"] for message in sent["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "tool"]
    assert (sent["messages"][0]["content"], sent["max_tokens"]) == ("Be <b>kind</b>.", 6)
    browser.click("#new")
    assert browser.run(kept) == 0
    ready(browser, server.url + "/#/chat")
    assert browser.count(".turn") == 0
    browser.run("localStorage.setItem(`fp8serve chat ${location.pathname}`, '{\"columns\": 1}')")  # of another version
    ready(browser, server.url + "/#/chat")
    assert (browser.count(".turn"), browser.run(kept)) == (0, 0)
    assert browser.complaints() == []


def test_an_answer_that_a_reload_cut_off_is_kept_as_far_as_it_came(browser: Browser, echoing: Process) -> None:
    ready(browser, echoing.url + "/#/chat")
    browser.fill("#prompt", "abc")
    browser.type("Enter")
    browser.until("document.querySelectorAll('.answer .token').length > 5")
    ready(browser, echoing.url + "/#/chat")
    assert browser.count(".answer .token") > 5
    assert browser.text(".facts-line").startswith("Stopped, because the page was loaded again.")
    browser.run("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#chat-tokens", "4")
    say(browser, "def")
    assert browser.text(".composer p.quiet").startswith("This browser does not keep the conversation")
    browser.click("#new")
    assert browser.complaints() == []


def test_a_refusal_is_a_sentence_and_not_a_part_of_the_conversation(browser: Browser, server: Process) -> None:
    ready(browser, server.url + "/#/chat")
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#chat-tokens", "100000")
    say(browser, "Why?")
    assert "context" in browser.text(".facts-line.error")
    assert "not a part of the conversation" in browser.text(".facts-line.error")
    browser.fill("#chat-tokens", "4")
    browser.click("#again")
    browser.until(IDLE)
    assert "4 tokens" in browser.text(".facts-line")
    browser.fill("#chat-tools", "{")
    browser.fill("#prompt", "Why?")
    browser.click("#go")
    assert "The tools are not JSON" in browser.text(".composer .error")
    assert browser.run("return document.getElementById('prompt').value") == "Why?"  # nothing is lost
    assert all("400" in message for message in browser.complaints())  # the browser's own note on the refusal


def test_a_model_without_a_template_writes_plain_text(browser: Browser, scaled: Process) -> None:
    ready(browser, scaled.url + "/#/chat")
    say(browser, "Once")
    assert browser.count(".facts-line.error") == 1
    browser.complaints()
    browser.choose("#chat-mode", "text")
    browser.click("#again")
    browser.until(IDLE)
    assert "tokens" in browser.text(".facts-line")
    assert browser.count(".facts-line.error") == 0
    browser.hover(".answer .token")
    browser.until("document.querySelectorAll('.hover tr').length >= 5")
    assert browser.complaints() == []


def test_reasoning_calls_and_broken_characters_are_shown(browser: Browser, server: Process) -> None:
    ready(browser, server.url + "/#/chat")
    euro = "€".encode()
    answer_with(browser, "/v1/chat/completions", [
        chunk(role="assistant", content=""),
        chunk(logprobs=[token(b"<think>", -0.1), token(b"hm", -3.0, ("ah", -0.4))], reasoning_content="hm"),
        chunk(logprobs=[token(euro[:1], -0.5), token(euro[1:], -0.5)], content="€"),
        chunk(tool_calls=[{"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": ""}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"city": "<b>Rome"}'}}]),
        chunk(finish="tool_calls"),
    ])  # fmt: skip
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#chat-system", "Be kind.")
    browser.fill("#chat-tools", TOOLS)
    say(browser, "How is it?")
    assert browser.run("return document.querySelector('.part .text').textContent") == "hm"
    assert browser.count(".part .token.rare") == 1
    assert browser.count(".answer > .text .token.unsure") == 1
    assert browser.text(".answer > .text") == "€"
    assert browser.text(".call summary") == "Calls weather"
    assert "<b>Rome" in browser.text(".call pre")
    sent = browser.run("return window.bodies.at(-1)")
    assert sent["messages"][0] == {"role": "system", "content": "Be kind."}
    assert sent["tools"] == json.loads(TOOLS)
    answer_with(browser, "/v1/chat/completions", [chunk(content="Warm."), chunk(finish="stop")])
    browser.fill(".results textarea", "30 degrees")
    browser.press("Send results")
    browser.until("document.querySelectorAll('.turn').length === 2")
    browser.until(IDLE)
    called, result = browser.run("return window.bodies.at(-1).messages.slice(-2)")
    assert called["tool_calls"][0]["function"]["arguments"] == '{"city": "<b>Rome"}'
    assert result == {"role": "tool", "tool_call_id": "call-1", "content": "30 degrees"}
    assert browser.complaints() == []


def test_a_stream_that_breaks_off_is_told(browser: Browser, server: Process) -> None:
    ready(browser, server.url + "/#/chat")
    answer_with(browser, "/v1/chat/completions", [chunk(content="half")])
    say(browser, "Why?")
    assert "ended before the answer did" in browser.text(".facts-line.error")
    answer_with(browser, "/v1/chat/completions", [chunk(content="half"), {"error": {"message": "The engine ended."}}])
    browser.click("#again")
    browser.until(IDLE)
    assert browser.text(".facts-line.error").startswith("The engine ended.")


def test_text_is_never_markup(browser: Browser, echoing: Process) -> None:
    hostile = '<img src=x onerror="window.hit = 1"><script>window.hit = 1</script>{{7*7}}'
    ready(browser, echoing.url + "/#/chat")
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#chat-tokens", "100")
    say(browser, hostile)
    assert "<img src=x" in browser.run("return document.querySelector('.answer .text').textContent")
    browser.hover(".answer .token:first-child")
    models = [{"id": hostile, "object": "model", "task": "generate", "max_model_len": 64}]
    answer_with(browser, "/v1/models", {"object": "list", "data": models})
    browser.until("document.querySelector('#chat-model option').value.startsWith('<img')")
    browser.run("location.hash = '#/models'")
    browser.until("document.querySelector('#names').textContent.includes('<img')")
    assert browser.count("main img, main script") == 0
    assert browser.run("return window.hit ?? null") is None
    assert browser.complaints() == []


def test_a_conversation_becomes_training_data(browser: Browser, echoing: Process) -> None:
    ready(browser, echoing.url + "/#/chat")
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#chat-tokens", "8")
    say(browser, "abc")
    browser.click("#train-on-this")
    browser.press("Fine-tune")
    browser.until("document.getElementById('rows')")
    row = json.loads(browser.run("return document.getElementById('rows').value"))
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert row["messages"][0]["content"] == "abc"
    assert len(row["messages"][1]["content"]) == 8


def test_a_server_that_dies_in_the_middle_costs_no_word(browser: Browser, tmp_path: Path) -> None:
    options = {"model": str(model_dir(tmp_path / "echo")), "data_dir": str(tmp_path / "data"), "fake": True}
    with serving(tmp_path / "log", **options, delay=0.05) as process:
        ready(browser, process.url + "/#/chat")
        browser.fill("#prompt", "abc")
        browser.type("Enter")
        browser.until("document.querySelectorAll('.answer .token').length > 5")
        process.popen.kill()
        browser.until("document.querySelector('.facts-line.error')?.textContent.includes('lost')")
        browser.until("document.getElementById('state').textContent === 'no answer'")
        assert browser.count(".answer .token") > 5
    browser.fill("#prompt", "def")
    browser.type("Enter")
    browser.until("document.querySelectorAll('.facts-line.error').length === 2")
    assert "The server does not answer." in browser.run("return document.querySelector('.turn:last-child').textContent")
