"""The commands `models` and `jobs` with a fake server."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fp8serve.cli import main
from fp8serve.commands import jobs
from tests.client.fake import EVENTS, Answer, FakeServer, json_answer

JOB: dict[str, Any] = {
    "id": "ftjob-1", "status": "succeeded", "base_model": "m", "fine_tuned_model": "ft:m", "error": None,
    "progress": {"step": 2, "total_steps": 2, "train_loss": 1.23456},
}  # fmt: skip
SMALL = {"name": "small", "default": False, "state": "ready", "problem": None, "served": {"source": "base"},
         "adapters": []}  # fmt: skip
TUTOR = {"name": "tutor", "root": "team/tutor", "in_flight": 0, "method": "lora", "rank": 8, "layers": 2, "bytes": 100}
LATER = TUTOR | {"name": "later", "root": "ftjob-2", "method": None, "rank": None, "layers": None, "bytes": None}
OURS = {
    "alias": "m",
    "state": "ready",
    "served": {"source": "base"},
    "available": [{"source": "base", "model": "m", "base": "m"}, {"source": "ftjob-1", "model": "ft:m", "base": "m"}],
    "models": [
        SMALL | {"name": "m", "default": True, "adapters": [TUTOR]},
        SMALL | {"adapters": [TUTOR | {"name": "esc\033[2J"}]},
        SMALL | {"name": "bad", "state": "failed", "problem": "Damaged.", "served": None, "adapters": [LATER]},
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


def test_models_of_an_fp8serve_server(fake: FakeServer, call: Any) -> None:
    fake.routes["GET /models"] = json_answer(OURS)
    status, out, _ = call("models", "list")
    assert (status, [line.split() for line in out.splitlines()[1:]]) == (
        0,
        [
            ["m", "base", "yes", "ready", "-", "-"],
            ["tutor", "team/tutor", "yes", "adapter", "m", "8"],
            ["small", "base", "yes", "ready", "-", "-"],
            ["esc\ufffd[2J", "team/tutor", "yes", "adapter", "small", "8"],
            ["bad", "-", "no", "failed:", "Damaged.", "-", "-"],
            ["later", "ftjob-2", "no", "adapter", "bad", "-"],
            ["ft:m", "ftjob-1", "no", "available", "m", "-"],
            ["gpt-4o", "m", "yes", "alias", "-", "-"],
            ["more", "more", "no", "loadable", "-", "-"],
        ],
    )
    listed = json.loads(call("models", "list", "--json")[1])
    assert [entry["served"] for entry in listed] == [True, True, True, True, False, False, False, True, False]
    assert {tuple(entry) for entry in listed} == {("model", "source", "served", "state", "base", "rank")}
    assert [entry["base"] for entry in listed] == ["m", "m", None, "small", None, "bad", "m", None, None]


@pytest.mark.parametrize("answer", [json_answer({"detail": "Not Found"}, 404), json_answer({"data": []})])
def test_models_of_another_server(answer: Answer, fake: FakeServer, call: Any) -> None:
    fake.routes["GET /models"] = answer
    assert [line.split() for line in call("models", "list")[1].splitlines()[1:]] == [
        ["fake", "-", "yes", "-", "-", "-"],
        ["other", "-", "yes", "-", "-", "-"],
    ]


def test_models_activate_sends_the_source_and_the_options(fake: FakeServer, call: Any) -> None:
    swapped = json_answer({"served": {"model": "ft:m"}})
    fake.routes |= {"GET /models": json_answer(OURS), "POST /finetune/ftjob-1/activate": swapped}
    assert call("models", "activate", "ftjob-1") == (0, "ft:m is served.\n", "")
    chosen = "--step", "4", "--max-perplexity-ratio", "1.5"
    assert call("models", "activate", "ftjob-1", *chosen) == (0, "ft:m is served.\n", "")
    assert fake.bodies("POST /finetune/ftjob-1/activate") == [{}, {"step": 4, "max_perplexity_ratio": 1.5}]
    assert "leave --step or --model out" in call("models", "activate", "ftjob-1", "--step", "4", "--model", "m")[2]
    fake.routes["POST /models/m/activate"] = json_answer({"served": {"model": "m"}})
    assert call("models", "activate", "base") == (0, "m is served.\n", "")
    assert fake.bodies("POST /models/m/activate") == [{"source": "base"}]
    fake.routes["POST /models/small/activate"] = json_answer([])
    answer = call("models", "activate", "ftjob-1", "--model", "small")
    assert answer == (1, "", "fp8serve: The server's response has no model; is it an fp8serve server?\n")
    assert fake.bodies("POST /models/small/activate") == [{"source": "ftjob-1"}]


def test_models_load_unload_and_alias(fake: FakeServer, call: Any) -> None:
    for change in ("load", "unload", "alias"):
        fake.routes[f"POST /models/small/{change}"] = json_answer({"name": "small"})
    assert call("models", "load", "small", "more", "--option", "recipe=bf16", "--option", "max_num_seqs=2") == (
        0, "small is served.\n", "",
    )  # fmt: skip
    assert call("models", "load", "small")[0] == 0
    assert fake.bodies("POST /models/small/load") == [
        {"source": "more", "options": {"recipe": "bf16", "max_num_seqs": 2}}, {},
    ]  # fmt: skip
    assert call("models", "unload", "small", "--seconds", "0") == (0, "small was unloaded.\n", "")
    assert fake.bodies("POST /models/small/unload") == [{"seconds": 0.0}]
    assert call("models", "alias", "small", "gpt") == (0, "gpt is an alias of small.\n", "")
    assert call("models", "alias", "small", "gpt", "--remove")[1] == "gpt is no longer an alias of small.\n"
    assert [b["remove"] for b in fake.bodies("POST /models/small/alias")] == [False, True]
    assert call("models", "load", "small", "--option", "recipe=bf16")[0] == 2


def test_jobs_are_listed_page_by_page(fake: FakeServer, call: Any) -> None:
    waiting = {**JOB, "id": "ftjob-0", "status": "queued", "fine_tuned_model": None, "progress": {}}
    fake.routes["GET /finetune?limit=2"] = json_answer({"jobs": [JOB], "has_more": True})
    fake.routes["GET /finetune?limit=1&after=ftjob-1"] = json_answer({"jobs": [waiting], "has_more": True})
    rows = [line.split() for line in call("jobs", "list", "--limit", "2")[1].splitlines()[1:]]
    assert rows == [["ftjob-1", "succeeded", "2/2", "1.235", "ft:m"], ["ftjob-0", "queued", "-", "-", "m"]]


def test_a_job_is_submitted_with_only_the_given_options_and_followed(
    fake: FakeServer, call: Any, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n')
    fake.routes |= {
        "POST /v1/files": [json_answer({"id": "file-1"}), json_answer({"id": "file-2"})],
        "POST /finetune": json_answer({**JOB, "status": "queued"}, 202),
        "GET /finetune/ftjob-1/events": Answer(history("succeeded"), kind=EVENTS),
        "GET /finetune/ftjob-1": json_answer(JOB),
    }
    options = ["--lr", "0.001", "--epochs", "1", "--recipe-option", "margin=1", "--suffix", "s"]
    status, out, err = call("jobs", "submit", str(data), "--validation", str(data), *options, "--follow", "--json")
    assert (status, json.loads(out)) == (0, JOB)
    assert err == "Job ftjob-1\nStep 1/2: \ufffd[2J\n"
    assert fake.bodies("POST /finetune") == [
        {"learning_rate": 0.001, "epochs": 1, "recipe_options": {"margin": 1}, "suffix": "s"}
        | {"file_id": "file-1", "validation_file_id": "file-2"}
    ]


def test_following_a_failed_job_is_status_1(fake: FakeServer, call: Any) -> None:
    failed = {**JOB, "status": "failed", "error": {"message": "The disk is full."}}
    fake.routes |= {
        "GET /finetune/ftjob-1/events": Answer(history("failed"), kind=EVENTS),
        "GET /finetune/ftjob-1": json_answer(failed),
    }
    status, out, _ = call("jobs", "follow", "ftjob-1")
    assert status == 1
    assert "The disk is full." in out


@pytest.mark.parametrize("action", ["show", "cancel", "pause", "resume"])
def test_actions_on_a_job_send_their_requests(action: str, fake: FakeServer, call: Any) -> None:
    route = "GET /finetune/a%2Fb" if action == "show" else f"POST /finetune/a%2Fb/{action}"
    fake.routes[route] = json_answer(JOB)
    status, out, _ = call("jobs", action, "a/b")
    assert (status, out.splitlines()[1].split()) == (0, ["status", "succeeded"])
    assert json.loads(call("jobs", action, "a/b", "--json")[1]) == JOB
    fake.routes[route] = json_answer({"error": "The job has ended already.", "code": "job_state"}, 409)
    assert call("jobs", action, "a/b")[2] == "fp8serve: The server answered 409: The job has ended already.\n"
    fake.routes[route] = json_answer({"hello": 1})
    assert "is it an fp8serve server?" in call("jobs", action, "a/b")[2]


def test_a_job_is_deleted(fake: FakeServer, call: Any) -> None:
    fake.routes["DELETE /finetune/a%2Fb"] = json_answer({"id": "a/b", "deleted": True})
    assert call("jobs", "delete", "a/b") == (0, "a/b was deleted.\n", "")
    assert json.loads(call("jobs", "delete", "a/b", "--json")[1]) == {"id": "a/b", "deleted": True}
    fake.routes["DELETE /finetune/a%2Fb"] = json_answer({"error": "The job has not ended.", "code": "job_state"}, 409)
    assert call("jobs", "delete", "a/b")[2] == "fp8serve: The server answered 409: The job has not ended.\n"


SERIES = [
    {"step": 1, "total_steps": 2, "train_loss": 2.5, "learning_rate": 1e-5},
    {"step": 2, "total_steps": 2, "train_loss": 1.25, "valid_loss": 2.0, "reward": "esc\033[2J"},
]


def test_the_metrics_of_a_job(fake: FakeServer, call: Any, tmp_path: Path) -> None:
    fake.routes["GET /finetune/j/metrics"] = json_answer({"metrics": SERIES})
    lines = call("jobs", "metrics", "j")[1].splitlines()
    assert lines[0].split()[:5] == ["step", "total_steps", "epoch", "train_loss", "valid_loss"]
    assert lines[2].split()[:5] == ["2", "2", "-", "1.25", "2"]
    assert json.loads(call("jobs", "metrics", "j", "--json")[1]) == SERIES
    assert [line.split(",")[3] for line in call("jobs", "metrics", "j", "--csv")[1].splitlines()] == [
        "train_loss", "2.5", "1.25",
    ]  # fmt: skip
    assert call("jobs", "metrics", "j", "--csv", "--json")[0] == 2
    chart = call("jobs", "plot", "j")[1].splitlines()
    assert (chart[0].split()[0], chart[-3].split()[0], chart[-1].split()[1:]) == (
        "2.5", "1.25", ["training", "o", "validation"],
    )  # fmt: skip
    picture = tmp_path / "loss.svg"
    assert call("jobs", "plot", "j", "--svg", str(picture)) == (0, "", "")
    root = ElementTree.fromstring(picture.read_text())
    assert [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")] == ["training", "validation"]
    assert "cannot be written" in call("jobs", "plot", "j", "--svg", str(tmp_path / "no" / "loss.svg"))[2]


def test_metrics_of_a_job_without_a_step(fake: FakeServer, call: Any) -> None:
    fake.routes["GET /finetune/j/metrics"] = json_answer({"metrics": []})
    assert len(call("jobs", "metrics", "j")[1].splitlines()) == 1
    assert len(call("jobs", "metrics", "j", "--csv")[1].splitlines()) == 1
    assert call("jobs", "plot", "j") == (
        1, "", "fp8serve: No step has been reported yet; there is nothing to draw.\n"
    )  # fmt: skip
    fake.routes["GET /finetune/j/metrics"] = json_answer({"hello": 1})
    assert "is it an fp8serve server?" in call("jobs", "metrics", "j")[2]


def test_a_dry_run_on_the_server_starts_no_job(fake: FakeServer, call: Any, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n')
    report = {
        "ok": True, "bad_lines": [], "bad_line_count": 0, "data": {"rows": 1, "tokens": 2}, "trainable_fraction": 1.0,
        "steps": 3, "memory_bytes": {"total": 1 << 30}, "sample": [["a", True]],
    }  # fmt: skip
    fake.routes |= {"POST /v1/files": json_answer({"id": "file-1"}), "POST /finetune/validate": json_answer(report)}
    status, out, _ = call("jobs", "submit", str(data), "--epochs", "3", "--dry-run")
    assert (status, out.splitlines()[0]) == (
        0,
        "1 rows, 2 tokens, 100% of them carry loss; 3 steps; about 1.0 GiB of memory",
    )
    assert fake.bodies("POST /finetune/validate") == [{"epochs": 3, "file_id": "file-1"}]
    bad = {"line": 1, "message": "line 1 is\033 bad"}
    fake.routes["POST /finetune/validate"] = json_answer(
        report | {"ok": False, "bad_lines": [bad], "bad_line_count": 2}
    )
    status, out, _ = call("jobs", "submit", str(data), "--dry-run")
    assert (status, out.splitlines()[:2]) == (1, ["line 1 is\ufffd bad", "... and 1 more invalid rows"])
    assert json.loads(call("jobs", "submit", str(data), "--dry-run", "--json")[1])["bad_lines"] == [bad]


@pytest.mark.parametrize(
    "answer", [Answer(history("x")[:2], kind=EVENTS), Answer(history("x")[:2], kind=EVENTS, cut=True)]
)
def test_a_server_that_disconnects_during_follow_is_reported(answer: Answer, fake: FakeServer, call: Any) -> None:
    fake.routes["GET /finetune/j/events"] = answer
    status, out, err = call("jobs", "follow", "j")
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith("fp8serve: The server")


def test_ctrl_c_leaves_the_job_running(fake: FakeServer) -> None:
    resume = threading.Event()
    fake.routes["GET /finetune/j/events"] = Answer(history("succeeded"), kind=EVENTS, until=resume)
    command = [sys.executable, "-m", "fp8serve.cli", "jobs", "follow", "j", "--server", fake.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "Step 1/2" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read() == "The job is still running; fp8serve jobs cancel j ends it.\n"
    resume.set()


@pytest.mark.parametrize("args", [["generate"], ["jobs", "show"], ["models", "x"]])
def test_wrong_usage(args: list[str]) -> None:
    assert main(args) == 2


def test_losses_are_drawn_only_at_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.print_loss_chart(SERIES)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    jobs.print_loss_chart([])
    jobs.print_loss_chart(SERIES)
    assert capsys.readouterr().out.splitlines()[-1].split()[1:] == ["training", "o", "validation"]


def test_all_named_metrics_are_drawn() -> None:
    names = [f"metric {n}" for n in range(7)]
    drawn = jobs.terminal_chart([{"step": step, **dict.fromkeys(names, step)} for step in range(3)], names)
    assert [name for name in names if name in drawn] == names
