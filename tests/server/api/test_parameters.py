"""Request parameters other than the prompt, on every route that generates."""

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.api.chat_generation import template_variables
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.settings import ServerLimits
from tests.server.conftest import Server, Start
from tests.server.fakes import FakeEngine, Launcher, byte_tokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"prompt": "ab", "max_tokens": 2}


class RecordingEngine(FakeEngine):
    """Records its requests. Of several answers to one prompt, each is more likely than those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    async def _outputs(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        number = int(request.request_id.rpartition("-")[2])
        async for output in super()._outputs(request):
            logprobs = output.logprobs and tuple(TokenLogprob(item.token_id, number - 10.0) for item in output.logprobs)
            yield replace(output, logprobs=logprobs)


async def params(server: Server, route: str, body: dict[str, Any]) -> SamplingParams:
    answer = await server.client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    engine = server.launcher.engine
    assert isinstance(engine, RecordingEngine)
    return engine.requests[-1].params


async def test_every_route_passes_sampling_parameters_to_the_engine(start: Start) -> None:
    parameters: dict[str, Any] = {
        "logit_bias": {"97": -100, "98": 2.5},
        "bad_words": ["damn"],
        "stop_token_ids": [7],
        "min_tokens": 1,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    async with start(Launcher(RecordingEngine)) as server:
        for route, body in (
            ("/v1/completions", TEXT | parameters),
            ("/v1/chat/completions", CHAT | parameters),
            ("/generate", {"inputs": "ab", "parameters": parameters}),
        ):
            params_seen = await params(server, route, body)
            assert params_seen.logit_bias == ((97, -100.0), (98, 2.5))
            assert (params_seen.bad_words, params_seen.stop_token_ids, params_seen.min_tokens) == (("damn",), (7,), 1)
            assert (params_seen.skip_special_tokens, params_seen.include_stop_str_in_output) == (False, True)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"1": "2"}}, "logit_bias.1"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, None),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"min_tokens": 3}, None),
        ({"n": 129}, "n"),
    ],
)
async def test_an_invalid_parameter_is_refused_by_name(start: Start, change: dict[str, Any], param: str | None) -> None:
    async with start() as server:
        for route, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            answer = await server.client.post(route, json=body | change)
            assert answer.status_code == 400, answer.text
            name = answer.json()["error"]["param"] or ""
            assert name.startswith(param or ""), name


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": ""}, "prompt"),
        ("/v1/completions", {"model": "tiny", "prompt": ["a", ""]}, "prompt"),
    ],
)
async def test_an_empty_prompt_is_reported_by_the_field_of_the_route(
    route: str, body: dict[str, Any], param: str, start: Start
) -> None:
    async with start() as server:
        answer = await server.client.post(route, json=body)
        assert answer.status_code in (400, 422), answer.text
        error = answer.json()["error"] if route.startswith("/v1") else answer.json()
        assert error["param"] == param
        assert "The prompt has no tokens." in answer.text


async def test_the_end_is_part_of_the_text_and_of_its_log_probabilities(start: Start) -> None:
    """This holds with include_stop_str_in_output; without it, the tokens of a stop string are no part of the answer."""
    async with start() as server:
        request = {"prompt": "abcd", "max_tokens": 8, "stop": ["cd"], "logprobs": 0}
        for shows, text in ((False, "ab"), (True, "abcd")):
            response = (
                await server.client.post("/v1/completions", json=request | {"include_stop_str_in_output": shows})
            ).json()
            choice = response["choices"][0]
            assert choice["text"] == text
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


async def test_a_request_may_have_128_answers_to_one_prompt(start: Start) -> None:
    async with start() as server:
        response = (await server.client.post("/v1/chat/completions", json=CHAT | {"n": 128})).json()
        assert [choice["index"] for choice in response["choices"]] == list(range(128))
        assert response["usage"]["completion_tokens"] == 256


async def test_best_of_returns_the_most_likely_answers(start: Start) -> None:
    async with start(Launcher(RecordingEngine)) as server:
        request = {"prompt": ["ab", "cd"], "n": 2, "best_of": 4, "max_tokens": 3}
        response = (await server.client.post("/v1/completions", json=request)).json()
        assert [(c["index"], c["text"], c["logprobs"]) for c in response["choices"]] == [
            (0, "aba", None),
            (1, "aba", None),
            (2, "cdc", None),
            (3, "cdc", None),
        ]
        assert response["usage"]["completion_tokens"] == 24  # of all that were generated
        choices = (await server.client.post("/v1/completions", json=request | {"logprobs": 0})).json()["choices"]
        assert [choice["logprobs"]["token_logprobs"][0] for choice in choices] == [-7.0, -8.0, -3.0, -4.0]


@pytest.mark.parametrize(
    "change", [{"best_of": 2, "n": 3}, {"best_of": 2, "stream": True}, {"best_of": 0}, {"best_of": 200}]
)
async def test_an_invalid_best_of_is_refused(start: Start, change: dict[str, Any]) -> None:
    async with start() as server:
        assert (await server.client.post("/v1/completions", json=TEXT | change)).status_code == 400


async def test_a_template_gets_further_variables(start: Start, settings: Any) -> None:
    (settings.model / "chat_template.jinja").write_text(
        "{{ 'yes' if thinks else 'no' }}{% if documents %}{{ documents[0].text }}{% endif %}"
    )
    async with start() as server:
        for variables, text in (
            ({"thinks": True}, "yesyes"),
            (None, "nonono"),
            ({"documents": [{"text": "!"}]}, "no!no"),
        ):
            request = CHAT | {"max_tokens": 6, "chat_template_kwargs": variables}
            response = (await server.client.post("/v1/chat/completions", json=request)).json()
            assert response["choices"][0]["message"]["content"].startswith(text[:5])
            body = {"messages": CHAT["messages"], "chat_template_kwargs": variables}
            assert (await server.client.post("/tokenize", json=body)).json()["count"] in (2, 3)
        for invalid in ({"messages": []}, {"add_generation_prompt": False}, [1], {str(i): i for i in range(65)}):
            answer = await server.client.post("/v1/chat/completions", json=CHAT | {"chat_template_kwargs": invalid})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")


async def test_log_probabilities_of_the_prompt(start: Start) -> None:
    """The fake engine gives token n of a prompt the log-probability -n, and lists it as the most likely one."""
    async with start() as server:
        for route, body in (("/v1/completions", {"prompt": "abc"}), ("/v1/chat/completions", CHAT)):
            response = (await server.client.post(route, json=body | {"max_tokens": 1, "prompt_logprobs": 1})).json()
            table = (response if "chat" in route else response["choices"][0])["prompt_logprobs"]
            assert table[0] is None
            assert len(table) == response["usage"]["prompt_tokens"]
            if "chat" not in route:
                (token,) = table[2].values()
                assert token == {"logprob": -2.0, "rank": 1, "decoded_token": "c"}
            streamed = await server.client.post(route, json=body | {"stream": True, "prompt_logprobs": 1})
            assert (streamed.status_code, streamed.headers["content-type"]) == (400, "application/json")
            plain = (await server.client.post(route, json=body | {"max_tokens": 1})).json()
            assert (plain if "chat" in route else plain["choices"][0])["prompt_logprobs"] is None


async def test_log_probabilities_of_prompts_are_bounded_before_any_work(start: Start) -> None:
    async with start(limits=ServerLimits(prompt_logprobs=63)) as server:
        asks: list[tuple[str, dict[str, Any], int]] = [
            ("/v1/completions", {"prompt": "abc", "prompt_logprobs": 20}, 200),
            ("/v1/completions", {"prompt": "abcd", "prompt_logprobs": 20}, 400),
            ("/v1/completions", {"prompt": ["abc", "d"], "prompt_logprobs": 20}, 400),
            ("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 5, "n": 4}, 400),
            ("/v1/completions", {"prompt": "abc" * 30, "logprobs": 5}, 200),
            ("/v1/chat/completions", CHAT | {"prompt_logprobs": 20}, 400),
        ]
        for route, body, status in asks:
            before = len(server.launcher.engine.requests)
            answer = await server.client.post(route, json=body | {"max_tokens": 1})
            assert answer.status_code == status, answer.text
            if status == 400:
                assert "limit of 63 in one request" in answer.json()["error"]["message"]
                assert len(server.launcher.engine.requests) == before
        native = {"inputs": "a" * 64, "parameters": {"details": True, "decoder_input_details": True}}
        answer = await server.client.post("/generate", json=native)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_parameter")


async def test_an_echo_and_prompt_logprobs_do_not_mix(start: Start) -> None:
    async with start() as server:
        request = {"prompt": "abc", "max_tokens": 0, "prompt_logprobs": 1}
        for echo, logprobs in ((True, 0), (True, None), (False, None)):
            response = (
                await server.client.post("/v1/completions", json=request | {"echo": echo, "logprobs": logprobs})
            ).json()
            (choice,) = response["choices"]
            assert choice["text"] == ("abc" if echo else "")
            assert len(choice["prompt_logprobs"]) == 3
            tops = None if choice["logprobs"] is None else choice["logprobs"]["top_logprobs"]
            assert tops == ([None, {"b": -1.0}, {"c": -2.0}] if logprobs == 0 else None)


async def test_the_native_route_returns_details_of_the_prompt(start: Start) -> None:
    async with start() as server:
        parameters = {"max_new_tokens": 1, "details": True, "decoder_input_details": True}
        response = (await server.client.post("/generate", json={"inputs": "abc", "parameters": parameters})).json()
        tokens = [(token["text"], token["logprob"]) for token in response["details"]["prefill"]]
        assert tokens == [("a", None), ("b", -1.0), ("c", -2.0)]
        for invalid in ({"stream": True, "parameters": parameters}, {"parameters": parameters | {"details": False}}):
            assert (await server.client.post("/generate", json={"inputs": "abc"} | invalid)).status_code == 422


async def test_health_answers_to_head(start: Start) -> None:
    async with start() as server:
        answer = await server.client.head("/health")
        assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    ("change", "variables"),
    [
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"enable_thinking": True, "reasoning_effort": "high"}),
        ({"reasoning_effort": None}, {}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "reasoning_effort": "low"},
        ),
    ],
)
async def test_effort_reaches_the_template(change: dict[str, Any], variables: dict[str, Any]) -> None:
    assert template_variables(ChatBody.model_validate(CHAT | change)) == variables | {"tools": None}


async def test_an_unknown_reasoning_effort_is_refused(start: Start) -> None:
    async with start() as server:
        answer = await server.client.post("/v1/chat/completions", json=CHAT | {"reasoning_effort": "some"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")


async def test_every_chunk_can_have_the_usage(start: Start) -> None:
    """As in vLLM, a chunk has the usage of its choice so far, and the last chunk that of all choices."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with start() as server:
        for route, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            request = body | {"n": 2, "stream": True, "max_tokens": 3}
            chunks = await streamed(server, route, request | {"stream_options": options})
            *early, last = chunks
            for index in (0, 1):
                usages = [chunk["usage"] for chunk in early if chunk["choices"][0]["index"] == index]
                counts = [usage["completion_tokens"] for usage in usages]
                assert (counts, counts[-1]) == (sorted(counts), 3)
                assert len({usage["prompt_tokens"] for usage in usages}) == 1
                assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in usages)
            assert last["usage"]["completion_tokens"] == 6
            for fewer in ({"continuous_usage_stats": True}, {"include_usage": None, "continuous_usage_stats": None}):
                assert all("usage" not in c for c in await streamed(server, route, request | {"stream_options": fewer}))


async def streamed(server: Server, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await server.client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


CONTINUED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, \n"}]


def prompt_of(server: Server) -> str:
    """Returns the prompt of the engine's last request, as text."""
    return byte_tokenizer().decode(list(server.launcher.engine.requests[-1].prompt_token_ids))


async def test_a_final_assistant_message_is_continued(start: Start) -> None:
    continued, whole = "<user>hi\n<assistant>Well, \n", "<user>hi\n<assistant>Well, \n\n"
    fields = ("add_generation_prompt", "continue_final_message")
    async with start() as server:
        for values, prompt in (
            ((None, None), whole + "<assistant>"),
            ((True, False), whole + "<assistant>"),
            ((False, None), whole),
            ((False, True), continued),
            ((None, True), continued),
        ):
            request = {"messages": CONTINUED} | dict(zip(fields, values, strict=True))
            answer = await server.client.post("/v1/chat/completions", json=request | {"max_tokens": 2})
            assert (answer.status_code, prompt_of(server)) == (200, prompt)
            assert answer.json()["choices"][0]["message"]["content"] == "<u"  # the fake engine repeats its prompt
            assert (await server.client.post("/tokenize", json=request)).json()["count"] == len(prompt)
        prefilled = await server.client.post("/v1/messages", json={"messages": CONTINUED, "max_tokens": 2})
        assert (prefilled.status_code, prompt_of(server)) == (200, continued)
        counted = await server.client.post("/v1/messages/count_tokens", json={"messages": CONTINUED})
        assert counted.json() == {"input_tokens": len(continued)}


CALLING = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    "change",
    [
        {"messages": CONTINUED[:1]},
        {"messages": [*CONTINUED, CALLING]},
        {"messages": CONTINUED, "add_generation_prompt": True},
    ],
)
async def test_a_conversation_that_cannot_be_continued_is_refused(
    start: Start, route: str, change: dict[str, Any]
) -> None:
    async with start() as server:
        answer = await server.client.post(route, json=change | {"continue_final_message": True})
        assert answer.status_code == (422 if route == "/tokenize" else 400)
        assert "continue_final_message" in answer.text
