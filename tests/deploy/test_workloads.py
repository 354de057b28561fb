"""What the workloads of the chart start runs as processes of this machine, with the same commands and environment."""

import contextlib
import json
import random
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.tiny import write_model, write_scales
from tests.patience import PATIENCE, until
from tests.tiny import CHATS

from .chart import JOB, Manifest, container_of, kill, needs_helm, pod_templates, render, start

pytestmark = [needs_helm, pytest.mark.slow, pytest.mark.distributed]
SECRET = {"api-key": "a-key-of-the-test", "database-password": "unused"}
HEADERS = {"authorization": f"Bearer {SECRET['api-key']}"}
GREEDY = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0}
DRAIN = {"drainSeconds": int(PATIENCE)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The volume: a model, and conversations to train on."""
    path = tmp_path_factory.mktemp("volume")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    write_scales(write_model(path / "model", **sizes), path / "model" / "scales.safetensors")
    (path / "chats.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in CHATS.splitlines()))
    return path


class Pods:
    """The running pods of a workload, and a client of the first one's port."""

    def __init__(self, pods: Sequence[Manifest], data: Path, place: Path, model: Path) -> None:
        self.pods, self.log = pods, place / "log"
        ports = {8000: free_port(), 29400: free_port()}
        self.processes = []
        for rank, pod in enumerate(pods):
            (temporary := place / f"tmp{rank}").mkdir(parents=True, exist_ok=True)
            variables = {"LWS_WORKER_INDEX": str(rank), "JOB_COMPLETION_INDEX": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
            variables |= {"LWS_LEADER_ADDRESS": "chat-0.chat"}
            paths = {"/data": data, "/tmp": temporary, "/mnt/models": model}
            self.processes.append(start(pod, self.log, paths, ports, variables, SECRET))
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{ports[8000]}", timeout=PATIENCE)

    def probe(self, name: str) -> bool:
        """Whether a probe of the first pod succeeds."""
        with contextlib.suppress(httpx.TransportError):
            return self.client.get(container_of(self.pods[0])[name]["httpGet"]["path"]).is_success
        return False

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert not any(process.poll() for process in self.processes), self.log.read_text()
            return self.probe("readinessProbe")

        until(is_ready, "the readiness probe")

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        response = self.client.post("/v1/completions", json=body, headers=HEADERS)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def terminate(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)

    def wait(self) -> list[int]:
        return [process.wait(PATIENCE) for process in self.processes]


@contextlib.contextmanager
def running(manifests: list[Manifest], data: Path, place: Path, count: int = 1) -> Iterator[Pods]:
    """Runs `count` pods of the release's workload. The last template is for all that have none of their own."""
    (templates,) = filter(None, map(pod_templates, manifests))
    templates += templates[-1:] * (count - len(templates))
    pods = Pods(templates, data, place, data / "model")
    try:
        yield pods
    finally:
        pods.client.close()
        for process in pods.processes:
            kill(process)


def free_port() -> int:
    """Returns a free port below those that the system gives to tests that ask for any."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("", random.randrange(10_000, 32_000))) as listener:
            return int(listener.getsockname()[1])


def stream_through_a_drain(pods: Pods, tokens: int) -> None:
    """Ends the pods while a stream runs, which gets all its tokens."""
    body = GREEDY | {"max_tokens": tokens, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with pods.client.stream("POST", "/v1/completions", json=body, headers=HEADERS) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        next(lines)
        pods.terminate()
        *_, last, end = lines
    assert end == "[DONE]"
    assert json.loads(last)["usage"]["completion_tokens"] == tokens
    pods.wait()
    log = pods.log.read_text()
    assert 0 < log.index("asked to stop: draining") < log.rindex("POST /v1/completions 200")


def expected_text(data: Path) -> str:
    from fp8serve.engine.engine import Engine

    return Engine(data / "model").generate([str(GREEDY["prompt"])], max_new_tokens=12, temperature=0.0)[0].text


def test_the_server_of_the_deployment(data: Path, tmp_path: Path) -> None:
    with running(render(**DRAIN), data, tmp_path) as pods:
        pods.wait_until_ready()
        assert pods.probe("startupProbe")
        assert pods.probe("livenessProbe")
        assert pods.client.get("/v1/models").status_code == 401
        assert pods.client.get("/metrics").status_code == 401
        answer = pods.complete(GREEDY | {"model": "model"})
        assert answer["choices"][0]["text"] == expected_text(data)
        stream_through_a_drain(pods, 2000)
        assert pods.wait() == [0]


def test_ranks_on_two_nodes(data: Path, tmp_path: Path) -> None:
    with running(render(nodes=2, options=["--invariant"], **DRAIN), data, tmp_path, 2) as pods:
        pods.wait_until_ready()
        assert pods.complete(GREEDY)["choices"][0]["text"] == expected_text(data)
        assert pods.client.get("/info", headers=HEADERS).json()["engine"]["tensor_parallel"] == 2
        stream_through_a_drain(pods, 500)


def test_a_lost_worker_makes_the_leader_unready(data: Path, tmp_path: Path) -> None:
    """The end of a container makes LeaderWorkerSet start all pods of the group again."""
    with running(render(nodes=2), data, tmp_path, 2) as pods:
        pods.wait_until_ready()
        kill(pods.processes[1])
        until(lambda: not pods.probe("readinessProbe"), "the loss")


def test_the_server_of_kserve(data: Path, tmp_path: Path) -> None:
    with running(render(run="kserve"), data, tmp_path) as pods:
        pods.wait_until_ready()
        assert pods.client.get("/v1/models").status_code == 401
        pods.complete(GREEDY | {"model": "model"})
        metrics = pods.client.get("/metrics").text  # the endpoint picker sends no key
        for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"):
            assert f"\nvllm:{name}{{" in metrics
        assert 'max_lora="16"' in metrics
        pods.terminate()
        assert pods.wait() == [0]


def train(data: Path, place: Path, out: str, **values: Any) -> bytes:
    """Runs a fine-tune as a job, and returns the bytes of its weights."""
    command = [*JOB[:3], f"--out=/data/{out}", "--max-steps=4", "--accumulate=2"]
    with running(render(run="job", command=command, **values), data, place, values.get("nodes", 1)) as pods:
        assert set(pods.wait()) == {0}, pods.log.read_text()
    return (data / out / "model" / "model.safetensors").read_bytes()


def test_jobs_on_one_node_and_on_two_write_the_same_bytes(data: Path, tmp_path: Path) -> None:
    one_thread = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    one = train(data, tmp_path / "one", "one", env=one_thread)
    assert train(data, tmp_path / "two", "two", nodes=2) == one


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_that_is_evicted_fails_and_continues_from_its_checkpoint(nodes: int, data: Path, tmp_path: Path) -> None:
    """The Job or JobSet starts failed pods again with the same command."""
    out = f"evicted{nodes}"
    command = [*JOB[:3], f"--out=/data/{out}", "--max-steps=150", "--accumulate=2"]
    manifests = render(run="job", command=command, nodes=nodes)
    with running(manifests, data, tmp_path, nodes) as pods:
        until(lambda: "Step 1/150" in pods.log.read_text(), "a step")
        pods.terminate()
        assert 0 not in pods.wait()
    assert not (data / out / "model").exists()
    with running(manifests, data, tmp_path / "again", nodes) as pods:
        assert set(pods.wait()) == {0}, pods.log.read_text()
    assert (data / out / "model").exists()
