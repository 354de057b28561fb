"""The benchmark of training runs without a GPU, and its rows show that sharing casts changes no bit."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu_training import Bench

CASES = (
    "convert delayed", "trainer bf16", "trainer delayed", "trainer delayed unfused", "trainer delayed separate",
    "trainer delayed masters",
    "trainer delayed recompute", "trainer delayed packed", "trainer delayed packed loop", "norm", "norm by rows",
)  # fmt: skip


def test_every_case_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench("cpu", tmp_path / "out.json")
    for case in CASES:
        bench.run(case)
    rows = {row["what"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert {name: row["error"] for name, row in rows.items() if "error" in row} == {}
    assert len(capsys.readouterr().out.splitlines()) == len(rows) == len(CASES)
    digests = {name: row["digest"] for name, row in rows.items() if "digest" in row}
    assert (
        len({digests[f"trainer delayed{how}"] for how in ("", " unfused", " separate", " masters", " recompute")}) == 1
    )
    assert digests["trainer delayed packed"] == digests["trainer delayed packed loop"] != digests["trainer delayed"]
    assert rows["norm"]["norm"] == pytest.approx(rows["norm by rows"]["norm"])


def test_a_case_that_fails_is_a_row(tmp_path: Path) -> None:
    bench = Bench("cpu", tmp_path / "out.json")
    bench.run("trainer unknown")
    assert "unknown" in bench.rows[0]["error"]
