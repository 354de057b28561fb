"""A server as a process: draining, disconnects, overload, half-sent requests, and one sentence when it cannot start."""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fp8serve.running import open_listener
from tests.engine.tiny import write_model
from tests.patience import PATIENCE, until
from tests.server.fakes import model_dir
from tests.server.process import Process, serving

LONG = {"inputs": "abc", "parameters": {"max_new_tokens": 400}}


def options(path: Path, **more: Any) -> dict[str, Any]:
    base = {"model": str(model_dir(path / "tiny")), "data_dir": str(path / "data"), "fake": True, "train_on": "share"}
    return base | more


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    path = tmp_path_factory.mktemp("server")
    limits = {"queue": 4, "body_seconds": 1.5, "keep_alive_seconds": 0.2, "header_seconds": 1.0, "send_seconds": 1.0}
    with serving(path / "log", **options(path, delay=0.01, max_num_seqs=4, limits=limits)) as process:
        yield process
        assert process.stop() == 0, process.log.read_text()
        assert "Traceback" not in process.log.read_text()


def raw(port: int, data: bytes) -> bytes:
    """Returns the beginning of the response; empty if the server closes the connection without one."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        connection.sendall(data)
        return connection.recv(65536)


def request(path: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server that finishes no request by itself."""
    path = tmp_path_factory.mktemp("gated")
    with serving(path / "log", **options(path, gate=str(path / "gate"))) as process:
        yield process
        assert process.stop() == 0, process.log.read_text()


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", LONG),
        ("/generate", LONG | {"stream": True}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 400}),
    ],
    ids=["/generate", "/generate stream", "/v1/completions"],
)
def test_a_disconnect_ends_the_generation(gated: Process, path: str, body: dict[str, Any], how: str) -> None:
    before = gated.metric('fp8serve_requests_finished_total{model="tiny",outcome="cancelled"}')
    connection = socket.create_connection(("127.0.0.1", gated.port))
    connection.sendall(request(path, body))
    until(lambda: gated.metric("fp8serve_requests_in_flight") == 1)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    until(lambda: gated.metric("fp8serve_requests_in_flight") == 0)
    until(lambda: gated.metric("fp8serve_requests_running") == 0)
    assert gated.metric('fp8serve_requests_finished_total{model="tiny",outcome="cancelled"}') == before + 1


def test_overload_is_refused_at_once_and_the_counters_add_up(server: Process) -> None:
    def ask(number: int) -> tuple[int, str | None]:
        answer = client.post("/generate", json={"inputs": "abc", "parameters": {"max_new_tokens": 30}})
        return answer.status_code, answer.headers.get("retry-after")

    client = httpx.Client(base_url=server.url, timeout=PATIENCE, limits=httpx.Limits(max_connections=100))
    with client, concurrent.futures.ThreadPoolExecutor(60) as pool:
        answers = list(pool.map(ask, range(120)))
    assert {status for status, _ in answers} == {200, 429}
    assert all(retry is not None for status, retry in answers if status == 429)
    accepted, finished = (server.metric(f"fp8serve_requests_{name}_total") for name in ("accepted", "finished"))
    assert accepted == finished + server.metric("fp8serve_requests_in_flight")
    assert server.metric('fp8serve_requests_rejected_total{model="tiny",reason="requests"}') >= sum(
        s == 429 for s, _ in answers
    )


def test_choices_are_admitted_together_or_not_at_all(server: Process) -> None:
    answer = server.client.post("/v1/completions", json={"prompt": "abc", "n": 9})  # 8 fit
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"
    assert server.metric("fp8serve_requests_in_flight") == 0
    assert server.client.post("/v1/completions", json={"prompt": "abc", "n": 8}).status_code == 200


def test_a_half_sent_body_is_given_up(server: Process) -> None:
    answer = raw(
        server.port,
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{",
    )
    assert answer.startswith(b"HTTP/1.1 408")


def drip(connection: socket.socket, data: bytes) -> bytes:
    """Sends a byte at a time until the server ends the request; returns its answer."""
    connection.settimeout(0.2)
    for i in range(int(PATIENCE / 0.2)):
        with contextlib.suppress(OSError):
            connection.sendall(data[i % len(data) :][:1])
        with contextlib.suppress(TimeoutError):
            return connection.recv(65536)
    raise AssertionError("The connection is still open.")


@pytest.mark.parametrize("start", [b"", b"GET /version HTTP/1.1\r\n"])
def test_a_connection_that_asks_for_nothing_is_closed(server: Process, start: bytes) -> None:
    assert raw(server.port, start).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("before", [b"", b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_dripping_headers_are_given_up(server: Process, before: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        if before:
            connection.sendall(before)
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        assert drip(connection, b"a").startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("path", ["/generate", "/v1/files"])
def test_a_dripping_body_is_given_up(server: Process, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
    head += "Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode())
        assert drip(connection, b"a").startswith(b"HTTP/1.1 408 ")


def test_a_client_that_reads_nothing_is_disconnected(server: Process) -> None:
    rows = b'{"text": "' + b"x" * 1000 + b'"}\n'
    upload = server.client.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows * 16_000)})
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(f"GET /v1/files/{upload.json()['id']}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    metric = 'fp8serve_http_responses_total{method="GET",route="/v1/files/{file_id}/content",status="200"}'
    until(lambda: server.metric(metric) == 1)
    received = 0
    with connection, contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 20):
            received += len(piece)
    assert received < upload.json()["bytes"]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % i for i in range(20_000)) + b"\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"\x00\x01\x02\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET //generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"TRACE /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /finetune/%00%ff/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    ],
)
def test_broken_http_is_a_4xx_and_harms_nobody(server: Process, data: bytes) -> None:
    answer = raw(server.port, data)
    assert answer.startswith(b"HTTP/1.1 4"), answer[:200]
    assert server.client.get("/health/ready").status_code == 200


@pytest.mark.slow
def test_a_silent_stream_gets_keep_alive_comments(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with serving(tmp_path / "log", **options(tmp_path, gate=str(gate), limits={"keep_alive_seconds": 0.2})) as process:
        body, text = {"inputs": "a", "parameters": {"max_new_tokens": 1}, "stream": True}, ""
        with process.client.stream("POST", "/generate", json=body) as answer:
            for part in answer.iter_text():
                text += part
                if text.count(": keep-alive\n\n") >= 2:
                    gate.touch()
        assert text.split("\n\n")[-2].startswith("data: {")
        assert process.stop() == 0


def test_sigterm_loses_no_accepted_request(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with serving(tmp_path / "log", **options(tmp_path, gate=str(gate), drain_seconds=PATIENCE)) as process:
        body = {"inputs": "abc", "parameters": {"max_new_tokens": 60}}
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            pending = [
                pool.submit(httpx.post, process.url + "/generate", json=body | {"stream": i % 2 == 0}, timeout=PATIENCE)
                for i in range(8)
            ]
            until(lambda: process.metric("fp8serve_requests_in_flight") == 8)
            process.popen.send_signal(signal.SIGTERM)
            until(lambda: process.client.get("/health/ready").status_code == 503)
            assert process.client.get("/health/ready").json()["state"] == "draining"
            assert process.client.get("/health/live").status_code == 200
            refused = process.client.post("/generate", json=body)
            assert (refused.status_code, refused.json()["code"]) == (503, "draining")
            gate.touch()
            answers = [future.result() for future in pending]
        assert [a.status_code for a in answers] == [200] * 8
        assert all(("abc" * 20) in a.text for a in answers)
        assert process.popen.wait(PATIENCE) == 0
        assert "Traceback" not in process.log.read_text()


@pytest.mark.slow
def test_the_drain_has_a_deadline(tmp_path: Path) -> None:
    with serving(tmp_path / "log", **options(tmp_path, delay=0.5, drain_seconds=1)) as process:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            plain = pool.submit(httpx.post, process.url + "/generate", json=LONG, timeout=PATIENCE)
            streamed = pool.submit(
                httpx.post,
                process.url + "/v1/completions",
                json={"prompt": "a", "stream": True, "max_tokens": 400},
                timeout=PATIENCE,
            )
            until(lambda: process.metric("fp8serve_requests_in_flight") == 2)
            assert process.stop() == 0
            assert (plain.result().status_code, plain.result().json()["code"]) == (503, "draining")
            assert '"code":"draining"' in streamed.result().text
            assert streamed.result().text.endswith("data: [DONE]\n\n")
        assert "Traceback" not in process.log.read_text()


@pytest.mark.slow
@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to_all", [True, False])
def test_a_stop_while_the_model_loads_is_no_failure(tmp_path: Path, number: int, to_all: bool) -> None:
    """The signal of a service manager or a terminal also reaches the engine's process (`to_all`)."""
    write_model(tmp_path / "model")
    settings = options(tmp_path, fake=False, recipe="bf16") | {"model": str(tmp_path / "model")}
    process = Process(tmp_path / "log", **settings)
    try:
        until(lambda: engines(process) or process.popen.poll() is not None, "an engine's process")
        process.popen.send_signal(signal.SIGSTOP)  # so that the engine's end is what it learns of first
        (engine,) = engines(process)
        process.popen.send_signal(number)
        if to_all:
            os.kill(engine, number)
            until(lambda: number == signal.SIGINT or gone(engine), "its end")
        process.popen.send_signal(signal.SIGCONT)
        assert process.popen.wait(PATIENCE) == 0
    finally:
        process.client.close()
        process.popen.kill()
        process.popen.wait()
    *_, line = (tmp_path / "log").read_text().splitlines()
    assert line.endswith("asked to stop: draining")


def engines(process: Process) -> list[int]:
    children = Path(f"/proc/{process.popen.pid}/task/{process.popen.pid}/children").read_text().split()
    return [int(p) for p in children if b"fp8serve.engine.worker" in Path(f"/proc/{p}/cmdline").read_bytes()]


def gone(pid: int) -> bool:
    """Returns whether the process has ended, even if its parent has not waited for it."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(") ")[2].startswith("Z")


@pytest.mark.slow
def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with serving(tmp_path / "log", **options(tmp_path, delay=1.0, drain_seconds=2 * PATIENCE)) as process:
        thread = threading.Thread(target=raw, args=(process.port, request("/generate", LONG)))
        thread.start()
        until(lambda: process.metric("fp8serve_requests_in_flight") == 1)
        process.popen.send_signal(signal.SIGINT)
        until(lambda: process.client.get("/health/ready").json()["state"] == "draining")  # a pending signal is one
        assert process.stop(signal.SIGINT) == 0
        thread.join()


def refusal(tmp_path: Path, **more: Any) -> tuple[int, list[str]]:
    process = Process(tmp_path / "log", **options(tmp_path, **more))
    try:
        return process.popen.wait(PATIENCE), (tmp_path / "log").read_text().strip().splitlines()
    finally:
        process.client.close()
        process.popen.kill()
        process.popen.wait()


def test_a_port_in_use_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with open_listener() as other:
        port = other.getsockname()[1]
        status, lines = refusal(tmp_path, port=port)
    assert status == 1
    assert lines == [
        f"Port {port} on 127.0.0.1 is in use by another program; stop it or choose another port with --port."
    ]


def test_an_open_port_without_a_key_is_refused_in_one_sentence(tmp_path: Path) -> None:
    status, lines = refusal(tmp_path, host="0.0.0.0")
    assert status == 1
    assert len(lines) == 1
    assert "--api-key" in lines[0]


def test_a_data_directory_that_cannot_be_used_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, lines = refusal(tmp_path, data_dir=str(tmp_path / "file" / "data"))
    assert status == 1
    assert len(lines) == 1
    assert "--data-dir" in lines[0]


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_sentence(tmp_path: Path) -> None:
    status, lines = refusal(tmp_path, fake=False)
    assert status == 1
    assert "Traceback" not in "\n".join(lines)
    assert lines[-1].endswith(".")
