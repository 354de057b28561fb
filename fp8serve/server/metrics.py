"""Prometheus metrics of one server, in a registry of its own; every name starts with `fp8serve_`.

What the front counts itself (HTTP, admission, latencies) are ordinary counters and histograms. What the engines know
(running, waiting, cache use) is read from their last statistics at scrape time (live_metrics.py). What belongs to a
model has its name as the label `model`. With `vllm_aliases` the families that dashboards and autoscalers for vLLM query
appear a second time (vllm_metrics.py). Labels never hold anything a request sent: routes are templates, unknown paths
share one label, and models have the names that the operator gave them.
"""

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fp8serve.server.faults import Code
from fp8serve.server.live_metrics import Live, Sources
from fp8serve.server.vllm_metrics import vllm_families

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
INTER_TOKEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
PHASES = (0.001, 0.005, 0.01, 0.02, *LATENCY)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """All metrics of one server. `sources` are asked at every scrape.

    The series of an engine that does not run are absent, and its `fp8serve_engine_up` is 0.
    """

    def __init__(self, vllm_aliases: bool = False) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.sources = Sources()
        self._http()
        self._generation()
        self._latencies()
        self._phases()
        self._sizes()
        self._weights()
        self._tenants()
        self.registry.register(Live(self.sources))
        self._vllm_aliases = vllm_aliases

    def _http(self) -> None:
        on = self.registry
        self.responses = Counter(
            "fp8serve_http_responses", "HTTP responses", ("route", "method", "status"), registry=on
        )
        self.http_seconds = Histogram(
            "fp8serve_http_seconds", "From request line to last byte", ("route",), buckets=LATENCY, registry=on
        )
        self.errors = Counter(
            "fp8serve_http_errors", "Requests that failed, by the code of the failure", ("code",), registry=on
        )
        for code in Code:  # from the start at zero, so that a rate is right from the first event
            self.errors.labels(code.value)
        started = Gauge("fp8serve_start_time_seconds", "When this server started, in Unix time", registry=on)
        started.set(time.time())

    def _generation(self) -> None:
        """What has a label `model`, and what is of all models together."""
        on, model = self.registry, ("model",)
        self.accepted = Counter("fp8serve_requests_accepted", "Generation requests admitted", model, registry=on)
        self.finished = Counter(
            "fp8serve_requests_finished",
            "Generation requests ended: ok, failed or cancelled",
            (*model, "outcome"),
            registry=on,
        )
        self.rejected = Counter(
            "fp8serve_requests_rejected",
            "Refused before admission, by the bound that was met",
            (*model, "reason"),
            registry=on,
        )
        self.in_flight = Gauge("fp8serve_requests_in_flight", "Admitted and not ended", model, registry=on)
        self.prompt_tokens = Counter("fp8serve_prompt_tokens", "Prompt tokens of ended requests", model, registry=on)
        self.cached_tokens = Counter(
            "fp8serve_prompt_tokens_cached", "Of these, taken from the prefix cache", model, registry=on
        )
        self.generated_tokens = Counter("fp8serve_generated_tokens", "Tokens generated", model, registry=on)
        self.ended = Counter(
            "fp8serve_sequences_ended",
            "Sequences that ended: stop, length, abort or error",
            (*model, "finished_reason"),
            registry=on,
        )

    def _latencies(self) -> None:
        on, model = self.registry, ("model",)
        self.first_token = Histogram(
            "fp8serve_time_to_first_token_seconds", "Admission to first token", model, buckets=TTFT, registry=on
        )
        self.inter_token = Histogram(
            "fp8serve_inter_token_seconds", "Between two tokens of a request", model, buckets=INTER_TOKEN, registry=on
        )
        self.per_token = Histogram(
            "fp8serve_time_per_output_token_seconds",
            "Mean after the first token",
            model,
            buckets=INTER_TOKEN,
            registry=on,
        )
        self.request_seconds = Histogram(
            "fp8serve_request_seconds", "Admission to last token", model, buckets=LATENCY, registry=on
        )

    def _phases(self) -> None:
        """Of ended sequences, by the engine's clock."""
        meanings = {
            "queue": "From the engine's receipt to its first computation",
            "prefill": "From then to the first token",
            "decode": "From the first token to the last",
            "inference": "Prefill and decode",
        }
        self.phases = {
            name: Histogram(
                f"fp8serve_request_{name}_seconds", meaning, ("model",), buckets=PHASES, registry=self.registry
            )
            for name, meaning in meanings.items()
        }

    def _sizes(self) -> None:
        on, model = self.registry, ("model",)
        self.request_prompt = Histogram(
            "fp8serve_request_prompt_tokens", "Prompt tokens of a request", model, buckets=TOKENS, registry=on
        )
        self.request_generated = Histogram(
            "fp8serve_request_generated_tokens", "Tokens generated for a request", model, buckets=TOKENS, registry=on
        )
        self.request_computed = Histogram(
            "fp8serve_request_computed_prompt_tokens",
            "Prompt tokens of a request that no cache had",
            model,
            buckets=(0, *TOKENS),
            registry=on,
        )
        self.request_max = Histogram(
            "fp8serve_request_max_tokens", "The most that a request might generate", model, buckets=TOKENS, registry=on
        )
        self.request_n = Histogram(
            "fp8serve_request_n", "Answers to a prompt", model, buckets=(1, 2, 5, 10, 20, 50, 128), registry=on
        )
        self.longest = Histogram(
            "fp8serve_request_longest_answer_tokens",
            "Tokens of the longest of a request's answers",
            model,
            buckets=TOKENS,
            registry=on,
        )

    def _weights(self) -> None:
        on, model = self.registry, ("model",)
        self.swaps = Counter(
            "fp8serve_weight_swaps",
            "Changes of the served weights, by how they ended",
            (*model, "outcome"),
            registry=on,
        )
        self.engine_restarts = Counter(
            "fp8serve_engine_restarts", "Engine processes started again after they died", model, registry=on
        )
        self.reading = Gauge("fp8serve_reading_bytes", "Of requests that are read, or wait to be", registry=on)
        self.streams_rejected = Counter(
            "fp8serve_streams_rejected", "Event streams refused because too many were open", registry=on
        )

    def _tenants(self) -> None:
        """By the names that the operator gave tenants, never by keys."""
        on, tenant = self.registry, ("tenant",)
        self.tenant_requests = Counter("fp8serve_tenant_requests", "Requests that were let in", tenant, registry=on)
        self.tenant_in_flight = Gauge("fp8serve_tenant_requests_in_flight", "Of these, not ended", tenant, registry=on)
        self.tenant_tokens = Counter(
            "fp8serve_tenant_tokens", "Of ended requests: prompt or generated", (*tenant, "kind"), registry=on
        )
        self.tenant_rejected = Counter(
            "fp8serve_tenant_requests_rejected",
            "Refused by a limit of the tenant: requests, tokens or concurrent",
            (*tenant, "reason"),
            registry=on,
        )

    def of(self, model: str) -> "ModelMetrics":
        """The series of one model. They exist from here on, at zero, so that a rate over them is right from the first
        event.
        """
        return ModelMetrics(self, model)

    def forget(self, model: str) -> None:
        """Ends the series of a model that is no longer served."""
        for family in (
            self.accepted, self.finished, self.rejected, self.in_flight, self.prompt_tokens, self.cached_tokens,
            self.generated_tokens, self.ended, self.first_token, self.inter_token, self.per_token,
            self.request_seconds, self.request_prompt, self.request_generated, self.request_computed,
            self.request_max, self.request_n, self.longest, self.swaps, self.engine_restarts, *self.phases.values(),
        ):  # fmt: skip
            family.remove_by_labels({"model": model})

    def render(self) -> bytes:
        """The text exposition of everything."""
        text = generate_latest(self.registry)
        if not self._vllm_aliases:
            return text
        return text + generate_latest(_only(vllm_families(self.registry.collect(), self.sources)))


class ModelMetrics:
    """What is counted of one model."""

    def __init__(self, all_models: Metrics, model: str) -> None:
        self.accepted = all_models.accepted.labels(model)
        self.in_flight = all_models.in_flight.labels(model)
        self.prompt_tokens = all_models.prompt_tokens.labels(model)
        self.generated_tokens = all_models.generated_tokens.labels(model)
        self.first_token = all_models.first_token.labels(model)
        self.inter_token = all_models.inter_token.labels(model)
        self.per_token = all_models.per_token.labels(model)
        self.request_seconds = all_models.request_seconds.labels(model)
        self.request_prompt = all_models.request_prompt.labels(model)
        self.request_generated = all_models.request_generated.labels(model)
        self.cached_tokens = all_models.cached_tokens.labels(model)
        self.request_computed = all_models.request_computed.labels(model)
        self.request_max = all_models.request_max.labels(model)
        self.request_n = all_models.request_n.labels(model)
        self.longest = all_models.longest.labels(model)
        self.phases = {name: family.labels(model) for name, family in all_models.phases.items()}
        self.restarts = all_models.engine_restarts.labels(model)
        self._all, self._model = all_models, model
        for outcome in ("ok", "failed", "cancelled"):
            self.finished(outcome)
        for reason in ("requests", "tokens"):
            self.rejected(reason)
        for reason in ("stop", "length", "abort", "error"):
            self.ended(reason)
        for outcome in ("ok", "failed", "rolled_back"):
            self.swaps(outcome)

    def forget(self) -> None:
        """Ends the series: nothing of that name is served any more."""
        self._all.forget(self._model)

    def ended(self, reason: str) -> Counter:
        """Sequences that ended so."""
        return self._all.ended.labels(self._model, reason)

    def finished(self, outcome: str) -> Counter:
        """Requests that ended so."""
        return self._all.finished.labels(self._model, outcome)

    def rejected(self, reason: str) -> Counter:
        """Requests refused by this bound."""
        return self._all.rejected.labels(self._model, reason)

    def swaps(self, outcome: str) -> Counter:
        """Changes of the weights that ended so."""
        return self._all.swaps.labels(self._model, outcome)


def _only(families: Iterable[Metric]) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(list(families)))
    return registry


class _Fixed(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
