"""A leak is found, a wrong answer is found, and a server of ours passes."""

import json
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8serve.train.scratch import write_random_model
from tests.tiny import SENTENCES

SOAK: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/soak.py"))


def samples(*anonymous: float) -> list[dict[str, Any]]:
    return [{"seconds": i, "engine": {"resident": 2 * mb, "anonymous": mb}} for i, mb in enumerate(anonymous)]


@pytest.mark.parametrize(
    ("curve", "grown"),
    [
        ([50.0, 90.0, *[100.0] * 16], 0.0),  # the warm-up is not judged
        ([50.0, 90.0, *[100.0 + i for i in range(16)]], 12.0),
        ([50.0, 90.0, *[100.0] * 7, 180.0, *[100.0] * 8], 0.0),  # nor is one peak
    ],
)
def test_growth_is_that_of_the_quarters(curve: list[float], grown: float) -> None:
    assert SOAK["growth"](samples(*curve), 2.0, "engine") == pytest.approx(grown)


GROWING = """
import mmap
print("before", flush=True)
input()
held = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE)  # of the system's memory, never from a heap with room left
held.write(b"x" * len(held))
print("after", flush=True)
input()
"""


def test_the_memory_of_a_process() -> None:
    """Of a child that does nothing else: what ran here before leaves room in the heap, and threads that come and go."""
    with subprocess.Popen([sys.executable, "-c", GROWING], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        seen = {}
        for when in ("before", "after"):
            assert child.stdout.readline() == when + "\n"
            seen[when] = SOAK["resident"](child.pid)
            print(file=child.stdin, flush=True)
    grown = seen["after"]["anonymous"] - seen["before"]["anonymous"]
    assert 32 <= grown < 66  # the bytes that were written may still be held
    assert seen["after"]["resident"] > seen["after"]["anonymous"]


def test_the_children_of_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in SOAK["children"](os.getpid())
        child.communicate(b"\n")


def test_every_kind_of_request_says_what_is_due() -> None:
    asks = [make(random.Random(seed), 200) for seed in range(20) for make in SOAK["MAKERS"]]
    assert len({ask.kind for ask in asks}) == len(SOAK["MAKERS"])
    assert {ask.status for ask in asks} == {200, 400, 404}
    assert {ask.hang_up for ask in asks} == {None, 0, 1, 6}


def test_an_answer_that_is_not_due_is_kept() -> None:
    counts, ask = SOAK["Counts"](), SOAK["Ask"]("short", "/v1/completions", {})
    counts.answered(ask, 200, b"fine")
    counts.answered(ask, 500, b"oh")
    counts.answered(ask, 200, b'data: {"error": {"message": "broke"}}')
    assert counts.sent["short"] == 3
    assert counts.wrong == [
        "short: 500 instead of 200: oh",
        'short: a stream ended with an error: data: {"error": {"message": "broke"}}',
    ]


@pytest.mark.slow
def test_our_server_stays_flat(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 128}
    model = write_random_model(tmp_path / "model", SENTENCES, vocab_size=320, context=256, **sizes)
    words = ["--minutes", "0.1", "--warm-up", "0.05", "--context", "256", "--recipe", "current", "--allow", "100"]
    assert SOAK["main"]([str(model), *words, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("soak-*.json")
    result = json.loads(path.read_text())
    assert result["failed"] == []
    assert len(result["requests"]["sent"]) == len(SOAK["MAKERS"])
    assert path.with_suffix(".svg").read_text().startswith("<svg")
