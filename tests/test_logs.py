"""One line a record, in text or as JSON, and nothing else on standard error."""

import json
import logging
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fp8serve import logs
from tests.server.fakes import model_dir

PROGRAM = """
import logging, sys, threading, warnings
from fp8serve import logs
logs.configure(sys.argv[1], "test")
log = logging.getLogger("fp8serve.test")
log.info("two\\nlines, \\u2028 and \\x85 and \\ud800 %s", "é", extra=logs.fields(count=2, none=None))
log.debug("nobody asked for this")
logging.getLogger("another.library").warning("of another library")
warnings.warn("a warning of Python")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(); thread.join()
try:
    raise ValueError("inner")
except ValueError:
    log.exception("caught")
raise KeyError("outer")
"""


def run_program(log_format: str) -> tuple[str, int]:
    process = subprocess.run([sys.executable, "-c", PROGRAM, log_format], capture_output=True, text=True)
    return process.stderr, process.returncode


def test_json_is_one_object_a_line_whatever_happens() -> None:
    text, status = run_program("json")
    assert status == 1
    records: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    assert [record["message"].split(" ")[0] for record in records] == [
        "two\nlines,", "of", "<string>:9:", "unexpected", "caught", "unexpected",
    ]  # fmt: skip
    for record in records:
        assert {"time", "level", "logger", "message", "process", "pid"} <= set(record)
        assert record["time"].endswith("Z")
        assert datetime.fromisoformat(record["time"]).utcoffset() is not None
        assert record["process"] == "test"
    first = records[0]
    assert (first["level"], first["logger"], first["count"]) == ("info", "fp8serve.test", 2)
    assert "none" not in first
    assert [record.get("exception") for record in records[3:]] == ["ZeroDivisionError", "ValueError", "KeyError"]
    assert all(record["traceback"].startswith("Traceback (most recent call last):\n") for record in records[3:])


def test_plain_records_are_text_with_a_level() -> None:
    text, status = run_program("plain")
    assert status == 1
    assert " INFO two\nlines" in text
    assert "{" not in text.splitlines()[0]


@pytest.mark.parametrize(
    "module",
    [
        "fp8serve.engine.worker --model m --socket /nowhere/engine --log-format",
        "fp8serve.server.parsing.parser_process",
    ],
)
def test_child_processes_log_json_too(module: str, tmp_path: Path) -> None:
    """Each fails to start, because its socket is missing, and logs the failure as one record."""
    command = [sys.executable, "-m", *module.split(), "json"]
    process = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    (record,) = [json.loads(line) for line in process.stderr.splitlines()]
    assert record["process"] in ("engine", "parser")
    assert (record["level"], process.returncode) == ("critical", 1)
    assert record["traceback"].startswith("Traceback")


def test_a_server_that_cannot_start_says_so_in_json(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = [
            "--port",
            str(listener.getsockname()[1]),
            "--data-dir",
            str(tmp_path / "data"),
            "--log-format",
            "json",
        ]
        command = [sys.executable, "-m", "fp8serve.cli", "serve", str(model_dir(tmp_path / "tiny")), *options]
        process = subprocess.run(command, capture_output=True, text=True)
    record = json.loads(process.stderr)
    assert (record["level"], process.returncode) == ("critical", 1)
    assert "is in use by another program" in record["message"]


def test_a_program_that_hosts_the_server_keeps_its_logging() -> None:
    before = list(logging.getLogger().handlers)
    assert before  # pytest's
    logs.configure("json", "test")
    assert logging.getLogger().handlers == before
    assert not logs.writes_json()


def test_fields_are_bound_to_the_request_and_to_no_other() -> None:
    logs.bind(lost="there is no request")
    assert logs.bound() == {}
    with logs.request_fields(request_id="a"):
        logs.bind(tenant="t")
        assert logs.bound() == {"request_id": "a", "tenant": "t"}
        with logs.request_fields(request_id="b"):
            assert logs.bound() == {"request_id": "b"}
        assert logs.bound()["request_id"] == "a"
    assert logs.bound() == {}
