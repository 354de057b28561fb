"""/v1: the JSON that OpenAI's client expects. test_live.py uses the client itself."""

import json
from typing import Any

import pytest

from tests.server.conftest import Start
from tests.server.fakes import FakeEngine, Launcher

ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def chunks(text: str) -> list[Any]:
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def test_completion_counts_choices_and_tokens(start: Start) -> None:
    async with start() as server:
        request = {"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 4, "model": "tiny"}
        response = (await server.client.post("/v1/completions", json=request)).json()
        assert response["object"] == "text_completion"
        assert [c["text"] for c in response["choices"]] == ["abab", "abab", "xyzx", "xyzx"]
        assert [c["index"] for c in response["choices"]] == [0, 1, 2, 3]
        counts = {"prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21}
        assert response["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
        assert response["system_fingerprint"].startswith("base-")


@pytest.mark.parametrize("prompt", ["ab", [97, 98], [[97, 98]], ["ab"]])
async def test_every_type_of_prompt_is_accepted(start: Start, prompt: Any) -> None:
    async with start() as server:
        response = (await server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})).json()
        tokens = (await server.client.post("/tokenize", json={"prompt": "ab"})).json()["tokens"]
        expected = "ab" if isinstance(prompt, str) or isinstance(prompt[0], str) else None
        assert response["usage"]["prompt_tokens"] == len(tokens) == 2
        assert expected is None or response["choices"][0]["text"] == expected


async def test_streams_add_up_for_every_choice(start: Start) -> None:
    async with start() as server:
        for route, request in (
            ("/v1/completions", {"prompt": "naïve ☕", "max_tokens": 30}),
            ("/v1/chat/completions", ASK | {"max_tokens": 30}),
        ):
            whole = (await server.client.post(route, json=request | {"n": 3})).json()
            options = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
            events = chunks((await server.client.post(route, json=request | options)).text)
            texts, ends = ["", "", ""], [None, None, None]
            for chunk in events:
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
                    ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
            assert texts == [c["text"] if "text" in c else c["message"]["content"] for c in whole["choices"]]
            assert ends == ["length"] * 3
            assert events[-1]["choices"] == []
            details = [usage.pop("prompt_tokens_details") for usage in (whole["usage"], events[-1]["usage"])]
            assert details[0]["cached_tokens"] <= details[1]["cached_tokens"] < whole["usage"]["prompt_tokens"]
            assert events[-1]["usage"] == whole["usage"]
            assert all(chunk["usage"] is None for chunk in events[:-1])
            assert len({chunk["id"] for chunk in events}) == 1


async def test_chat_uses_the_template_and_opens_with_the_role(start: Start) -> None:
    async with start() as server:
        response = (await server.client.post("/v1/chat/completions", json=ASK | {"max_tokens": 8})).json()
        assert response["choices"][0]["message"] == {"role": "assistant", "content": "<user>hi", "refusal": None}
        parts = {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
            ]
        }
        response = (await server.client.post("/v1/chat/completions", json=parts | {"max_completion_tokens": 10})).json()
        assert response["choices"][0]["message"]["content"] == "<system>ab"
        events = chunks((await server.client.post("/v1/chat/completions", json=ASK | {"stream": True})).text)
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "usage" not in events[0]


async def test_a_chat_answer_may_fill_the_context(start: Start) -> None:
    async with start() as server:
        response = (await server.client.post("/v1/chat/completions", json={"messages": ASK["messages"]})).json()
        assert response["usage"]["total_tokens"] == 512
        assert response["choices"][0]["finish_reason"] == "length"


async def test_logprobs_hold_no_infinity(start: Start) -> None:
    async with start() as server:
        request = {"prompt": "ab", "max_tokens": 3, "logprobs": 2}
        response = (await server.client.post("/v1/completions", json=request)).json()["choices"][0]["logprobs"]
        assert response["tokens"] == ["a", "b", "a"]
        assert response["text_offset"] == [0, 1, 2]
        assert response["token_logprobs"] == [-0.5] * 3
        assert all(set(top.values()) == {-9999.0, -0.5} for top in response["top_logprobs"])  # and the token itself
        request = ASK | {"logprobs": True, "top_logprobs": 2}
        content = (await server.client.post("/v1/chat/completions", json=request)).json()["choices"][0]["logprobs"][
            "content"
        ]
        assert [c["token"] for c in content] == list("<user")
        assert [c["bytes"] for c in content] == [[ord(c)] for c in "<user"]
        streamed = chunks(
            (
                await server.client.post(
                    "/v1/completions", json={"prompt": "ab", "max_tokens": 3, "logprobs": 0, "stream": True}
                )
            ).text
        )
        assert [c["choices"][0]["logprobs"]["text_offset"] for c in streamed] == [[0], [1], [2]]


async def test_a_failure_in_a_stream_is_an_error_and_then_done(start: Start) -> None:
    async with start(Launcher(FakeEngine)) as server:
        server.launcher.engine.fail = "Out of blocks."
        events = chunks((await server.client.post("/v1/completions", json={"prompt": "ab", "stream": True})).text)
        assert events[-1]["error"]["type"] == "server_error"
        assert events[-1]["error"]["message"] == "Out of blocks."


@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"n": 129}, 400, "invalid_parameter", "n"),
        ({"max_tokens": 600}, 400, "context_length_exceeded", None),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "invalid_parameter", None),
        ({"top_logprobs": 2}, 400, "invalid_parameter", None),
        ({"stream_options": {"include_usage": True}}, 400, "invalid_parameter", None),
        ({"messages": []}, 400, "invalid_parameter", "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, 400, "invalid_parameter", "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x"}] * 1025}, 400, "invalid_parameter", "messages"),
        ({"stop": ["a"] * 5}, 400, "invalid_parameter", "stop"),
    ],
)
async def test_refusals(start: Start, change: dict[str, Any], status: int, code: str, param: str | None) -> None:
    async with start() as server:
        answer = await server.client.post("/v1/chat/completions", json=ASK | change)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param)


SPOILED_STOPS: dict[str, Any] = {
    "five": ["a"] * 5,
    "number": 5,
    "empty": "",
    "one of them empty": ["a", ""],
    "one of them long": ["a" * 257],
    "one of them null": [None],
}


async def test_an_error_in_a_union_field_is_about_the_type_that_was_sent(start: Start) -> None:
    async with start() as server:
        response = {
            text: (await server.client.post("/v1/chat/completions", json=ASK | {"stop": stop})).json()["error"][
                "message"
            ]
            for text, stop in SPOILED_STOPS.items()
        }
    assert response["five"] == "stop must have at most 4 items."
    assert response["number"] == "stop must be text or a list."
    assert response["empty"] == "stop must have at least 1 character."
    assert response["one of them empty"] == "stop.1 must have at least 1 character."
    assert response["one of them long"] == "stop.0 must have at most 256 characters."
    assert response["one of them null"] == "stop.0 must be text."


async def test_the_refusal_of_a_prompt_that_fills_the_context_advises_to_shorten_it(start: Start) -> None:
    """Advice to ask for fewer tokens would not help such a prompt."""
    async with start() as server:
        response = [
            (await server.client.post("/v1/completions", json={"prompt": [5] * length, "max_tokens": 2})).json()
            for length in (510, 511, 512, 513)
        ]
    assert response[0]["choices"][0]["finish_reason"] == "length"
    assert [one["error"]["message"] for one in response[1:]] == [
        "The prompt has 511 tokens and up to 2 are requested, but the context holds 512. Shorten the prompt or "
        "ask for fewer tokens.",
        "The prompt has 512 tokens and fills this model's context, which has no room for a completion. "
        "Shorten the prompt.",
        "The prompt has 513 tokens, but this model's context holds 512. Shorten the prompt.",
    ]


async def test_models_are_looked_up_by_name(start: Start) -> None:
    async with start(served_model_name="org/name:tag") as server:
        answer = (await server.client.get("/v1/models")).json()
        assert [m["id"] for m in answer["data"]] == ["org/name:tag"]
        assert (answer["first_id"], answer["last_id"], answer["has_more"]) == ("org/name:tag", "org/name:tag", False)
        assert answer["data"][0]["created_at"].endswith("Z")  # as Anthropic's API has it, beside the number of OpenAI's
        assert (await server.client.get("/v1/models/org/name:tag")).json()["max_model_len"] == 512
        assert (await server.client.get("/v1/models/other")).status_code == 404


async def test_the_placeholder_of_huggingface_hub_selects_the_served_model(start: Start) -> None:
    async with start() as server:
        answer = await server.client.post("/v1/chat/completions", json=ASK | {"model": "dummy"})
        assert answer.status_code == 200
        assert (await server.client.get("/v1/models/dummy")).status_code == 404


async def test_a_request_that_can_never_fit_is_refused_without_retry_after(start: Start) -> None:
    """64 prompts of 16 choices are 1,024 sequences; 272 fit into an idle server."""

    async with start() as server:
        answer = await server.client.post("/v1/completions", json={"prompt": ["a"] * 64, "n": 16, "max_tokens": 1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        assert "retry-after" not in answer.headers
        few = {"prompt": ["a"] * 64, "n": 4, "max_tokens": 1}
        assert (await server.client.post("/v1/completions", json=few)).status_code == 200


async def test_token_ids_are_returned_on_request(start: Start) -> None:
    """The fake engine repeats the tokens of the prompt."""
    options = {"max_tokens": 4, "return_token_ids": True, "return_tokens_as_token_ids": True}
    async with start() as server:
        body = {"prompt": [[97, 98], [99]], "n": 2, "logprobs": 1, **options}
        choices = (await server.client.post("/v1/completions", json=body)).json()["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [[97, 98], [97, 98], [99], [99]]
        assert [choice["token_ids"] for choice in choices] == [[97, 98, 97, 98]] * 2 + [[99] * 4] * 2
        assert choices[0]["logprobs"]["tokens"] == ["token_id:97", "token_id:98"] * 2
        assert choices[0]["logprobs"]["top_logprobs"][0]["token_id:97"] == -0.5
        chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1, **options}
        answer = (await server.client.post("/v1/chat/completions", json=chat)).json()
        prompt = (await server.client.post("/tokenize", json={"messages": chat["messages"]})).json()["tokens"]
        (choice,) = answer["choices"]
        assert (answer["prompt_token_ids"], choice["token_ids"]) == (prompt, prompt[:4])
        first = choice["logprobs"]["content"][0]
        assert (first["token"], first["top_logprobs"][0]["token"]) == (f"token_id:{prompt[0]}", "token_id:0")
        plain = (await server.client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1})).json()
        assert not {"token_ids", "prompt_token_ids"} & plain["choices"][0].keys()
        for path, request in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", chat)):
            refused = await server.client.post(path, json=request | {"return_token_ids": True, "stream": True})
            assert (refused.status_code, "return_token_ids cannot be streamed" in refused.text) == (400, True)
