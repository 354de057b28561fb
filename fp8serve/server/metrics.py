"""Prometheus metrics of one server, in a registry of its own; every name starts with `fp8serve_`.

What the front counts itself (HTTP, admission, latencies) are ordinary counters and histograms. What the engines know
(running, waiting, cache use) is read from their last statistics at scrape time. What belongs to a model has its name
as the label `model`. With `vllm_aliases` the families that dashboards and autoscalers for vLLM query appear a second
time under their `vllm:` names. Labels never hold anything a request sent: routes are templates, unknown paths share one
label, and models have the names that the operator gave them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

LiveFamily = TypeVar("LiveFamily", CounterMetricFamily, GaugeMetricFamily)
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
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

VLLM_NAMES = {
    "fp8serve_request_seconds": "vllm:e2e_request_latency_seconds",
    "fp8serve_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "fp8serve_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "fp8serve_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "fp8serve_prompt_tokens": "vllm:prompt_tokens",
    "fp8serve_generated_tokens": "vllm:generation_tokens",
    "fp8serve_request_prompt_tokens": "vllm:request_prompt_tokens",
    "fp8serve_request_generated_tokens": "vllm:request_generation_tokens",
    "fp8serve_requests_running": "vllm:num_requests_running",
    "fp8serve_requests_waiting": "vllm:num_requests_waiting",
    "fp8serve_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "fp8serve_preemptions": "vllm:num_preemptions",
    "fp8serve_prefix_cache_queried_tokens": "vllm:prefix_cache_queries",
    "fp8serve_prefix_cache_hit_tokens": "vllm:prefix_cache_hits",
    "fp8serve_drafts": "vllm:spec_decode_num_drafts",
    "fp8serve_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "fp8serve_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens",
}


class Metrics:
    """All metrics of one server. `engine_stats` and `job_counts` are asked at every scrape and must not block.

    `engine_stats`: by model; empty while its engine does not run: its series are then absent, and `fp8serve_engine_up`
    is 0.
    """

    def __init__(self, vllm_aliases: bool = False) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.engine_stats: Callable[[], Mapping[str, Mapping[str, Any]]] = dict
        self.job_counts: Callable[[], Mapping[str, int]] = dict
        self._http()
        self._generation()
        self._tenants()
        self.registry.register(_Live(self))
        self._vllm_aliases = vllm_aliases

    def _http(self) -> None:
        on = self.registry
        self.responses = Counter(
            "fp8serve_http_responses", "HTTP responses", ("route", "method", "status"), registry=on
        )
        self.http_seconds = Histogram(
            "fp8serve_http_seconds", "From request line to last byte", ("route",), buckets=LATENCY, registry=on
        )

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
        self.generated_tokens = Counter("fp8serve_generated_tokens", "Tokens generated", model, registry=on)
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
        self.request_prompt = Histogram(
            "fp8serve_request_prompt_tokens", "Prompt tokens of a request", model, buckets=TOKENS, registry=on
        )
        self.request_generated = Histogram(
            "fp8serve_request_generated_tokens", "Tokens generated for a request", model, buckets=TOKENS, registry=on
        )
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
            self.accepted, self.finished, self.rejected, self.in_flight, self.prompt_tokens, self.generated_tokens,
            self.first_token, self.inter_token, self.per_token, self.request_seconds, self.request_prompt,
            self.request_generated, self.swaps, self.engine_restarts,
        ):  # fmt: skip
            family.remove_by_labels({"model": model})

    def render(self) -> bytes:
        """The text exposition of everything."""
        text = generate_latest(self.registry)
        if not self._vllm_aliases:
            return text
        return text + generate_latest(_only(_aliased(self.registry.collect())))


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
        self.restarts = all_models.engine_restarts.labels(model)
        self._all, self._model = all_models, model
        for outcome in ("ok", "failed", "cancelled"):
            self.finished(outcome)
        for reason in ("requests", "tokens"):
            self.rejected(reason)

    def finished(self, outcome: str) -> Counter:
        """Requests that ended so."""
        return self._all.finished.labels(self._model, outcome)

    def rejected(self, reason: str) -> Counter:
        """Requests refused by this bound."""
        return self._all.rejected.labels(self._model, reason)

    def swaps(self, outcome: str) -> Counter:
        """Changes of the weights that ended so."""
        return self._all.swaps.labels(self._model, outcome)


ENGINE_GAUGES = {
    "running": ("fp8serve_requests_running", "Sequences being computed"),
    "waiting": ("fp8serve_requests_waiting", "Sequences waiting for a place in the batch"),
    "kv_usage": ("fp8serve_kv_cache_usage_ratio", "Share of cache blocks in use, 0 to 1"),
    "kv_blocks_used": ("fp8serve_kv_cache_blocks_used", "Cache blocks in use"),
    "layers_drifting": ("fp8serve_layers_drifting", "FP8 layers whose inputs are beyond --drift-alarm"),
    "input_drift_max": (
        "fp8serve_input_drift_max_ratio",
        "Largest input of the last window, as a multiple of the calibrated one, of the layer where that is most",
    ),
}
ENGINE_COUNTERS = {
    "scale_windows_total": ("fp8serve_scale_windows", "Looks at the range of inputs by the present engine process"),
    "steps_total": ("fp8serve_engine_steps", "Batches computed by the present engine process"),
    "preemptions_total": ("fp8serve_preemptions", "Sequences that lost their blocks and were recomputed"),
    "prefix_queried_tokens_total": (
        "fp8serve_prefix_cache_queried_tokens",
        "Prompt tokens looked up in the prefix cache",
    ),
    "prefix_hit_tokens_total": ("fp8serve_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache"),
    "drafts_total": ("fp8serve_drafts", "Drafts that were checked"),
    "draft_tokens_total": ("fp8serve_draft_tokens", "Tokens of these drafts"),
    "accepted_draft_tokens_total": ("fp8serve_accepted_draft_tokens", "Tokens of these that became part of an answer"),
}
"""Key of the engine's statistics -> metric name and meaning."""


class _Live(Collector):
    """Numbers that are read rather than counted."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        stats = self._metrics.engine_stats()
        up = {model: float(bool(said)) for model, said in stats.items()}
        yield _family(GaugeMetricFamily, "fp8serve_engine_up", "Whether an engine runs and reports: 1 or 0", up)
        for key, (name, meaning) in ENGINE_GAUGES.items():
            yield _family(GaugeMetricFamily, name, meaning, _figure(stats, key))
        for key, (name, meaning) in ENGINE_COUNTERS.items():
            yield _family(CounterMetricFamily, name, meaning, _figure(stats, key))
        jobs = GaugeMetricFamily("fp8serve_jobs", "Fine-tune jobs by state", labels=["state"])
        for state, count in self._metrics.job_counts().items():
            jobs.add_metric([state], count)
        yield jobs


def _figure(stats: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, float]:
    """Of each model whose engine reports it."""
    return {model: float(said[key]) for model, said in stats.items() if key in said}


def _family(kind: type[LiveFamily], name: str, meaning: str, values: Mapping[str, float]) -> LiveFamily:
    family = kind(name, meaning, labels=["model"])
    for model, value in values.items():
        family.add_metric([model], value)
    return family


def _aliased(families: Iterable[Metric]) -> Iterator[Metric]:
    """vLLM's families, of which the label is called `model_name`."""
    for family in families:
        if (alias := VLLM_NAMES.get(family.name)) is not None:
            copy = Metric.__new__(Metric)
            copy.name, copy.documentation, copy.unit, copy.type = alias, family.documentation, "", family.type
            copy.samples = [
                s._replace(name=s.name.replace(family.name, alias, 1), labels=_for_vllm(s.labels))
                for s in family.samples
            ]
            yield copy


def _for_vllm(labels: Mapping[str, str]) -> dict[str, str]:
    return {"model_name" if name == "model" else name: value for name, value in labels.items()}


def _only(families: Iterable[Metric]) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(list(families)))
    return registry


class _Fixed(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
