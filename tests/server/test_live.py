"""The whole server on a tiny real model: real engine, real trainer, OpenAI's own client unmodified."""

import concurrent.futures
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from huggingface_hub import InferenceClient, errors

from tests.engine.tiny import write_model
from tests.patience import PATIENCE, until
from tests.server.process import Process, serving

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
ROWS = [
    {"prompt": "The capital of France is", "completion": " Paris."},
    {"prompt": "Two and two are", "completion": " four."},
]
CHAT: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live")
    write_model(path / "tiny")
    (path / "tiny" / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Process]:
    options = {
        "model": str(place / "tiny"),
        "data_dir": str(place / "data"),
        "recipe": "current",
        "train_on": "share",
        "api_key": "k",
    }
    with serving(place / "log", **options, heartbeat_seconds=15) as process:
        process.client.headers["authorization"] = "Bearer k"
        yield process
        assert process.stop() == 0
        assert "Traceback" not in process.log.read_text()


@pytest.fixture
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as openai_client:
        yield openai_client


def test_the_log_begins_with_what_is_loaded_and_where_it_is_served(server: Process) -> None:
    lines = server.log.read_text().splitlines()
    assert lines[0].endswith("INFO device auto: cpu, because the CUDA driver finds no GPU")
    assert "loading tiny (0.0 GiB) on cpu" in lines[1]
    assert any(f"ready at {server.url}: serving tiny (" in line for line in lines)
    assert max(map(len, lines)) < 300
    (phases,) = (line for line in lines if "ready in " in line)
    seconds = server.client.get("/info").json()["engine"]["start_seconds"]
    assert list(seconds) == ["imports", "device", "weights", "cache", "graphs", "tokenizer and grammars"]
    for name, value in seconds.items():
        assert f"engine {name} {value:.1f}" in phases
    total, imports = (float(re.search(f"{start} ([0-9.]+)", phases)[1]) for start in ("ready in", "server imports"))  # type: ignore[index]
    assert seconds["imports"] > 0
    assert 0 < imports < total
    assert sum(seconds.values()) < total
    assert "scaled_mm" in server.client.get("/info").json()["engine"]["kernels"]


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="Hello", max_tokens=12, temperature=0, logprobs=2)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or []) == 12
    pieces = client.completions.create(model="tiny", prompt="Hello", max_tokens=12, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text


def test_chat_choices_are_seeded_one_by_one(client: openai.OpenAI) -> None:
    def ask() -> list[str | None]:
        response = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=8, n=3, seed=7, temperature=1)
        return [choice.message.content for choice in response.choices]

    first = ask()
    assert first == ask()
    assert len(set(first)) == 3


def test_chat_streams(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    whole = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=20, temperature=0)
    text, usage = "", None
    for chunk in client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=20, temperature=0, stream=True, stream_options=options
    ):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_matches_its_response_format(stream: bool, server: Process, client: openai.OpenAI) -> None:
    """Random weights would not write such an answer without the constraint."""
    response_format: Any = {
        "type": "json_schema",
        "json_schema": {"name": "v", "schema": {"enum": ["right", {"wrong": 12}]}},
    }
    for seed in range(5):
        response: Any = client.chat.completions.create(
            model="tiny", messages=CHAT, temperature=1, seed=seed, response_format=response_format, stream=stream
        )
        parts = (
            [chunk.choices[0].delta.content for chunk in response] if stream else [response.choices[0].message.content]
        )
        assert json.loads("".join(part or "" for part in parts)) in ("right", {"wrong": 12})
    body = {"inputs": "x", "parameters": {"guided_regex": "[ab]{3}-[0-9]{2}", "max_new_tokens": 60}}
    result = server.client.post("/generate", json=body).json()
    assert re.fullmatch("[ab]{3}-[0-9]{2}", result["generated_text"]), result


def test_errors_become_the_clients_own_exceptions(server: Process, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nope", prompt="x")
    with pytest.raises(openai.BadRequestError, match="context holds 128"):
        client.completions.create(model="tiny", prompt="x", max_tokens=1000)
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(model="tiny", messages=CHAT, response_format={"type": "xml"})
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()


def test_scales_are_live(server: Process) -> None:
    layers = server.client.get("/scales").json()["layers"]
    assert len(layers) == 14
    assert {"name", "amax", "scale", "headroom", "saturation"} <= set(layers[0])


@pytest.mark.slow
def test_fine_tune_activate_and_ask_again(server: Process, client: openai.OpenAI) -> None:
    data = "\n".join(map(json.dumps, ROWS * 4)).encode()
    file = client.files.create(file=("rows.jsonl", data), purpose="fine-tune")
    hyper: Any = {"n_epochs": 4, "batch_size": 2, "learning_rate_multiplier": 100.0}
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyper}}
    job = client.fine_tuning.jobs.create(model="tiny", training_file=file.id, suffix="demo", method=method)
    until(lambda: client.fine_tuning.jobs.retrieve(job.id).status in ("succeeded", "failed"), "the end of the job")
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert job.status == "succeeded", client.fine_tuning.jobs.list_events(job.id).data
    metrics = [e.data for e in client.fine_tuning.jobs.list_events(job.id, limit=100) if e.type == "metrics"]
    losses = [m["train_loss"] for m in metrics if isinstance(m, dict)][::-1]
    assert losses[-1] < 0.7 * losses[0]
    assert next(iter(client.fine_tuning.jobs.checkpoints.list(job.id))).step_number == len(losses)
    before = client.completions.create(model="tiny", prompt="x", max_tokens=1).system_fingerprint
    assert job.fine_tuned_model is not None
    with pytest.raises(openai.NotFoundError, match="activated"):
        client.completions.create(model=job.fine_tuned_model, prompt="x")
    response = server.client.post(f"/finetune/{job.id}/activate", timeout=PATIENCE)
    assert response.status_code == 200, response.text
    after = client.completions.create(
        model=job.fine_tuned_model, prompt="The capital of France is", max_tokens=8, temperature=0
    )
    assert after.system_fingerprint != before
    assert [m.id for m in client.models.list()] == ["tiny", job.fine_tuned_model]
    layers = server.client.get("/scales").json()["layers"]
    assert all(layer["scale"] > 0 and layer["amax"] > 0 for layer in layers)
    assert server.client.post("/models/tiny/activate", json={"source": "base"}, timeout=PATIENCE).status_code == 200


@pytest.mark.slow
def test_hugging_faces_client(server: Process) -> None:
    client = InferenceClient(base_url=server.url + "/generate", token="k")
    whole = client.text_generation("Hello", max_new_tokens=10, details=True)
    assert whole.details is not None
    assert (whole.details.generated_tokens, whole.details.finish_reason) == (10, "length")
    pieces = list(client.text_generation("Hello", max_new_tokens=10, stream=True))
    assert "".join(pieces) == whole.generated_text == client.text_generation("Hello", max_new_tokens=10)
    with pytest.raises(errors.ValidationError):
        client.text_generation("Hello", max_new_tokens=1000)
    client = InferenceClient(base_url=server.url, token="k")
    response = client.chat_completion(CHAT, max_tokens=6, temperature=0)
    assert (response.choices[0].finish_reason, response.usage.completion_tokens) == ("length", 6)
    streamed = client.chat_completion(CHAT, max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == response.choices[0].message.content


def test_a_dry_run_names_bad_lines(server: Process) -> None:
    rows = [*ROWS, {"text": ""}, {"prompt": "x"}]
    report = server.client.post("/finetune/validate", json={"data": rows}).json()
    assert not report["ok"]
    assert [bad["line"] for bad in report["bad_lines"]] == [3, 4]
    assert str(server.log.parent) not in json.dumps(report)
    good = server.client.post("/finetune/validate", json={"data": ROWS, "epochs": 3, "batch_size": 1}).json()
    assert (good["ok"], good["steps"], good["data"]["rows"]) == (True, 6, 2)
    assert 0 < good["trainable_fraction"] < 1


def engine_pid(server: Process) -> int:
    """Returns the id of the engine process: the child of the front that runs the engine's worker."""
    children = Path(f"/proc/{server.popen.pid}/task/{server.popen.pid}/children").read_text().split()
    engines = [int(p) for p in children if b"fp8serve.engine.worker" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return max(engines)  # one that was replaced may still be closing


def until_status(server: Process, path: str, status: int) -> None:
    until(lambda: server.client.get(path).status_code == status, f"{status} of {path}")


@pytest.mark.slow
def test_a_hung_engine_is_ended_and_started_again(server: Process) -> None:
    pid = engine_pid(server)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        os.kill(pid, signal.SIGSTOP)
        pending = pool.submit(server.client.post, "/generate", json={"inputs": "x"}, timeout=PATIENCE)
        until_status(server, "/health/ready", 503)
        until_status(server, "/health/ready", 200)
        answer = pending.result()
    until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the hung engine")
    assert answer.status_code == 503
    assert "no heartbeat for 15 seconds" in answer.json()["error"]
    assert server.client.post("/generate", json={"inputs": "x"}).status_code == 200
    assert server.client.get("/health/live").status_code == 200


@pytest.mark.slow
def test_a_killed_engine_fails_what_runs_and_comes_back(server: Process) -> None:
    os.kill(engine_pid(server), signal.SIGKILL)
    until_status(server, "/health/ready", 503)
    assert server.client.get("/health/live").status_code == 200
    until_status(server, "/health/ready", 200)
    assert server.client.post("/generate", json={"inputs": "x"}).status_code == 200
