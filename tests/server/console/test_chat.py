"""The chat: streams, probabilities, two columns, tools, what can be done with a conversation, and hostile text."""

import json
from pathlib import Path

import pytest

from tests.patience import until
from tests.server.console.browser import Browser
from tests.server.console.canned import answer_with, chunk, token
from tests.server.console.conftest import serving_echoes
from tests.server.console.test_frame import ready, show_view
from tests.server.process import Process

pytestmark = pytest.mark.browser
IDLE = (
    "document.querySelector('.turn') && [...document.querySelectorAll('.log')].every((log) => log.ariaBusy === 'false')"
)
TOOLS = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}])


def copy(browser: Browser, css: str) -> None:
    """Presses a button that copies a text, and waits until it says so; two seconds later it has its own name again."""
    script = """const button = document.querySelector(arguments[0]);
      const record = () => { button.dataset.names += button.textContent; };
      new MutationObserver(record).observe(button, { childList: true });"""
    browser.run(script, css)
    browser.click(css)
    browser.until(f"document.querySelector('{css}').dataset.names?.includes('Copied')")


def say(browser: Browser, text: str) -> None:
    browser.fill("#prompt", text)
    browser.type("Enter")
    browser.until(IDLE)


@pytest.mark.smoke
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


def test_an_answer_can_be_stopped_and_the_conversation_goes_on(browser: Browser, slow: Process) -> None:
    ready(browser, slow.url + "/#/chat")
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
    browser.until("document.querySelectorAll('.turn').length === 0")
    assert browser.complaints() == []


STORED = "return Object.keys(localStorage).filter((name) => !name.endsWith(' index')).length"
"""How many conversations the browser stores."""


def test_a_conversation_outlives_a_reload_until_it_is_deleted(browser: Browser, server: Process) -> None:
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
    assert browser.run(STORED) == 1
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
    body = browser.run("return window.bodies.at(-1)")
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "tool"]
    assert (body["messages"][0]["content"], body["max_tokens"]) == ("Be <b>kind</b>.", 6)
    browser.click("#new")
    browser.until("document.querySelectorAll('.turn').length === 0")
    ready(browser, server.url + "/#/chat")
    assert (browser.count(".turn"), browser.run(STORED)) == (0, 1)
    browser.press("Conversations (1)")
    browser.press("Delete")
    browser.until("document.getElementById('chats').hidden")
    assert browser.run(STORED) == 0
    browser.run(
        "const name = `fp8serve chat ${location.pathname}`;"
        "localStorage.setItem(`${name} a`, '{\"columns\": 1}');"  # of another version
        "localStorage.setItem(`${name} index`, JSON.stringify({ open: 'a', list: [{ id: 'a', title: '', at: 0 }] }));"
    )
    ready(browser, server.url + "/#/chat")
    assert (browser.count(".turn"), browser.run(STORED)) == (0, 0)
    assert browser.complaints() == []


def test_a_reload_during_an_answer_is_not_reported_as_a_lost_connection(browser: Browser, slow: Process) -> None:
    ready(browser, slow.url + "/#/chat")
    browser.fill("#prompt", "second " * 20)
    browser.type("Enter")
    browser.until("document.querySelectorAll('.answer .token').length > 5")
    browser.reload()
    browser.until("document.querySelector('.facts-line')")
    assert browser.text(".facts-line") == (
        "Stopped, because the page was loaded again. What came so far is a part of the conversation."
    )
    assert browser.count(".answer .token") > 5
    assert browser.complaints() == []


def test_two_tabs_of_one_conversation_lose_no_turn(browser: Browser, echoing: Process) -> None:
    ready(browser, echoing.url + "/#/chat")
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#chat-tokens", "4")
    say(browser, "root")
    with browser.another_tab():
        ready(browser, echoing.url + "/#/chat")
        assert browser.count(".turn") == 1
        say(browser, "second tab")
        assert "Another tab" not in browser.text("#notice")
    browser.until("Object.values(localStorage).some((text) => text.includes('second tab'))")
    say(browser, "first tab")
    assert browser.run(STORED) == 2
    assert browser.text("#notice").startswith("Another tab has gone on with this conversation")
    say(browser, "first tab again")
    assert browser.run(STORED) == 2
    browser.run("scrollTo(0, 0)")  # the notice may lie above what is at the page's edge
    browser.press("Conversations (2)")
    browser.click(".chats li:last-child .plain")
    browser.until("document.querySelectorAll('.turn').length === 2")
    assert browser.text(".turn:last-child .said").endswith("second tab")
    with browser.another_tab():  # looks at it and is closed: nothing new is stored
        ready(browser, echoing.url + "/#/chat")
    say(browser, "third")
    assert browser.run(STORED) == 2
    assert browser.complaints() == []


def test_a_conversation_that_another_tab_deletes_stays_deleted(browser: Browser, echoing: Process) -> None:
    ready(browser, echoing.url + "/#/chat")
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#chat-tokens", "4")
    say(browser, "abc")
    with browser.another_tab():
        ready(browser, echoing.url + "/#/chat")
        browser.press("Conversations (1)")
        browser.press("Delete")
        browser.until("document.getElementById('chats').hidden")
    until(lambda: browser.run(STORED) == 0, "the deletion in the first tab")
    browser.reload()
    browser.until("document.getElementById('state').textContent === 'ready'")
    assert (browser.count(".turn"), browser.run(STORED)) == (0, 0)
    assert browser.complaints() == []


def test_conversations_are_listed_opened_and_deleted(browser: Browser, slow: Process) -> None:
    titles = "[...document.querySelectorAll('.chats .plain')].map((one) => one.textContent).join()"
    ready(browser, slow.url + "/#/chat")
    assert browser.run("return document.getElementById('chats').hidden")
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#chat-tokens", "4")
    browser.fill("#chat-system", "Be kind.")
    say(browser, "<b>first</b>")
    browser.click("#new")
    browser.until("document.querySelectorAll('.turn').length === 0")
    browser.fill("#chat-tokens", "200")
    browser.fill("#chat-system", "Be short.")
    browser.fill("#prompt", "second " * 20)
    browser.type("Enter")
    browser.until("document.querySelectorAll('.answer .token').length > 5")
    browser.press("Conversations (2)")
    browser.press("<b>first</b>")  # while the second is still being answered
    browser.until("document.querySelector('.said')?.textContent.endsWith('<b>first</b>')")
    assert browser.count(".turn") == 1
    assert browser.run("return document.getElementById('chat-tokens').value") == "4"
    assert browser.run("return document.getElementById('chat-system').value") == "Be kind."
    assert browser.text(".chats [aria-current]") == "<b>first</b>"
    assert browser.run(f"return {titles}").startswith("second second")  # the latest first
    ready(browser, slow.url + "/#/chat")  # a reload shows the one that was open
    assert browser.text(".said").endswith("<b>first</b>")
    browser.press("Conversations (2)")
    browser.click(".chats li:first-child .plain")
    browser.until("document.querySelector('.said').textContent.includes('second')")
    assert browser.text(".facts-line").startswith("Stopped. What came so far")
    assert browser.count(".answer .token") > 5  # probabilities are stored, too
    browser.click(".chats li:last-child button:last-child")  # not the one that is shown
    browser.until(f"!{titles}.includes('first')")
    assert (browser.count(".turn"), browser.run(STORED)) == (1, 1)
    browser.press("Delete")
    browser.until("document.querySelectorAll('.turn').length === 0")
    assert browser.run(STORED) == 0
    assert browser.complaints() == []


def test_a_full_storage_drops_the_probabilities_of_the_oldest_conversation_first(
    browser: Browser, echoing: Process
) -> None:
    sizes = (
        "return Object.entries(localStorage).filter(([name]) => !name.endsWith(' index'))"
        ".map(([, text]) => text.includes('logprob\"'))"
    )
    ready(browser, echoing.url + "/#/chat")
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#chat-tokens", "8")
    say(browser, "abc")
    browser.click("#new")
    browser.until("document.querySelectorAll('.turn').length === 0")
    browser.run(  # as full as it can be with one of them in brief
        "const set = Storage.prototype.setItem;"
        "Storage.prototype.setItem = function (name, value) {"
        "  const others = Object.entries(localStorage).filter(([other]) => other !== name);"
        "  if ([[name, value], ...others].filter(([, text]) => text.includes('logprob\"')).length > 1)"
        "    throw new DOMException('full', 'QuotaExceededError');"
        "  set.call(this, name, value);"
        "}"
    )
    say(browser, "def")
    assert sorted(browser.run(sizes)) == [False, True]
    browser.press("Conversations (2)")
    browser.click(".chats li:last-child .plain")
    browser.until("document.querySelector('.said').textContent.endsWith('abc')")
    assert (browser.count(".answer .token"), len(browser.text(".answer .text"))) == (0, 8)
    assert browser.complaints() == []


MARKDOWN = """# Title <img src=x onerror="window.hit = 1">

Some **bold *and* both**, `code <b>` and snake_case_name, 2 * 3.
[a link](javascript:alert(1)) ![x](http://example.com/x.png)

1. one
   - inner
2. two

> quoted

```python onclick=x
def f():
    return "<script>window.hit = 1</script>"


```
"""


def test_an_answer_is_formatted_without_becoming_markup(browser: Browser, server: Process) -> None:
    pieces = MARKDOWN.split(" ")
    words = [piece + " " for piece in pieces[:-1]] + pieces[-1:]
    ready(browser, server.url + "/#/chat")
    answer_with(browser, "/v1/chat/completions", [
        *(chunk(logprobs=[token(word.encode(), -0.1, ("else", -2.0))], content=word) for word in words),
        chunk(finish="stop"),
    ])  # fmt: skip
    say(browser, "Why?")
    tree = browser.run(
        "const shape = (node) => [node.tagName.toLowerCase(), ...[...node.children]"
        ".filter((one) => !['SPAN', 'BUTTON'].includes(one.tagName)).map(shape)];"
        "return shape(document.querySelector('.answer .text')).slice(1)"
    )
    item = ["li", ["p"], ["ul", ["li", ["p"]]]]
    assert tree == [
        ["p"], ["p", ["strong", ["em"]], ["code"]], ["ol", item, ["li", ["p"]]], ["blockquote", ["p"]],
        ["div", ["div"], ["pre", ["code"]]],
    ]  # fmt: skip
    assert browser.run("return document.querySelector('.text .heading').textContent") == MARKDOWN.split("\n")[0][2:]
    assert browser.text(".text strong") == "bold and both"
    assert "[a link](javascript:alert(1)) ![x](http" in browser.text(".answer .text")
    assert browser.text(".code-head span") == "python"
    code = MARKDOWN.partition("onclick=x\n")[2].partition("\n```")[0]
    assert browser.run("return document.querySelector('.text pre').textContent") == code
    assert browser.count(".text img, .text script, .text a, .text b") == 0
    assert browser.run("return window.hit ?? null") is None
    browser.hover(".text strong .token")
    browser.until("document.querySelectorAll('.hover tr').length >= 2")
    browser.run("window.written = []; navigator.clipboard.writeText = async (text) => { window.written.push(text); }")
    copy(browser, ".code .copy")
    copy(browser, ".foot .copy")
    assert browser.run("return window.written") == [code, MARKDOWN]
    browser.press("Settings: system prompt, sampling, tools")
    browser.click("#chat-markdown")
    assert browser.run("return document.querySelector('.answer .text').textContent") == MARKDOWN
    browser.click("#chat-markdown")
    assert browser.count(".text strong") == 1
    ready(browser, server.url + "/#/chat")
    assert browser.count(".text strong") == 1
    assert browser.complaints() == []


def test_text_is_copied_where_the_browser_has_no_clipboard(browser: Browser, server: Process) -> None:
    ready(browser, server.url + "/#/chat")
    answer_with(browser, "/v1/chat/completions", [chunk(content="An *answer*."), chunk(finish="stop")])
    say(browser, "Why?")
    browser.run(
        "Object.defineProperty(navigator, 'clipboard', { value: undefined });"  # as at an address without TLS
        "document.addEventListener('copy', () => { window.copied = document.getSelection().toString()"
        " || document.activeElement.value; })"
    )
    copy(browser, ".foot .copy")
    assert browser.run("return window.copied") == "An *answer*."
    assert browser.count("textarea.unseen") == 0


FUZZ = r"""
const marks = ["*", "**", "***", "_", "__", "`", "``", "\n", "\n\n", " ", "- ", "1. ", "> ", "# ", "a", "b", "\\", "é",
  "<i>", "---"];
let seed = 1;
const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
const letters = (text) => text.replace(/[^abé]/gu, "");
const leaf = (text) => (from, to) => [document.createTextNode(text.slice(from, to))];
const shown = (text) => markdown(text, leaf(text)).map((node) => node.textContent).join("");
const broken = [];
for (let i = 0; i < 4000; i += 1) {
  const text = Array.from({ length: 1 + random(24) }, () => marks[random(marks.length)]).join("");
  if (!text.includes("```") && letters(shown(text)) !== letters(text)) broken.push(text);
}
const long = ["` ", "*a", "**a *b __c ", ">", "- a\n\n\n", "- ", "> - ", "```\n", "*", "\\*", "a\n", "_a a_ ", "   "];
for (const one of long) shown(one.repeat(20000)); // in quadratic time longer than a script may take
return broken;
"""


def test_markdown_of_any_kind_loses_no_letter_and_takes_no_time(browser: Browser, server: Process) -> None:
    """Marks in any order, and texts that would take a careless reader quadratic time."""
    ready(browser, server.url + "/#/chat")
    broken = browser.run("return import('./console/markdown.js').then(({ markdown }) => {" + FUZZ + "})")
    assert broken == []


def test_an_answer_that_a_reload_cut_off_keeps_its_text(browser: Browser, slow: Process) -> None:
    ready(browser, slow.url + "/#/chat")
    browser.fill("#prompt", "abc")
    browser.type("Enter")
    browser.until("document.querySelectorAll('.answer .token').length > 5")
    ready(browser, slow.url + "/#/chat")
    assert browser.count(".answer .token") > 5
    assert browser.text(".facts-line").startswith("Stopped, because the page was loaded again.")
    browser.run("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    browser.press("Settings: system prompt, sampling, tools")
    browser.fill("#chat-tokens", "4")
    say(browser, "def")
    assert browser.text(".composer p.quiet").startswith("This browser has no room for the conversation")
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
    body = browser.run("return window.bodies.at(-1)")
    assert body["messages"][0] == {"role": "system", "content": "Be kind."}
    assert body["tools"] == json.loads(TOOLS)
    answer_with(browser, "/v1/chat/completions", [chunk(content="Warm."), chunk(finish="stop")])
    browser.fill(".results textarea", "30 degrees")
    browser.press("Send results")
    browser.until("document.querySelectorAll('.turn').length === 2")
    browser.until(IDLE)
    called, result = browser.run("return window.bodies.at(-1).messages.slice(-2)")
    assert called["tool_calls"][0]["function"]["arguments"] == '{"city": "<b>Rome"}'
    assert result == {"role": "tool", "tool_call_id": "call-1", "content": "30 degrees"}
    assert browser.complaints() == []


def test_a_stream_that_breaks_off_is_reported(browser: Browser, server: Process) -> None:
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
    show_view(browser, "Fine-tune")
    browser.until("document.getElementById('rows')")
    row = json.loads(browser.run("return document.getElementById('rows').value"))
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert row["messages"][0]["content"] == "abc"
    assert len(row["messages"][1]["content"]) == 8


def test_a_server_that_dies_during_an_answer_loses_no_text(browser: Browser, tmp_path: Path) -> None:
    with serving_echoes(tmp_path, delay=0.25) as process:
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
