"""Prometheus metrics of one server, in a registry of its own; every name starts with `fp8serve_`.

What the front counts itself (HTTP, admission, latencies) are ordinary counters and histograms: a row of `Metrics`, or
of `ModelMetrics` if it belongs to a model and has its name as the label `model`. What the engines know (running,
waiting, cache use) is read from their last statistics at scrape time: a row of `ENGINE` or `LAYERS`. Families with a
vLLM name can be had under it as well (vllm_metrics.py). Labels never hold anything a request sent: routes are
templates, unknown paths share one label, and models have the names that the operator gave them.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fp8serve.server.faults import Code

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
INTER_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
PHASES = (0.001, 0.005, 0.01, 0.02, *LATENCY)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

Kind = TypeVar("Kind", Counter, Gauge, Histogram)
Stats = Mapping[str, Mapping[str, Any]]


class Family(Generic[Kind]):
    """A family of series: an attribute of Metrics, whose value is the family, or of ModelMetrics, whose value is the
    series of one model. `vllm`: its name in vLLM.
    """

    def __init__(
        self, kind: type[Kind], name: str, meaning: str, *labels: str, buckets: Sequence[float] = (), vllm: str = ""
    ) -> None:
        self._kind: Callable[..., Any] = kind
        self.name, self.meaning, self.labels = f"fp8serve_{name}", meaning, labels
        self.buckets, self.vllm = buckets, vllm

    def create(self, registry: CollectorRegistry, *labels: str) -> Any:
        more: dict[str, Any] = {"buckets": self.buckets} if self.buckets else {}
        return self._kind(self.name, self.meaning, (*labels, *self.labels), registry=registry, **more)

    def __get__(self, owner: "Metrics | ModelMetrics", _: object) -> Kind:
        return cast(Kind, owner.series[self])


class Split(Family[Counter]):
    """A counter of a model with one more label; `values`: those that exist from the start. The attribute of
    ModelMetrics is a function from the label's value to the series."""

    def __init__(self, name: str, meaning: str, label: str, values: Sequence[str], vllm: str = "") -> None:
        super().__init__(Counter, name, meaning, label, vllm=vllm)
        self.values = values

    def __get__(self, owner: "Metrics | ModelMetrics", _: object) -> Callable[[str], Counter]:  # type: ignore[override]
        series: Callable[[str], Counter] = owner.series[self]
        return series


def families(owner: type) -> list[Family[Any]]:
    """The rows of a class."""
    return [row for row in vars(owner).values() if isinstance(row, Family)]


class ModelMetrics:
    """What is counted of one model. The series exist from here on, at zero, so that a rate over them is right from the
    first event."""

    accepted = Family(Counter, "requests_accepted", "Generation requests admitted")
    finished = Split(
        "requests_finished", "Generation requests ended: ok, failed or cancelled", "outcome",
        ("ok", "failed", "cancelled"),
    )  # fmt: skip
    rejected = Split(
        "requests_rejected", "Refused before admission, by the bound that was met", "reason", ("requests", "tokens")
    )
    in_flight = Family(Gauge, "requests_in_flight", "Admitted and not ended")
    prompt_tokens = Family(Counter, "prompt_tokens", "Prompt tokens of ended requests", vllm="prompt_tokens")
    cached_tokens = Family(
        Counter, "prompt_tokens_cached", "Of these, taken from the prefix cache", vllm="prompt_tokens_cached"
    )
    generated_tokens = Family(Counter, "generated_tokens", "Tokens generated", vllm="generation_tokens")
    ended = Split(
        "sequences_ended", "Sequences that ended: stop, length, abort or error", "finished_reason",
        ("stop", "length", "abort", "error"), vllm="request_success",
    )  # fmt: skip
    first_token = Family(
        Histogram, "time_to_first_token_seconds", "Admission to first token", buckets=TTFT,
        vllm="time_to_first_token_seconds",
    )  # fmt: skip
    inter_token = Family(
        Histogram, "inter_token_seconds", "Between two tokens of a request", buckets=INTER_TOKEN,
        vllm="inter_token_latency_seconds",
    )  # fmt: skip
    per_token = Family(
        Histogram, "time_per_output_token_seconds", "Mean after the first token", buckets=INTER_TOKEN,
        vllm="request_time_per_output_token_seconds",
    )  # fmt: skip
    request_seconds = Family(
        Histogram, "request_seconds", "Admission to last token", buckets=LATENCY, vllm="e2e_request_latency_seconds"
    )
    queue_seconds = Family(
        Histogram, "request_queue_seconds", "From the engine's receipt to its first computation", buckets=PHASES,
        vllm="request_queue_time_seconds",
    )  # fmt: skip
    prefill_seconds = Family(
        Histogram, "request_prefill_seconds", "From then to the first token", buckets=PHASES,
        vllm="request_prefill_time_seconds",
    )  # fmt: skip
    decode_seconds = Family(
        Histogram, "request_decode_seconds", "From the first token to the last", buckets=PHASES,
        vllm="request_decode_time_seconds",
    )  # fmt: skip
    inference_seconds = Family(
        Histogram, "request_inference_seconds", "Prefill and decode", buckets=PHASES,
        vllm="request_inference_time_seconds",
    )  # fmt: skip
    request_prompt = Family(
        Histogram, "request_prompt_tokens", "Prompt tokens of a request", buckets=TOKENS, vllm="request_prompt_tokens"
    )
    request_generated = Family(
        Histogram, "request_generated_tokens", "Tokens generated for a request", buckets=TOKENS,
        vllm="request_generation_tokens",
    )  # fmt: skip
    request_computed = Family(
        Histogram, "request_computed_prompt_tokens", "Prompt tokens of a request that no cache had",
        buckets=(0, *TOKENS), vllm="request_prefill_kv_computed_tokens",
    )  # fmt: skip
    request_max = Family(
        Histogram, "request_max_tokens", "The most that a request might generate", buckets=TOKENS,
        vllm="request_params_max_tokens",
    )  # fmt: skip
    request_n = Family(
        Histogram, "request_n", "Answers to a prompt", buckets=(1, 2, 5, 10, 20, 50, 128), vllm="request_params_n"
    )
    longest = Family(
        Histogram, "request_longest_answer_tokens", "Tokens of the longest of a request's answers", buckets=TOKENS,
        vllm="request_max_num_generation_tokens",
    )  # fmt: skip
    swaps = Split(
        "weight_swaps", "Changes of the served weights, by how they ended", "outcome", ("ok", "failed", "rolled_back")
    )
    restarts = Family(Counter, "engine_restarts", "Engine processes started again after they died")

    def __init__(self, created: Mapping[Family[Any], Any], model: str) -> None:
        self.series: dict[Family[Any], Any] = {}
        self._created, self._model = created, model
        for row, family in created.items():
            self.series[row] = partial(family.labels, model) if isinstance(row, Split) else family.labels(model)
            for value in row.values if isinstance(row, Split) else ():
                family.labels(model, value)

    def forget(self) -> None:
        """Ends the series: nothing of that name is served any more."""
        for family in self._created.values():
            family.remove_by_labels({"model": self._model})


class Metrics:
    """All metrics of one server. `sources` are asked at every scrape.

    The series of an engine that does not run are absent, and its `fp8serve_engine_up` is 0. Tenants have the names that
    the operator gave them; no label holds a key.
    """

    responses = Family(Counter, "http_responses", "HTTP responses", "route", "method", "status")
    http_seconds = Family(Histogram, "http_seconds", "From request line to last byte", "route", buckets=LATENCY)
    errors = Family(Counter, "http_errors", "Requests that failed, by the code of the failure", "code")
    started = Family(Gauge, "start_time_seconds", "When this server started, in Unix time")
    reading = Family(Gauge, "reading_bytes", "Of requests that are read, or wait to be")
    streams_rejected = Family(Counter, "streams_rejected", "Event streams refused because too many were open")
    tenant_requests = Family(Counter, "tenant_requests", "Requests that were let in", "tenant")
    tenant_in_flight = Family(Gauge, "tenant_requests_in_flight", "Of these, not ended", "tenant")
    tenant_tokens = Family(Counter, "tenant_tokens", "Of ended requests: prompt or generated", "tenant", "kind")
    tenant_rejected = Family(
        Counter, "tenant_requests_rejected", "Refused by a limit of the tenant: requests, tokens or concurrent",
        "tenant", "reason",
    )  # fmt: skip

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.sources = Sources()
        self.series = {row: row.create(self.registry) for row in families(Metrics)}
        self._of_models = {row: row.create(self.registry, "model") for row in families(ModelMetrics)}
        for code in Code:  # from the start at zero, so that a rate is right from the first event
            self.errors.labels(code.value)
        self.started.set(time.time())
        self.registry.register(Live(self.sources))

    def of(self, model: str) -> ModelMetrics:
        """The series of one model."""
        return ModelMetrics(self._of_models, model)

    def render(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self.registry)


# -- read at every scrape ----------------------------------------------------------------------------------------------


class Reported(NamedTuple):
    """A figure that an engine reports. `key`: in its statistics, or in a record of `Engine.scales`."""

    key: str
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    meaning: str
    vllm: str = ""


ENGINE = (
    Reported("running", GaugeMetricFamily, "requests_running", "Sequences being computed", "num_requests_running"),
    Reported(
        "waiting", GaugeMetricFamily, "requests_waiting", "Sequences waiting for a place in the batch",
        "num_requests_waiting",
    ),
    Reported(
        "kv_usage", GaugeMetricFamily, "kv_cache_usage_ratio", "Share of cache blocks in use, 0 to 1",
        "kv_cache_usage_perc",
    ),
    Reported("kv_blocks_used", GaugeMetricFamily, "kv_cache_blocks_used", "Cache blocks in use"),
    Reported(
        "layers_drifting", GaugeMetricFamily, "layers_drifting", "FP8 layers whose inputs are beyond --drift-alarm"
    ),
    Reported(
        "input_saturation_max", GaugeMetricFamily, "input_cut_off_max_ratio",
        "Share of the inputs of the last window that were cut off, of the layer where that is most",
    ),
    Reported(
        "input_drift_max", GaugeMetricFamily, "input_drift_max_ratio",
        "Largest input of the last window, as a multiple of the calibrated one, of the layer where that is most",
    ),
    Reported(
        "scale_windows_total", CounterMetricFamily, "scale_windows",
        "Looks at the range of inputs by the present engine process",
    ),
    Reported("steps_total", CounterMetricFamily, "engine_steps", "Batches computed by the present engine process"),
    Reported(
        "preemptions_total", CounterMetricFamily, "preemptions",
        "Sequences that lost their blocks and were recomputed", "num_preemptions",
    ),
    Reported(
        "prefix_queried_tokens_total", CounterMetricFamily, "prefix_cache_queried_tokens",
        "Prompt tokens looked up in the prefix cache", "prefix_cache_queries",
    ),
    Reported(
        "prefix_hit_tokens_total", CounterMetricFamily, "prefix_cache_hit_tokens",
        "Prompt tokens found in the prefix cache", "prefix_cache_hits",
    ),
    Reported(
        "prefix_restored_hit_tokens_total", CounterMetricFamily, "prefix_cache_restored_hit_tokens",
        "Of the prompt tokens found in the prefix cache those that --cache-dir kept from an earlier process",
    ),
    Reported("drafts_total", CounterMetricFamily, "drafts", "Drafts that were checked", "spec_decode_num_drafts"),
    Reported(
        "draft_tokens_total", CounterMetricFamily, "draft_tokens", "Tokens of these drafts",
        "spec_decode_num_draft_tokens",
    ),
    Reported(
        "accepted_draft_tokens_total", CounterMetricFamily, "accepted_draft_tokens",
        "Tokens of these that became part of an answer", "spec_decode_num_accepted_tokens",
    ),
    Reported(
        "draft_model_tokens_total", CounterMetricFamily, "draft_model_tokens", "Tokens that a draft model computed"
    ),
)  # fmt: skip
LAYERS = (
    Reported(
        "amax", GaugeMetricFamily, "layer_input_amax",
        "Largest magnitude of the layer's inputs since the engine started",
    ),
    Reported(
        "headroom", GaugeMetricFamily, "layer_headroom_ratio",
        "How many times as large its inputs could be and still fit its scale",
    ),
    Reported(
        "saturation", GaugeMetricFamily, "layer_cut_off_ratio", "Share of its inputs' elements that were cut off"
    ),
    Reported(
        "drift", GaugeMetricFamily, "layer_drift_ratio",
        "Its largest input in the last window, divided by the calibrated maximum",
    ),
)  # fmt: skip


@dataclass
class Sources:
    """What is asked at every scrape; nothing here may block. By model; an engine that does not run reports nothing."""

    stats: Callable[[], Stats] = dict
    adapters: Callable[[], Mapping[str, Mapping[str, Mapping[str, int]]]] = dict
    layers: Callable[[], Mapping[str, Sequence[Mapping[str, Any]]]] = dict
    jobs: Callable[[], Mapping[str, int]] = dict
    ready: Callable[[], bool] = bool
    build: Callable[[], Mapping[str, str]] = dict
    served: Callable[[], Mapping[str, Mapping[str, str]]] = dict


class Live(Collector):
    """What is read, and not counted: the engine's last report, and what is served."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources

    def collect(self) -> Iterator[Metric]:
        sources = self.sources
        stats = sources.stats()
        yield GaugeMetricFamily("fp8serve_ready", "Whether requests should be sent here: 1 or 0", value=sources.ready())
        up = GaugeMetricFamily("fp8serve_engine_up", "Whether an engine runs and reports: 1 or 0", labels=["model"])
        for model, figures in stats.items():
            up.add_metric([model], float(bool(figures)))
        yield up
        adapters = {name: counts for beside in sources.adapters().values() for name, counts in beside.items()}
        yield from _of_engines({**stats, **adapters})
        yield from _of_layers(sources.layers())
        jobs = GaugeMetricFamily("fp8serve_jobs", "Fine-tune jobs by state", labels=["state"])
        for state, count in sources.jobs().items():
            jobs.add_metric([state], count)
        yield jobs
        yield from facts("fp8serve_build_info", "Versions of what serves", [sources.build()])
        about = [{"model": model} | dict(served) for model, served in sources.served().items() if served]
        yield from facts("fp8serve_model_info", "The weights that answer, and how they are served", about)


def facts(name: str, meaning: str, rows: Sequence[Mapping[str, str]]) -> Iterator[Metric]:
    """A gauge of 1 for each row, whose labels hold the facts; nothing if there are no rows."""
    if rows and rows[0]:
        family = GaugeMetricFamily(name, meaning, labels=list(rows[0]))
        for row in rows:
            family.add_metric(list(row.values()), 1)
        yield family


def _of_engines(stats: Stats) -> Iterator[Metric]:
    for row in ENGINE:
        family = row.kind(f"fp8serve_{row.name}", row.meaning, labels=["model"])
        for model, figures in stats.items():
            if row.key in figures:
                family.add_metric([model], float(figures[row.key]))
        yield family
    positions = CounterMetricFamily(
        "fp8serve_accepted_draft_tokens_by_position", "Of drafts, by their place in it", labels=["model", "position"]
    )
    steps = HistogramMetricFamily("fp8serve_step_tokens", "Tokens computed in a batch", labels=["model"])
    for model, figures in stats.items():
        for position, count in enumerate(figures.get("accepted_by_position", ())):
            positions.add_metric([model, str(position)], count)
        if "step_tokens" in figures:  # counts at or below each bound and above the one before, then above all bounds
            sizes = figures["step_tokens"]
            names = [*(str(float(bound)) for bound in sizes["bounds"]), "+Inf"]
            buckets = list(zip(names, map(float, accumulate(sizes["counts"])), strict=True))
            steps.add_metric([model], buckets, sizes["total"])
    yield positions
    yield steps


def _of_layers(layers: Mapping[str, Iterable[Mapping[str, Any]]]) -> Iterator[Metric]:
    for row in LAYERS:
        family = GaugeMetricFamily(f"fp8serve_{row.name}", row.meaning, labels=["model", "layer"])
        for model, records in layers.items():
            for record in records:
                if record.get(row.key) is not None:
                    family.add_metric([model, record["name"]], float(record[row.key]))
        if family.samples:
            yield family
