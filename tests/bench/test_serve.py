"""`bench serve` counts requests and computes its figures correctly; speed is not tested."""

import json
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fp8serve.bench import serve
from fp8serve.bench.options import Load
from fp8serve.bench.serve import Outcome, Prompt, body, prompts, send_times
from fp8serve.cli import main
from fp8serve.errors import DataError, Fp8ServeError, JobError, ServerError
from tests.client.fake import Answer, FakeServer, delta, json_answer, stream_answer
from tests.tiny import write_tiny_model

ROUTE, CHAT = "POST /v1/completions", "POST /v1/chat/completions"
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer().running() as server:
        yield server


def text(value: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": value, "finish_reason": finish}]}


def ignore(what: str, completed: int, total: int) -> None:
    """A progress callback that does nothing."""


def test_figures_of_a_server(fake: FakeServer) -> None:
    fake.routes[ROUTE] = stream_answer(text("a"), text(""), text("b"), text("c", "length"), USAGE, "[DONE]")
    progress: list[int] = []
    load = Load(num_prompts=4, max_concurrency=2, input_len=3, output_len=5)
    report = serve.measure(fake.url + "/v1", load, lambda what, completed, total: progress.append(completed))
    bodies = fake.bodies(ROUTE)
    assert len(bodies) == 5  # the first is a warm-up
    assert {(len(b["prompt"]), b["max_tokens"], b["ignore_eos"], b["model"]) for b in bodies} == {(3, 5, True, "fake")}
    assert progress == [1, 2, 3, 4]
    assert (report["completed"], report["failed"], report["input_tokens"], report["output_tokens"]) == (4, 0, 28, 20)
    assert report["output_throughput"] == pytest.approx(20 / report["duration_seconds"])
    assert report["total_token_throughput"] == pytest.approx(48 / report["duration_seconds"])
    assert 0 < report["ttft_ms"]["mean"] <= report["e2el_ms"]["mean"]


def test_figures_of_known_outcomes() -> None:
    outcomes = [
        Outcome([1.0, 2.0, 4.0], 4.0, input_tokens=10, output_tokens=4),
        Outcome([3.0], 3.0, input_tokens=2, output_tokens=1),  # no time between tokens
        Outcome([], 1.0, input_tokens=1, output_tokens=0),  # an answer without text
        Outcome([0.1], 0.1, error="It died."),
    ]
    report = serve.figures(outcomes, 8.0)
    assert (report["completed"], report["failed"], report["errors"]) == (3, 1, ["It died."])
    assert (report["request_throughput"], report["output_throughput"], report["total_token_throughput"]) == (
        3 / 8, 5 / 8, 18 / 8,
    )  # fmt: skip
    assert report["ttft_ms"]["mean"] == report["ttft_ms"]["median"] == 2000
    assert report["tpot_ms"]["mean"] == 1000  # three seconds for three further tokens
    assert report["itl_ms"] == {"mean": 1500, "median": 1500, "p90": 1900, "p99": pytest.approx(1990)}
    assert report["e2el_ms"]["mean"] == pytest.approx(8000 / 3)
    assert math.isnan(serve.figures(outcomes[1:2], 1.0)["tpot_ms"]["mean"])


def test_chat_without_usage_counts_events(fake: FakeServer, tmp_path: Path) -> None:
    events = (delta(role="assistant", content=""), delta(content="a"), delta(reasoning="b"), delta("stop"), "[DONE]")
    fake.routes[CHAT] = stream_answer(*events)
    (tmp_path / "a.jsonl").write_text('{"prompt": "Hello"}')
    load = Load(num_prompts=1, dataset="jsonl", dataset_path=str(tmp_path / "a.jsonl"), api="chat")
    report = serve.measure(fake.url, load, ignore)
    assert (report["input_tokens"], report["output_tokens"]) == (0, 2)
    request = fake.bodies(CHAT)[0]
    assert request["messages"] == [{"role": "user", "content": "Hello"}]
    assert "ignore_eos" not in request
    assert body(Prompt("Hello", 9), Load(ignore_eos=True), "m")["ignore_eos"] is True


def test_failed_requests_are_counted_and_the_others_continue(fake: FakeServer) -> None:
    good = stream_answer(text("a"), text("b", "stop"), "[DONE]")
    busy = json_answer({"error": {"message": "Too many requests."}}, 429)
    broken = stream_answer(text("a"), cut=True)
    fake.routes[ROUTE] = [good, good, busy, broken, stream_answer(text("a"), "[DONE]"), stream_answer({"choices": 7})]
    report = serve.measure(fake.url, Load(num_prompts=5, max_concurrency=1, output_len=2), ignore)
    assert (report["completed"], report["failed"], report["output_tokens"]) == (1, 4, 2)
    assert report["errors"][0] == "The server answered 429: Too many requests."


@pytest.mark.parametrize("answer", [json_answer({"error": {"message": "No."}}, 400), stream_answer(text("a"))])
def test_a_server_that_answers_no_request_is_an_error(answer: Answer, fake: FakeServer) -> None:
    fake.routes[ROUTE] = answer
    with pytest.raises(ServerError, match=r"answered 400: No|closed the"):
        serve.measure(fake.url, Load(num_prompts=2), ignore)
    fake.routes[ROUTE] = [stream_answer(text("a", "stop"), "[DONE]"), *[json_answer({}, 500)] * 2]
    with pytest.raises(ServerError, match=r"No request was answered: The server answered 500"):
        serve.measure(fake.url, Load(num_prompts=2), ignore)


def test_no_server_is_an_error() -> None:
    with pytest.raises(ServerError, match="no server at"):
        serve.measure("http://127.0.0.1:9", Load(), ignore)


def test_send_times_follow_the_rate_and_the_burstiness() -> None:
    assert send_times(3, Load()) == [0.0] * 3
    for burstiness in (0.1, 1.0, 1000.0):
        times = send_times(100, Load(request_rate=4.0, burstiness=burstiness))
        assert times == sorted(times)
        assert times[-1] == pytest.approx(25.0)
    even = [b - a for a, b in pairwise(times)]
    assert max(even) < 2 * min(even)
    bursty = send_times(100, Load(request_rate=4.0, burstiness=0.1))
    assert max(b - a for a, b in pairwise(bursty)) > 1.0


def test_random_prompts_depend_on_the_seed() -> None:
    assert prompts(Load(seed=1), None) == prompts(Load(seed=1), None) != prompts(Load(seed=2), None)


def test_prompts_from_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "One"}\n\n{"prompt": "Two", "output_tokens": 3}\n')
    load = Load(num_prompts=5, dataset="jsonl", dataset_path=str(path))
    loaded_prompts = prompts(load, None)
    assert len(loaded_prompts) == 5
    assert set(loaded_prompts) == {Prompt("One", 64), Prompt("Two", 3)}
    assert {p.output_len for p in prompts(Load(dataset="jsonl", dataset_path=str(path), output_len=2), None)} == {2}


def test_prompts_from_sharegpt(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    path = tmp_path / "a.json"
    talks = [["The scale of a tensor", "is the largest number"], ["Why?" * 2000, "is the largest"], ["One turn"], []]
    path.write_text(json.dumps([{"conversations": [{"from": "x", "value": v} for v in talk]} for talk in talks]))
    load = Load(num_prompts=2, dataset="sharegpt", dataset_path=str(path))
    loaded_prompts = prompts(load, model)
    from fp8serve.model.text.tokenizer import Tokenizer

    assert {p.text for p in loaded_prompts if isinstance(p.text, str)} == {talks[0][0]}
    assert {p.output_len for p in loaded_prompts} == {len(Tokenizer.from_dir(model).encode(talks[0][1]))}
    some = prompts(Load(num_prompts=4, dataset="sharegpt", dataset_path=str(path), output_len=9), None)
    assert len({str(p.text) for p in some}) == 2
    with pytest.raises(JobError, match="needs --tokenizer"):
        prompts(load, None)


@pytest.mark.parametrize(
    ("dataset", "content", "sentence"),
    [
        ("jsonl", "[]", "line 1: expected an object"),
        ("jsonl", '{"prompt": "a"}\n{"prompt": [1]}', "line 2: expected an object"),
        ("jsonl", '{"prompt": "a", "output_tokens": 0}', "line 1: expected an object"),
        ("jsonl", "", "holds no prompt"),
        ("sharegpt", "{", "is not ShareGPT's JSON"),
        ("sharegpt", '[{"a": 1}]', "is not ShareGPT's JSON"),
        ("sharegpt", "[]", "holds no prompt"),
        ("sharegpt", None, "cannot be read"),
    ],
)
def test_invalid_data_files_are_refused(dataset: Any, content: str | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=sentence):
        prompts(Load(dataset=dataset, dataset_path=str(path), output_len=4), None)


@pytest.mark.parametrize("load", [Load(api="chat"), Load(dataset="jsonl")])
def test_the_error_names_the_missing_options(load: Load) -> None:
    with pytest.raises(Fp8ServeError, match=r"use a|provide it"):
        prompts(load, None)


def test_the_command_prints_and_writes_its_figures(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.routes[ROUTE] = stream_answer(text("a"), text("b", "stop"), USAGE, "[DONE]")
    args = ["bench", "serve", "--server", fake.url, "--model", "mine", "--num-prompts", "2", "--request-rate", "1000"]
    assert main([*args, "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "mine: 2 requests answered, 0 failed" in output
    assert "time to first token (TTFT)" in output
    report = json.loads((tmp_path / "serve.json").read_text())
    assert (report["load"]["request_rate"], report["output_tokens"]) == (1000.0, 10)
    assert main(["bench", "serve"]) == main(["bench", "serve", "m", "--model", "x"]) == 2


def test_ctrl_c_ends_the_command(fake: FakeServer) -> None:
    resume = threading.Event()
    fake.routes[ROUTE] = [
        stream_answer(text("a", "stop"), "[DONE]"),
        *[stream_answer(text("a"), text("b"), until=resume)] * 3,
    ]
    command = [sys.executable, "-m", "fp8serve.cli", "bench", "serve", "--server", fake.url, "--num-prompts", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        from tests.patience import until

        until(lambda: len(fake.bodies(ROUTE)) == 4, "the requests")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""
    resume.set()
