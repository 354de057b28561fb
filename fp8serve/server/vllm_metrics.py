"""The server's metrics under the names that dashboards, autoscalers and gateways for vLLM query.

Most are families of fp8serve with another name, and the labels `model_name` and `engine`. A few have no counterpart of
the same form: why requests wait, the size of the cache, that an engine is awake, which adapters run and wait, and
responses by the class of their status.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from fp8serve.server.live_metrics import Sources, Stats

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
    "fp8serve_sequences_ended": "vllm:request_success",
    "fp8serve_request_queue_seconds": "vllm:request_queue_time_seconds",
    "fp8serve_request_prefill_seconds": "vllm:request_prefill_time_seconds",
    "fp8serve_request_decode_seconds": "vllm:request_decode_time_seconds",
    "fp8serve_request_inference_seconds": "vllm:request_inference_time_seconds",
    "fp8serve_request_max_tokens": "vllm:request_params_max_tokens",
    "fp8serve_request_n": "vllm:request_params_n",
    "fp8serve_request_longest_answer_tokens": "vllm:request_max_num_generation_tokens",
    "fp8serve_request_computed_prompt_tokens": "vllm:request_prefill_kv_computed_tokens",
    "fp8serve_prompt_tokens_cached": "vllm:prompt_tokens_cached",
    "fp8serve_step_tokens": "vllm:iteration_tokens_total",
    "fp8serve_prefix_cache_queried_tokens": "vllm:prefix_cache_queries",
    "fp8serve_prefix_cache_hit_tokens": "vllm:prefix_cache_hits",
    "fp8serve_drafts": "vllm:spec_decode_num_drafts",
    "fp8serve_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "fp8serve_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens",
    "fp8serve_accepted_draft_tokens_by_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
}
ENGINE = "0"  # a model has one


def vllm_families(families: Iterable[Metric], sources: Sources) -> Iterator[Metric]:
    """`families`: all of ours."""
    for family in families:
        if (alias := VLLM_NAMES.get(family.name)) is not None:
            yield _renamed(family, alias)
        if family.name == "fp8serve_http_responses":
            yield _by_class(family)
    running = {model: stats for model, stats in sources.stats().items() if stats}
    yield from _of_engines(running, sources.served(), sources.adapters())


def _renamed(family: Metric, name: str) -> Metric:
    copy = Metric.__new__(Metric)
    copy.name, copy.documentation, copy.unit, copy.type = name, family.documentation, "", family.type
    copy.samples = [
        s._replace(name=s.name.replace(family.name, name, 1), labels=_labels(s.labels)) for s in family.samples
    ]
    return copy


def _labels(ours: Mapping[str, str]) -> dict[str, str]:
    return {"model_name" if name == "model" else name: value for name, value in ours.items()} | {"engine": ENGINE}


def _by_class(family: Metric) -> Metric:
    """Responses by class, `5xx`, as counted by prometheus-fastapi-instrumentator, which vLLM uses."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for sample in family.samples:
        if sample.name.endswith("_total"):
            found = sample.labels
            counts[found["route"], found["method"], found["status"][:1] + "xx"] += int(sample.value)
    copy = CounterMetricFamily("http_requests", family.documentation, labels=["handler", "method", "status"])
    for key, count in counts.items():
        copy.add_metric(key, count)
    return copy


def _of_engines(
    running: Stats, served: Mapping[str, Mapping[str, str]], adapters: Mapping[str, Mapping[str, Mapping[str, int]]]
) -> Iterator[Metric]:
    waiting = _gauge("num_requests_waiting_by_reason", "For a place or for blocks, all of them", "reason")
    sleep = _gauge("engine_sleep_state", "An engine of ours never sleeps", "sleep_state")
    cache = _gauge("cache_config_info", "The cache of keys and values", *CACHE)
    lora = _gauge("lora_requests_info", "The present time, with the adapters that run and wait", *ADAPTERS)
    for model, stats in running.items():
        own = [model, ENGINE]
        for reason, count in (("capacity", stats.get("waiting", 0)), ("deferred", 0)):
            waiting.add_metric([*own, reason], count)
        for state, value in (("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)):
            sleep.add_metric([*own, state], value)
        known = served.get(model, {})
        sizes = (known.get(name, "") for name in ("block_size", "num_blocks", "kv_cache_dtype"))
        cache.add_metric([*own, *sizes, "True"], 1)
        beside = adapters.get(model, {})
        lists = (",".join(name for name, counts in beside.items() if counts[key]) for key in ("running", "waiting"))
        lora.add_metric([*own, str(len(beside)), *lists], time.time())
    yield from (waiting, sleep, cache, lora)


CACHE = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")
ADAPTERS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")


def _gauge(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"vllm:{name}", meaning, labels=["model_name", "engine", *labels])
