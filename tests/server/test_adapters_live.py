"""A real server with adapters of the command line, a route and a job; OpenAI's client uses all of them at once."""

import concurrent.futures
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from fp8serve.engine.engine import Engine
from tests.engine.adapters import write_random_adapter
from tests.engine.tiny import write_model, write_scales
from tests.patience import until
from tests.server.process import Process, serving

PROMPTS = ["Once upon a time", "The scale of a tensor", "Why?"]
PARAMETERS: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "logprobs": 0}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    model = write_model(path / "base")
    write_scales(model, model / "scales.safetensors")
    write_random_adapter(path / "more" / "lora", model, rank=4, seed=1)
    write_random_adapter(path / "more" / "dora", model, rank=6, dora=True, seed=2)
    write_random_adapter(path / "more" / "wide", model, rank=300)
    return path


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Process]:
    options = {
        "model": str(place / "base"),
        "data_dir": str(place / "data"),
        "models_dir": str(place / "more"),
        "adapters": [f"one={place / 'more' / 'lora'}"],
        "train_on": "share",
        "vllm_metrics": True,
    }
    with serving(place / "log", **options) as process:
        yield process
        assert process.stop() == 0
        assert "Traceback" not in process.log.read_text()


def trained_job(server: Process) -> dict[str, Any]:
    body = {"data": [{"text": "to be or not to be"}] * 4, "lora_rank": 4, "learning_rate": 0.02, "max_steps": 4}
    job = server.client.post("/finetune", json=body).json()
    until(lambda: server.client.get(f"/finetune/{job['id']}").json()["status"] in ("succeeded", "failed"), "the job")
    return server.client.get(f"/finetune/{job['id']}").json()  # type: ignore[no-any-return]


def complete(client: openai.OpenAI, model: str, prompt: str) -> tuple[str, list[float | None]]:
    choice = client.completions.create(model=model, prompt=prompt, **PARAMETERS).choices[0]
    assert choice.logprobs is not None
    return choice.text, list(choice.logprobs.token_logprobs or [])


def alone(place: Path, adapter: Path | None) -> list[tuple[str, list[float]]]:
    engine = Engine(place / "base")
    if adapter is not None:
        engine.load_adapter("a", adapter)
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "logprobs": 0}
    name = None if adapter is None else "a"
    completions = [engine.generate([prompt], adapter=name, **options)[0] for prompt in PROMPTS]
    return [(one.text, [entry.logprob for entry in one.logprobs or ()]) for one in completions]


def test_three_adapters_and_none_answer_at_once_as_each_does_alone(server: Process, place: Path) -> None:
    body = {"lora_name": "two", "lora_path": "dora"}
    assert server.client.post("/v1/load_lora_adapter", json=body).status_code == 200
    wide = server.client.post("/v1/load_lora_adapter", json={"lora_name": "wide", "lora_path": "wide"})
    assert wide.status_code == 409
    assert "is 300, above the limit of 256; raise max_lora_rank" in wide.text
    job = trained_job(server)
    assert job["status"] == "succeeded", job["error"]
    name = job["fine_tuned_model"]
    assert server.client.post(f"/finetune/{job['id']}/activate").json()["model"] == name

    [trained] = (place / "data").glob(f"jobs/{job['id']}/**/adapter_config.json")
    places = {"base": None, "one": place / "more/lora", "two": place / "more/dora", name: trained.parent}
    expected = {model: alone(place, adapter) for model, adapter in places.items()}
    assert len({repr(answers) for answers in expected.values()}) == 4
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        assert {model.id: model.model_dump()["parent"] for model in client.models.list()} | {} == {
            "base": None, "one": "base", "two": "base", name: "base",
        }  # fmt: skip

        def check() -> None:
            requests = [(model, i) for i in range(len(PROMPTS)) for model in expected] * 2
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                answers = [pool.submit(complete, client, model, PROMPTS[i]) for model, i in requests]
            for (model, i), answer in zip(requests, answers, strict=True):
                assert answer.result() == expected[model][i], (model, PROMPTS[i])

        check()
        engine = children(server.popen.pid)
        os.kill(engine[0], signal.SIGKILL)
        until(lambda: server.client.get("/health/ready").status_code == 503, "the loss of the engine")
        until(lambda: server.client.get("/health/ready").status_code == 200, "a new engine")
        check()
        assert server.metric('fp8serve_requests_accepted_total{model="one"}') == 12
        assert "vllm:lora_requests_info" in server.client.get("/metrics").text

        assert server.client.post("/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code == 200
        with pytest.raises(openai.NotFoundError):
            complete(client, "one", "Why?")
        assert complete(client, "base", "Why?") == expected["base"][2]


def children(pid: int) -> list[int]:
    """Returns the engine's processes."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_text()
        except OSError:
            continue
        if parent == pid and "fp8serve.engine.worker" in command:
            pids.append(int(path.parent.name))
    return pids
