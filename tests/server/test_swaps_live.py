"""Ten activations on a real server with real engines while clients send requests; five activate damaged weights.

No request fails, and every answer is exactly that of the version that it names.
"""

import concurrent.futures
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8serve.engine.engine import Engine
from tests.engine.tiny import write_model
from tests.patience import PATIENCE, until
from tests.server.process import Process, serving

ROWS = [
    {"prompt": "The capital of France is", "completion": " Paris."},
    {"prompt": "Two and two are", "completion": " four."},
]
PROMPT = "The capital of France is"
NEW = 16
CLIENTS = 2  # one streams, one completes
ACTIVATIONS = 10
STEPS = 8
MAX_PERPLEXITY_RATIO = 1000.0  # above the default, because the base model is not trained
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Answer:
    text: str
    version: str  # of the weights, as the server names it


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("swaps")
    write_model(path / "tiny")
    return path


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Process]:
    options = {"model": str(place / "tiny"), "data_dir": str(place / "data"), "recipe": "current", "train_on": "share"}
    with serving(place / "log", **options) as process:
        yield process
        assert process.stop() == 0
        assert "Traceback" not in process.log.read_text()


def trained(server: Process, **more: Any) -> str:
    body = {"data": ROWS * 4, "max_steps": STEPS, "batch_size": 2, "save_every": 1, "keep_last": STEPS, **more}
    job: str = server.client.post("/finetune", json=body).raise_for_status().json()["id"]
    until(lambda: status(server, job) in ("succeeded", "failed"), "the end of the job")
    assert status(server, job) == "succeeded", server.client.get(f"/finetune/{job}/events").text
    return job


def status(server: Process, job: str) -> str:
    return str(server.client.get(f"/finetune/{job}").json()["status"])


def activate(server: Process, source: str) -> Any:
    return server.client.post(
        "/models/tiny/activate", json={"source": source, "max_perplexity_ratio": MAX_PERPLEXITY_RATIO}, timeout=PATIENCE
    )


def not_a_number(weights: Weights) -> None:
    weights["model.norm.weight"][3] = torch.nan


def scale_of_zero(weights: Weights) -> None:
    next(tensor for name, tensor in weights.items() if name.endswith("weight_scale")).zero_()


def missing(weights: Weights) -> None:
    del weights["model.layers.1.mlp.down_proj.weight"]


def random_embeddings(weights: Weights) -> None:
    """Finite weights of the right shapes, but useless: large random embeddings, which are also the head."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(weights["model.embed_tokens.weight"].shape, generator=generator)
    weights["model.embed_tokens.weight"] = (5 * drawn).to(weights["model.embed_tokens.weight"].dtype)


SPOILERS: dict[Callable[[Weights], None], str] = {
    not_a_number: "model.safetensors holds NaN or an infinity in model.norm.weight",
    scale_of_zero: "q_proj.weight_scale holds the scale 0.0",
    missing: "down_proj",
    random_embeddings: "more than 1000 times the",
}
CUT = "is not a complete safetensors file"


def spoiled(server: Process, place: Path, job: str) -> dict[str, str]:
    """Checkpoints of the job whose models are spoiled on the disk, with the message that each must cause."""
    served = place / "data" / "jobs" / job / "served"
    messages = {}
    for step, (spoil, message) in enumerate([*SPOILERS.items(), (None, CUT)], 1):
        file = shutil.copytree(place / "data" / "jobs" / job / "out" / "model", served / f"step-{step}")
        file /= "model.safetensors"
        if spoil is None:
            os.truncate(file, file.stat().st_size - 1000)
        else:
            for name in ("scales.safetensors", "model.safetensors.index.json"):  # they would reveal any change
                file.with_name(name).unlink()
            weights = load_file(file)
            spoil(weights)
            save_file(weights, file, {"format": "pt"})
        messages[f"{job}:ckpt-step-{step}"] = message
    return messages


def streamed(client: openai.OpenAI) -> Answer:
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=NEW, temperature=0, stream=True)
    pieces = list(stream)
    (version,) = {piece.system_fingerprint for piece in pieces}
    return Answer("".join(piece.choices[0].text for piece in pieces if piece.choices), str(version))


def completed(client: openai.OpenAI) -> Answer:
    completion = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=NEW, temperature=0)
    return Answer(completion.choices[0].text, str(completion.system_fingerprint))


def send_until_stopped(server: Process, ask: Callable[[openai.OpenAI], Answer], stop: threading.Event) -> list[Answer]:
    """Sends requests one after the other until `stop` is set; returns the answers. A failed request raises."""
    answers = []
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        while not stop.is_set():
            answers.append(ask(client))
    return answers


def written_by(directory: Path, recipe: str) -> str:
    """Returns the text that an engine with these weights alone generates."""
    return Engine(directory, recipe=recipe).generate([PROMPT], max_new_tokens=NEW, temperature=0.0)[0].text


@pytest.mark.slow
def test_ten_activations_five_of_them_spoiled_fail_no_request(server: Process, place: Path) -> None:
    jobs = [trained(server, learning_rate=rate) for rate in (1e-3, 3e-3)]
    bad = spoiled(server, place, jobs[0])
    good = ["base", *jobs, f"{jobs[1]}:ckpt-step-3"]
    order = list(itertools.islice(itertools.cycle(good[1:] + good[:1]), ACTIVATIONS - len(bad)))
    for place_in_order, source in zip(range(1, ACTIVATIONS, 2), bad, strict=True):
        order.insert(place_in_order, source)

    stop, outcomes = threading.Event(), []
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        asks = itertools.islice(itertools.cycle([streamed, completed]), CLIENTS)
        clients = [pool.submit(send_until_stopped, server, ask, stop) for ask in asks]
        try:
            outcomes = [activate(server, source) for source in order]
        finally:
            stop.set()
        answers = [answer for client in clients for answer in client.result()]

    assert len(outcomes) == ACTIVATIONS
    for source, outcome in zip(order, outcomes, strict=True):
        assert outcome.status_code == (409 if source in bad else 200), (source, outcome.text)
        if source in bad:
            error = outcome.json()
            assert error["code"] == "activation_failed"
            assert bad[source] in error["error"], error
            assert error["error"].startswith("The new weights cannot be served, and the previous ones stay in use: ")
            assert "\n" not in error["error"]
            assert str(place) not in outcome.text

    accepted = [outcome.json()["served"] for outcome in outcomes if outcome.status_code == 200]
    versions = {served["source"]: served["weight_version"] for served in accepted}
    data = place / "data" / "jobs"
    expected = {
        versions["base"]: written_by(place / "tiny", "current"),
        **{versions[job]: written_by(data / job / "out" / "model", "stored") for job in jobs},
        versions[good[3]]: written_by(data / jobs[1] / "served" / "step-3", "stored"),
    }
    assert len(set(expected.values())) == len(good), "the versions write different texts"
    for answer in answers:
        assert answer.text == expected[answer.version]
    assert {answer.version for answer in answers} == set(expected), "each version has answered"
    assert server.metric('fp8serve_weight_swaps_total{model="tiny",outcome="failed"}') == len(bad)
    assert server.metric('fp8serve_weight_swaps_total{model="tiny",outcome="ok"}') == ACTIVATIONS - len(bad)
