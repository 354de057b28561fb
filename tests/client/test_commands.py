"""`models`, `jobs` and `generate --server` against a server that says what a test tells it to."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fp8serve.cli import main
from tests.client.fake import EVENTS, FakeServer, Said, says

JOB: dict[str, Any] = {
    "id": "ftjob-1", "status": "succeeded", "base_model": "m", "fine_tuned_model": "ft:m", "error": None,
    "progress": {"step": 2, "total_steps": 2, "train_loss": 1.23456},
}  # fmt: skip
SMALL = {"name": "small", "default": False, "state": "ready", "problem": None, "served": {"source": "base"}}
OURS = {
    "alias": "m",
    "state": "ready",
    "served": {"source": "base"},
    "available": [{"source": "base", "model": "m"}, {"source": "ftjob-1", "model": "ft:m"}],
    "models": [
        SMALL | {"name": "m", "default": True},
        SMALL,
        SMALL | {"name": "bad", "state": "failed", "problem": "It is damaged.", "served": None},
    ],
    "aliases": {"gpt-4o": "m"},
    "loadable": ["more"],
}


@pytest.fixture
def call(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*args: str) -> tuple[int, str, str]:
        status = main([*args, "--server", fake.url])
        return status, *capsys.readouterr()

    return run


def event(data: dict[str, Any], name: str) -> bytes:
    return f"id: 1\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode()


def history(status: str) -> list[bytes]:
    step = {"type": "metrics", "message": "Step 1/2: \033[2J", "data": {"step": 1, "total_steps": 2}}
    return [b": keep-alive\n\n", event(step, "metrics"), event({"status": status}, "end")]


def test_models_of_ours(fake: FakeServer, call: Any) -> None:
    fake.routes["GET /models"] = says(OURS)
    status, out, _ = call("models", "list")
    assert (status, [line.split() for line in out.splitlines()[1:]]) == (
        0,
        [
            ["m", "base", "yes", "ready"],
            ["small", "base", "yes", "ready"],
            ["bad", "-", "no", "failed:", "It", "is", "damaged."],
            ["ft:m", "ftjob-1", "no", "available"],
            ["gpt-4o", "m", "yes", "alias"],
            ["more", "more", "no", "loadable"],
        ],
    )
    listed = json.loads(call("models", "list", "--json")[1])
    assert [entry["served"] for entry in listed] == [True, True, False, False, True, False]


@pytest.mark.parametrize("said", [says({"detail": "Not Found"}, 404), says({"data": []})])
def test_models_of_another_server(said: Said, fake: FakeServer, call: Any) -> None:
    fake.routes["GET /models"] = said
    assert [line.split() for line in call("models", "list")[1].splitlines()[1:]] == [
        ["fake", "-", "yes", "-"],
        ["other", "-", "yes", "-"],
    ]


def test_activation(fake: FakeServer, call: Any) -> None:
    swapped = says({"served": {"model": "ft:m"}})
    fake.routes |= {"GET /models": says(OURS), "POST /finetune/ftjob-1/activate": swapped}
    assert call("models", "activate", "ftjob-1") == (0, "ft:m is served.\n", "")
    fake.routes["POST /models/m/activate"] = says({"served": {"model": "m"}})
    assert call("models", "activate", "base") == (0, "m is served.\n", "")
    assert fake.bodies("POST /models/m/activate") == [{"source": "base"}]
    fake.routes["POST /models/small/activate"] = says([])
    answer = call("models", "activate", "ftjob-1", "--model", "small")
    assert answer == (1, "", "fp8serve: The server named no model; is it one of fp8serve?\n")
    assert fake.bodies("POST /models/small/activate") == [{"source": "ftjob-1"}]


def test_loading_unloading_and_other_names(fake: FakeServer, call: Any) -> None:
    for change in ("load", "unload", "alias"):
        fake.routes[f"POST /models/small/{change}"] = says({"name": "small"})
    assert call("models", "load", "small", "more", "--option", "recipe=bf16", "--option", "max_num_seqs=2") == (
        0, "small is served.\n", "",
    )  # fmt: skip
    assert call("models", "load", "small")[0] == 0
    assert fake.bodies("POST /models/small/load") == [
        {"source": "more", "options": {"recipe": "bf16", "max_num_seqs": 2}}, {},
    ]  # fmt: skip
    assert call("models", "unload", "small", "--seconds", "0") == (0, "small is not served any more.\n", "")
    assert fake.bodies("POST /models/small/unload") == [{"seconds": 0.0}]
    assert call("models", "alias", "small", "gpt") == (0, "gpt is a name of small.\n", "")
    assert call("models", "alias", "small", "gpt", "--remove")[1] == "gpt is no name of small.\n"
    assert [b["remove"] for b in fake.bodies("POST /models/small/alias")] == [False, True]
    assert call("models", "load", "small", "--option", "recipe=bf16")[0] == 2


def test_jobs_are_listed_page_by_page(fake: FakeServer, call: Any) -> None:
    waiting = {**JOB, "id": "ftjob-0", "status": "queued", "fine_tuned_model": None, "progress": {}}
    fake.routes["GET /finetune?limit=2"] = says({"jobs": [JOB], "has_more": True})
    fake.routes["GET /finetune?limit=1&after=ftjob-1"] = says({"jobs": [waiting], "has_more": True})
    rows = [line.split() for line in call("jobs", "list", "--limit", "2")[1].splitlines()[1:]]
    assert rows == [["ftjob-1", "succeeded", "2/2", "1.235", "ft:m"], ["ftjob-0", "queued", "-", "-", "m"]]


def test_a_job_is_submitted_with_what_was_given_and_followed(fake: FakeServer, call: Any, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n')
    fake.routes |= {
        "POST /v1/files": [says({"id": "file-1"}), says({"id": "file-2"})],
        "POST /finetune": says({**JOB, "status": "queued"}, 202),
        "GET /finetune/ftjob-1/events": Said(history("succeeded"), kind=EVENTS),
        "GET /finetune/ftjob-1": says(JOB),
    }
    options = ["--lr", "0.001", "--epochs", "1", "--recipe-option", "margin=1", "--suffix", "s"]
    status, out, err = call("jobs", "submit", str(data), "--validation", str(data), *options, "--follow", "--json")
    assert (status, json.loads(out)) == (0, JOB)
    assert err == "Job ftjob-1\nStep 1/2: \ufffd[2J\n"
    assert fake.bodies("POST /finetune") == [
        {"learning_rate": 0.001, "epochs": 1, "recipe_options": {"margin": 1}, "suffix": "s"}
        | {"file_id": "file-1", "validation_file_id": "file-2"}
    ]


def test_a_job_that_fails_is_a_status(fake: FakeServer, call: Any) -> None:
    failed = {**JOB, "status": "failed", "error": {"message": "The disk is full."}}
    fake.routes |= {
        "GET /finetune/ftjob-1/events": Said(history("failed"), kind=EVENTS),
        "GET /finetune/ftjob-1": says(failed),
    }
    status, out, _ = call("jobs", "follow", "ftjob-1")
    assert status == 1
    assert "The disk is full." in out


@pytest.mark.parametrize("action", ["show", "cancel", "pause", "resume"])
def test_actions_on_a_job(action: str, fake: FakeServer, call: Any) -> None:
    route = "GET /finetune/a%2Fb" if action == "show" else f"POST /finetune/a%2Fb/{action}"
    fake.routes[route] = says(JOB)
    status, out, _ = call("jobs", action, "a/b")
    assert (status, out.splitlines()[1].split()) == (0, ["status", "succeeded"])
    assert json.loads(call("jobs", action, "a/b", "--json")[1]) == JOB
    fake.routes[route] = says({"error": "The job has ended already.", "code": "job_state"}, 409)
    assert call("jobs", action, "a/b")[2] == "fp8serve: The server answered 409: The job has ended already.\n"
    fake.routes[route] = says({"hello": 1})
    assert "is it one of fp8serve?" in call("jobs", action, "a/b")[2]


@pytest.mark.parametrize("said", [Said(history("x")[:2], kind=EVENTS), Said(history("x")[:2], kind=EVENTS, cut=True)])
def test_a_server_that_goes_away_while_it_is_watched(said: Said, fake: FakeServer, call: Any) -> None:
    fake.routes["GET /finetune/j/events"] = said
    status, out, err = call("jobs", "follow", "j")
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith("fp8serve: The server")


def test_ctrl_c_leaves_the_job_running(fake: FakeServer) -> None:
    pause = threading.Event()
    fake.routes["GET /finetune/j/events"] = Said(history("succeeded"), kind=EVENTS, until=pause)
    command = [sys.executable, "-m", "fp8serve.cli", "jobs", "follow", "j", "--server", fake.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "Step 1/2" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read() == "The job goes on; fp8serve jobs cancel j ends it.\n"
    pause.set()


def test_generate(fake: FakeServer, call: Any) -> None:
    choices = [{"index": 1, "text": " two", "finish_reason": "stop"}, {"index": 0, "text": " one"}]
    fake.routes["POST /v1/completions"] = says({"choices": choices})
    options = ["--json-schema", '{"a": 1}', "--regex", "a+", "--stop", "x", "--top-k", "3"]
    assert call("generate", "First", "Second", "--stop", "x")[:2] == (0, "First one\nSecond two\n")
    assert fake.bodies("POST /v1/completions")[0] == {
        "model": "fake", "prompt": ["First", "Second"], "max_tokens": 64, "temperature": 0.0, "stop": ["x"],
    }  # fmt: skip
    assert call("generate", "First", *options)[0] == 1  # a schema and a regular expression
    status, out, _ = call("generate", "First", "--json-schema", '{"a": 1}', "--model", "mine", "--json")
    assert (status, json.loads(out)) == (0, [{"prompt": "First", "text": " one", "finish_reason": None}])
    body = fake.bodies("POST /v1/completions")[1]
    assert (body["prompt"], body["model"]) == ("First", "mine")
    assert body["response_format"]["json_schema"]["schema"] == {"a": 1}


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [7]}, [], {"choices": [{"index": 0}]}])
def test_a_completion_that_is_none(answer: Any, fake: FakeServer, call: Any) -> None:
    fake.routes["POST /v1/completions"] = says(answer)
    assert "did not answer a completion" in call("generate", "First")[2]


@pytest.mark.parametrize("args", [["generate"], ["generate", "m", "--model", "x"], ["jobs", "show"], ["models", "x"]])
def test_wrong_usage(args: list[str]) -> None:
    assert main(args) == 2
