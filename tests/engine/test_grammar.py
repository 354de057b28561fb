"""Grammars, regular expressions and JSON schemas: answers match them, even those of a model with random weights."""

import json
import re
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest

from fp8serve.engine import grammar
from fp8serve.engine.engine import Engine
from fp8serve.engine.grammar import Masks, _to_llguidance, validate
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.engine.sequence import Sequence
from fp8serve.errors import RequestError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
DEEP = '{"type": "array", "items": ' * 500 + "{}" + "}" * 500


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Engine:
    return Engine(model_dir, recipe="bf16", num_blocks=12, max_num_seqs=4)


def test_json_follows_its_schema(engine: Engine) -> None:
    text = json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})
    prompts = [[256, *f"{i}".encode()] for i in range(8)]
    completions = engine.generate(prompts, max_new_tokens=100, json_schema=text, seed=1)
    assert [item.finish_reason for item in completions] == ["stop"] * 8
    for item in completions:
        answer = json.loads(item.text)
        assert set(answer) == {"name", "age"}
        assert len(answer["name"]) <= 5
        assert 0 <= answer["age"] <= 99


def test_white_space_in_json_is_bounded(engine: Engine) -> None:
    """A model with random weights samples blanks as often as any other token."""
    schema = '{"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}'
    for answer in engine.generate([[1]] * 8, max_new_tokens=120, json_schema=schema, temperature=1.0, seed=1):
        assert re.fullmatch(r"\[(\n? *1\n? *),(\n? *1\n? *)\]", answer.text), answer.text


def test_answers_match_the_whole_regex(engine: Engine) -> None:
    completions = engine.generate([[1], [2], [3]], max_new_tokens=30, regex=r"(ab|cde){2}-[0-9]{3}", seed=0)
    assert all(re.fullmatch(r"(ab|cde){2}-[0-9]{3}", item.text) for item in completions)
    assert {item.finish_reason for item in completions} == {"stop"}


@pytest.mark.parametrize(
    "grammar",
    [
        'start: sum\nsum: DIGIT ("+" DIGIT){2}\nDIGIT: /[0-9]/',
        'root ::= digit ("+" digit){2}\ndigit ::= [0-9]',
    ],
)
def test_a_grammar_is_followed_in_both_notations(engine: Engine, grammar: str) -> None:
    for answer in engine.generate([[1], [2], [3]], max_new_tokens=9, grammar=grammar, seed=5):
        assert (answer.finish_reason, bool(re.fullmatch(r"\d\+\d\+\d", answer.text))) == ("stop", True)


def test_each_row_of_a_batch_follows_its_own_grammar(engine: Engine) -> None:
    """Answers with and without a grammar have the same bits in one batch as alone."""
    grammars: list[dict[str, Any]] = [
        {},
        {"regex": "[0-9]+x"},
        {"json_schema": json.dumps(SCHEMA)},
        {"grammar": 'start: "a"+'},
    ]
    requests = [
        Request(f"{i}", (1, i), SamplingParams(max_new_tokens=12, seed=i, logprobs=2, **grammar_options))
        for i, grammar_options in enumerate(grammars)
    ]

    def run(batch: list[Request]) -> dict[str, list[Any]]:
        outputs: dict[str, list[Any]] = {request.request_id: [] for request in batch}
        for request in batch:
            engine.add_request(request)
        while engine.has_work():
            for output in engine.step():
                outputs[output.request_id].append((output.token_ids, output.logprobs, output.finish_reason))
        return outputs

    alone = {name: steps for request in requests for name, steps in run([request]).items()}
    assert run(requests) == alone
    assert run(requests[::-1]) == alone


def test_what_is_cut_off_says_so(engine: Engine) -> None:
    (completion,) = engine.generate([[1]], max_new_tokens=3, regex="[0-9]{8}")
    assert (completion.finish_reason, len(completion.text)) == ("length", 3)


def test_logprobs_are_those_before_the_mask(engine: Engine) -> None:
    (free,) = engine.generate([[1]], max_new_tokens=1, temperature=0.0, logprobs=1)
    (bound,) = engine.generate([[1]], max_new_tokens=1, temperature=0.0, logprobs=1, regex="#")
    assert bound.text == "#"
    assert free.logprobs is not None
    assert bound.logprobs is not None
    assert bound.logprobs[0].top == free.logprobs[0].top


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"json_schema": "{"}, "not valid JSON"),
        ({"json_schema": "[]"}, "must be a JSON object"),
        ({"json_schema": ""}, "at least 1 character"),
        ({"json_schema": "[" * 60_000}, "not valid JSON"),
        ({"json_schema": DEEP}, "The JSON schema cannot be used"),
        ({"json_schema": '{"type": "nothing"}'}, "The JSON schema cannot be used"),
        ({"json_schema": "{}", "regex": "a"}, "json_schema and regex cannot be used together"),
        ({"grammar": "start: ", "regex": "a"}, "regex and grammar cannot be used together"),
        ({"grammar": "start: ("}, "The grammar cannot be used"),
        ({"grammar": "root ::= ("}, "The grammar cannot be used"),
        ({"grammar": "::="}, "The grammar cannot be used"),
        ({"grammar": "root ::= " + "(" * 5000}, "The grammar cannot be used: it is nested too deeply"),
        ({"grammar": "other ::= 'a'"}, "The grammar cannot be used"),
        ({"grammar": "start: other"}, "The grammar cannot be used"),
        ({"regex": "a", "bad_words": ("b",)}, "bad_words cannot be used with"),
        ({"regex": "("}, "The regex cannot be used"),
        ({"regex": "a" * 70_000}, "at most 65536 characters"),
        ({"regex": 5}, "regex must be text"),
        ({"regex": "a", "ignore_eos": True}, "cannot be used with"),
    ],
)
def test_invalid_grammars_are_refused(params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence) as caught:
        validate(SamplingParams(**params))
    assert len(str(caught.value)) < 300


def test_an_infinitely_recursive_schema_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"The JSON schema cannot be used: no text of finite length matches it\.$"):
        engine.generate([[1]], max_new_tokens=4, json_schema='{"$ref": "#"}')


def test_a_grammar_is_compiled_once_for_many_answers(engine: Engine) -> None:
    compiled = engine.loaded.grammars._compiled
    misses = compiled.cache_info().misses
    completions = engine.generate([[i] for i in range(8)], max_new_tokens=20, regex="once|upon|a time", seed=3)
    assert {item.text for item in completions} <= {"once", "upon", "a time"}
    assert compiled.cache_info().misses == misses + 1


def test_an_exponential_regex_is_refused_or_harmless(engine: Engine) -> None:
    """The regex must neither stop the engine nor take long."""
    try:
        (completion,) = engine.generate([[1]], max_new_tokens=5, regex="(((a{1,999}){1,999}){1,999}b|a*a*a*a*a*a*c){9}")
    except RequestError:
        return
    assert completion.finish_reason == "length"


def test_a_grammar_too_complex_for_its_first_step_is_refused_before_queueing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test sets tiny limits."""
    limits = llguidance.LLParserLimits(max_lexer_states=3)
    original = llguidance.LLMatcher

    class Limited:
        validate_grammar = original.validate_grammar
        grammar_from_regex = original.grammar_from_regex

        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            return original(*arguments, **options, limits=limits)

    monkeypatch.setattr(grammar, "LLMatcher", Limited)
    with pytest.raises(RequestError, match=r"The regex cannot be used: .*too many states") as caught:
        engine.generate([[1]], regex="[a-z]*q")
    assert "<state>" not in str(caught.value)


def test_masks_equal_those_of_the_library_without_slices(engine: Engine) -> None:
    """Compares them at every step of an answer."""
    schema = json.dumps(SCHEMA | {"properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "null"}}})
    vocab = engine.limits.vocab_size
    file = engine.loaded.grammars._file
    plain = llguidance.LLTokenizer(file.read_text(), n_vocab=vocab, eos_token=list(engine.eos_ids), slices=[])
    reference = llguidance.LLMatcher(plain, _to_llguidance("json_schema", schema), log_level=0)
    params = SamplingParams(json_schema=schema)
    seqs = [Sequence.of(Request(f"{i}", (1,), params)) for i in range(3)]
    for i in (0, 2):
        seqs[i].matcher = engine.loaded.grammars.matcher(params)
    masks = Masks(vocab)
    assert engine.tokenizer is not None
    tokens = engine.tokenizer.encode('{"name": "a name of many letters", "age": null}')
    for token in [token for token in tokens if token < 256]:  # without special tokens
        mask = masks.start([seq.matcher for seq in seqs])
        assert mask is not None
        assert mask.rows == [0, 2]
        bits = np.frombuffer(reference.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[:vocab].astype(bool)
        assert allowed.any()
        assert not allowed.all()
        actual = np.unpackbits(mask.allowed().view(np.uint8), axis=1, bitorder="little")[:, :vocab]
        assert (actual == allowed).all()
        assert reference.consume_token(token)
        for seq in seqs:
            assert seq.matcher is None or seq.matcher.consume_token(token)
    assert masks.start([seq.matcher for seq in seqs[1:2]]) is None
