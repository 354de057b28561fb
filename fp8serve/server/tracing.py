"""Spans of requests for an OpenTelemetry collector, by the standard packages (`pip install 'fp8serve[otel]'`).

    POST /v1/chat/completions          from the request's first line to its last byte, a child of the caller's span
      queue, prefill, decode           of each sequence: by the engine's own clock (engine/output.py: Timing)

A collector is named by `--otlp-endpoint` or by OTEL_EXPORTER_OTLP_ENDPOINT, and everything else by the standard OTEL_*
variables, as the packages read them. Spans hold numbers and names: no prompt, no answer, no header. Attributes have the
names of the GenAI conventions and, where those have changed, the ones that vLLM uses as well.

A thread of the package sends spans from a queue of limited length, so a collector that does not answer delays no
request: spans that do not fit are dropped. The packages' own warnings, one for each batch, are silenced in favour of an
occasional one. Nothing here is global: a program that hosts the server keeps its own tracing.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import fp8serve
from fp8serve.errors import MachineError
from fp8serve.server.faults import KINDS, Code
from fp8serve.server.usage import Answer, Usage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger("fp8serve.server.tracing")

Attributes = dict[str, Any]
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
NEEDED = "pip install 'fp8serve[otel]'"
QUIET_SECONDS = 300.0  # between two warnings that spans are lost
CLOSING_SECONDS = 3.0  # for the last spans to be sent
OPERATIONS = {
    "/v1/chat/completions": "chat", "/v1/messages": "chat", "/v1/responses": "chat", "/v1/embeddings": "embeddings",
    "/v1/completions": "text_completion", "/generate": "text_completion", "/generate_stream": "text_completion",
}  # fmt: skip


class Tracing:
    """Spans that go to `exporter`."""

    def __init__(self, exporter: Any) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self.provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self.provider.get_tracer("fp8serve", fp8serve.__version__)

    def begin(self, name: str, headers: Mapping[str, str]) -> "RequestSpan":
        """`headers`: of the request, `traceparent` and `tracestate` among them if it has them."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers)
        return RequestSpan(self._tracer, self._tracer.start_span(name, parent, SpanKind.SERVER))

    async def close(self) -> None:
        """Sends the remaining spans, for CLOSING_SECONDS at most. The thread may remain: it keeps no process alive."""
        closing = threading.Thread(target=self.provider.shutdown, daemon=True)
        closing.start()
        end = time.monotonic() + CLOSING_SECONDS
        while closing.is_alive() and time.monotonic() < end:
            await asyncio.sleep(0.02)


class RequestSpan:
    """The span of one request, from `Tracing.begin` to `end`. Ids are hexadecimal."""

    def __init__(self, tracer: "Tracer", span: "Span") -> None:
        self._tracer, self._span = tracer, span
        self._began = time.time()
        context = span.get_span_context()
        self.trace_id, self.span_id = f"{context.trace_id:032x}", f"{context.span_id:016x}"

    def end(self, attributes: Attributes, usage: Usage) -> None:
        """`attributes`: of HTTP, with `http.route` and `http.response.status_code`."""
        from opentelemetry.trace import Status, StatusCode

        self._span.update_name(f"{attributes['http.request.method']} {attributes['http.route']}")
        self._span.set_attributes(attributes | _of_usage(usage, attributes))
        if "error.type" in attributes and _is_ours(attributes["error.type"]):
            self._span.set_status(Status(StatusCode.ERROR))
        for index, answer in enumerate(usage.answers):
            self._phases(index, answer)
        self._span.end()

    def _phases(self, index: int, answer: Answer) -> None:
        """The children of one sequence, as far as the engine got."""
        from opentelemetry.trace import set_span_in_context

        if (timing := answer.timing) is None:
            return
        parent, at = set_span_in_context(self._span), timing.arrived
        for name, seconds in (("queue", timing.queue), ("prefill", timing.prefill), ("decode", timing.decode)):
            if seconds is None or (name == "decode" and answer.finish_reason is None):
                return
            span = self._tracer.start_span(name, parent, start_time=_nanoseconds(at))
            span.set_attributes({"gen_ai.request.id": answer.request.request_id, "fp8serve.sequence": index})
            if name == "prefill":
                span.set_attribute("fp8serve.cached_tokens", answer.cached)
            at += seconds
            span.end(_nanoseconds(at))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _is_ours(error: str) -> bool:
    """Whether the failure's code means that the server, and not the client, is at fault."""
    return KINDS[Code(error)].v1 >= 500


def _of_usage(usage: Usage, attributes: Attributes) -> Attributes:
    """The attributes of the tokens read and generated."""
    if usage.model is None and not usage.total:
        return {}
    result: Attributes = {
        "gen_ai.provider.name": "fp8serve",
        "gen_ai.operation.name": OPERATIONS.get(attributes["http.route"]),
        "gen_ai.request.model": usage.model,
        "gen_ai.response.model": usage.model,
        "gen_ai.usage.prompt_tokens": usage.prompt,
        "gen_ai.usage.input_tokens": usage.prompt,
        "gen_ai.usage.completion_tokens": usage.generated,
        "gen_ai.usage.output_tokens": usage.generated,
    }
    if usage.answers:
        result |= _of_answers(usage.answers)
    return {name: value for name, value in result.items() if value is not None}


def _of_answers(answers: Sequence[Answer]) -> Attributes:
    first = answers[0]
    params = first.request.params
    result: Attributes = {
        "gen_ai.request.id": first.request.request_id.rpartition("-")[0],
        "gen_ai.request.n": len(answers),
        "gen_ai.request.max_tokens": params.max_new_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.response.finish_reasons": [answer.finish_reason or "cancelled" for answer in answers],
    }
    return result | (_latencies(first) if len(answers) == 1 else {})


def _latencies(answer: Answer) -> Attributes:
    """Latencies in seconds, as far as the engine got. For a request with several sequences, only the children have
    them."""
    if (timing := answer.timing) is None:
        return {}
    latencies: Attributes = {"gen_ai.latency.time_in_queue": timing.queue}
    if timing.decode is None or timing.prefill is None:
        return latencies
    latencies["gen_ai.latency.time_in_model_prefill"] = timing.prefill
    latencies["gen_ai.latency.time_to_first_token"] = timing.queue + timing.prefill
    if answer.finish_reason is None:
        return latencies
    return latencies | {
        "gen_ai.latency.time_in_model_decode": timing.decode,
        "gen_ai.latency.time_in_model_inference": timing.inference,
        "gen_ai.latency.e2e": timing.queue + timing.inference,
    }


def _resource() -> Any:
    """The sender: as OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say, otherwise fp8serve."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    ours = Resource.create({"service.name": "fp8serve", "service.version": fp8serve.__version__})
    return ours.merge(OTELResourceDetector().detect())


# -- where they go -----------------------------------------------------------------------------------------------------


def tracing_of(endpoint: str | None) -> Tracing | None:
    """Tracing to the collector at `endpoint`, or at that of the environment; None if neither names one.

    MachineError: an `endpoint` is given, and the packages are not installed. The environment may be meant for other
    programs, so that it only causes a warning.
    """
    is_named = endpoint is not None or any(os.environ.get(name) for name in ENDPOINTS)
    if not is_named or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if not _installed():
        if endpoint is not None:
            raise MachineError(f"--otlp-endpoint needs the OpenTelemetry packages; install them: {NEEDED}.")
        log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, and no spans are sent: the packages are missing; %s", NEEDED)
        return None
    if "grpc" in [os.environ.get(name) for name in PROTOCOLS]:
        log.warning("spans are sent as http/protobuf, whatever OTEL_EXPORTER_OTLP_PROTOCOL says: see the port")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Tracing(QuietExporter(OTLPSpanExporter(endpoint=None if endpoint is None else traces_url(endpoint))))


def _installed() -> bool:
    try:
        return all(find_spec(name) for name in ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk"))
    except ModuleNotFoundError:  # of a parent
        return False


def traces_url(endpoint: str) -> str:
    """Where spans go at a collector: /v1/traces below its address, unless the address says so already."""
    base = endpoint.rstrip("/")
    return base if urlsplit(base).path.endswith("/v1/traces") else f"{base}/v1/traces"


class QuietExporter:
    """`exporter`, with an occasional warning that spans are lost, and a line when they are accepted again. A
    SpanExporter by its methods, since the package with that class may be missing."""

    def __init__(self, exporter: "SpanExporter") -> None:
        self._exporter = exporter
        self._lost = 0
        self._last_warning = -QUIET_SECONDS
        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)

    def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = SpanExportResult.FAILURE
        with contextlib.suppress(Exception):
            result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                log.info("the collector takes spans again; %d were lost", self._lost)
            self._lost = 0
            return result
        self._lost += len(spans)
        if time.monotonic() - self._last_warning >= QUIET_SECONDS:
            self._last_warning = time.monotonic()
            log.warning("the collector takes no spans; %d are lost so far, and requests go on", self._lost)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)
