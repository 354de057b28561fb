"""Our metrics under the names by which dashboards, autoscalers and gateways for vLLM ask for them.

Most are families of ours with another name, and the labels `model_name` and `engine`. A few say in vLLM's way what we
say in another: why requests wait, the size of the cache, that an engine is awake, which adapters run (none, ever), and
responses by the class of their status.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from fp8serve.server.live_metrics import Sources, facts

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
ENGINE = "0"  # there is one


def vllm_families(families: Iterable[Metric], model: str, sources: Sources) -> Iterator[Metric]:
    """`families`: all of ours."""
    labels = {"model_name": model, "engine": ENGINE}
    for family in families:
        if (alias := VLLM_NAMES.get(family.name)) is not None:
            yield _renamed(family, alias, labels)
        if family.name == "fp8serve_http_responses":
            yield _by_class(family)
    if stats := sources.stats():
        for family in _of_engine(stats, sources.served()):
            yield _renamed(family, family.name, labels)


def _renamed(family: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    copy = Metric.__new__(Metric)
    copy.name, copy.documentation, copy.unit, copy.type = name, family.documentation, "", family.type
    copy.samples = [
        s._replace(name=s.name.replace(family.name, name, 1), labels={**s.labels, **labels}) for s in family.samples
    ]
    return copy


def _by_class(family: Metric) -> Metric:
    """As prometheus-fastapi-instrumentator counts them, which vLLM uses: `5xx`."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for sample in family.samples:
        if sample.name.endswith("_total"):
            found = sample.labels
            counts[found["route"], found["method"], found["status"][:1] + "xx"] += int(sample.value)
    copy = CounterMetricFamily("http_requests", family.documentation, labels=["handler", "method", "status"])
    for key, count in counts.items():
        copy.add_metric(key, count)
    return copy


def _of_engine(stats: Mapping[str, Any], served: Mapping[str, str]) -> Iterator[Metric]:
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "For a place or blocks, all of them", labels=["reason"]
    )
    for reason, count in (("capacity", stats.get("waiting", 0)), ("deferred", 0)):
        waiting.add_metric([reason], count)
    yield waiting
    sleep = GaugeMetricFamily("vllm:engine_sleep_state", "An engine of ours never sleeps", labels=["sleep_state"])
    for state, value in (("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)):
        sleep.add_metric([state], value)
    yield sleep
    cache = {"block_size": served.get("block_size", ""), "num_gpu_blocks": served.get("num_blocks", "")}
    cache |= {"cache_dtype": served.get("kv_cache_dtype", ""), "enable_prefix_caching": "True"}
    yield from facts("vllm:cache_config_info", "The cache of keys and values", cache)
    adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    lora = GaugeMetricFamily(
        "vllm:lora_requests_info", "The present time; there are no adapters", labels=list(adapters)
    )
    lora.add_metric(list(adapters.values()), time.time())
    yield lora
