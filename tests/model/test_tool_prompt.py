"""Tools are written into the prompt as text for templates without tools; templates with tools get them as arguments."""

import json
from typing import Any

from fp8serve.model.text.chat import ChatTemplate

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CALLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
CALL = {"id": "a", "type": "function", "function": {"name": "now", "arguments": {}}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Time?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "12:00", "name": "now"},
    {"role": "tool", "content": "12:01"},
]
WRITTEN = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_a_template_without_tools_gets_them_as_text() -> None:
    text = ChatTemplate(PLAIN, {}).render(TALK, variables={"tools": TOOLS})
    head, _, rest = text.partition("<user>")
    assert head.startswith("<system>")
    assert json.dumps(TOOLS[0]) in head
    assert rest == f"Time?<assistant>{WRITTEN}\n{WRITTEN}<user>now returned:\n12:00\nThe function returned:\n12:01"


def test_tools_follow_the_text_of_the_system_message() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *TALK[:1]]
    text = ChatTemplate(PLAIN, {}).render(messages, variables={"tools": TOOLS})
    assert text.startswith("<system>Be brief.\n\n# Tools")
    assert messages[0]["content"] == "Be brief."


def test_a_template_that_knows_calls_writes_them_itself() -> None:
    text = ChatTemplate(CALLS, {}).render(TALK, variables={"tools": None})
    assert text.endswith(json.dumps([CALL, CALL]) + "<tool>12:00<tool>12:01")


def test_a_template_with_tools_gets_them_unchanged() -> None:
    template = ChatTemplate("{{ tools | tojson }}" + PLAIN, {})
    assert template.render(TALK[:1], variables={"tools": TOOLS}) == json.dumps(TOOLS) + "<user>Time?"
    assert template.render(TALK[:1], variables={"tools": None}) == "null<user>Time?"


def test_training_rows_are_rendered_without_a_description_of_tools() -> None:
    assert ChatTemplate(PLAIN, {}).render(TALK).endswith("<assistant><tool>12:00<tool>12:01")


def test_content_that_is_null_beside_calls_stays_null() -> None:
    template = ChatTemplate("{{ tools }}{% for m in messages %}{{ m.content is none }}{% endfor %}", {})
    assert template.render([TALK[1] | {"content": None}], variables={"tools": None}) == "NoneTrue"
