"""Requests of Dynamo's frontend become sampling parameters, and outputs become chunks; nothing is ignored."""

from typing import Any

import pytest

from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError
from fp8serve.integrations.dynamo.requests import cache_salt, chunk, sampling_params

# What the frontend of Dynamo 1.6.1 sends for a chat without options: everything else is null.
UNSET: dict[str, Any] = {
    "sampling_options": dict.fromkeys(("n", "best_of", "temperature", "top_k", "guided_decoding", "use_beam_search")),
    "stop_conditions": dict.fromkeys(("max_tokens", "stop", "stop_token_ids", "max_thinking_tokens"))
    | {"stop_token_ids_hidden": [2]},
    "output_options": dict.fromkeys(("logprobs", "prompt_logprobs")) | {"skip_special_tokens": True},
}


def params(**groups: dict[str, Any]) -> SamplingParams:
    request = {"token_ids": [1, 2, 3], **{name: UNSET[name] | groups.get(name, {}) for name in UNSET}}
    return sampling_params(request, max_model_len=10)


def test_a_request_without_options_may_fill_the_context() -> None:
    assert params() == SamplingParams(max_new_tokens=7, stop_token_ids=(2,))


def test_options_are_mapped_one_to_one() -> None:
    sampling = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "repetition_penalty": 1.1, "seed": 7, "n": 1, "best_of": 1, "use_beam_search": False,
    }  # fmt: skip
    stop = {"max_tokens": 5, "min_tokens": 2, "ignore_eos": True, "stop": ["a"], "stop_token_ids": [9, 2]}
    expected = SamplingParams(
        max_new_tokens=5, min_tokens=2, ignore_eos=True, stop=("a",), stop_token_ids=(9, 2), temperature=0.5,
        top_p=0.9, top_k=4, min_p=0.1, presence_penalty=0.2, frequency_penalty=0.3, repetition_penalty=1.1, seed=7,
        logprobs=2, prompt_logprobs=0,
    )  # fmt: skip
    output = {"logprobs": 2, "prompt_logprobs": 0}
    assert params(sampling_options=sampling, stop_conditions=stop, output_options=output) == expected
    assert params(sampling_options={"top_k": -1}).top_k == 0


@pytest.mark.parametrize(
    ("guided", "field", "value"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json": '{"type": "object"}', "regex": None}, "json_schema", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["a.", "b"]}, "regex", r"a\.|b"),
        ({"grammar": "start: /a/", "backend": "xgrammar"}, "grammar", "start: /a/"),
    ],
)
def test_guided_decoding(guided: dict[str, Any], field: str, value: str) -> None:
    assert getattr(params(sampling_options={"guided_decoding": guided}), field) == value


@pytest.mark.parametrize(
    ("group", "options", "message"),
    [
        ("sampling_options", {"use_beam_search": True}, "does not support use_beam_search, and the request sets it to"),
        ("sampling_options", {"n": 2}, "does not support n, and the request sets it to 2; leave it out."),
        ("sampling_options", {"best_of": 2}, "does not support best_of"),
        ("sampling_options", {"allowed_token_ids": [1]}, "does not support allowed_token_ids"),
        ("sampling_options", {"guided_decoding": {"structural_tag": {}}}, "does not support structural_tag"),
        ("sampling_options", {"guided_decoding": {"regex": "a", "choice": ["b"], "json": {}}}, "cannot be used togeth"),
        ("sampling_options", {"an_option_of_tomorrow": 1}, "does not support an_option_of_tomorrow"),
        ("sampling_options", {"temperature": -1.0}, "temperature must be at least 0"),
        ("stop_conditions", {"max_thinking_tokens": 5}, "does not support max_thinking_tokens"),
        ("stop_conditions", {"stop": ["x"] * 17}, "stop must have at most 16 items"),
        ("output_options", {"logprobs": 21}, "logprobs must be at most 20"),
    ],
)
def test_what_the_engine_does_not_have_is_refused(group: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        params(**{group: options})


def test_the_router_s_part() -> None:
    request = {"token_ids": [1], "routing": {"priority": 3, "cache_salt": "me"}}
    assert sampling_params(request, 10) == SamplingParams(max_new_tokens=9)
    assert (cache_salt(request), cache_salt({"routing": None})) == ("me", "")
    with pytest.raises(RequestError, match="does not support lora_name"):
        sampling_params({"token_ids": [1], "routing": {"lora_name": "tutor"}}, 10)


def test_a_long_salt_is_refused() -> None:
    assert len(cache_salt({"routing": {"cache_salt": "a" * 1024}})) == 1024
    with pytest.raises(RequestError, match="cache_salt must have at most 1024 characters, not 1025"):
        cache_salt({"routing": {"cache_salt": "a" * 1025}})


@pytest.mark.parametrize(
    ("part", "value", "subject"),
    [
        ("multi_modal_data", {"image_url": []}, "images, audio or video"),
        ("multi_modal_uuids", {"image_url": ["a"]}, "images, audio or video"),
        ("prompt_embeds", "AAAA", "embeddings as a prompt"),
    ],
)
def test_parts_for_other_kinds_of_workers_are_refused(part: str, value: object, subject: str) -> None:
    with pytest.raises(RequestError, match=rf"does not support {subject} \({part}\)"):
        sampling_params({"token_ids": [1], part: value}, 10)


def test_chunks() -> None:
    assert chunk(RequestOutput("a", "x", (5,))) == {"token_ids": [5], "index": 0}
    logprobs = (TokenLogprob(5, -0.5, ((6, -0.25), (5, -0.5))),)
    last = RequestOutput(
        "a", token_ids=(5,), logprobs=logprobs, finish_reason="length", num_prompt_tokens=3, num_generated=2,
        num_cached_tokens=1,
    )  # fmt: skip
    prompt = (TokenLogprob(8, -1.5), TokenLogprob(9, -2.5, ((7, -0.1),)))
    assert chunk(last, prompt) == {
        "token_ids": [5],
        "index": 0,
        "log_probs": [-0.5],
        "top_logprobs": [
            [
                {"rank": 1, "token_id": 6, "token": None, "logprob": -0.25},
                {"rank": 2, "token_id": 5, "token": None, "logprob": -0.5},
            ]
        ],
        "finish_reason": "length",
        "completion_usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
        "engine_data": {
            "prompt_logprobs": [
                None,
                {"8": {"logprob": -1.5}},
                {"9": {"logprob": -2.5}, "7": {"logprob": -0.1, "rank": 1}},
            ]
        },
    }
