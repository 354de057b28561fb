"""POST /generate and its streams: the shapes of answers, refusals before a stream starts, the same text in both."""

import asyncio
import json
from typing import Any

import pytest

from tests.patience import eventually
from tests.server.conftest import Start
from tests.server.fakes import FakeEngine, Launcher


def sse(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data:") and "[DONE]" not in line]


async def test_generate_answers_with_text_and_origin(start: Start) -> None:
    async with start() as server:
        answer = await server.client.post("/generate", json={"inputs": "abc", "parameters": {"max_new_tokens": 7}})
        assert answer.status_code == 200
        response = answer.json()
        assert response["generated_text"] == "abcabca"
        assert response["weight_version"].startswith("base-")
        assert response["request_id"] == answer.headers["x-request-id"]
        assert "details" not in response


async def test_details_list_every_token_and_the_finish_reason(start: Start) -> None:
    async with start() as server:
        parameters = {"max_new_tokens": 9, "details": True, "stop": ["ca"], "top_n_tokens": 2}
        response = (await server.client.post("/generate", json={"inputs": "abc", "parameters": parameters})).json()
        assert response["generated_text"] == "ab"
        details = response["details"]
        assert details["finish_reason"] == "stop_sequence"
        assert details["generated_tokens"] == len(details["tokens"]) == len(details["top_tokens"]) == 4
        assert "".join(token["text"] for token in details["tokens"]) == "ab"
        assert {top["logprob"] for tops in details["top_tokens"] for top in tops} == {-9999.0}


@pytest.mark.parametrize("text", ["abc", "naïve café ☕ 日本語", "😀"])
async def test_streamed_pieces_add_up_to_the_whole(start: Start, text: str) -> None:
    async with start() as server:
        request = {"inputs": text, "parameters": {"max_new_tokens": 40}}
        whole = (await server.client.post("/generate", json=request)).json()["generated_text"]
        streamed = await server.client.post("/generate", json=request | {"stream": True})
        assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = sse(streamed.text)
        assert "".join(e["token"]["text"] for e in events) == whole == events[-1]["generated_text"]
        assert [e["index"] for e in events] == list(range(1, 41))
        assert all(e["generated_text"] is None for e in events[:-1])
        assert "[DONE]" not in streamed.text


@pytest.mark.parametrize(
    ("parameters", "greedy"),
    [
        ({}, True),
        ({"temperature": 0}, True),
        ({"do_sample": True}, False),
        ({"temperature": 0.5}, False),
        ({"top_p": 0.9}, False),
    ],
)
async def test_parameters_of_sampling_enable_it(start: Start, parameters: dict[str, Any], greedy: bool) -> None:
    async with start() as server:
        details = {"details": True} | parameters
        response = (await server.client.post("/generate", json={"inputs": "x", "parameters": details})).json()
        assert (response["details"]["seed"] is None) == greedy


async def test_truncate_keeps_the_end_of_the_prompt_and_full_text_its_start(start: Start) -> None:
    async with start() as server:
        parameters = {"truncate": 2, "max_new_tokens": 2, "return_full_text": True}
        response = (await server.client.post("/generate", json={"inputs": "abcd", "parameters": parameters})).json()
        assert response["generated_text"] == "abcd" + "cd"


async def test_too_long_a_prompt_is_refused_before_the_200(start: Start) -> None:
    async with start() as server:
        answer = await server.client.post("/generate", json={"inputs": "x" * 600, "stream": True})
        assert answer.status_code == 422
        response = answer.json()
        assert (response["error_type"], response["code"]) == ("validation", "context_length_exceeded")
        assert "600" in response["error"]
        assert "512" in response["error"]


async def test_a_failure_in_the_middle_is_an_event_in_a_stream_and_a_424_elsewhere(start: Start) -> None:
    async with start(Launcher(lambda: FakeEngine(fail="Out of blocks."))) as server:
        server.launcher.engine.fail = "Out of blocks."
        request = {"inputs": "abc"}
        plain = await server.client.post("/generate", json=request)
        assert (plain.status_code, plain.json()["error_type"]) == (424, "generation")
        streamed = sse((await server.client.post("/generate", json=request | {"stream": True})).text)
        assert streamed[0]["token"]["text"] == "a"
        assert streamed[-1]["error"] == "Out of blocks."


async def test_an_engine_that_dies_is_a_503_and_is_started_again(start: Start) -> None:
    async with start(Launcher(lambda: FakeEngine(delay=0.01))) as server:
        first = server.launcher.engine
        pending = asyncio.create_task(
            server.client.post("/generate", json={"inputs": "x", "parameters": {"max_new_tokens": 100}})
        )
        await eventually(lambda: first.running)
        first.alive = False
        answer = await pending
        assert (answer.status_code, answer.json()["code"]) == (503, "engine_down")
        assert int(answer.headers["retry-after"]) >= 1
        assert (await server.client.get("/health/ready")).status_code == 503
        assert (await server.client.get("/health/live")).status_code == 200
        await server.ready()
        assert server.launcher.engine is not first
        assert (await server.client.post("/generate", json={"inputs": "x"})).status_code == 200


async def test_detokenize_names_an_id_that_the_tokenizer_lacks(start: Start) -> None:
    async with start() as server:
        answer = await server.client.post("/detokenize", json={"tokens": [104, 99999, 105]})
        assert answer.status_code == 422
        assert "99999" in answer.json()["error"]


async def test_tokenize_and_back(start: Start) -> None:
    async with start() as server:
        response = (await server.client.post("/tokenize", json={"prompt": "héy", "return_token_strs": True})).json()
        assert response["count"] == 4
        assert response["max_model_len"] == 512
        back = await server.client.post("/detokenize", json={"tokens": response["tokens"]})
        assert back.json() == {"prompt": "héy"}
        chat = (await server.client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
        text = (await server.client.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
        assert text == "<user>hi\n<assistant>"
