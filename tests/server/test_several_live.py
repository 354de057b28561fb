"""Several real engines in one server: two families with tokenizers of their own, and an encoder."""

import concurrent.futures
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from fp8serve.cli import main
from fp8serve.engine.embedding import Embedder
from fp8serve.engine.engine import Engine
from tests.engine.tiny import write_model
from tests.model.encoders import BERT, make, pooled
from tests.patience import PATIENCE, until
from tests.server.process import Process, serving
from tests.tiny import write_tiny_model

PROMPTS = ["Once upon a time", "The scale of a tensor", "A history keeps", "Numbers", "Why?", "é€😀"]
NEW = 24
RECIPE = {"one": "current", "two": "rowwise"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """one: Llama, bytes. two: Qwen3, pieces of words. three: BERT, letters."""
    path = tmp_path_factory.mktemp("several")
    write_model(path / "one")
    words = write_tiny_model(path / "words")
    write_model(path / "more" / "two", "qwen3", seed=1, vocab_size=320, bos_token_id=None, eos_token_id=None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(words / name, path / "more" / "two" / name)
    make(path / "more" / "three", BERT)
    pooled(path / "more" / "three", "mean_tokens", normalize=True, max_length=24)
    shutil.copytree(path / "one", path / "more" / "damaged")
    os.truncate(path / "more" / "damaged" / "model.safetensors", 9000)
    shutil.copytree(path / "one", path / "more" / "huge")
    claim_a_huge_tensor(path / "more" / "huge" / "model.safetensors")
    return path


def claim_a_huge_tensor(file: Path) -> None:
    """Rewrites the header so that it names 8 TiB of BF16, and makes the file that long, but sparse."""
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header["more"] = {"dtype": "BF16", "shape": [1 << 21, 1 << 21], "data_offsets": [0, 1 << 43]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + (1 << 43))


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Process]:
    more = place / "more"
    options = {
        "model": str(place / "one"),
        "data_dir": str(place / "data"),
        "recipe": RECIPE["one"],
        "models": [f"two={more / 'two'},recipe={RECIPE['two']}", f"three={more / 'three'},recipe=bf16"],
        "models_dir": str(more),
        "aliases": ["gpt-4o=two"],
    }
    with serving(place / "log", **options) as process:
        until(lambda: set(states(process).values()) == {"ready"} and len(states(process)) == 3, "three models")
        yield process
        assert process.stop() == 0
        assert "Traceback" not in process.log.read_text()


@pytest.fixture
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client


def states(server: Process) -> dict[str, str]:
    return {model["name"]: model["state"] for model in server.client.get("/models").json()["models"]}


def complete(client: openai.OpenAI, model: str, prompt: str) -> tuple[str, list[float | None]]:
    """Returns the text and the log-probabilities of a greedy answer."""
    parameters: Any = {"max_tokens": NEW, "temperature": 0, "logprobs": 0}
    choice = client.completions.create(model=model, prompt=prompt, **parameters).choices[0]
    assert choice.logprobs is not None
    return choice.text, list(choice.logprobs.token_logprobs or [])


def expected(directory: Path, recipe: str) -> list[tuple[str, list[float]]]:
    engine = Engine(directory, recipe=recipe)
    alone = [engine.generate([prompt], max_new_tokens=NEW, temperature=0.0, logprobs=0)[0] for prompt in PROMPTS]
    return [(completion.text, [entry.logprob for entry in completion.logprobs or ()]) for completion in alone]


def test_two_families_answer_at_once_as_each_does_alone(client: openai.OpenAI, place: Path) -> None:
    """Every log-probability is equal to the last bit, while vectors are computed in between."""
    directories = {"one": place / "one", "two": place / "more" / "two"}
    expected_answers = {name: expected(directory, RECIPE[name]) for name, directory in directories.items()}
    vectors = Embedder(place / "more" / "three", recipe="bf16").embed(["some text"]).vectors[0]
    requests = [(name, i) for i in range(len(PROMPTS)) for name in expected_answers] * 2
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(complete, client, name, PROMPTS[i]) for name, i in requests]
        embedded = [pool.submit(client.embeddings.create, model="three", input="some text") for _ in range(6)]
    for (name, i), answer in zip(requests, answers, strict=True):
        assert answer.result() == expected_answers[name][i], (name, PROMPTS[i])
    for vector in embedded:
        assert torch.equal(torch.tensor(vector.result().data[0].embedding), vectors)


def test_openais_client_finds_and_uses_all_of_them(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()][:4] == ["one", "two", "three", "gpt-4o"]
    assert client.models.retrieve("gpt-4o").model_dump()["root"] == "two"
    assert complete(client, "gpt-4o", "Why?") == complete(client, "two", "Why?")
    assert complete(client, "one", "Why?") != complete(client, "two", "Why?")
    with pytest.raises(openai.NotFoundError, match="This server has one, two, three, gpt-4o") as refused:
        complete(client, "nope", "Why?")
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="writes no text"):
        complete(client, "three", "Why?")
    with pytest.raises(openai.BadRequestError, match="makes no vectors"):
        client.embeddings.create(model="two", input="Why?")


@pytest.mark.smoke
def test_each_model_has_its_own_tokens_and_limits(server: Process) -> None:
    lengths = {}
    for name in ("one", "two", "three"):
        response = server.client.post("/tokenize", json={"prompt": "a tensor", "model": name}).json()
        lengths[name] = (response["count"], response["max_model_len"])
        back = server.client.post("/detokenize", json={"tokens": response["tokens"], "model": name})
        assert back.status_code == 200
    assert len(set(lengths.values())) == 3
    info = server.client.get("/info", params={"model": "two"}).json()
    assert (info["model_id"], info["engine"]["architecture"]) == ("two", "Qwen3ForCausalLM")
    assert server.client.get("/scales", params={"model": "two"}).json()["layers"]


def engine_of(server: Process, directory: Path) -> int:
    """Returns the engine process that holds a directory."""
    children = Path(f"/proc/{server.popen.pid}/task/{server.popen.pid}/children").read_text().split()
    pids = [int(p) for p in children if os.fsencode(directory) in Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0")]
    return max(pids)


def send_until_stopped(server: Process, model: str, stop: threading.Event) -> list[int]:
    """Sends requests one after the other until `stop` is set; returns their statuses."""
    statuses = []
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        while not stop.is_set():
            statuses.append(
                client.completions.with_raw_response.create(model=model, prompt="a", max_tokens=8).status_code
            )
    return statuses


def test_a_killed_engine_takes_no_other_down_and_comes_back(
    server: Process, place: Path, client: openai.OpenAI
) -> None:
    before, stop = complete(client, "two", "Why?"), threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(send_until_stopped, server, "one", stop)
        try:
            os.kill(engine_of(server, place / "more" / "two"), signal.SIGKILL)
            until(lambda: states(server)["two"] == "restarting", "the death of two")
            assert server.client.get("/health/ready").status_code == 200
            until(lambda: states(server)["two"] == "ready", "two")
        finally:
            stop.set()
        assert set(other.result()) == {200}
    assert complete(client, "two", "Why?") == before
    assert server.metric('fp8serve_engine_restarts_total{model="two"}') == 1
    assert server.metric('fp8serve_engine_restarts_total{model="one"}') == 0


def test_loading_fails_no_request_of_another_model(server: Process, capsys: pytest.CaptureFixture[str]) -> None:
    """Loads a damaged, a too large and a good model by the command line, and unloads."""

    def call(*arguments: str) -> tuple[int, str]:
        status = main(["models", *arguments, "--server", server.url])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(send_until_stopped, server, "one", stop)
        try:
            assert "damaged" in call("load", "x", "damaged", "--option", "recipe=bf16")[1]
            status, sentence = call("load", "x", "huge", "--option", "recipe=bf16")
            assert (status, "its weights take 8192.0 GiB" in sentence) == (1, True), sentence
            assert call("load", "x", "three", "--option", "recipe=bf16") == (0, "x is served.\n")
            assert server.client.post("/v1/embeddings", json={"model": "x", "input": "a"}).status_code == 200
            assert call("unload", "x") == (0, "x was unloaded.\n")
            assert server.client.post("/v1/embeddings", json={"model": "x", "input": "a"}).status_code == 404
        finally:
            stop.set()
        statuses = other.result()
    assert len(statuses) > 1
    assert set(statuses) == {200}
    assert "x " not in call("list")[1]


def test_metrics_are_labelled_by_model(server: Process, client: openai.OpenAI) -> None:
    def counted(model: str) -> float:
        return server.metric(f'fp8serve_generated_tokens_total{{model="{model}"}}')

    before = {name: counted(name) for name in ("one", "two")}
    complete(client, "two", "Why?")
    assert {name: counted(name) - before[name] for name in before} == {"one": 0.0, "two": float(NEW)}
    text = server.client.get("/metrics").text
    assert all(f'fp8serve_engine_up{{model="{name}"}}' in text for name in ("one", "two", "three"))
