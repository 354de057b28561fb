"""Sends spans of requests to an OpenTelemetry collector, with the standard packages (`pip install 'fp8serve[otel]'`).

    POST /v1/chat/completions          from the request's first line to the response's last byte, a child of the
                                       caller's span
      queue, prefill, decode           for each sequence, measured by the engine's clock (engine/output.py: Timing)

`--otlp-endpoint` or OTEL_EXPORTER_OTLP_ENDPOINT names the collector. The packages read the other OTEL_* variables.
Spans contain numbers and names, but no prompt, completion or header. Attributes have the names of the GenAI
conventions. Where a convention has changed, vLLM's older name is set as well.

A thread of the package sends spans from a bounded queue and drops spans that do not fit, so a slow collector delays no
request. The packages would log a warning for each lost batch; `QuietExporter` logs one every few minutes instead.
Nothing here is global: a program that hosts the server keeps its own tracing.
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
from fp8serve.server.faults import Code
from fp8serve.server.usage import SequenceUsage, Usage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger("fp8serve.server.tracing")

Attributes = dict[str, Any]
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
INSTALL_COMMAND = "pip install 'fp8serve[otel]'"
WARNING_INTERVAL_SECONDS = 300.0  # between two warnings that spans are lost
CLOSE_SECONDS = 3.0  # time limit for sending the last spans
OPERATIONS = {
    "/v1/chat/completions": "chat", "/v1/messages": "chat", "/v1/responses": "chat", "/v1/embeddings": "embeddings",
    "/v1/completions": "text_completion", "/generate": "text_completion",
}  # fmt: skip


class Tracing:
    """Creates spans and sends them to `exporter`."""

    def __init__(self, exporter: Any) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self.provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self.provider.get_tracer("fp8serve", fp8serve.__version__)

    def begin(self, name: str, headers: Mapping[str, str]) -> "RequestSpan":
        """Starts the span of a request, as a child of the span that its `headers` name in `traceparent`."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers)
        return RequestSpan(self._tracer, self._tracer.start_span(name, parent, SpanKind.SERVER))

    async def close(self) -> None:
        """Sends the remaining spans, for at most CLOSE_SECONDS. Spans that are not sent by then are lost."""
        thread = threading.Thread(target=self.provider.shutdown, daemon=True)
        thread.start()
        end = time.monotonic() + CLOSE_SECONDS
        while thread.is_alive() and time.monotonic() < end:
            await asyncio.sleep(0.02)


class RequestSpan:
    """The span of one request. `trace_id` and `span_id` are hexadecimal."""

    def __init__(self, tracer: "Tracer", span: "Span") -> None:
        self._tracer, self._span = tracer, span
        context = span.get_span_context()
        self.trace_id, self.span_id = f"{context.trace_id:032x}", f"{context.span_id:016x}"

    def end(self, attributes: Attributes, usage: Usage) -> None:
        """Ends the span with the HTTP `attributes`, which include `http.route` and `http.response.status_code`."""
        from opentelemetry.trace import Status, StatusCode

        self._span.update_name(f"{attributes['http.request.method']} {attributes['http.route']}")
        self._span.set_attributes(attributes | _usage_attributes(usage, attributes))
        if (
            "error.type" in attributes and Code(attributes["error.type"]).kind.v1_status >= 500
        ):  # the server is at fault
            self._span.set_status(Status(StatusCode.ERROR))
        for index, sequence in enumerate(usage.sequences):
            self._add_phases(index, sequence)
        self._span.end()

    def _add_phases(self, index: int, sequence: SequenceUsage) -> None:
        """Adds a child span for each phase of a sequence that the engine has completed."""
        from opentelemetry.trace import set_span_in_context

        if (timing := sequence.timing) is None:
            return
        parent, phase_start = set_span_in_context(self._span), timing.arrived
        for name, seconds in (("queue", timing.queue), ("prefill", timing.prefill), ("decode", timing.decode)):
            if seconds is None or (name == "decode" and sequence.finish_reason is None):
                return
            span = self._tracer.start_span(name, parent, start_time=int(phase_start * 1e9))
            span.set_attributes({"gen_ai.request.id": sequence.request.request_id, "fp8serve.sequence": index})
            if name == "prefill":
                span.set_attribute("fp8serve.cached_tokens", sequence.cached_tokens)
            phase_start += seconds
            span.end(int(phase_start * 1e9))


def _usage_attributes(usage: Usage, attributes: Attributes) -> Attributes:
    if usage.model is None and not usage.total_tokens:
        return {}
    result: Attributes = {
        "gen_ai.provider.name": "fp8serve",
        "gen_ai.operation.name": OPERATIONS.get(attributes["http.route"]),
        "gen_ai.request.model": usage.model,
        "gen_ai.response.model": usage.model,
        "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": usage.generated_tokens,
        "gen_ai.usage.output_tokens": usage.generated_tokens,
    }
    if usage.sequences:
        result |= _sequence_attributes(usage.sequences)
    return {name: value for name, value in result.items() if value is not None}


def _sequence_attributes(sequences: Sequence[SequenceUsage]) -> Attributes:
    first = sequences[0]
    params = first.request.params
    result: Attributes = {
        "gen_ai.request.id": first.request.request_id.rpartition("-")[0],
        "gen_ai.request.n": len(sequences),
        "gen_ai.request.max_tokens": params.max_new_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.response.finish_reasons": [sequence.finish_reason or "cancelled" for sequence in sequences],
    }
    return result | (_latencies(first) if len(sequences) == 1 else {})


def _latencies(sequence: SequenceUsage) -> Attributes:
    """Returns the latencies of a request's only sequence, in seconds, for the phases that it completed."""
    if (timing := sequence.timing) is None:
        return {}
    latencies: Attributes = {"gen_ai.latency.time_in_queue": timing.queue}
    if timing.decode is None or timing.prefill is None:
        return latencies
    latencies["gen_ai.latency.time_in_model_prefill"] = timing.prefill
    latencies["gen_ai.latency.time_to_first_token"] = timing.queue + timing.prefill
    if sequence.finish_reason is None:
        return latencies
    return latencies | {
        "gen_ai.latency.time_in_model_decode": timing.decode,
        "gen_ai.latency.time_in_model_inference": timing.inference,
        "gen_ai.latency.e2e": timing.queue + timing.inference,
    }


def _resource() -> Any:
    """Returns the resource (OpenTelemetry's word for the sender of spans): fp8serve, unless OTEL_SERVICE_NAME or
    OTEL_RESOURCE_ATTRIBUTES name another one."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    default = Resource.create({"service.name": "fp8serve", "service.version": fp8serve.__version__})
    return default.merge(OTELResourceDetector().detect())


# -- the collector -----------------------------------------------------------------------------------------------------


def create_tracing(endpoint: str | None) -> Tracing | None:
    """Returns the tracing to the collector that `endpoint` or the environment names, or None if neither names one.

    If the packages are missing, an `endpoint` raises MachineError. A collector in the environment only causes a
    warning, because the variable may be meant for other programs.
    """
    is_named = endpoint is not None or any(os.environ.get(name) for name in ENDPOINTS)
    if not is_named or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if not _is_installed():
        if endpoint is not None:
            raise MachineError(f"--otlp-endpoint needs the OpenTelemetry packages; install them: {INSTALL_COMMAND}.")
        message = "OTEL_EXPORTER_OTLP_ENDPOINT is set, but no spans are sent, because the packages are missing: %s"
        log.warning(message, INSTALL_COMMAND)
        return None
    if "grpc" in [os.environ.get(name) for name in PROTOCOLS]:
        log.warning(
            "OTEL_EXPORTER_OTLP_PROTOCOL asks for grpc, but spans are sent as http/protobuf; check the collector's port"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Tracing(QuietExporter(OTLPSpanExporter(endpoint=None if endpoint is None else traces_url(endpoint))))


def _is_installed() -> bool:
    try:
        return all(find_spec(name) for name in ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk"))
    except ModuleNotFoundError:  # a parent package is missing
        return False


def traces_url(endpoint: str) -> str:
    """Returns the collector's address for spans: `endpoint`, with /v1/traces added unless it ends with that."""
    base = endpoint.rstrip("/")
    return base if urlsplit(base).path.endswith("/v1/traces") else f"{base}/v1/traces"


class QuietExporter:
    """A span exporter that warns of lost spans, at most once every WARNING_INTERVAL_SECONDS.

    It has the methods of SpanExporter, but does not inherit from it, because that package may be missing.
    """

    def __init__(self, exporter: "SpanExporter") -> None:
        self._exporter = exporter
        self._lost = 0
        self._last_warning = -WARNING_INTERVAL_SECONDS
        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)

    def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = SpanExportResult.FAILURE
        with contextlib.suppress(Exception):
            result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                log.info("the collector accepts spans again; %d spans were lost", self._lost)
            self._lost = 0
            return result
        self._lost += len(spans)
        if time.monotonic() - self._last_warning >= WARNING_INTERVAL_SECONDS:
            self._last_warning = time.monotonic()
            log.warning(
                "the collector does not accept spans; %d are lost so far; requests are not affected", self._lost
            )
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)
