"""Spans of requests, in the SDK's in-memory exporter, and sent by OTLP to collectors that work or fail."""

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fp8serve.engine.output import RequestOutput, Timing
from fp8serve.errors import MachineError, RequestError
from fp8serve.server import server_state, tracing
from fp8serve.server.settings import Settings
from fp8serve.server.tracing import ENDPOINTS, QuietExporter, Tracing, create_tracing, traces_url
from tests.engine.tiny import write_model
from tests.patience import until
from tests.server.collector import Collector, attributes, collector
from tests.server.conftest import Start
from tests.server.fakes import FakeEngine, Launcher, model_dir
from tests.server.process import serving

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TIMED = Timing(arrived=1000.0, queue=0.5, prefill=1.0, decode=2.0)


class TimedEngine(FakeEngine):
    """An engine whose first output has the times of queue and prefill, and whose last has those of all phases."""

    async def generate(self, request: Any) -> Any:
        async with contextlib.aclosing(super().generate(request)) as outputs:
            async for output in outputs:
                first = output.num_generated == 1 and output.finish_reason is None
                timing = Timing(1000.0, 0.5, 1.0, 0.0) if first else TIMED if output.finish_reason else None
                values = {name: getattr(output, name) for name in RequestOutput.__slots__}
                yield RequestOutput(**values | {"timing": timing})


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tracing]]:
    """The tracing of servers that are started in this test; `spans` empties it."""
    tracings: list[Tracing] = []

    def in_memory(endpoint: str | None) -> Tracing:
        tracings.append(Tracing(InMemorySpanExporter()))
        return tracings[-1]

    monkeypatch.setattr(server_state, "create_tracing", in_memory)
    yield tracings
    for each in tracings:
        each.provider.shutdown()


def spans(memory: list[Tracing]) -> dict[str, list[ReadableSpan]]:
    """Returns the finished spans by name."""
    provider = memory[-1].provider
    provider.force_flush()
    exporter: Any = provider._active_span_processor._span_processors[0].span_exporter  # type: ignore[attr-defined]
    spans_by_name: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        spans_by_name.setdefault(span.name, []).append(span)
    return spans_by_name


async def test_a_request_is_a_span_with_its_phases(start: Start, memory: list[Tracing]) -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1", "x-request-id": "mine"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "temperature": 0.5}
    async with start(Launcher(TimedEngine)) as server:
        await server.client.post("/v1/chat/completions", json=body, headers=headers)
        finished = spans(memory)
    (request,) = finished["POST /v1/chat/completions"]
    assert request.parent is not None
    assert (f"{request.parent.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, SPAN)
    assert request.context is not None
    assert request.context.trace_state.get("vendor") == "1"
    span_attributes = dict(request.attributes or {})
    expected = {
        "http.request.method": "POST", "http.route": "/v1/chat/completions", "http.response.status_code": 200,
        "fp8serve.request_id": "mine", "fp8serve.tenant": "anonymous", "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny", "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.n": 1, "gen_ai.usage.completion_tokens": 5, "gen_ai.usage.output_tokens": 5,
        "gen_ai.latency.time_in_queue": 0.5, "gen_ai.latency.time_to_first_token": 1.5,
        "gen_ai.latency.time_in_model_prefill": 1.0, "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 3.0, "gen_ai.latency.e2e": 3.5,
        "gen_ai.response.finish_reasons": ("length",),
    }  # fmt: skip
    assert {name: span_attributes.get(name) for name in expected} == expected
    assert span_attributes["gen_ai.usage.prompt_tokens"] == span_attributes["gen_ai.usage.input_tokens"] > 0
    times = {
        name: (finished[name][0].start_time, finished[name][0].end_time) for name in ("queue", "prefill", "decode")
    }
    at = 10**9
    assert times["queue"] == (1000 * at, 1000 * at + at // 2)
    assert times["prefill"] == (1000 * at + at // 2, 1001 * at + at // 2)
    assert times["decode"] == (1001 * at + at // 2, 1003 * at + at // 2)
    for name in times:
        (child,) = finished[name]
        assert child.parent == request.context


async def test_each_sequence_has_its_phases(start: Start, memory: list[Tracing]) -> None:
    async with start(Launcher(TimedEngine)) as server:
        await server.client.post("/v1/completions", json={"model": "tiny", "prompt": ["a", "b"], "n": 2})
        finished = spans(memory)
    assert [len(finished[name]) for name in ("queue", "prefill", "decode")] == [4, 4, 4]
    numbers = [dict(span.attributes or {})["fp8serve.sequence"] for span in finished["queue"]]
    assert sorted(map(str, numbers)) == ["0", "1", "2", "3"]
    span_attributes = dict(finished["POST /v1/completions"][0].attributes or {})
    assert span_attributes["gen_ai.request.n"] == 4
    assert "gen_ai.latency.e2e" not in span_attributes


async def test_failures_and_odd_paths(start: Start, memory: list[Tracing]) -> None:
    async with start(Launcher(lambda: FakeEngine(fail="It broke."))) as server:
        await server.client.post("/generate", json={"inputs": "abc"})
        await server.client.post("/generate", json={"inputs": "abc", "stream": True})
        await server.client.post("/generate", json={"inputs": 1})
        await server.client.get("/a/secret/path?secret=1")
        for quiet in ("/health", "/health/live", "/health/ready", "/ping", "/metrics"):
            await server.client.get(quiet)
        finished = spans(memory)
    assert set(finished) == {"POST /generate", "GET unmatched"}
    failed, stream, invalid = finished["POST /generate"]
    (nowhere,) = finished["GET unmatched"]
    kinds = [dict(span.attributes or {}).get("error.type") for span in (failed, stream, invalid, nowhere)]
    assert kinds == ["generation_failed", "generation_failed", "invalid_parameter", "route_not_found"]
    assert [span.status.is_ok for span in (failed, stream, invalid, nowhere)] == [False, False, True, True]
    assert "secret" not in str([dict(span.attributes or {}) for group in finished.values() for span in group])


async def test_a_client_that_leaves_has_the_phases_that_ended(start: Start, memory: list[Tracing]) -> None:
    async with start(Launcher(lambda: TimedEngine(delay=0.01))) as server:
        body = {"inputs": "abc", "parameters": {"max_new_tokens": 400}, "stream": True}
        events: list[Any] = []
        disconnected = asyncio.Event()

        async def receive() -> Any:
            if not events:
                events.append(1)
                import json

                return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if b"data:" in message.get("body", b""):
                disconnected.set()

        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {
            "type": "http", "method": "POST", "path": "/generate", "raw_path": b"/generate",
            "headers": headers, "query_string": b"", "http_version": "1.1", "scheme": "http",
            "client": ("127.0.0.1", 1), "server": ("localhost", 80), "root_path": "",
        }  # fmt: skip
        await server.app(scope, receive, send)
        finished = spans(memory)
    assert set(finished) == {"POST /generate", "queue", "prefill"}
    span_attributes = dict(finished["POST /generate"][0].attributes or {})
    assert span_attributes["gen_ai.response.finish_reasons"] == ("cancelled",)


# -- where spans go ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp", "https://c/otlp/v1/traces"),
        ("http://c:4318/v1/traces", "http://c:4318/v1/traces"),
    ],
)
def test_the_path_for_traces_is_added_to_the_endpoint(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4318", "grpc://c:4317", "http://", "http://c:port", "http://c:99999"]
)
def test_an_invalid_endpoint_is_refused_without_repeating_it(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--otlp-endpoint must be an address such as"):
        Settings(model=tmp_path, otlp_endpoint=endpoint)


def test_settings_do_not_show_the_address(tmp_path: Path) -> None:
    settings = Settings(model=tmp_path, otlp_endpoint="http://user:password@c:4318")
    assert "password" not in repr(settings)
    assert "otlp_endpoint" not in settings.public


def test_missing_opentelemetry_packages_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"needs the OpenTelemetry packages; install them: pip install"):
        create_tracing("http://c:4318")
    monkeypatch.setenv(ENDPOINTS[1], "http://c:4318")
    assert create_tracing(None) is None
    assert "the packages are missing" in caplog.text


def test_the_sdk_is_not_imported_without_a_collector() -> None:
    """FastAPI imports the API, but nothing imports the SDK."""
    code = (
        "import sys; from fp8serve.server import tracing; tracing.create_tracing(None); import fp8serve.server.app\n"
        "print([m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


async def test_the_environment_names_a_collector_and_can_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINTS[1], "http://127.0.0.1:9")
    tracing_created = create_tracing(None)
    assert isinstance(tracing_created, Tracing)
    await tracing_created.close()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert create_tracing("http://127.0.0.1:9") is None


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("traced") / "tiny")


@pytest.mark.slow
def test_a_real_engine_sends_spans_to_a_real_collector(
    real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=abc")
    with collector() as otel_collector:
        options = {"model": str(real), "data_dir": str(tmp_path / "data"), "recipe": "bf16"}
        with serving(tmp_path / "log", **options, otlp_endpoint=otel_collector.url) as server:
            answer = server.client.post(
                "/generate",
                json={"inputs": "Hello there", "parameters": {"max_new_tokens": 8, "ignore_eos": True}},
                headers={"traceparent": f"00-{TRACE}-{SPAN}-01"},
            )
            assert answer.status_code == 200
            assert server.stop() == 0  # which sends what is left
        assert "Traceback" not in server.log.read_text()
        check_spans(otel_collector)


def check_spans(otel_collector: Collector) -> None:
    until(lambda: otel_collector.named("POST /generate"), "the span of the request")
    (request,) = otel_collector.named("POST /generate")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, SPAN)
    assert otel_collector.resource["service.name"] == "my-service"
    path, headers = otel_collector.requests[0]
    assert path == "/v1/traces"
    assert headers["x-token"] == "abc"
    phases = [otel_collector.named(name)[0] for name in ("queue", "prefill", "decode")]
    assert all(span.parent_span_id == request.span_id for span in phases)
    assert phases[0].end_time_unix_nano == phases[1].start_time_unix_nano
    assert phases[1].end_time_unix_nano == phases[2].start_time_unix_nano
    assert all(span.end_time_unix_nano > span.start_time_unix_nano for span in phases)
    slack = 50_000_000  # two processes ask the time of day, and a step of the clock lies between
    assert request.start_time_unix_nano - slack <= phases[0].start_time_unix_nano
    assert phases[2].end_time_unix_nano <= request.end_time_unix_nano + slack
    assert attributes(request)["gen_ai.usage.completion_tokens"] == 8


@pytest.mark.parametrize("way", ["nobody listens", "it refuses", "it is silent"])
def test_a_bad_collector_costs_no_request_and_one_warning(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    options = {"model": str(model_dir(tmp_path / "tiny")), "data_dir": str(tmp_path / "data"), "fake": True}
    log = tmp_path / "log"
    with collector() as otel_collector:
        otel_collector.status, otel_collector.silent = 403 if way == "it refuses" else 200, way == "it is silent"
        endpoint = "http://127.0.0.1:9" if way == "nobody listens" else otel_collector.url
        with serving(log, **options, otlp_endpoint=endpoint) as server:
            for _ in range(40):  # more spans than the queue holds
                assert server.client.post("/generate", json={"inputs": "abc"}).status_code == 200
            until(lambda: "the collector does not accept spans" in log.read_text(), "the warning")
            assert server.stop() == 0
    text = log.read_text()
    assert text.count("the collector does not accept spans") == 1
    assert "Traceback" not in text
    assert "opentelemetry" not in text.lower()


def test_a_collector_that_recovers_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Moody(SpanExporter):
        results = iter([SpanExportResult.FAILURE, SpanExportResult.FAILURE, SpanExportResult.SUCCESS])

        def export(self, spans: Any) -> SpanExportResult:
            return next(self.results)

    caplog.set_level(logging.INFO)
    exporter = QuietExporter(Moody())
    for _ in range(3):
        exporter.export([object()] * 3)  # type: ignore[list-item]
    assert [record.getMessage() for record in caplog.records] == [
        "the collector does not accept spans; 3 are lost so far; requests are not affected",
        "the collector accepts spans again; 6 spans were lost",
    ]
