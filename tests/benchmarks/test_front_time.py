"""The benchmark of the server process, on a few short streams: it imitates the engine process."""

import json
import subprocess
import sys

PROGRAM = [sys.executable, "-m", "benchmarks.front_time", "--step-ms", "1", "--requests", "4", "--clients", "2"]


def test_few_streams_are_timed() -> None:
    options = ["--streams", "2", "--tokens", "5", "--route", "/v1/chat/completions"]
    result = subprocess.run([*PROGRAM, *options], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-1000:]
    figures = json.loads(result.stdout)
    assert (figures["streams"], figures["tokens"]) == (2, 10)
    assert 0 < figures["events"] <= 2 * 10
