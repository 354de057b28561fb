"""Requests of megabytes are refused by their length alone if that suffices; otherwise another process reads them, under
limits, while the server answers other requests.

Many tests stop the parser processes with SIGSTOP, so that a long request certainly waits while other requests are
answered.
"""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fp8serve.model.text.tokenizer import Tokenizer
from tests.patience import PATIENCE, until
from tests.server.conftest import Start
from tests.server.process import Process, serving
from tests.server.test_process import options

MIB = 1 << 20
TEXT = "spam and eggs " * (2 * MIB // 14)
ROWS = [{"text": "a row of text"}] * 30_000
BODIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "a conversation": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}, 400),
    "many messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 50_000}, 400),
    "many prompts": ("/v1/completions", {"prompt": [TEXT[:50_000]] * 32}, 400),
    "too many prompts": ("/v1/completions", {"prompt": [""] * (MIB // 2)}, 400),
    "ids": ("/v1/completions", {"prompt": [1] * MIB}, 400),
    "lists of ids": ("/v1/completions", {"prompt": [[1]] * (MIB // 4)}, 400),
    "ids to generate": ("/generate", {"inputs": None, "input_ids": [1] * MIB}, 422),
    "ids to cut": ("/generate", {"input_ids": [97] * (MIB // 2), "parameters": {"truncate": 20}}, 200),
    "a text": ("/generate", {"inputs": TEXT}, 422),
    "a text to cut": ("/generate", {"inputs": TEXT[:MIB], "parameters": {"truncate": 20}}, 200),
    "not what it should be": ("/generate", {"inputs": [[]] * (MIB // 2)}, 422),
    "unknown fields": ("/generate", {f"f{i}": 1 for i in range(100_000)}, 422),
    "a text to cut, and a schema": (
        "/generate",
        {
            "inputs": TEXT[:MIB],
            "parameters": {"truncate": 20, "guided_json": {"type": "null"}},
        },
        200,
    ),
    "a text to count": ("/tokenize", {"prompt": TEXT[:MIB]}, 200),
    "ids to read": ("/detokenize", {"tokens": [1] * MIB}, 422),
    "rows": ("/finetune/validate", {"data": ROWS}, 200),
    "rows to train on": ("/finetune", {"data": [*ROWS, {"word": "x"}]}, 422),
}

pytestmark = pytest.mark.slow


def parsers(parent: int) -> list[int]:
    """Process ids of the children of `parent` that are parsers."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and b"parser_process" in (folder / "cmdline").read_bytes():
                pids.append(int(folder.name))
    return pids


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    path = tmp_path_factory.mktemp("server")
    with serving(path / "log", **options(path, limits={"queue": 2000})) as process:
        yield process
        assert process.stop() == 0, process.log.read_text()
        assert "Traceback" not in process.log.read_text()


def ask(process: Process, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(process.url + path, json=body, timeout=PATIENCE)


@pytest.mark.parametrize("name", BODIES)
def test_liveness_is_answered_before_a_long_request_is(server: Process, name: str) -> None:
    path, body, status = BODIES[name]
    assert server.client.post("/tokenize", json={"prompt": "hello"}).status_code == 200  # a parser process is there
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with stopped(parsers(server.popen.pid)):
            pending = pool.submit(ask, server, path, body)
            until(lambda: server.metric("fp8serve_reading_bytes") > MIB / 2)
            assert server.client.get("/health/live").status_code == 200
            assert server.client.post("/generate", json={"input_ids": [97]}).status_code == 200
            assert not pending.done()
        answer = pending.result()
    assert answer.status_code == status, answer.text[:500]
    assert status < 300 or len(answer.content) < 1000


@pytest.mark.smoke
def test_a_short_request_does_not_wait_for_a_long_one(server: Process) -> None:
    """The short request needs a parser process, too, as every conversation does."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert server.client.post("/v1/chat/completions", json=chat).status_code == 200
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with stopped(parsers(server.popen.pid)[:1]):
            pending = [pool.submit(ask, server, "/tokenize", {"prompt": TEXT[:MIB]}) for _ in range(2)]
            until(lambda: server.metric("fp8serve_reading_bytes") > 2 * MIB)
            assert server.client.post("/v1/chat/completions", json=chat).status_code == 200
            assert not any(future.done() for future in pending)
        assert [future.result().status_code for future in pending] == [200, 200]


def test_the_bytes_that_wait_for_a_parser_are_bounded(tmp_path: Path) -> None:
    with serving(tmp_path / "log", **options(tmp_path, limits={"reading_bytes": 2 * MIB})) as process:
        assert process.client.post("/tokenize", json={"prompt": "hello"}).status_code == 200
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            with stopped(parsers(process.popen.pid)):
                pending = pool.submit(ask, process, "/tokenize", {"prompt": TEXT[:MIB]})
                until(lambda: process.metric("fp8serve_reading_bytes") > MIB)
                refused = ask(process, "/tokenize", {"prompt": TEXT[: 2 * MIB]})
                assert (refused.status_code, refused.json()["code"]) == (429, "queue_full")
            assert pending.result().status_code == 200
        assert process.metric("fp8serve_reading_bytes") == 0
        assert process.stop() == 0


@pytest.mark.smoke
def test_all_bodies_together_are_bounded(tmp_path: Path) -> None:
    with serving(tmp_path / "log", **options(tmp_path, limits={"held_bytes": MIB})) as process:
        assert process.client.post("/tokenize", json={"prompt": "hello"}).status_code == 200
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            with stopped(parsers(process.popen.pid)):
                pending = pool.submit(ask, process, "/tokenize", {"prompt": TEXT[: MIB - MIB // 4]})
                until(lambda: process.metric("fp8serve_reading_bytes") > MIB / 2)
                refused = ask(process, "/generate", {"inputs": TEXT[: MIB // 2]})
                assert (refused.status_code, refused.json()["code"]) == (429, "queue_full")
                assert ask(process, "/generate", {"inputs": "short"}).status_code == 200
            assert pending.result().status_code == 200
        assert ask(process, "/tokenize", {"prompt": TEXT[: MIB - MIB // 4]}).status_code == 200
        assert process.stop() == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, 200), (signal.SIGSEGV, 503)])
def test_a_parser_that_dies_is_replaced(tmp_path: Path, number: int, status: int) -> None:
    with serving(tmp_path / "log", **options(tmp_path)) as process:
        assert process.client.post("/tokenize", json={"prompt": "hello"}).status_code == 200
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pids = parsers(process.popen.pid)
            with stopped(pids):
                pending = pool.submit(ask, process, "/tokenize", {"prompt": TEXT[:MIB]})
                until(lambda: process.metric("fp8serve_reading_bytes") > MIB / 2)
                for pid in pids:
                    os.kill(pid, number)
            assert pending.result().status_code == status, pending.result().text
        until(lambda: not set(pids) & set(parsers(process.popen.pid)))  # SIGSEGV waits until a process goes on
        assert process.client.post("/tokenize", json={"prompt": "hello"}).status_code == 200
        for pid in parsers(process.popen.pid):  # an idle parser that dies disturbs no request
            os.kill(pid, signal.SIGKILL)
        until(lambda: not parsers(process.popen.pid))
        assert process.client.post("/tokenize", json={"prompt": "hello"}).status_code == 200
        assert process.stop() == 0


def test_a_client_that_leaves_frees_the_parser(tmp_path: Path) -> None:
    with serving(tmp_path / "log", **options(tmp_path)) as process:
        assert process.client.post("/tokenize", json={"prompt": "hello"}).status_code == 200
        pids = parsers(process.popen.pid)
        with stopped(pids):
            content = json.dumps({"prompt": TEXT[:MIB]}).encode()
            head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            with socket.create_connection(("127.0.0.1", process.port), PATIENCE) as client:
                client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
                until(lambda: process.metric("fp8serve_reading_bytes") > MIB / 2)
            until(lambda: process.metric("fp8serve_reading_bytes") == 0)
            until(lambda: not set(pids) & set(parsers(process.popen.pid)))
            assert process.client.post("/tokenize", json={"prompt": TEXT[:MIB]}).status_code == 200
        assert process.stop() == 0


@contextlib.contextmanager
def template(path: Path, text: str, **limits: float) -> Iterator[Process]:
    settings = options(path, limits=limits)
    (path / "tiny" / "chat_template.jinja").write_text(text)
    with serving(path / "log", **settings) as process:
        yield process
        assert process.stop() == 0
        assert "Traceback" not in process.log.read_text()


def test_a_template_that_runs_on_is_ended(tmp_path: Path) -> None:
    endless = "{% for a in range(20000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}"
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    with template(tmp_path, endless, template_seconds=0.2) as process:
        for _ in range(2):  # and another parser process is started
            answer = process.client.post("/v1/chat/completions", json=chat, timeout=PATIENCE)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "template_error")
        assert "more processor time" in answer.json()["error"]["message"]
        assert process.client.get("/health/ready").status_code == 200


def test_a_request_that_needs_too_much_memory_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "log", **options(tmp_path, limits={"reading_memory": 32 * MIB})) as process:
        answer = process.client.post("/tokenize", json={"prompt": TEXT * 4}, timeout=PATIENCE)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_parameter")
        assert "memory" in answer.json()["error"]
        assert process.client.post("/tokenize", json={"prompt": "hello"}).json()["count"] == 5
        assert process.stop() == 0


@pytest.mark.smoke
async def test_a_text_that_cannot_fit_is_not_tokenized(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> list[int]:
        raise AssertionError("the text was tokenized")

    async with start() as server:
        monkeypatch.setattr(Tokenizer, "encode", never)
        answer = await server.client.post("/generate", json={"inputs": "a" * 5000})
        assert (answer.status_code, answer.json()["code"]) == (422, "context_length_exceeded")
        answer = await server.client.post("/v1/completions", json={"prompt": ["a" * 5000] * 64})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.smoke
async def test_a_full_queue_refuses_before_it_tokenizes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> list[int]:
        raise AssertionError("the text was tokenized")

    async with start(max_num_seqs=1) as server:
        monkeypatch.setattr(Tokenizer, "encode", never)
        with server.state.models.default.admission.reserve(server.state.models.default.admission.capacity.max_requests):
            answer = await server.client.post("/generate", json={"inputs": "a"})
            assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
        assert server.state.models.default.admission.capacity.reserved == 0
        assert server.state.models.default.admission.capacity.idle.is_set()


def test_a_long_request_is_the_same_job_as_before(server: Process) -> None:
    """Rows that a parser process wrote also count for an idempotency key."""
    rows, key = {"data": ROWS[:2000]}, {"Idempotency-Key": "long"}
    first, again = (server.client.post("/finetune", json=rows, headers=key) for _ in range(2))
    assert first.json()["id"] == again.json()["id"]
    other = server.client.post("/finetune", json={"data": ROWS[:2001]}, headers=key)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_mismatch")


def test_the_error_names_the_bad_row_of_many(server: Process) -> None:
    answer = server.client.post("/finetune", json={"data": [*ROWS[:2000], {"word": "x"}]})
    assert answer.status_code == 422
    assert "2001" in answer.json()["error"]
    too_large = server.client.post("/finetune", json={"data": [{"text": "x" * (2 * MIB)}]})
    assert too_large.status_code == 422
    assert "Row 1 is larger" in too_large.json()["error"]
    assert json.dumps(sorted(p.name for p in (server.log.parent / "data" / "jobs").glob("rows-*"))) == "[]"
