"""Grammars of calls: a random walk over the tokens that they allow gives valid calls."""

import json
import random
from typing import Any

import llguidance
import pytest
import tokenizers

from fp8serve.server.output_parsers.family_parsers import CALL, CALL_END, CALLS, CALLS_END, SEPARATOR
from fp8serve.server.output_parsers.output_format import (
    TOOL_FAMILIES,
    CallGrammar,
    OutputFormat,
    ReasoningTags,
    ToolFormat,
)
from tests.server.fakes import byte_backend
from tests.server.output_parsers.test_parsers import joined

SYNTAXES = {name: family.syntax for name, family in TOOL_FAMILIES.items() if family.syntax is not None}

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Paris", "Rome"]}},
    },
    "now": {"properties": {}, "additionalProperties": False},
}
TAGS = {
    "hermes": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "mistral": ["[TOOL_CALLS]"],
    "granite": ["<|tool_call|>"],
    "deepseek": [CALLS, CALLS_END, CALL, CALL_END, SEPARATOR],
    "gpt-oss": ["<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>"],
}  # fmt: skip


def walk(grammar: str, backend: tokenizers.Tokenizer, seed: int, first: str = "") -> str:
    """Returns text that the grammar allows: `first`, followed by random allowed tokens."""
    size = backend.get_vocab_size()
    llg = llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=[256])
    matcher = llguidance.LLMatcher(llg, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    draw, ids = random.Random(seed), backend.encode(first, add_special_tokens=False).ids
    for token in ids:
        assert matcher.consume_token(token), (first, backend.id_to_token(token))
    while not matcher.is_stopped() and len(ids) < 2000:
        bits = matcher.compute_bitmask()
        allowed = [i for i in range(size) if bits[i // 8] >> (i % 8) & 1]
        ids.append(256 if 256 in allowed else draw.choice(allowed))
        assert matcher.consume_token(ids[-1])
    return backend.decode([i for i in ids if i != 256], skip_special_tokens=False)


def backend(family: str, as_tokens: bool) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    tokenizer = byte_backend()
    tags = TAGS.get(family, []) if as_tokens else []
    tokenizer.add_special_tokens(tags)
    return tokenizer, {tag: tokenizer.token_to_id(tag) for tag in tags}


def check(calls: list[tuple[str, str]]) -> None:
    """Asserts that the arguments of each call fit the schema of its tool."""
    for name, text in calls:
        arguments = json.loads(text)
        assert arguments.keys() <= TOOLS[name]["properties"].keys()
        assert name == "now" or arguments["city"] in ("Paris", "Rome")
        assert isinstance(arguments.get("days", 0), int)


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("family", sorted(SYNTAXES))
def test_a_forced_answer_is_calls_and_nothing_else(family: ToolFormat, as_tokens: bool) -> None:
    tokenizer, tokens = backend(family, as_tokens)
    for seed in range(4):
        text = walk(CallGrammar(SYNTAXES[family], TOOLS, tokens).calls_only(), tokenizer, seed)
        parser = OutputFormat(family).parser(TOOLS)
        reasoning, content, calls = joined(parser.push(text) + parser.finish())
        assert (reasoning, content) == ("", "")
        assert calls, text
        check(calls)


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("family", [family for family in sorted(SYNTAXES) if SYNTAXES[family].trigger])
def test_free_text_is_followed_by_a_valid_call(family: ToolFormat, as_tokens: bool) -> None:
    tokenizer, tokens = backend(family, as_tokens)
    grammar = CallGrammar(SYNTAXES[family], TOOLS, tokens).text_with_calls()
    assert walk(grammar, tokenizer, 0) == ""  # ends as soon as it may
    text = walk(grammar, tokenizer, 0, "Let me look. " + SYNTAXES[family].trigger)
    parser = OutputFormat(family).parser(TOOLS)
    _, content, calls = joined(parser.push(text) + parser.finish())
    assert content == "Let me look."
    assert calls
    check(calls)


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("opened", [False, True])
def test_a_model_may_think_before_it_calls(opened: bool, as_tokens: bool) -> None:
    tokenizer, tokens = backend("hermes", as_tokens)
    tags = ReasoningTags(("<think>",), ("</think>",), opened)
    grammar = CallGrammar(SYNTAXES["hermes"], TOOLS, tokens, tags).calls_only(parallel=False)
    text = walk(grammar, tokenizer, 0, ("" if opened else "<think>") + "Hm.</think>\n\n")
    parser = OutputFormat("hermes", "think").parser(TOOLS, "<think>" if opened else "")
    reasoning, content, calls = joined(parser.push(text) + parser.finish())
    assert (reasoning, content, len(calls)) == ("Hm.", "", 1)
    check(calls)


def test_gpt_oss_may_analyse_before_it_calls() -> None:
    tokenizer, tokens = backend("gpt-oss", as_tokens=True)
    grammar = OutputFormat("gpt-oss", "gpt-oss").call_grammar(TOOLS, tokens, "").calls_only()
    text = walk(grammar, tokenizer, 0, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant")
    parser = OutputFormat("gpt-oss", "gpt-oss").parser(TOOLS)
    reasoning, content, calls = joined(parser.push(text) + parser.finish())
    assert (reasoning, content, len(calls)) == ("Hm.", "", 1)
    check(calls)


def test_json_of_a_schema_may_replace_calls() -> None:
    tokenizer, _ = backend("hermes", as_tokens=False)
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}
    grammar = CallGrammar(SYNTAXES["hermes"], TOOLS, {}).calls_only(or_json=json.dumps(schema))
    assert json.loads(walk(grammar, tokenizer, 0, "{")) == {"a": None}
    check(joined(OutputFormat("hermes").parser(TOOLS).push(walk(grammar, tokenizer, 0, "<")))[2])
