"""Requests: an invalid value is refused with a sentence that names the field; requests and outputs survive JSON."""

import json
from typing import Any

import pytest

from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.engine.request import EngineLimits, Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError

LIMITS = EngineLimits(max_model_len=32, num_blocks=4, block_size=4, vocab_size=100)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("top_k", 2.0),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0.0),
        ("seed", 2**64),
        ("seed", True),
        ("max_new_tokens", 0),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("stop", ["ok", ""]),
        ("stop", [1]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", list(range(129))),
        ("ignore_eos", 1),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: True}),
        ("logit_bias", [1]),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("bad_words", [""]),
        ("bad_words", ["x"] * 65),
        ("bad_words", "word"),
        ("skip_special_tokens", 0),
        ("include_stop_str_in_output", "yes"),
    ],
)
def test_the_error_names_a_bad_parameter(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field if field != "stop" else "stop"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": ""},
        {"prompt_token_ids": ()},
        {"prompt_token_ids": (1.5,)},
        {"prompt_token_ids": "text"},
        {"tenant": 1},
    ],
)
def test_a_bad_request_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        Request(**{"request_id": "r", "prompt_token_ids": (1,), **fields})


@pytest.mark.parametrize("bias", [[(5, 1.0), (6, 2.0), (5, -3.0)], {"5": 1.0, "6": 2.0, "05": -3.0}])
def test_the_last_bias_of_a_token_counts(bias: Any) -> None:
    assert SamplingParams(logit_bias=bias).logit_bias == ((5, -3.0), (6, 2.0))


def test_requests_survive_json() -> None:
    request = Request(
        "r",
        (1, 2),
        SamplingParams(stop=("a", "b"), stop_token_ids=(3,), seed=7, logprobs=2, logit_bias={5: -1, "6": 2.5}),
        tenant="t",
    )
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request


def test_outputs_survive_json() -> None:
    logprobs = (TokenLogprob(5, -0.25, ((5, -0.25), (6, -2.0))),)
    output = RequestOutput("r", "é", (5,), logprobs, "stop", 3, 1, 2, "\n", None)
    assert RequestOutput.from_json(json.loads(json.dumps(output.to_json()))) == output


@pytest.mark.parametrize(
    "data", [{"request_id": "r", "prompt": "x"}, {"request_id": "r", "params": {"temprature": 1}}, {"params": []}]
)
def test_unknown_fields_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"no field|must be an object"):
        Request.from_json(data)


@pytest.mark.parametrize(
    ("prompt", "new", "numbers"),
    [
        (range(30), 10, r"30 tokens .* 10, together 40, .* 32"),
        (range(15), 3, r"5 cache blocks of 4 tokens .* 4:"),
        ([1, 100], 1, r"100 is outside the vocabulary of 100"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_its_token_counts(prompt: Any, new: int, numbers: str) -> None:
    with pytest.raises(RequestError, match=numbers):
        LIMITS.check(Request("r", tuple(prompt), SamplingParams(max_new_tokens=new)))


def test_a_request_that_just_fits_is_accepted() -> None:
    LIMITS.check(Request("r", tuple(range(15)), SamplingParams(max_new_tokens=2)))
