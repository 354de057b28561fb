"""Metrics that are read when /metrics is requested, and not counted: the engine's last report, and what is served."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

LiveFamily = TypeVar("LiveFamily", CounterMetricFamily, GaugeMetricFamily)
Stats = Mapping[str, Mapping[str, Any]]

ENGINE_GAUGES = {
    "running": ("fp8serve_requests_running", "Sequences being computed"),
    "waiting": ("fp8serve_requests_waiting", "Sequences waiting for a place in the batch"),
    "kv_usage": ("fp8serve_kv_cache_usage_ratio", "Share of cache blocks in use, 0 to 1"),
    "kv_blocks_used": ("fp8serve_kv_cache_blocks_used", "Cache blocks in use"),
    "layers_drifting": ("fp8serve_layers_drifting", "FP8 layers whose inputs are beyond --drift-alarm"),
    "input_saturation_max": (
        "fp8serve_input_cut_off_max_ratio",
        "Share of the inputs of the last window that were cut off, of the layer where that is most",
    ),
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
    "prefix_restored_hit_tokens_total": (
        "fp8serve_prefix_cache_restored_hit_tokens",
        "Of the prompt tokens found in the prefix cache those that --cache-dir kept from an earlier process",
    ),
    "drafts_total": ("fp8serve_drafts", "Drafts that were checked"),
    "draft_tokens_total": ("fp8serve_draft_tokens", "Tokens of these drafts"),
    "accepted_draft_tokens_total": ("fp8serve_accepted_draft_tokens", "Tokens of these that became part of an answer"),
    "draft_model_tokens_total": ("fp8serve_draft_model_tokens", "Tokens that a draft model computed"),
}
"""Key of the engine's statistics -> metric name and meaning."""
LAYER_GAUGES = {
    "amax": ("fp8serve_layer_input_amax", "Largest magnitude of the layer's inputs since the engine started"),
    "headroom": (
        "fp8serve_layer_headroom_ratio",
        "How many times as large its inputs could be and still fit its scale",
    ),
    "saturation": ("fp8serve_layer_cut_off_ratio", "Share of its inputs' elements that were cut off"),
    "drift": ("fp8serve_layer_drift_ratio", "Its largest input of the last window, times the calibrated one"),
}
"""Key of a record of `Engine.scales` -> metric name and meaning."""


@dataclass
class Sources:
    """What is asked at every scrape; nothing here may block. By model; an engine that does not run reports nothing."""

    stats: Callable[[], Mapping[str, Mapping[str, Any]]] = dict
    adapters: Callable[[], Mapping[str, Mapping[str, Mapping[str, int]]]] = dict
    layers: Callable[[], Mapping[str, Sequence[Mapping[str, Any]]]] = dict
    jobs: Callable[[], Mapping[str, int]] = dict
    ready: Callable[[], bool] = bool
    build: Callable[[], Mapping[str, str]] = dict
    served: Callable[[], Mapping[str, Mapping[str, str]]] = dict


class Live(Collector):
    """See the module."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources

    def collect(self) -> Iterator[Metric]:
        sources = self.sources
        stats = sources.stats()
        yield GaugeMetricFamily("fp8serve_ready", "Whether requests should be sent here: 1 or 0", value=sources.ready())
        up = {model: float(bool(said)) for model, said in stats.items()}
        yield _family(GaugeMetricFamily, "fp8serve_engine_up", "Whether an engine runs and reports: 1 or 0", up)
        beside = {name: counts for adapters in sources.adapters().values() for name, counts in adapters.items()}
        yield from _of_engine({**stats, **beside})
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


def _figure(stats: Stats, key: str) -> dict[str, float]:
    """The figure of each model whose engine reports it."""
    return {model: float(said[key]) for model, said in stats.items() if key in said}


def _family(kind: type[LiveFamily], name: str, meaning: str, values: Mapping[str, float]) -> LiveFamily:
    family = kind(name, meaning, labels=["model"])
    for model, value in values.items():
        family.add_metric([model], value)
    return family


def _of_engine(stats: Stats) -> Iterator[Metric]:
    for key, (name, meaning) in ENGINE_GAUGES.items():
        yield _family(GaugeMetricFamily, name, meaning, _figure(stats, key))
    for key, (name, meaning) in ENGINE_COUNTERS.items():
        yield _family(CounterMetricFamily, name, meaning, _figure(stats, key))
    places = CounterMetricFamily(
        "fp8serve_accepted_draft_tokens_by_position", "Of drafts, by their place in it", labels=["model", "position"]
    )
    steps = HistogramMetricFamily("fp8serve_step_tokens", "Tokens computed in a batch", labels=["model"])
    for model, said in stats.items():
        for position, count in enumerate(said.get("accepted_by_position", ())):
            places.add_metric([model, str(position)], count)
        if "step_tokens" in said:
            sizes = said["step_tokens"]
            steps.add_metric([model], _buckets(sizes["bounds"], sizes["counts"]), sizes["total"])
    yield places
    yield steps


def _buckets(bounds: Sequence[int], counts: Sequence[int]) -> list[tuple[str, float]]:
    """`counts`: how many values are at or below each bound and above the one before; the last are above all bounds."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))


def _of_layers(layers: Mapping[str, Iterable[Mapping[str, Any]]]) -> Iterator[Metric]:
    for key, (name, meaning) in LAYER_GAUGES.items():
        family = GaugeMetricFamily(name, meaning, labels=["model", "layer"])
        for model, records in layers.items():
            for record in records:
                if record.get(key) is not None:
                    family.add_metric([model, record["name"]], float(record[key]))
        if family.samples:
            yield family
