"""Conversations with tools as training rows: which tokens are trained, rendering as in a request, and refused rows."""

import contextlib
import math
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import DataError
from fp8serve.model.text.examples import ChatExample, parse_example, tokenize
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.server.schemas.messages import Message, Tool, plain_messages, plain_tools
from tests.model.families import CHATML, FAMILIES, QWEN3, R1, unmarked
from tests.model.test_assistant_spans import tokenizer_of

ARGUMENTS = '{"city": "A \\"b\\"\\n</tool_call><|im_end|> \u00e9", "days": 3}'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CHAT: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "is it "}, {"type": "text", "text": "sunny?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "yes </tool_call>"},
    {"role": "assistant", "content": "It is."},
    {"role": "user", "content": "and later?"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [{"id": "c2", "type": "function", "function": {"name": "weather", "arguments": '{"n": 2}'}}],
    },
]
CALLED = '<tool_call>\n{"name": "weather", "arguments": ' + ARGUMENTS + "}\n</tool_call><|im_end|>"
CALLED_LATER = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"n": 2}}\n</tool_call><|im_end|>'


def example(**changed: Any) -> ChatExample:
    result = parse_example({"messages": CHAT, "tools": [TOOL]} | changed)
    assert isinstance(result, ChatExample)
    return result


def trained_text(tokenizer: Tokenizer, row: ChatExample) -> list[str]:
    row_tokens = tokenize(row, tokenizer)
    runs: list[list[int]] = []
    for i, (token, learn) in enumerate(zip(row_tokens.ids, row_tokens.loss_mask, strict=True)):
        if learn and (not i or not row_tokens.loss_mask[i - 1]):
            runs.append([])
        if learn:
            runs[-1].append(token)
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in runs]


@pytest.mark.parametrize("template", [CHATML, unmarked(CHATML)], ids=["blocks", "stand-ins"])
def test_tool_calls_are_trained_and_results_are_not(template: str, tmp_path: Path) -> None:
    assert trained_text(tokenizer_of(tmp_path, template), example()) == [CALLED, "It is.<|im_end|>", CALLED_LATER]


def test_a_template_that_knows_tools_writes_the_calls(tmp_path: Path) -> None:
    thought = "<think>\n\n</think>\n\n"
    expected = [CALLED, "It is.<|im_end|>", thought + CALLED_LATER]
    assert trained_text(tokenizer_of(tmp_path, unmarked(QWEN3)), example()) == expected


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3", "granite"])
def test_a_row_is_rendered_as_the_request_would_be(family: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, unmarked(FAMILIES[family]))
    messages = plain_messages([Message.model_validate(message) for message in CHAT])
    text = tokenizer.chat(
        messages, add_generation_prompt=False, variables={"tools": plain_tools([Tool.model_validate(TOOL)])}
    )
    assert tokenize(example(), tokenizer).ids == tokenizer.encode(text, add_special_tokens=False)


def test_tools_may_be_bare_functions_or_json_text(tmp_path: Path) -> None:
    assert example(tools=[TOOL["function"]]) == example(tools='[{"name": "weather"}]') == example()


def test_weight_zero_leaves_a_call_out(tmp_path: Path) -> None:
    row = example(messages=[*CHAT[:2], CHAT[2] | {"weight": 0}, *CHAT[3:]])
    assert trained_text(tokenizer_of(tmp_path, unmarked(CHATML)), row) == ["It is.<|im_end|>", CALLED_LATER]


def test_a_call_that_does_not_follow_the_generation_prompt_is_refused(tmp_path: Path) -> None:
    """R1's prompt opens the reasoning, which its template drops from earlier turns."""
    with pytest.raises(DataError, match="does not begin message 2, which calls tools, with its generation prompt"):
        tokenize(example(), tokenizer_of(tmp_path, unmarked(R1)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"content": [{"type": "image_url"}]}, "message 0 has a part of the type 'image_url'"),
        ({"content": ["a"]}, "message 0 has a part that is text in"),
        ({"content": []}, "message 0 has no text in `content`"),
        ({"content": "a", "tool_calls": [{}]}, "its role is user; only an assistant calls tools"),
        ({"role": "assistant", "tool_calls": {}, "content": "a"}, "`tool_calls` is an object, not a list"),
        ({"role": "assistant", "tool_calls": [{}]}, "call 0 has no `function` with a `name`"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "call 0 has no `arguments`"),
        ({"role": "assistant", "tool_calls": [CHAT[2]["tool_calls"][0] | {"id": "<|im_end|>"}]}, "an id has up to"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "has `function_call`, OpenAI's older format"),
        ({"role": "tool", "content": "a", "tool_call_id": 7}, "`tool_call_id` is 7; an id has"),
        ({"content": "\ud800"}, "half of a surrogate pair"),
        (
            {"role": "asistant", "content": "a"},
            "message 0 has the role 'asistant'; roles are system, ",
        ),
        ({"role": "Assistant", "content": "a"}, "message 0 has the role 'Assistant'"),
        ({"role": "gpt", "content": "a"}, "message 0 has the role 'gpt'"),
        (
            {"role": "assistant", "content": ""},
            "message 0 is an empty assistant message; remove it",
        ),
        ({"content": "a", "train": False}, '`train`, which is not supported; write "weight": 0'),
        ({"content": "a", "trainable": 0}, "`trainable`, which is not supported"),
        ({"content": "a", "training": "false"}, "`training`, which is not supported"),
        ({"content": "a", "training": None}, None),
        ({"content": "a", "name": 5}, "its `name` must be text, not 5"),
        ({"content": "a", "reasoning_content": 3}, "its reasoning must be text, not 3"),
        ({"role": "tool", "content": "a", "tool_call_id": "c9"}, None),  # the calls before it may be in the text
        ({"role": "assistant", "tool_calls": [{"function": {"name": " ", "arguments": {}}}]}, "no `function` with a"),
        (
            {"role": "assistant", "tool_calls": [CHAT[2]["tool_calls"][0] | {"type": "custom"}]},
            "call 0 has the type 'custom'; only functions can be called",
        ),
    ],
)
def test_the_error_names_the_invalid_part_of_a_message(changed: dict[str, Any], message: str | None) -> None:
    with contextlib.nullcontext() if message is None else pytest.raises(DataError, match=message):
        example(messages=[{"role": "user"} | changed, *CHAT[1:]])


def test_a_result_names_a_call_before_it() -> None:
    with pytest.raises(
        DataError, match="message 3 is the result of the call 'c9', but no earlier message has a call with this id"
    ):
        example(messages=[*CHAT[:3], CHAT[3] | {"tool_call_id": "c9"}, *CHAT[4:]])


DEEP: Any = {}
for _ in range(600):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("city: Oslo", "`arguments` of call 0 is text that is not valid JSON"),
        ('{"city": "Oslo"', "`arguments` of call 0 is text that is not valid JSON"),
        ('{"city": "Oslo", "city": "Rome"}', "`arguments` of call 0 .*: the key 'city' appears twice"),
        ('["Oslo"]', r"`arguments` of call 0 must be an object, not \['Oslo'\]"),
        ("3", "`arguments` of call 0 must be an object, not 3"),
        ('{"n": NaN}', "`arguments` of call 0 contain nan, which JSON cannot represent"),
        ({"n": 1e999}, "`arguments` of call 0 contain inf, which JSON cannot represent"),
        (f'{{"n": {"9" * 5000}}}', "`arguments` of call 0 contain Decimal"),
        ({"day": date(2026, 1, 1)}, "`arguments` of call 0 contain datetime.date"),
        (DEEP, "nested too deeply"),
        ("", None),
        ({}, None),
        (' {"city": "Oslo"}', None),
    ],
)
def test_arguments_of_trained_calls_are_a_json_object(arguments: Any, message: str | None) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    with contextlib.nullcontext() if message is None else pytest.raises(DataError, match=message):
        example(messages=[*CHAT[:2], CHAT[2] | {"tool_calls": [call]}, *CHAT[3:]])


def test_a_malformed_call_may_be_context(tmp_path: Path) -> None:
    """A row with a malformed call trains a model to correct the call."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "city: Oslo"}}
    row = example(messages=[*CHAT[:2], CHAT[2] | {"tool_calls": [call], "weight": 0}, *CHAT[3:]])
    assert trained_text(tokenizer_of(tmp_path, unmarked(CHATML)), row) == ["It is.<|im_end|>", CALLED_LATER]


def test_other_keys_of_a_message_reach_the_template(tmp_path: Path) -> None:
    """Values that cannot be passed to a template are left out."""
    more = {"rating": 5, "sent": datetime(2026, 1, 1), "score": float("nan"), "raw": b"x", "n": 10**5000, "deep": DEEP}
    row = example(messages=[CHAT[0] | more, *CHAT[1:]])
    assert set(row.messages[0]) == {"role", "content", "rating"}
    assert trained_text(tokenizer_of(tmp_path, unmarked(CHATML)), row)[0] == CALLED


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tools": "weather"}, "`tools` is text that is not valid JSON"),
        ({"tools": {"name": "f"}}, "`tools` is an object, not a list"),
        ({"tools": [{"type": "function"}]}, "tool 0 has no `function` with a `name`"),
        ({"tools": [{"name": ""}]}, "tool 0 has no `function` with a `name`"),
        ({"tools": [{"name": "f", "parameters": "x"}]}, "tool 0: its `parameters` are 'x', which is not a JSON schema"),
        ({"tools": [{"name": "f", "description": 3}]}, "tool 0: its `description` must be text, not 3"),
        ({"functions": [{"name": "f"}]}, "has `functions`, OpenAI's older format"),
    ],
)
def test_the_error_names_tools_that_cannot_be_read(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        example(**columns)


@pytest.mark.parametrize("value", [datetime(2026, 1, 1), Decimal("9" * 5000), math.inf])
def test_arguments_that_are_no_json_are_refused_also_in_context(value: Any) -> None:
    call = {"function": {"name": "f", "arguments": {"when": value}}}
    context = [CHAT[0], {"role": "assistant", "weight": 0, "tool_calls": [call]}, CHAT[-1]]
    with pytest.raises(DataError, match=r"message 1: `arguments` of call 0 contain .* which JSON cannot represent"):
        example(messages=context)


def test_a_row_whose_answers_all_have_weight_0_says_so() -> None:
    with pytest.raises(DataError, match="every message of the assistant has weight 0, so there is nothing to learn"):
        example(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}])
