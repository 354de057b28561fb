"""Status of a server: health from start to end, metrics with stable names, pages that load nothing from other hosts."""

import json
import re
from pathlib import Path
from urllib.parse import urljoin

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fp8serve.errors import RequestError
from fp8serve.fp8.cuda_support import Gpu
from fp8serve.model import device as model_device
from fp8serve.server.app import PAGES
from tests.patience import eventually
from tests.server.conftest import Server, Start
from tests.server.fakes import FakeEngine, Launcher

NAMES = """
fp8serve_http_responses fp8serve_http_seconds fp8serve_requests_accepted fp8serve_requests_finished
fp8serve_requests_rejected fp8serve_requests_in_flight fp8serve_prompt_tokens fp8serve_generated_tokens
fp8serve_time_to_first_token_seconds fp8serve_inter_token_seconds fp8serve_time_per_output_token_seconds
fp8serve_request_seconds fp8serve_request_prompt_tokens fp8serve_request_generated_tokens fp8serve_weight_swaps
fp8serve_engine_restarts fp8serve_requests_running fp8serve_requests_waiting fp8serve_kv_cache_usage_ratio
fp8serve_preemptions fp8serve_jobs fp8serve_engine_up fp8serve_drafts fp8serve_draft_tokens
fp8serve_accepted_draft_tokens fp8serve_prefix_cache_queried_tokens fp8serve_prefix_cache_hit_tokens
fp8serve_streams_rejected fp8serve_prefix_cache_restored_hit_tokens
"""


async def metrics(server: Server, line: str) -> str:
    """Returns /metrics once it contains `line`: the server polls the engine's numbers."""
    text = ""

    async def has_line() -> bool:
        nonlocal text
        text = (await server.client.get("/metrics")).text
        return line in text

    await eventually(has_line, line)
    return text


async def test_loading_is_live_and_not_ready(start: Start) -> None:
    launcher = Launcher()
    launcher.paused = True
    async with start(launcher, wait=False) as server:
        assert (await server.client.get("/health/live")).status_code == 200
        ready = await server.client.get("/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"ok": False, "state": "loading"})
        early = await server.client.post("/generate", json={"inputs": "x"})
        assert (early.status_code, early.json()["code"]) == (503, "starting")
        assert "retry-after" in early.headers
        launcher.paused = False
        await server.ready()
        for path in ("/health", "/health/ready", "/health/live", "/ping"):
            assert (await server.client.get(path)).json() == {"ok": True, "state": "ready"}


async def test_metric_names_are_stable_and_parse(start: Start) -> None:
    async with start() as server:
        await server.client.post("/generate", json={"inputs": "abc"})
        text = await metrics(server, 'fp8serve_kv_cache_usage_ratio{model="tiny"} 0.25')
        families = {f.name: f for f in text_string_to_metric_families(text)}
        assert set(NAMES.split()) <= set(families)
        assert all(name.startswith("fp8serve_") for name in families)
        tokens = {s.name: s.value for s in families["fp8serve_generated_tokens"].samples}
        assert tokens["fp8serve_generated_tokens_total"] == 16
        assert {s.labels["state"] for s in families["fp8serve_jobs"].samples} == {
            "queued",
            "running",
            "succeeded",
            "failed",
            "cancelled",
            "paused",
        }


async def test_vllm_metrics_are_served_on_request(start: Start) -> None:
    async with start(vllm_metrics=True) as server:
        await server.client.post("/generate", json={"inputs": "abc"})
        text = await metrics(server, 'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25')
        for name in (
            'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0',
            'vllm:generation_tokens_total{engine="0",model_name="tiny"} 16',
            'vllm:e2e_request_latency_seconds_count{engine="0",model_name="tiny"} 1',
            'vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} 3',
            'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny"} 12',
            'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} 7',
            'vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 40',
            'vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 32',
        ):
            assert name in text


async def test_the_capacity_for_adapters_does_not_depend_on_how_many_are_loaded(start: Start) -> None:
    """A router sends a request for an adapter only to servers whose running adapters are fewer than `max_lora`."""
    async with start(vllm_metrics=True, max_num_seqs=3) as server:
        text = await metrics(server, "vllm:lora_requests_info{")
    assert 'max_lora="3",model_name="tiny",running_lora_adapters="",waiting_lora_adapters=""' in text


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_pages_load_nothing_from_other_hosts(start: Start, path: str) -> None:
    async with start() as server:
        page = await server.client.get(path)
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        assert "style=" not in page.text
        for link in re.findall(r'(?:src|href)="([^"]+)"', page.text):
            assert not re.match(r"//|[a-z]+:", link)
            answer = await server.client.get(urljoin(path, link))
            assert answer.status_code == 200, link
            assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", ""), link
            assert "https://" not in answer.text, link


async def test_parts_of_pages_name_no_other_host(start: Start) -> None:
    async with start() as server:
        for path in PAGES:
            text = (await server.client.get(path)).text.replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), path


async def test_info_shows_limits_and_no_path(start: Start) -> None:
    async with start() as server:
        info = (await server.client.get("/info")).json()
        assert info["limits"]["n"] == 128
        assert info["max_total_tokens"] == 512
        assert "/secret" not in json.dumps(info)


async def test_info_shows_the_options_in_force_and_no_secret(start: Start, tmp_path: Path) -> None:
    private = {"api_key": "k", "scales": str(tmp_path), "allowed_hosts": ("inside",)}
    async with start(max_num_seqs=3, request_seconds=7.0, **private) as server:
        info = (await server.client.get("/info", headers={"authorization": "Bearer k"})).json()
        assert (info["options"]["max_num_seqs"], info["options"]["request_seconds"]) == (3, 7.0)
        assert info["options"]["drain_seconds"] == server.state.settings.drain_seconds
        assert not {*private, "data_dir", "host", "port"} & info["options"].keys()


@pytest.mark.parametrize(("gpus", "device"), [([], "cpu"), ([Gpu("NVIDIA H100", 90, 79 << 30)], "cuda")])
async def test_the_device_is_chosen_for_the_default_model(
    start: Start, monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], device: str
) -> None:
    monkeypatch.setattr(model_device, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(model_device, "gpu_obstacle", lambda gpu: None)
    async with start() as server:
        info = (await server.client.get("/info")).json()
        assert (info["options"]["device"], info["training_device"]) == (device, device)
        assert server.launcher.sources[0].options.device == device
    async with start(device="cpu", train_device="auto") as server:
        assert (await server.client.get("/info")).json()["training_device"] == device


async def test_an_option_of_a_gpu_needs_one(start: Start) -> None:
    with pytest.raises(RequestError, match="gpu_memory is for a GPU, and the device is 'cpu'"):
        async with start(gpu_memory=0.5):
            pass


async def test_the_engine_says_how_many_sequences_run(start: Start) -> None:
    """The engine derives this number from its GPU; an engine without it uses the number of the options."""
    queue, engine = 256, FakeEngine()
    engine.info["max_num_seqs"] = 192
    for launcher, expected in ((Launcher(lambda: engine), 192), (Launcher(), 16)):
        async with start(launcher) as server:
            assert (await server.client.get("/info")).json()["max_concurrent_requests"] == expected + queue


async def test_an_internal_error_is_a_small_500_without_details(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start() as server:

        def broken(*_: object) -> None:
            raise RuntimeError("/secret/place at 0x7f001122")

        monkeypatch.setattr(server.state.models, "resolve", broken)
        for path, body in (("/generate", {"inputs": "x"}), ("/v1/completions", {"prompt": "x"})):
            answer = await server.client.post(path, json=body)
            assert answer.status_code == 500
            assert "internal_error" in answer.text
            assert "secret" not in answer.text


async def test_metrics_do_not_show_the_numbers_of_a_dead_engine(start: Start) -> None:
    async with start() as server:
        text = await metrics(server, 'fp8serve_kv_cache_usage_ratio{model="tiny"} 0.25')
        assert 'fp8serve_engine_up{model="tiny"} 1.0' in text
        server.launcher.problem = "The weights are gone."
        server.launcher.engine.alive = False
        text = (await server.client.get("/metrics")).text
        assert "fp8serve_kv_cache_usage_ratio{" not in text
        assert "fp8serve_requests_running{" not in text
        assert 'fp8serve_engine_up{model="tiny"} 0.0' in text
