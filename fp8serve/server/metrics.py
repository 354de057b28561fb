"""The Prometheus metrics of one server, in their own registry. Every name starts with `fp8serve_`.

The server process itself counts responses, admissions and latencies. Their families are attributes of `Metrics`, or of
`ModelMetrics` if they have a label `model`. Engine processes report running and waiting sequences, cache use and the
like. Their families are rows of `ENGINE_METRICS` or `LAYER_METRICS`, filled from the engines' last statistics at every
scrape. vllm_metrics.py publishes families with a vLLM name under that name, too. Labels never contain text of a client:
routes are templates, unknown paths share one label, and the operator names the models.
"""

import asyncio
import time
from bisect import bisect_left
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

Kind = TypeVar("Kind", Counter, Gauge, Histogram, "BatchedHistogram")
Stats = Mapping[str, Mapping[str, Any]]


class BatchedHistogram(Histogram):
    """A histogram that takes many observations in one call."""

    def observe_all(self, counts: Sequence[int], total: float) -> None:
        """Adds the number of observations in each bucket, and the sum of all of them."""
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)


class TokenCounts:
    """Counts tokens and the seconds between them, and adds them to the metrics once in an iteration of the event loop:
    a metric takes a lock and several calls, which is too much for every token."""

    def __init__(self, tokens: Counter, seconds: BatchedHistogram) -> None:
        self._tokens, self._seconds = tokens, seconds
        self._reset()

    def add(self, tokens: int, seconds: float) -> None:
        """Counts tokens that arrived together. `seconds` is the interval from one of them to the next."""
        if not self._count:
            asyncio.get_running_loop().call_soon(self._record)
        self._count += tokens
        self._buckets[bisect_left(INTER_TOKEN, seconds)] += tokens
        self._total_seconds += seconds * tokens

    def _record(self) -> None:
        self._tokens.inc(self._count)
        self._seconds.observe_all(self._buckets, self._total_seconds)
        self._reset()

    def _reset(self) -> None:
        self._count, self._total_seconds = 0, 0.0
        self._buckets = [0] * (len(INTER_TOKEN) + 1)


class Family(Generic[Kind]):
    """A family of series, declared as a class attribute.

    On an instance of Metrics, the attribute is the family; on one of ModelMetrics, the series of one model. `help_text`
    is the HELP line, and `vllm` the name of the same family in vLLM.
    """

    def __init__(
        self, kind: type[Kind], name: str, help_text: str, *labels: str, buckets: Sequence[float] = (), vllm: str = ""
    ) -> None:
        self._kind: Callable[..., Any] = kind
        self.name, self.help_text, self.labels = f"fp8serve_{name}", help_text, labels
        self.buckets, self.vllm = buckets, vllm

    def create(self, registry: CollectorRegistry, *labels: str) -> Any:
        options: dict[str, Any] = {"buckets": self.buckets} if self.buckets else {}
        return self._kind(self.name, self.help_text, (*labels, *self.labels), registry=registry, **options)

    def __get__(self, owner: "Metrics | ModelMetrics", _: object) -> Kind:
        return cast(Kind, owner.series[self])


class LabeledCounter(Family[Counter]):
    """A counter with one more label besides `model`. On an instance of ModelMetrics, the attribute is a function from a
    value of that label to the series. Series for `values` exist from the start."""

    def __init__(self, name: str, help_text: str, label: str, values: Sequence[str], vllm: str = "") -> None:
        super().__init__(Counter, name, help_text, label, vllm=vllm)
        self.values = values

    def __get__(self, owner: "Metrics | ModelMetrics", _: object) -> Callable[[str], Counter]:  # type: ignore[override]
        series: Callable[[str], Counter] = owner.series[self]
        return series


def families(owner: type) -> list[Family[Any]]:
    return [family for family in vars(owner).values() if isinstance(family, Family)]


class ModelMetrics:
    """The series of one model or adapter. They start at zero, so that a rate includes their first event."""

    accepted = Family(Counter, "requests_accepted", "Generation requests that were admitted")
    finished = LabeledCounter(
        "requests_finished", "Generation requests that ended, by outcome: ok, failed or cancelled", "outcome",
        ("ok", "failed", "cancelled"),
    )  # fmt: skip
    rejected = LabeledCounter(
        "requests_rejected", "Generation requests refused because a limit was reached, by limit: requests or tokens",
        "reason", ("requests", "tokens"),
    )  # fmt: skip
    in_flight = Family(Gauge, "requests_in_flight", "Generation requests that were admitted and have not ended")
    prompt_tokens = Family(Counter, "prompt_tokens", "Prompt tokens of requests that finished", vllm="prompt_tokens")
    cached_tokens = Family(
        Counter, "prompt_tokens_cached", "Prompt tokens of requests that finished, found in the prefix cache",
        vllm="prompt_tokens_cached",
    )  # fmt: skip
    generated_tokens = Family(Counter, "generated_tokens", "Tokens that were generated", vllm="generation_tokens")
    sequences_ended = LabeledCounter(
        "sequences_ended", "Sequences that ended, by reason: stop, length, abort or error", "finished_reason",
        ("stop", "length", "abort", "error"), vllm="request_success",
    )  # fmt: skip
    first_token = Family(
        Histogram, "time_to_first_token_seconds", "Seconds from the admission of a request to its first token",
        buckets=TTFT, vllm="time_to_first_token_seconds",
    )  # fmt: skip
    inter_token = Family(
        BatchedHistogram, "inter_token_seconds", "Seconds between two tokens of a request", buckets=INTER_TOKEN,
        vllm="inter_token_latency_seconds",
    )  # fmt: skip
    per_token = Family(
        Histogram, "time_per_output_token_seconds",
        "Seconds per output token after the first one, the mean of a request", buckets=INTER_TOKEN,
        vllm="request_time_per_output_token_seconds",
    )  # fmt: skip
    request_seconds = Family(
        Histogram, "request_seconds", "Seconds from the admission of a request to its last token", buckets=LATENCY,
        vllm="e2e_request_latency_seconds",
    )  # fmt: skip
    queue_seconds = Family(
        Histogram, "request_queue_seconds",
        "Seconds from the arrival of a request in the engine to the start of its prefill", buckets=PHASES,
        vllm="request_queue_time_seconds",
    )  # fmt: skip
    prefill_seconds = Family(
        Histogram, "request_prefill_seconds", "Seconds from the start of a request's prefill to its first token",
        buckets=PHASES, vllm="request_prefill_time_seconds",
    )  # fmt: skip
    decode_seconds = Family(
        Histogram, "request_decode_seconds", "Seconds from the first token of a request to its last", buckets=PHASES,
        vllm="request_decode_time_seconds",
    )  # fmt: skip
    inference_seconds = Family(
        Histogram, "request_inference_seconds", "Seconds from the start of a request's prefill to its last token",
        buckets=PHASES, vllm="request_inference_time_seconds",
    )  # fmt: skip
    request_prompt = Family(
        Histogram, "request_prompt_tokens", "Prompt tokens of a request", buckets=TOKENS, vllm="request_prompt_tokens"
    )
    request_generated = Family(
        Histogram, "request_generated_tokens", "Tokens generated for a request", buckets=TOKENS,
        vllm="request_generation_tokens",
    )  # fmt: skip
    request_computed = Family(
        Histogram, "request_computed_prompt_tokens",
        "Prompt tokens of a request that were computed, because the prefix cache did not have them",
        buckets=(0, *TOKENS), vllm="request_prefill_kv_computed_tokens",
    )  # fmt: skip
    request_max = Family(
        Histogram, "request_max_tokens", "Largest number of tokens that a request was allowed to generate",
        buckets=TOKENS, vllm="request_params_max_tokens",
    )  # fmt: skip
    request_n = Family(
        Histogram, "request_n", "Choices that a request asked for per prompt (n)", buckets=(1, 2, 5, 10, 20, 50, 128),
        vllm="request_params_n",
    )  # fmt: skip
    longest_choice = Family(
        Histogram, "request_longest_answer_tokens", "Tokens of the longest choice of a request", buckets=TOKENS,
        vllm="request_max_num_generation_tokens",
    )  # fmt: skip
    swaps = LabeledCounter(
        "weight_swaps", "Activations of weights, by outcome: ok, failed or rolled_back", "outcome",
        ("ok", "failed", "rolled_back"),
    )  # fmt: skip
    restarts = Family(Counter, "engine_restarts", "Restarts of engine processes that died")

    def __init__(self, created: Mapping[Family[Any], Any], model: str) -> None:
        self.series: dict[Family[Any], Any] = {}
        self._created, self._model = created, model
        for family, metric in created.items():
            self.series[family] = (
                partial(metric.labels, model) if isinstance(family, LabeledCounter) else metric.labels(model)
            )
            for value in family.values if isinstance(family, LabeledCounter) else ():
                metric.labels(model, value)
        self.token_counts = TokenCounts(self.generated_tokens, self.inter_token)

    def forget(self) -> None:
        """Removes the series, because the model or adapter is no longer served."""
        for metric in self._created.values():
            metric.remove_by_labels({"model": self._model})


class Metrics:
    """All metrics of one server. `sources` holds the functions that are called at every scrape.

    While an engine does not run, its series are absent and `fp8serve_engine_up` is 0. The operator names the tenants;
    no label contains an API key.
    """

    responses = Family(
        Counter, "http_responses", "HTTP responses, by route, method and status", "route", "method", "status"
    )
    http_seconds = Family(
        Histogram, "http_seconds", "Seconds from the request line to the last byte of the response", "route",
        buckets=LATENCY,
    )  # fmt: skip
    errors = Family(Counter, "http_errors", "HTTP requests that failed, by error code", "code")
    start_time = Family(Gauge, "start_time_seconds", "Start of this server, in seconds since the Unix epoch")
    parsing = Family(Gauge, "reading_bytes", "Bytes of requests that are being parsed or wait for it")
    streams_rejected = Family(Counter, "streams_rejected", "Event streams that were refused because too many were open")
    tenant_requests = Family(
        Counter, "tenant_requests", "Generation requests of a tenant that were within its limits", "tenant"
    )
    tenant_in_flight = Family(
        Gauge, "tenant_requests_in_flight", "Generation requests of a tenant that have not ended", "tenant"
    )
    tenant_tokens = Family(
        Counter, "tenant_tokens", "Tokens of a tenant's requests that ended, by kind: prompt or generated", "tenant",
        "kind",
    )  # fmt: skip
    tenant_rejected = Family(
        Counter, "tenant_requests_rejected",
        "Generation requests refused by a limit of the tenant, by limit: requests, tokens or concurrent", "tenant",
        "reason",
    )  # fmt: skip

    def __init__(self) -> None:
        self.registry, self._tenant_registry = (
            CollectorRegistry(auto_describe=True),
            CollectorRegistry(auto_describe=True),
        )
        self.sources = ScrapeSources()
        self.series = {
            family: family.create(self._tenant_registry if "tenant" in family.labels else self.registry)
            for family in families(Metrics)
        }
        self._model_families = {family: family.create(self.registry, "model") for family in families(ModelMetrics)}
        for code in Code:  # the series start at zero, so that a rate includes their first event
            self.errors.labels(code.value)
        self.start_time.set(time.time())
        self.registry.register(ScrapeCollector(self.sources))

    def for_model(self, name: str) -> ModelMetrics:
        """Returns the series of one model or adapter."""
        return ModelMetrics(self._model_families, name)

    def render(self, with_tenants: bool = True) -> bytes:
        """Returns the metrics in Prometheus' text format, with or without the series of single tenants."""
        text = generate_latest(self.registry)
        return text + generate_latest(self._tenant_registry) if with_tenants else text


# -- read at every scrape ----------------------------------------------------------------------------------------------


class EngineMetric(NamedTuple):
    """A metric that an engine reports under `key` of its statistics, or of a layer's record in `Engine.scales`."""

    key: str
    name: str
    help_text: str
    vllm: str = ""

    @property
    def family(self) -> type[CounterMetricFamily] | type[GaugeMetricFamily]:
        return CounterMetricFamily if self.key.endswith("_total") else GaugeMetricFamily


ENGINE_METRICS = (
    EngineMetric("running", "requests_running", "Sequences in the running batch", "num_requests_running"),
    EngineMetric(
        "waiting", "requests_waiting", "Sequences that wait to enter the running batch", "num_requests_waiting"
    ),
    EngineMetric(
        "kv_usage", "kv_cache_usage_ratio", "Share of the KV cache blocks in use, 0 to 1", "kv_cache_usage_perc"
    ),
    EngineMetric("kv_blocks_used", "kv_cache_blocks_used", "KV cache blocks in use"),
    EngineMetric("layers_drifting", "layers_drifting", "FP8 layers whose input drift exceeds --drift-alarm"),
    EngineMetric(
        "input_saturation_max", "input_cut_off_max_ratio",
        "Share of input elements that were clipped in the last window, in the layer with the largest share",
    ),
    EngineMetric(
        "input_drift_max", "input_drift_max_ratio",
        "Input amax of the last window divided by the calibrated amax, in the layer with the largest ratio",
    ),
    EngineMetric(
        "scale_windows_total", "scale_windows", "Windows of layer inputs that the current engine process has measured"
    ),
    EngineMetric("steps_total", "engine_steps", "Batches that the current engine process has computed"),
    EngineMetric(
        "preemptions_total", "preemptions",
        "Preemptions of sequences, which lose their KV cache blocks and are recomputed", "num_preemptions",
    ),
    EngineMetric(
        "prefix_queried_tokens_total", "prefix_cache_queried_tokens",
        "Prompt tokens that were looked up in the prefix cache", "prefix_cache_queries",
    ),
    EngineMetric(
        "prefix_hit_tokens_total", "prefix_cache_hit_tokens", "Prompt tokens that were found in the prefix cache",
        "prefix_cache_hits",
    ),
    EngineMetric(
        "prefix_restored_hit_tokens_total", "prefix_cache_restored_hit_tokens",
        "Prompt tokens that were found in prefix cache blocks restored from --cache-dir",
    ),
    EngineMetric(
        "drafts_total", "drafts", "Drafts of speculative decoding that were verified", "spec_decode_num_drafts"
    ),
    EngineMetric(
        "draft_tokens_total", "draft_tokens", "Draft tokens that were verified", "spec_decode_num_draft_tokens"
    ),
    EngineMetric(
        "accepted_draft_tokens_total", "accepted_draft_tokens", "Draft tokens that were accepted",
        "spec_decode_num_accepted_tokens",
    ),
    EngineMetric("draft_model_tokens_total", "draft_model_tokens", "Tokens that the draft model computed"),
)  # fmt: skip
LAYER_METRICS = (
    EngineMetric("amax", "layer_input_amax", "Input amax of an FP8 layer since the engine started"),
    EngineMetric(
        "headroom", "layer_headroom_ratio",
        "Factor by which the inputs of an FP8 layer could grow and still fit its scale",
    ),
    EngineMetric("saturation", "layer_cut_off_ratio", "Share of the input elements of an FP8 layer that were clipped"),
    EngineMetric(
        "drift", "layer_drift_ratio", "Input amax of an FP8 layer in the last window divided by the calibrated amax"
    ),
)  # fmt: skip


@dataclass
class ScrapeSources:
    """Functions that are called at every scrape and must not block. All but `jobs`, `ready` and `build` return values
    by model; an engine that does not run reports nothing. `max_adapters` is how many adapters a batch can use."""

    stats: Callable[[], Stats] = dict
    adapters: Callable[[], Mapping[str, Mapping[str, Mapping[str, int]]]] = dict
    max_adapters: Callable[[], Mapping[str, int]] = dict
    layers: Callable[[], Mapping[str, Sequence[Mapping[str, Any]]]] = dict
    jobs: Callable[[], Mapping[str, int]] = dict
    ready: Callable[[], bool] = bool
    build: Callable[[], Mapping[str, str]] = dict
    served: Callable[[], Mapping[str, Mapping[str, str]]] = dict


class ScrapeCollector(Collector):
    """Collects the metrics that are read at every scrape: the engines' last statistics, the jobs and the models."""

    def __init__(self, sources: ScrapeSources) -> None:
        self.sources = sources

    def collect(self) -> Iterator[Metric]:
        sources = self.sources
        stats = sources.stats()
        yield GaugeMetricFamily(
            "fp8serve_ready", "Readiness of this server for requests: 1 or 0", value=sources.ready()
        )
        up = GaugeMetricFamily(
            "fp8serve_engine_up", "State of the model's engine: 1 if it runs and reports, otherwise 0", labels=["model"]
        )
        for model, engine_stats in stats.items():
            up.add_metric([model], float(bool(engine_stats)))
        yield up
        adapters = {name: counts for by_name in sources.adapters().values() for name, counts in by_name.items()}
        yield from _engine_families({**stats, **adapters})
        yield from _layer_families(sources.layers())
        jobs = GaugeMetricFamily("fp8serve_jobs", "Fine-tune jobs by state", labels=["state"])
        for state, count in sources.jobs().items():
            jobs.add_metric([state], count)
        yield jobs
        yield from info_family("fp8serve_build_info", "Versions of fp8serve, Python and PyTorch", [sources.build()])
        rows = [{"model": model} | dict(served) for model, served in sources.served().items() if served]
        yield from info_family("fp8serve_model_info", "Weights that a model serves, and their engine's options", rows)


def info_family(name: str, help_text: str, rows: Sequence[Mapping[str, str]]) -> Iterator[Metric]:
    """Yields a gauge with a series of value 1 for each row, whose items become labels; nothing without rows."""
    if rows and rows[0]:
        family = GaugeMetricFamily(name, help_text, labels=list(rows[0]))
        for row in rows:
            family.add_metric(list(row.values()), 1)
        yield family


def _engine_families(stats: Stats) -> Iterator[Metric]:
    for row in ENGINE_METRICS:
        family = row.family(f"fp8serve_{row.name}", row.help_text, labels=["model"])
        for model, engine_stats in stats.items():
            if row.key in engine_stats:
                family.add_metric([model], float(engine_stats[row.key]))
        yield family
    positions = CounterMetricFamily(
        "fp8serve_accepted_draft_tokens_by_position",
        "Draft tokens that were accepted, by position in the draft",
        labels=["model", "position"],
    )
    steps = HistogramMetricFamily("fp8serve_step_tokens", "Tokens computed in one batch", labels=["model"])
    for model, engine_stats in stats.items():
        for position, count in enumerate(engine_stats.get("accepted_by_position", ())):
            positions.add_metric([model, str(position)], count)
        if "step_tokens" in engine_stats:  # one count per bucket, the last one for sizes above all bounds
            sizes = engine_stats["step_tokens"]
            names = [*(str(float(bound)) for bound in sizes["bounds"]), "+Inf"]
            buckets = list(zip(names, map(float, accumulate(sizes["counts"])), strict=True))
            steps.add_metric([model], buckets, sizes["total"])
    yield positions
    yield steps


def _layer_families(layers: Mapping[str, Iterable[Mapping[str, Any]]]) -> Iterator[Metric]:
    for row in LAYER_METRICS:
        family = GaugeMetricFamily(f"fp8serve_{row.name}", row.help_text, labels=["model", "layer"])
        for model, records in layers.items():
            for record in records:
                if record.get(row.key) is not None:
                    family.add_metric([model, record["name"]], float(record[row.key]))
        if family.samples:
            yield family
