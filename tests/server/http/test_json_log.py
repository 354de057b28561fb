"""The JSON log of a server: the fields of a request's record, and the secrets that no record contains."""

import json
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8serve import logs
from fp8serve.errors import RequestError
from fp8serve.server.http.access_log import trace_context
from fp8serve.server.settings import Settings
from tests.server.conftest import Start
from tests.server.fakes import FakeEngine, Launcher, model_dir
from tests.server.process import serving

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Records(logging.Handler):
    """Formats every record with the JSON formatter and stores the parsed result."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logs.JsonFormatter("server"))
        self.entries: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.entries.append(json.loads(self.format(record)))

    def of(self, request_id: str) -> list[dict[str, Any]]:
        return [record for record in self.entries if record.get("request_id") == request_id]


@pytest.fixture
def records() -> Iterator[Records]:
    handler, logger = Records(), logging.getLogger("fp8serve")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([f"00-{TRACE}-{SPAN}-01"], (TRACE, SPAN)),
        ([f" 00-{TRACE}-{SPAN}-00 "], (TRACE, SPAN)),
        ([f"01-{TRACE}-{SPAN}-01-more"], (TRACE, SPAN)),
        ([f"00-{TRACE}-{SPAN}-01-more"], None),
        ([f"ff-{TRACE}-{SPAN}-01"], None),
        ([f"00-{TRACE.upper()}-{SPAN}-01"], None),
        ([f"00-{'0' * 32}-{SPAN}-01"], None),
        ([f"00-{TRACE}-{'0' * 16}-01"], None),
        ([f"00-{TRACE}-{SPAN}-01"] * 2, None),
        ([f"00-{TRACE}-{SPAN}"], None),
        (["\xff" * 55], None),
        ([""], None),
        ([], None),
    ],
)
def test_only_a_valid_header_sets_the_trace(headers: list[str], expected: tuple[str, str] | None) -> None:
    scope = {"headers": [(b"traceparent", value.encode("latin-1")) for value in headers]}
    assert trace_context(scope) == expected


async def test_the_record_of_an_answer_has_its_route_status_tokens_and_trace(start: Start, records: Records) -> None:
    async with start() as server:
        headers = {"x-request-id": "mine", "traceparent": f"00-{TRACE}-{SPAN}-01"}
        for path, body in (
            ("/generate", {"inputs": "abc"}),
            ("/generate", {"inputs": "abc", "stream": True}),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "x"}], "max_tokens": 16, "stream": True},
            ),
        ):
            await server.client.post(path, json=body, headers=headers)
    entries = records.of("mine")
    assert [record["route"] for record in entries] == ["/generate", "/generate", "/v1/chat/completions"]
    for record in entries:
        assert (record["trace_id"], record["span_id"]) == (TRACE, SPAN)
        assert (record["level"], record["logger"]) == ("info", "fp8serve.server.access")
        assert (record["method"], record["status"], record["tenant"]) == ("POST", 200, "anonymous")
        assert record["duration_ms"] > 0
        assert record["answer_tokens"] == 16
    assert entries[0]["prompt_tokens"] == 3
    assert "error" not in entries[0]


async def test_a_failure_has_its_code_in_a_stream_too(start: Start, records: Records) -> None:
    launcher = Launcher(lambda: FakeEngine(fail="It broke."))
    async with start(launcher) as server:
        for name, path, body in (
            ("whole", "/generate", {"inputs": "abc"}),
            ("stream", "/generate", {"inputs": "abc", "stream": True}),
            ("invalid", "/generate", {"inputs": "abc", "unknown": 1}),
            ("nowhere", "/nope", {}),
        ):
            await server.client.post(path, json=body, headers={"x-request-id": name})
    codes = {name: records.of(name)[-1]["error"] for name in ("whole", "stream", "invalid", "nowhere")}
    assert codes == {
        "whole": "generation_failed", "stream": "generation_failed",
        "invalid": "unknown_parameter", "nowhere": "route_not_found",
    }  # fmt: skip
    assert records.of("stream")[-1]["status"] == 200


async def test_an_internal_error_is_one_record_with_its_traceback(
    start: Start, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start() as server:
        monkeypatch.setattr(server.state.parser, "encode_prompts", None)
        answer = await server.client.post("/generate", json={"inputs": "x"}, headers={"x-request-id": "bad"})
    assert answer.status_code == 500
    fault, access = records.of("bad")
    assert (fault["level"], fault["exception"], access["error"]) == ("error", "TypeError", "internal_error")
    assert "Traceback" in fault["traceback"]
    assert "Traceback" not in fault["message"]


@pytest.mark.parametrize("sent_id", ["", "two words", "a" * 65, 'q"uote', "é"])
async def test_an_invalid_request_id_is_replaced(start: Start, records: Records, sent_id: str) -> None:
    async with start() as server:
        headers = {b"x-request-id": sent_id.encode("latin-1")}
        answer = await server.client.post("/generate", json={"inputs": "x"}, headers=headers)
        request_id = answer.headers["x-request-id"]
    assert request_id.startswith("req-")
    assert len(records.of(request_id)) == 1


async def test_no_secret_and_no_text_of_a_request_is_in_any_record(start: Start, records: Records) -> None:
    async with start(api_key="a-secret-key") as server:
        for key in ("a-secret-key", "a-wrong-key"):
            headers = {"authorization": f"Bearer {key}", "cookie": "a-cookie"}
            for path in ("/generate?q=a-query", "/nope/a-path", "/finetune"):
                await server.client.post(path, json={"inputs": "a-prompt", "a-field": 1}, headers=headers)
    text = json.dumps(records.entries)
    assert "/generate" in text
    for secret in ("a-secret", "a-wrong", "a-cookie", "a-query", "a-path", "a-prompt", "a-field"):
        assert secret not in text, secret


def test_a_server_writes_nothing_but_json(tmp_path: Path) -> None:
    """The log is JSON from the first line to the last, including requests, a job and the stop."""
    log = tmp_path / "log"
    model = model_dir(tmp_path / "tiny")
    options = {"model": str(model), "data_dir": str(tmp_path / "data"), "fake": True, "log_format": "json"}
    with serving(log, **options) as server:
        server.client.post("/generate", json={"inputs": "x" * 20_000})
        server.client.post("/finetune", json={"data": [{"prompt": "a", "completion": "b"}]})
        server.client.get("/health")
        assert server.stop(signal.SIGTERM) == 0
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(": serving " in record["message"] for record in entries)
    assert entries[-1]["message"] == "asked to stop: draining"
    routes = [record.get("route") for record in entries]
    assert "/generate" in routes
    assert "/health" not in routes


def test_an_unknown_log_format_is_refused_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="log_format"):
        Settings(model=tmp_path, log_format="xml")  # type: ignore[arg-type]
