"""A draft model behind a real server: answers do not change, /metrics counts drafts, a wrong model is refused."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.drafts import LAYERS, write_drafts
from tests.engine.tiny import write_model
from tests.patience import PATIENCE
from tests.server.process import ROOT, Process, serving

PROMPTS = ["Once upon a time there was", "The scale of a tensor", "to be or not to be, to be or"]
NAMES = ("drafts", "draft_tokens", "accepted_draft_tokens", "draft_model_tokens")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafts(tmp_path_factory.mktemp("drafts"))


def options(home: Path, draft: str | None = None) -> dict[str, Any]:
    more = {} if draft is None else {"draft_model": str(home / draft)}
    return {"model": str(home / "model"), "data_dir": str(home / f"data-{draft}"), "recipe": "rowwise", **more}


@pytest.fixture(scope="module")
def plain(home: Path) -> Iterator[list[Any]]:
    """The answers without drafts."""
    with serving(home / "log", **options(home)) as server:
        yield answers(server)
        assert server.stop() == 0


def answers(server: Process) -> list[Any]:
    """Texts, tokens and log-probabilities: greedy and drawn, whole and streamed, several at once."""
    request: dict[str, Any] = {"max_tokens": 40, "logprobs": 2, "seed": 3, "ignore_eos": True, "prompt": PROMPTS}
    results = []
    for change in ({"temperature": 0}, {"temperature": 1}, {"temperature": 1, "n": 3}, {"stop": ["e", "\ufffd"]}):
        answer = server.client.post("/v1/completions", json=request | change)
        assert answer.status_code == 200, answer.text
        results.append(answer.json()["choices"])
    streamed = server.client.post(
        "/generate",
        json={
            "inputs": PROMPTS[0],
            "parameters": {"max_new_tokens": 40, "seed": 3, "temperature": 1.0},
            "stream": True,
        },
    )
    events = [json.loads(line[5:]) for line in streamed.text.splitlines() if line.startswith("data:")]
    return [*results, [event["token"] for event in events]]


@pytest.mark.parametrize("draft", ["same", "other"])
def test_answers_are_the_same_with_drafts_and_drafts_are_counted(home: Path, plain: list[Any], draft: str) -> None:
    with serving(home / f"log-{draft}", **options(home, draft)) as server:
        assert answers(server) == plain
        counted = {name: server.metric(f"fp8serve_{name}_total") for name in NAMES}
        info = server.client.get("/info").json()["engine"]
        assert server.stop() == 0
    assert info["draft_model"]["name"] == draft
    assert info["draft_model"]["step_cost"] >= 1 / LAYERS
    assert counted["draft_tokens"] >= counted["drafts"] > 0
    assert counted["draft_model_tokens"] >= counted["draft_tokens"]
    if draft == "same":
        assert counted["accepted_draft_tokens"] > counted["draft_tokens"] / 2
    else:
        assert counted["accepted_draft_tokens"] < counted["draft_tokens"]


def refusal(home: Path, draft: Path) -> str:
    """Returns the standard error of a server that refuses its draft model."""
    arguments = ["--recipe", "rowwise", "--port", "0", "--data-dir", str(home / "refused"), "--draft-model", str(draft)]
    command = [sys.executable, "-m", "fp8serve.cli", "serve", str(home / "model"), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT, check=False)
    assert (process.returncode, process.stdout) == (1, "")
    return process.stderr


@pytest.mark.smoke
def test_a_wrong_draft_model_is_refused_before_weights_are_loaded(home: Path, tmp_path: Path) -> None:
    tokenizer_file = write_model(tmp_path / "other-vocabulary") / "tokenizer.json"
    tokenizer_file.write_text(tokenizer_file.read_text().replace('"</s>"', '"<end>"'))
    (tmp_path / "other-vocabulary" / "model.safetensors").write_bytes(b"never read")
    for directory, sentence in (
        (tmp_path / "nowhere", "nowhere is not a directory"),
        (tmp_path / "other-vocabulary", "has another vocabulary than"),
    ):
        *_, line = refusal(home, directory).splitlines()
        assert line.startswith("fp8serve: ")
        assert sentence in line
