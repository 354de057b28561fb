"""Connections, with and without requests: those above the limit do not lock out other clients."""

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8serve.server.http.connections import ConnectionLimit, raise_open_files
from tests.patience import PATIENCE, until
from tests.server.fakes import model_dir
from tests.server.process import Process, serving

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
SLOW = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


@contextlib.contextmanager
def server(path: Path, **more: Any) -> Iterator[Process]:
    options = {"model": str(model_dir(path / "tiny")), "data_dir": str(path / "data"), "fake": True, "delay": 0.01}
    with serving(path / "log", **options | more) as process:
        yield process


def connected(stack: contextlib.ExitStack, port: int, data: bytes = b"") -> socket.socket:
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
    with contextlib.suppress(ConnectionError):
        connection.sendall(data)
    return connection


def answer(port: int, data: bytes = HEALTH) -> bytes:
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        connection.sendall(data)
        return connection.recv(65536)


def is_closed(connection: socket.socket) -> bool:
    """Returns whether the server has closed the connection. Reads the data that it sent before."""
    connection.settimeout(0.01)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    ("files", "most", "expected"),
    [
        (65536, 8192, ConnectionLimit(8192, 128)),
        (4096, 8192, ConnectionLimit(3712, 128)),
        (1024, 8192, ConnectionLimit(672, 84)),
        (64, 8192, ConnectionLimit(42, 5)),
        (65536, 3, ConnectionLimit(3, 1)),
    ],
)
def test_connections_leave_descriptors_for_everything_else(files: int, most: int, expected: ConnectionLimit) -> None:
    assert ConnectionLimit.within(files, most) == expected


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [(1024, 4096, 4096), (1024, 2**30, 65536), (1024, resource.RLIM_INFINITY, 65536), (2**20, 2**20, None)],
)
def test_the_soft_limit_is_raised_and_never_lowered(
    soft: int, hard: int, raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changes.append(limits))
    assert raise_open_files() == (raised or soft)
    assert changes == ([] if raised is None else [(raised, hard)])


def test_health_answers_beside_more_connections_than_descriptors(tmp_path: Path) -> None:
    """Every second connection is silent, and the others send half a header."""
    with server(tmp_path, open_files=(64, 128), api_key="secret") as process, contextlib.ExitStack() as stack:
        others = [connected(stack, process.port, SLOW if i % 2 else b"") for i in range(300)]
        for _ in range(3):
            assert answer(process.port).startswith(b"HTTP/1.1 200")
        until(lambda: sum(map(is_closed, others)) > 200, "the end of idle connections")
        assert process.stop() == 0
        log = process.log.read_text()
    assert "Traceback" not in log
    assert log.count("which is this server's limit; idle connections are closed") == 1
    assert "only 128 files" in log
    assert len(log) < 10_000


def test_a_request_under_way_is_not_closed_for_others(tmp_path: Path) -> None:
    generate = b'{"inputs": "abc", "parameters": {"max_new_tokens": 300}}'
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(generate)}\r\n\r\n".encode() + generate
    with server(tmp_path, limits={"connections": 16}) as process, contextlib.ExitStack() as stack:
        process.client.close()
        running = [connected(stack, process.port, request) for _ in range(2)]
        others = [connected(stack, process.port) for _ in range(50)]
        assert answer(process.port).startswith(b"HTTP/1.1 200")
        for connection in running:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        until(lambda: sum(map(is_closed, others)) >= 36)


def test_a_connection_is_refused_while_all_others_are_busy(tmp_path: Path) -> None:
    body = (
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
    )
    with server(tmp_path, limits={"connections": 3}) as process, contextlib.ExitStack() as stack:
        process.client.close()
        busy: list[socket.socket] = []

        def is_refused_beside_one_more() -> bool:
            busy.append(connected(stack, process.port, body))  # the server may close it before its header is read
            return answer(process.port).startswith(b"HTTP/1.1 503")

        until(is_refused_beside_one_more)
        for connection in busy:
            connection.close()
        until(lambda: answer(process.port).startswith(b"HTTP/1.1 200"))


def test_a_failure_to_accept_is_logged_once(tmp_path: Path) -> None:
    """The process has no free descriptors for a while."""
    with server(tmp_path, open_files=(64, 64)) as process, contextlib.ExitStack() as stack:
        process.client.close()
        resource.prlimit(process.popen.pid, resource.RLIMIT_NOFILE, (12, 64))
        for _ in range(100):
            connected(stack, process.port)
        until(lambda: "cannot be accepted" in process.log.read_text())
        resource.prlimit(process.popen.pid, resource.RLIMIT_NOFILE, (64, 64))
        until(lambda: answer(process.port).startswith(b"HTTP/1.1 200"))
        log = process.log.read_text()
    assert log.count("cannot be accepted") == 1
    assert "Traceback" not in log


@pytest.mark.parametrize("has_length", [True, False])
def test_a_request_with_two_lengths_ends_its_connection(has_length: bool, tmp_path: Path) -> None:
    chunked = b'5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n'
    length = "Content-Length: 3\r\n" if has_length else ""
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\n{length}Transfer-Encoding: chunked\r\n\r\n".encode()
    with server(tmp_path) as process, contextlib.ExitStack() as stack:
        connection = connected(stack, process.port, head + chunked + HEALTH)
        received = b""
        while part := connection.recv(65536):
            received += part
    first, _, rest = received.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 4")
    assert (b"connection: close" in first.lower()) is has_length
    assert (b"HTTP/1.1 200" in rest) is not has_length  # what follows the ambiguous request is not answered
