"""The main job on sharded directories that transformers wrote: calibrate, serve, fine-tune over HTTP, serve again."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from fp8serve.running import RunningServer
from tests.patience import until
from tests.tiny import write_tiny_model
from tests.watching import watch_sockets

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM)}
ROWS = [
    {"prompt": "What is a scale?", "completion": " A multiplier."},
    {"prompt": "What is an amax?", "completion": " The largest magnitude."},
]


def write_model(out: Path, family: str) -> Path:
    """Random weights in several shards, as transformers saves them, with a tokenizer beside."""
    config, model = FAMILIES[family]
    model(config(**SIZES, dtype="bfloat16")).save_pretrained(out, max_shard_size="50KB")
    other = write_tiny_model(out.parent / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(other / name, out)
    return out


def fp8serve(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "fp8serve.cli", *map(str, arguments), "--json"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    result: dict[str, Any] = json.loads(process.stdout)
    return result


def wait_for_job(server: RunningServer, job: str) -> dict[str, Any]:
    def ended() -> bool:
        job_state.update(server.get(f"/finetune/{job}"))
        return job_state["status"] in ("succeeded", "failed", "cancelled")

    job_state: dict[str, Any] = {}
    until(ended, "the end of the job")
    return job_state


def complete(server: RunningServer) -> dict[str, Any]:
    parameters = {"max_new_tokens": 24, "details": True}
    return server.post("/generate", {"inputs": ROWS[0]["prompt"], "parameters": parameters})


@pytest.mark.slow  # test_demo.py has the same stages, with a model of the family llama
def test_the_main_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process contacts another machine."""
    watch_sockets(monkeypatch, tmp_path / "sockets")
    source = write_model(tmp_path / "source", "gemma3")
    assert len(list(source.glob("*.safetensors"))) > 1
    report = fp8serve("calibrate", source, "--out", tmp_path / "fp8", "--samples", 4, "--seq-len", 32)
    assert report["data"]["tokens"] > 0
    options = ["--train-on", "share", "--data-dir", str(tmp_path / "data")]
    with RunningServer(tmp_path / "fp8", options, log=tmp_path / "log") as server:
        before = complete(server)
        job = server.post("/finetune", {"data": ROWS, "epochs": 40, "batch_size": 2, "learning_rate": 3e-3})
        finished_job = wait_for_job(server, job["id"])
        assert finished_job["status"] == "succeeded", finished_job
        events = server.get(f"/finetune/{job['id']}/events")["events"]
        losses = [e["data"]["train_loss"] for e in events if e["type"] == "metrics"]
        assert min(losses) < 0.5 * max(losses)
        server.post(f"/finetune/{job['id']}/activate", {})
        after = complete(server)
    assert before["weight_version"] != after["weight_version"]
    assert after["generated_text"].startswith(" A multiplier.")
    assert (tmp_path / "sockets").read_text() == ""


@pytest.mark.parametrize(
    "call",
    [
        "socket.create_connection(('192.0.2.1', 9), 0.01)",
        "socket.getaddrinfo('example.invalid', 80)",
        "socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 9))",
    ],
)
def test_requests_to_other_machines_are_logged(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch_sockets(monkeypatch, tmp_path / "sockets")
    subprocess.run([sys.executable, "-c", f"import socket; {call}"], capture_output=True, check=False)
    assert "socket." in (tmp_path / "sockets").read_text()
