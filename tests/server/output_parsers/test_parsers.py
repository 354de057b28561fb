"""Answers read from the texts of each family of models, into whatever pieces the text is divided."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8serve.server.output_parsers.incremental import Arguments, Content, Part, Reasoning, ToolCallStart
from fp8serve.server.output_parsers.output_format import OutputFormat, ToolFormat

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}
Answer = tuple[str, str, list[tuple[str, str]]]


def joined(parts: list[Part]) -> Answer:
    """Joins parts to (reasoning, content, calls as (name, arguments))."""
    reasoning, content, calls = "", "", []
    for part in parts:
        if isinstance(part, Content):
            content += part.text
        elif isinstance(part, Reasoning):
            reasoning += part.text
        elif isinstance(part, ToolCallStart):
            calls.append((part.name, ""))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return reasoning, content, calls


def read(output_format: OutputFormat, pieces: list[str], prompt_end: str = "", tools: Any = TOOLS) -> Answer:
    parser = output_format.parser(tools, prompt_end)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined(parts + parser.finish())


PARIS = '{"city": "Paris"}'
CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    ("hermes", "No tool needed.", "No tool needed.", []),
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', "", [("weather", PARIS)]),
    (
        "hermes",
        f'Let me look.\n\n<tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n',
        "Let me look.",
        [("weather", PARIS), ("now", "{}")],
    ),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"function": {"name": "f", "arguments": {}}}</tool_call>', "", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> \\" }"}}</tool_call>done',
        "done",
        [("f", '{"a": "</tool_call> \\" }"}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', "", [("f", '{"a": [1')]),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "<tool_call>{'name': 'f'}</tool_call>", []),
    ("hermes", 'x <tool_call>{"name": 3}</tool_call>', 'x <tool_call>{"name": 3}</tool_call>', []),
    ("hermes", "<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
    ("hermes", "a <tool_call", "a <tool_call", []),
    ("hermes", "<tool_call>", "<tool_call>", []),
    (
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": 2}}]</tool_call>',
        "",
        [("f", "{}"), ("g", '{"b": 2}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>.', ".", [("f", "{'a': 1}}")]),
    ("llama3", f'{{"name": "weather", "parameters": {PARIS}}}', "", [("weather", PARIS)]),
    ("llama3", f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}', "", [("weather", PARIS)]),
    (
        "llama3",
        f'{{"name": "weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}',
        "",
        [("weather", PARIS), ("now", "{}")],
    ),
    ("llama3", '{"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")]),
    ("llama3", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3", '{"colour": "red"}', '{"colour": "red"}', []),
    ("llama3", "Paris is {nice}.", "Paris is {nice}.", []),
    (
        "llama3",
        '[weather(city="Paris", days=2), now()]',
        "",
        [("weather", '{"city": "Paris", "days": 2}'), ("now", "{}")],
    ),
    ("llama3", "[now(), 3]", "[now(), 3]", []),
    ("llama3", "[1, 2, 3]", "[1, 2, 3]", []),
    ("llama3", "[now(", "[now(", []),
    (
        "llama3",
        '[weather(city="a]\'b", days=[1, {"x": true}])]',
        "",
        [("weather", '{"city": "a]\'b", "days": [1, {"x": true}]}')],
    ),
    ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}]', "", [("weather", PARIS)]),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}, "id": "abcdefghi"}}, '
        '{"name": "now", "arguments": {}}]',
        "",
        [("weather", PARIS), ("now", "{}")],
    ),
    (
        "mistral",
        f"Sure. [TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}",
        "Sure.",
        [("weather", PARIS), ("now", "{}")],
    ),
    ("mistral", f"[TOOL_CALLS]weather{PARIS}", "", [("weather", PARIS)]),
    ("mistral", "[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{}", "", [("weather", "{}")]),
    ("mistral", "[TOOL_CALLS]none of it", "[TOOL_CALLS]none of it", []),
    ("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}]', "", [("weather", PARIS)]),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', "", [("now", "{}")]),
    ("granite", "<|tool_call|>[]", "<|tool_call|>[]", []),
    (
        "deepseek",
        "Now.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{PARIS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Now.",
        [("weather", PARIS), ("now", "{}")],
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("weather", PARIS)],
    ),
    (
        "qwen3-coder",
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "I look.",
        [("weather", '{"city": "Paris", "days": 3}')],
    ),
    ("qwen3-coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", "{}")]),
    (
        "qwen3-coder",
        "<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\nx\ny\n</parameter>\n</function>",
        "",
        [("f", '{"a": 12, "b": "x\\ny"}')],
    ),
    (
        "qwen3-coder",
        "<function=weather>\n<parameter=city>\n12\n</parameter></function>",
        "",
        [("weather", '{"city": "12"}')],
    ),
    ("qwen3-coder", "<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
    (
        "gpt-oss",
        "<|channel|>commentary<|message|>I will look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>",
        "I will look.",
        [("weather", PARIS)],
    ),
    ("gpt-oss", f" to=functions.weather<|channel|>commentary json<|message|>{PARIS}", "", [("weather", PARIS)]),
    ("gpt-oss", "plain", "plain", []),
    ("gpt-oss", "<|channel|>final<|message|>Hello.<|return|>", "Hello.", []),
    ("none", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_answer(family: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(OutputFormat(family), [text]) == ("", content, calls)


@pytest.mark.parametrize(("family", "text"), [case[:2] for case in CASES])
def test_streamed_is_whole_at_every_split(family: ToolFormat, text: str) -> None:
    whole = read(OutputFormat(family), [text])
    for cut in range(1, len(text)):
        assert read(OutputFormat(family), [text[:cut], text[cut:]]) == whole
    assert read(OutputFormat(family), list(text)) == whole


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_an_answer_that_is_cut_off_shows_no_tag(
    family: ToolFormat, text: str, content: str, calls: list[tuple[str, str]], required: bool
) -> None:
    """Cut off at any character, the answer has a part of the content, and no text of a call's tag."""
    if family == "llama3" and calls and not required and "<|python_tag|>" not in text:
        return  # calls without a tag look like an answer in JSON until their name is there
    for cut in range(1, len(text)):
        for pieces in ([text[:cut]], list(text[:cut])):
            parser = OutputFormat(family).parser(TOOLS, calls_only=required)
            *early, last = pieces
            parts = [part for piece in early for part in parser.parse(piece, False)]
            _, partial_content, partial_calls = joined(parts + parser.parse(last, True, is_truncated=True))
            assert content.startswith(partial_content.rstrip()), text[:cut]
            assert [name for name, _ in calls][: len(partial_calls)] == [name for name, _ in partial_calls]
            assert all(whole.startswith(part) for (_, whole), (_, part) in zip(calls, partial_calls, strict=False))


FORMS = ("hermes", "llama3", "mistral", "granite", "deepseek", "qwen3-coder", "gpt-oss")
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "now()",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|tool_call|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<function=",
    "<parameter=",
    "</parameter>",
    "</function>",
    "<|channel|>",
    "<|message|>",
    "analysis",
    " to=functions.f",
    "<|end|>",
    "<|start|>",
    "<think>",
    "</think>",
    "```json",
)
PIECES = st.sampled_from((*'{}[]"\\,: \na<', '{"name": "weather", "arguments": ', PARIS, *MARKS))


@given(st.sampled_from(FORMS), st.lists(PIECES, max_size=12), st.data())
def test_any_text_reads_alike_however_it_is_cut(family: ToolFormat, pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    cut = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    output_format = OutputFormat(family, "think" if family != "gpt-oss" else "gpt-oss")
    assert read(output_format, cut) == read(output_format, [text]) == read(output_format, list(text))


@given(st.sampled_from(("hermes", "granite", "mistral")), st.text(max_size=30), st.dictionaries(st.text(), st.text()))
def test_any_name_and_arguments_in_json_are_read(family: ToolFormat, name: str, arguments: dict[str, str]) -> None:
    call = json.dumps({"name": "f" + name, "arguments": arguments})
    marks = {"hermes": "<tool_call>", "granite": "<|tool_call|>", "mistral": "[TOOL_CALLS]"}
    _, content, calls = read(OutputFormat(family), ["Well. ", marks[family], call])
    assert (content, calls[0][0], json.loads(calls[0][1])) == ("Well.", "f" + name, arguments)


def test_arguments_come_piece_by_piece() -> None:
    parser = OutputFormat("hermes").parser(TOOLS)
    assert parser.push('Hm.\n<tool_call>{"name": "weather", "argu') == [Content("Hm.")]
    assert parser.push('ments": {"ci') == [ToolCallStart("weather"), Arguments('{"ci')]
    assert parser.push('ty": "P') == [Arguments('ty": "P')]
    assert parser.push('"}}</tool_call>') == [Arguments('"}')]


REASONING: list[tuple[Any, str, str, Answer]] = [
    ("think", "", "<think>\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.", [])),
    ("think", "<think>\n", "Hm.</think>Yes.", ("Hm.", "Yes.", [])),
    ("think", "<think>\n", "<think>\nHm.\n</think>\nYes.", ("Hm.", "Yes.", [])),
    ("think", "<think>", "Hm, and no end", ("Hm, and no end", "", [])),
    ("think", "<think>\n\n</think>\n\n", "Yes.", ("", "Yes.", [])),
    ("think", "", "Yes, <think> is a mark.", ("", "Yes, <think> is a mark.", [])),
    ("think", "", " Yes.", ("", " Yes.", [])),
    (
        "think",
        "<think>",
        'Hm. <tool_call> no</think><tool_call>{"name": "now", "arguments": {}}</tool_call>',
        ("Hm. <tool_call> no", "", [("now", "{}")]),
    ),
    ("mistral", "", "[THINK]Hm.[/THINK]Yes.", ("Hm.", "Yes.", [])),
    ("granite", "", "Here is my thought process: Hm.\n\nHere is my response: Yes.", ("Hm.", "Yes.", [])),
    (
        "gpt-oss",
        "",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        ("Hm.", "Yes.", []),
    ),
    ("none", "<think>", "Hm.</think>", ("", "Hm.</think>", [])),
]


@pytest.mark.parametrize(("family", "prompt_end", "text", "answer"), REASONING)
def test_reasoning(family: Any, prompt_end: str, text: str, answer: Answer) -> None:
    output_format = OutputFormat("hermes", family)
    assert read(output_format, [text], prompt_end) == answer
    for cut in range(1, len(text)):
        assert read(output_format, [text[:cut], text[cut:]], prompt_end) == answer


def test_calls_are_content_where_no_tools_are_declared() -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert read(OutputFormat("hermes"), [text], tools=None) == ("", text, [])
