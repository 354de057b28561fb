"""Publishes the server's metrics under the names that dashboards, autoscalers and gateways for vLLM query.

Most are families of fp8serve with another name and with the labels `model_name` and `engine`. A few have no counterpart
with the same labels and are built here: waiting requests by reason, the KV cache's size, the engine's sleep state,
running and waiting adapters, and responses by status class.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fp8serve.server.metrics import ENGINE_METRICS, Metrics, ModelMetrics, Stats, families

VLLM_NAMES = {
    **{row.name: f"vllm:{row.vllm}" for row in families(ModelMetrics) if row.vllm},
    **{f"fp8serve_{row.name}": f"vllm:{row.vllm}" for row in ENGINE_METRICS if row.vllm},
    "fp8serve_step_tokens": "vllm:iteration_tokens_total",
    "fp8serve_accepted_draft_tokens_by_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
}
ENGINE_LABEL = "0"  # a model has one engine


class VllmMetrics(Collector):
    """Collects the families of one server under vLLM's names."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def render(self) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        for family in self._metrics.registry.collect():
            if (alias := VLLM_NAMES.get(family.name)) is not None:
                yield _renamed(family, alias)
            if family.name == "fp8serve_http_responses":
                yield _by_status_class(family)
        sources = self._metrics.sources
        running = {model: stats for model, stats in sources.stats().items() if stats}
        yield from _engine_families(running, sources.served(), sources.adapters(), sources.max_adapters())


def _renamed(family: Metric, name: str) -> Metric:
    """Returns a family under another name, with vLLM's labels."""
    copy = Metric.__new__(Metric)
    copy.name, copy.documentation, copy.unit, copy.type = name, family.documentation, "", family.type
    copy.samples = []
    for sample in family.samples:
        labels = {"model_name" if label == "model" else label: value for label, value in sample.labels.items()}
        sample_name = sample.name.replace(family.name, name, 1)
        copy.samples.append(sample._replace(name=sample_name, labels=labels | {"engine": ENGINE_LABEL}))
    return copy


def _by_status_class(family: Metric) -> Metric:
    """Returns responses by status class such as `5xx`, as vLLM's prometheus-fastapi-instrumentator counts them."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for sample in family.samples:
        if sample.name.endswith("_total"):
            labels = sample.labels
            counts[labels["route"], labels["method"], labels["status"][:1] + "xx"] += int(sample.value)
    copy = CounterMetricFamily("http_requests", family.documentation, labels=["handler", "method", "status"])
    for key, count in counts.items():
        copy.add_metric(key, count)
    return copy


def _engine_families(
    running: Stats,
    served: Mapping[str, Mapping[str, str]],
    adapters: Mapping[str, Mapping[str, Mapping[str, int]]],
    max_adapters: Mapping[str, int],
) -> Iterator[Metric]:
    waiting = _gauge(
        "num_requests_waiting_by_reason", "Sequences that wait, by reason; reason is always capacity", "reason"
    )
    sleep = _gauge("engine_sleep_state", "Sleep state of the engine; fp8serve engines are always awake", "sleep_state")
    cache = _gauge("cache_config_info", "Configuration of the KV cache", *CACHE_LABELS)
    lora = _gauge(
        "lora_requests_info", "Unix time of this scrape, labeled with the running and waiting adapters", *ADAPTER_LABELS
    )
    for model, stats in running.items():
        labels = [model, ENGINE_LABEL]
        for reason, count in (("capacity", stats.get("waiting", 0)), ("deferred", 0)):
            waiting.add_metric([*labels, reason], count)
        for state, value in (("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)):
            sleep.add_metric([*labels, state], value)
        info = served.get(model, {})
        sizes = (info.get(name, "") for name in ("block_size", "num_blocks", "kv_cache_dtype"))
        cache.add_metric([*labels, *sizes, "True"], 1)
        counts_by_name = adapters.get(model, {})
        lists = (
            ",".join(name for name, counts in counts_by_name.items() if counts[key]) for key in ("running", "waiting")
        )
        lora.add_metric([*labels, str(max_adapters[model]), *lists], time.time())
    yield from (waiting, sleep, cache, lora)


CACHE_LABELS = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")
ADAPTER_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")


def _gauge(name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"vllm:{name}", help_text, labels=["model_name", "engine", *labels])
