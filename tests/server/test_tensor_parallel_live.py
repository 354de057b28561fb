"""A server whose engine has several processes answers as one process does with `invariant`, and survives the death of
each of them."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.tiny import write_model, write_scales
from tests.patience import PATIENCE, until

from .process import ROOT, Process, serving

pytestmark = [pytest.mark.distributed]
QUESTION = {"inputs": "Once upon", "parameters": {"max_new_tokens": 12, "temperature": 0.7, "seed": 5}}
NOT_REPLACED = "The weights of an engine with tensor_parallel cannot be replaced; start another engine with them."
ENDLESS = {"inputs": "Once", "parameters": {"max_new_tokens": 3900, "ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    path = write_model(tmp_path_factory.mktemp("divided") / "llama", **sizes)
    write_scales(path, path / "scales.safetensors", kv=True)
    return path


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(
        log,
        model=str(model),
        data_dir=str(log.parent / "data"),
        tensor_parallel=2,
        kv_cache_dtype="fp8",
        invariant=True,
    ) as process:
        yield process


def engines(server: Process) -> list[int]:
    """Returns the ids of the processes of the engine: rank 0, and its child, rank 1."""
    (first,) = _children(server.popen.pid, b"fp8serve.engine.worker")
    return [first, *_children(first, b"fp8serve.engine.follower")]


def _children(pid: int, module: bytes) -> list[int]:
    pids = [int(p) for path in Path(f"/proc/{pid}/task").glob("*/children") for p in path.read_text().split()]
    return [pid for pid in pids if module in Path(f"/proc/{pid}/cmdline").read_bytes()]


def until_status(server: Process, path: str, status: int) -> None:
    until(lambda: server.client.get(path).status_code == status, f"{status} of {path}")


def test_answers_are_those_of_one_process(server: Process, model: Path, tmp_path: Path) -> None:
    answer = server.client.post("/generate", json=QUESTION).json()
    assert server.client.get("/info").json()["engine"]["tensor_parallel"] == 2
    configuration = server.client.get("/server_info").json()["vllm_config"]
    assert configuration["parallel_config"]["tensor_parallel_size"] == 2
    address = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    refused = server.client.post("/init_weights_update_group", json=address)
    assert (refused.status_code, refused.json()["error"]) == (409, NOT_REPLACED)
    with serving(tmp_path / "log", model=str(model), data_dir=str(tmp_path / "data"), kv_cache_dtype="fp8") as one:
        assert one.client.post("/generate", json=QUESTION).json()["generated_text"] == answer["generated_text"]


@pytest.mark.parametrize(
    ("rank", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)]
)
def test_a_lost_rank_fails_what_runs_and_all_ranks_start_again(
    rank: int, number: signal.Signals, server: Process
) -> None:
    before = server.client.post("/generate", json=QUESTION).json()["generated_text"]
    pids = engines(server)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pending = pool.submit(server.client.post, "/generate", json=ENDLESS, timeout=PATIENCE)
        until(lambda: server.client.get("/requests").json()["requests"], "the request")
        os.kill(pids[rank], number)
        until_status(server, "/health/ready", 503)
        until_status(server, "/health/ready", 200)
        answer = pending.result()
    reasons = {
        (0, signal.SIGKILL): "was killed (SIGKILL)",
        (0, signal.SIGSTOP): "sent no heartbeat for 8 seconds",
        (1, signal.SIGKILL): "Rank 1 of the engine has ended: killed by SIGKILL",
        (1, signal.SIGSTOP): "Rank 1 of the engine hangs",
    }
    assert answer.status_code == 503
    assert reasons[rank, number] in answer.json()["error"]
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of all processes")
    assert server.client.post("/generate", json=QUESTION).json()["generated_text"] == before


def test_all_processes_end_with_the_server(model: Path, tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with serving(tmp_path / "log", model=str(model), data_dir=str(tmp_path / "data"), tensor_parallel=2) as process:
            pids = engines(process)
            process.popen.send_signal(number)
            process.popen.wait(PATIENCE)
        until(lambda pids=pids: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of all processes")


def test_a_model_that_cannot_be_divided_is_refused_in_one_sentence(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fp8serve", "serve", str(model), "--tensor-parallel", "3", "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE, check=False)
    assert result.returncode == 1
    assert "tensor_parallel 3 does not divide the 4 attention heads of this model." in result.stderr
    assert "Traceback" not in result.stderr


def test_ranks_that_torchrun_starts_on_two_nodes_answer_as_one_process(model: Path) -> None:
    def free_port() -> int:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return int(listener.getsockname()[1])

    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    endpoint = f"localhost:{free_port()}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", "localhost", "-m"]
    generate = ["fp8serve", "generate", str(model), "Once upon", "--max-new-tokens", "8", "--json"]
    nodes = [
        subprocess.Popen(
            [*torchrun, *generate, "--tensor-parallel", "2", "--invariant"],
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
        )
        for _ in range(2)
    ]
    outputs = [node.communicate(timeout=PATIENCE)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    one = subprocess.run(
        [sys.executable, "-m", *generate], stdout=subprocess.PIPE, cwd=ROOT, timeout=PATIENCE, check=True
    )
    assert json.loads(b"".join(outputs)) == json.loads(one.stdout)
