"""The series that the dashboard and the alerts query exist in /metrics of a live server after events of every kind.

Each panel is checked for the names of its series, the labels that it matches or groups by, and the labels in its legend
and annotations. The syntax of expressions is not checked (promql.py).
"""

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from fp8serve.fp8.recipe import DelayedScaling, to_json
from tests.engine.tiny import write_model, write_scales
from tests.patience import until
from tests.server.access.files import bearer, key_of, one_for_each_scope
from tests.server.process import Process, serving
from tests.server.promql import parse_query

OBSERVABILITY = Path(__file__).resolve().parents[2] / "docker" / "observability"
DASHBOARD = json.loads((OBSERVABILITY / "fp8serve.json").read_text())
RULES = yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text())["groups"][0]["rules"]
PANELS = [
    (panel["title"], target["expr"], target["legendFormat"])
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]
ALERTS = [(rule["alert"], rule["expr"], rule["annotations"]["summary"]) for rule in RULES]
OF_PROMETHEUS = {"job", "instance", "pod", "namespace"}  # labels that Prometheus adds
CONTEXT = 8192  # a stream that fills it is under way for as long as a test needs
REPEATS = "ab ab ab ab ab ab ab ab ab ab ab ab "

# What vLLM's dashboards (examples/observability), llm-d's and the Gateway API inference extension query.
VLLM = """
vllm:num_requests_running vllm:num_requests_waiting vllm:num_requests_waiting_by_reason{reason}
vllm:kv_cache_usage_perc vllm:num_preemptions_total vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total
vllm:prompt_tokens_total vllm:prompt_tokens_cached_total vllm:generation_tokens_total
vllm:request_success_total{finished_reason} vllm:engine_sleep_state{sleep_state}
vllm:e2e_request_latency_seconds_bucket{le} vllm:e2e_request_latency_seconds_sum vllm:e2e_request_latency_seconds_count
vllm:time_to_first_token_seconds_bucket{le} vllm:inter_token_latency_seconds_bucket{le}
vllm:request_time_per_output_token_seconds_bucket{le} vllm:request_queue_time_seconds_sum
vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum vllm:request_inference_time_seconds_sum
vllm:request_queue_time_seconds_bucket{le} vllm:request_prefill_time_seconds_bucket{le}
vllm:request_decode_time_seconds_bucket{le} vllm:request_prompt_tokens_bucket{le}
vllm:request_generation_tokens_bucket{le} vllm:request_max_num_generation_tokens_sum
vllm:request_params_max_tokens_sum vllm:request_params_n_sum vllm:iteration_tokens_total_count
vllm:iteration_tokens_total_bucket{le} vllm:request_prefill_kv_computed_tokens_sum
vllm:spec_decode_num_drafts_total vllm:spec_decode_num_draft_tokens_total
vllm:spec_decode_num_accepted_tokens_total vllm:spec_decode_num_accepted_tokens_per_pos_total{position}
vllm:cache_config_info{block_size,num_gpu_blocks}
vllm:lora_requests_info{max_lora,running_lora_adapters,waiting_lora_adapters}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    path = tmp_path_factory.mktemp("observed")
    model = write_model(path / "tiny", max_position_embeddings=CONTEXT)
    limits = "tenants.generate = { requests_per_minute = 40 }"
    options = {
        "model": str(model),
        "data_dir": str(path / "data"),
        "api_keys": str(one_for_each_scope(path / "keys.toml", limits)),
        "recipe": to_json(DelayedScaling()),
        "scales": str(write_scales(model, path / "scales")),
        "train_on": "share",
        "speculative_tokens": 4,
        "drift_window": 4,
        "drift_alarm": 1e-6,
        "vllm_metrics": True,
        "metrics_per_layer": True,
        "limits": {"streams": 1},
    }
    with serving(path / "log", **options) as process:
        go_through_everything(process)
        yield process


def go_through_everything(server: Process) -> None:
    generate, admin = bearer(key_of("generate")), bearer(key_of("admin"))
    params = {"max_new_tokens": 24, "do_sample": False, "ignore_eos": True}
    for _ in range(3):
        server.client.post("/generate", json={"inputs": REPEATS, "parameters": params}, headers=generate)
    body = {"prompt": "a", "n": 2, "max_tokens": 4, "ignore_eos": True}
    server.client.post("/v1/completions", json=body, headers=generate)
    server.client.post("/v1/completions", json=body | {"stream": True}, headers=generate)
    server.client.post("/generate", json={"inputs": "x", "unknown": 1}, headers=generate)
    leave_a_stream_and_ask_for_a_second(server, generate)
    while server.client.post("/v1/completions", json=body | {"max_tokens": 1}, headers=generate).status_code != 429:
        pass
    submit(server, admin)
    swap(server, admin)
    kill_the_engine(server, admin)
    server.client.post("/generate", json={"inputs": REPEATS, "parameters": params}, headers=admin)
    until(lambda: scraped(server).get("fp8serve_input_drift_max_ratio"), "a window of the new engine")
    until(lambda: scraped(server).get("fp8serve_layer_drift_ratio"), "a look at its layers")


def leave_a_stream_and_ask_for_a_second(server: Process, headers: dict[str, str]) -> None:
    long = {"inputs": "x", "parameters": {"max_new_tokens": CONTEXT - 96, "ignore_eos": True}, "stream": True}
    with server.client.stream("POST", "/generate", json=long, headers=headers) as first:
        pieces = first.iter_bytes()
        next(pieces)
        assert server.client.post("/generate", json=long, headers=headers).status_code == 429


def submit(server: Process, headers: dict[str, str]) -> None:
    rows = [{"prompt": "a", "completion": "b"}]
    response = server.client.post("/finetune", json={"data": rows, "epochs": 1}, headers=headers)
    assert response.status_code < 300, response.text
    job = response.json()["id"]
    server.client.post(f"/finetune/{job}/cancel", headers=headers)
    ended = ("cancelled", "succeeded", "failed")
    until(lambda: server.client.get(f"/finetune/{job}", headers=headers).json()["status"] in ended, "the job's end")


def swap(server: Process, headers: dict[str, str]) -> None:
    answer = server.client.post("/models/tiny/activate", json={"source": "base"}, headers=headers)
    assert answer.status_code == 200, answer.text


def kill_the_engine(server: Process, headers: dict[str, str]) -> None:
    until(lambda: len(engines(server)) == 1, "the end of the engine before the swap")
    (pid,) = engines(server)
    os.kill(pid, signal.SIGKILL)
    until(lambda: value(server, "fp8serve_engine_restarts_total") == 1, "the restart")
    until(lambda: value(server, "fp8serve_ready") == 1, "readiness")


def engines(server: Process) -> list[int]:
    """Process ids of the server's engines. After a swap, the previous engine may still be ending."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return [int(pid) for pid, parent, args in rows if parent == str(server.popen.pid) and "engine.worker" in args]


def scraped(server: Process) -> dict[str, list[Sample]]:
    """Samples by their names."""
    with contextlib.suppress(httpx.TransportError):
        text = server.client.get("/metrics", headers=bearer(key_of("read"))).text
        samples: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample)
        return samples
    return {}


@pytest.fixture(scope="module")
def samples(server: Process) -> dict[str, list[Sample]]:
    return scraped(server)


def value(server: Process, name: str, **labels: str) -> float:
    return total(scraped(server), name, **labels)


def total(samples: dict[str, list[Sample]], name: str, **labels: str) -> float:
    return sum(s.value for s in samples.get(name, []) if labels.items() <= s.labels.items())


def check(expression: str, message: str, samples: dict[str, list[Sample]]) -> None:
    """Asserts that each series of the expression exists with its labels, and that the text `message` uses no others."""
    query = parse_query(expression)
    labels: set[str] = set(OF_PROMETHEUS)
    for selector in query.selectors:
        series = samples.get(selector.name)
        assert series, f"{selector.name} is nowhere in /metrics"
        for name, operator, label in selector.matchers:
            assert all(name in sample.labels for sample in series), (selector.name, name)
            if operator == "=":
                assert label in {sample.labels[name] for sample in series}, (selector.name, name, label)
        labels |= {name for sample in series for name in sample.labels}
    assert query.grouped <= labels, expression
    named = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", message))
    assert named <= (query.grouped or labels), message


@pytest.mark.parametrize(("title", "expression", "legend"), PANELS, ids=lambda text: str(text)[:40])
def test_every_panel_shows_something(
    title: str, expression: str, legend: str, samples: dict[str, list[Sample]]
) -> None:
    check(expression, legend, samples)


@pytest.mark.parametrize(("alert", "expression", "summary"), ALERTS, ids=lambda text: str(text)[:40])
def test_every_alert_can_fire(alert: str, expression: str, summary: str, samples: dict[str, list[Sample]]) -> None:
    check(expression, summary, samples)


@pytest.mark.parametrize("series", VLLM.split())
def test_every_series_of_vllms_is_there(series: str, samples: dict[str, list[Sample]]) -> None:
    name, _, labels = series.removesuffix("}").partition("{")
    assert name in samples
    for sample in samples[name]:
        assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")
        assert set(filter(None, labels.split(","))) <= set(sample.labels)


def test_http_responses_are_also_counted_by_status_class(samples: dict[str, list[Sample]]) -> None:
    ours, theirs = samples["fp8serve_http_responses_total"], samples["http_requests_total"]
    assert {sample.labels["status"] for sample in theirs} >= {"2xx", "4xx"}
    assert sum(s.value for s in theirs) == sum(s.value for s in ours)


def test_the_metrics_count_what_happened(samples: dict[str, list[Sample]]) -> None:
    expected = {
        ("fp8serve_engine_restarts_total",): 1, ("fp8serve_weight_swaps_total", "outcome", "ok"): 1,
        ("fp8serve_http_errors_total", "code", "unknown_parameter"): 1,
        ("fp8serve_http_errors_total", "code", "rate_limit_exceeded"): 1,
        ("fp8serve_tenant_requests_rejected_total", "reason", "requests"): 1,
        ("fp8serve_streams_rejected_total",): 1,
        ("fp8serve_ready",): 1, ("fp8serve_engine_up",): 1,
        ("fp8serve_sequences_ended_total", "finished_reason", "abort"): 1,
    }  # fmt: skip
    totals = {key: total(samples, key[0], **({key[1]: key[2]} if len(key) > 1 else {})) for key in expected}
    assert totals == expected
    assert total(samples, "fp8serve_jobs") == 1
    ended = total(samples, "fp8serve_sequences_ended_total", finished_reason="length")
    for name in ("queue", "prefill", "decode", "inference"):
        assert total(samples, f"fp8serve_request_{name}_seconds_count") == ended
        assert total(samples, f"fp8serve_request_{name}_seconds_sum") > 0
    assert total(samples, "fp8serve_accepted_draft_tokens_total") == total(
        samples, "fp8serve_accepted_draft_tokens_by_position_total"
    )
    assert total(samples, "fp8serve_step_tokens_count") == total(samples, "fp8serve_engine_steps_total")
    (build,), (model,) = samples["fp8serve_build_info"], samples["fp8serve_model_info"]
    assert all(build.labels.values())
    assert (model.labels["model"], model.labels["weights"], model.labels["device"]) == ("tiny", "tiny", "cpu")
    assert all(model.labels.values())


def test_layers_are_those_of_the_model(server: Process, samples: dict[str, list[Sample]]) -> None:
    layers = server.client.get("/scales", headers=bearer(key_of("read"))).json()["layers"]
    names = {layer["name"] for layer in layers}
    assert len(names) == 14
    for series in ("input_amax", "headroom_ratio", "cut_off_ratio", "drift_ratio"):
        assert {sample.labels["layer"] for sample in samples[f"fp8serve_layer_{series}"]} == names


@pytest.mark.parametrize(
    ("expression", "names", "grouped"),
    [
        ('rate(a_total{b="c d (", e=~"f.*"}[5m]) > 0 and on (g) count(h)', ["a_total", "h"], {"g"}),
        ("histogram_quantile(0.5, sum by (le, x) (rate(y_bucket[1m] offset 5m)))", ["y_bucket"], {"le", "x"}),
        ("sum(rate(x[1m])) without (status) / (rate(y[1m]) > bool 1e6)", ["x", "y"], {"status"}),
    ],
)
def test_expressions_are_read(expression: str, names: list[str], grouped: set[str]) -> None:
    query = parse_query(expression)
    assert ([selector.name for selector in query.selectors], query.grouped) == (names, grouped)


@pytest.mark.parametrize("expression", ["sum(rate(x[1m])", "1 + 1", "time()"])
def test_an_expression_without_a_series_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"match|no series"):
        parse_query(expression)


def test_a_panel_with_a_wrong_name_fails_the_check(samples: dict[str, list[Sample]]) -> None:
    invalid: list[tuple[Any, Any]] = [
        ("fp8serve_nothing", ""),
        ('fp8serve_jobs{state="lost"}', ""),
        ('fp8serve_jobs{status="failed"}', ""),
        ("sum by (status) (fp8serve_jobs)", ""),
        ("sum by (state) (fp8serve_jobs)", "{{status}}"),
    ]
    for expression, legend in invalid:
        with pytest.raises(AssertionError):
            check(expression, legend, samples)
