"""The client's error messages: one sentence if a server is unreachable, refuses, disconnects or sends nonsense."""

import json
from pathlib import Path
from typing import Any

import pytest

from fp8serve.chat.models import Piece, chat_pieces
from fp8serve.client.api import Api, base_url
from fp8serve.errors import DataError, Fp8ServeError, RequestError, ServerError
from tests.client.fake import CHAT, Answer, FakeServer, delta, json_answer, stream_answer

ROUTE = "POST /v1/chat/completions"
BODY = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]}


def chat(fake: FakeServer, answer: Answer) -> list[Piece]:
    fake.routes[ROUTE] = answer
    with Api(fake.url) as api:
        return list(chat_pieces(api, BODY))


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/", " http://a:1/v1//"])
def test_the_v1_of_a_url_may_be_left_out(url: str) -> None:
    assert base_url(url) == "http://a:1"


@pytest.mark.parametrize("url", ["", "a:1", "ftp://a", "http://", "http://a:x", "http://a:99999", "http://a?b", "/a"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="is not the URL of a server"):
        Api(url)


@pytest.mark.parametrize("key", ["", "a\nb", "clé"])
def test_a_key_that_is_no_valid_header_is_refused(key: str) -> None:
    with pytest.raises(RequestError, match="printable ASCII"):
        Api("http://a", key)


def test_the_key_is_sent(fake: FakeServer) -> None:
    with Api(fake.url, "secret") as api:
        assert api.first_model() == "fake"
    assert fake.headers[0]["Authorization"] == "Bearer secret"


def test_the_error_names_an_unreachable_server() -> None:
    with (
        Api("http://127.0.0.1:9") as api,
        pytest.raises(ServerError, match=r"There is no server at http://127\.0\.0\.1:9"),
    ):
        api.first_model()


def test_a_server_on_this_machine_is_reached_without_the_proxy(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with Api(fake.url) as api:
        assert api.first_model() == "fake"


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            json_answer({"error": {"message": "Too long.", "code": "context"}}, 400),
            "The server answered 400: Too long.",
        ),
        (json_answer({"error": "No job.", "hint": "List them."}, 404), "The server answered 404: No job. List them."),
        (
            json_answer({"object": "error", "message": "vLLM says so"}, 422),
            "The server answered 422: vLLM says so.",
        ),
        (json_answer({"detail": "Not Found"}, 404), "The server answered 404: Not Found."),
        (json_answer({"detail": [{"loc": ["body"]}]}, 422), "The server answered 422: [{'loc': ['body']}]."),
        (json_answer(["odd"], 500), "The server answered 500 Internal Server Error."),
        (Answer([b"<html>"], 502), "The server answered 502 Bad Gateway."),
        (Answer([b"<html>"], 404), "The server answered 404 Not Found; check the URL of the server ("),
        (
            json_answer({"error": {"message": "Bad key"}}, 401),
            "The server refuses the API key or requires one (Bad key); provide",
        ),
        (Answer([], 403), "The server refuses the API key or requires one (403); provide"),
        (Answer([], 308, headers={"Location": "https://b/"}), "The server responded with a redirect (308) to 'https"),
        (Answer([b"<html>"]), "is not JSON; check the URL"),
        (json_answer({"data": [{"name": "x"}]}), "/v1/models did not return a list of models"),
        (json_answer([]), "/v1/models did not return a list of models"),
        (json_answer({"data": []}), "serves no model now"),
    ],
)
def test_an_error_response_becomes_one_sentence(fake: FakeServer, answer: Answer, sentence: str) -> None:
    fake.routes["GET /v1/models"] = answer
    with Api(fake.url) as api, pytest.raises(ServerError) as refused:
        api.first_model()
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.status in (None, answer.status)


def test_the_client_yields_the_pieces_of_an_answer(fake: FakeServer) -> None:
    call = {"index": 0, "function": {"name": "look_up", "arguments": ""}}
    events = [
        delta(role="assistant", content=None),
        delta(reasoning_content="Hm."),
        delta(reasoning="So."),
        delta(content="Yes"),
        delta(tool_calls=[call]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a": 1}'}}]),
        {"choices": [], "usage": {"total_tokens": 3}},
        {"choices": [{"delta": None, "finish_reason": "stop"}], "surprise": True},
        "[DONE]",
    ]
    assert chat(fake, stream_answer(*events)) == [
        Piece("reasoning", "Hm."),
        Piece("reasoning", "So."),
        Piece("text", "Yes"),
        Piece("tool", "look_up", starts_call=True),
        Piece("tool", '{"a": 1}'),
    ]
    assert fake.bodies(ROUTE) == [BODY | {"stream": True}]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (stream_answer(*CHAT[:3]), "closed the stream before the end of its response"),
        (stream_answer(*CHAT[:3], cut=True), "closed the connection: "),
        (stream_answer(*CHAT[:2], {"error": {"message": "It died.\nSorry."}}), "with an error: It died. Sorry."),
        (stream_answer(*CHAT[:2], {"error": "It died."}), "with an error: It died."),
        (stream_answer("nonsense"), "an event that is not a JSON object: 'nonsense'"),
        (stream_answer([1]), "an event that is not a JSON object: '[1]'"),
        (stream_answer({"choices": [1]}), "an event unknown to OpenAI's API"),
        (stream_answer({"choices": 7}), "an event unknown to OpenAI's API"),
        (stream_answer({"choices": [{"delta": {"tool_calls": ["x"]}}]}), "an event unknown to OpenAI's API"),
        (json_answer({"choices": [{"message": {"content": "whole"}}]}), "text/event-stream"),
        (json_answer({"error": {"message": "No."}}, 400), "The server answered 400: No."),
    ],
)
def test_a_broken_stream_becomes_one_sentence(fake: FakeServer, answer: Answer, sentence: str) -> None:
    with pytest.raises(ServerError) as failed:
        chat(fake, answer)
    assert sentence in str(failed.value)
    assert "\n" not in str(failed.value)


def test_invalid_unicode_is_sent_for_the_server_to_refuse(fake: FakeServer) -> None:
    fake.routes[ROUTE] = json_answer({"error": {"message": "Not Unicode."}}, 400)
    with Api(fake.url) as api, pytest.raises(Fp8ServeError, match="Not Unicode"):
        list(chat_pieces(api, {"messages": "\udcff"}))


def test_uploads(fake: FakeServer, tmp_path: Path) -> None:
    fake.routes["POST /v1/files"] = json_answer({"id": "file-1"})
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "a"}))
    with Api(fake.url) as api:
        assert api.upload(data) == "file-1"
        with pytest.raises(DataError, match=r"none.jsonl cannot be read: No such file"):
            api.upload(tmp_path / "none.jsonl")
    (body,) = fake.bodies("POST /v1/files")
    assert b'filename="data.jsonl"' in body
    assert data.read_bytes() in body
    assert b"fine-tune" in body


def test_an_upload_answer_without_an_id_is_refused(fake: FakeServer, tmp_path: Path) -> None:
    answer: Any = {"object": "file"}
    fake.routes["POST /v1/files"] = json_answer(answer)
    (tmp_path / "a.jsonl").write_text("{}")
    with Api(fake.url) as api, pytest.raises(ServerError, match="response has no file"):
        api.upload(tmp_path / "a.jsonl")
