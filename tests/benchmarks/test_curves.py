"""The benchmark of loss curves: both trainers see the same rows in the same order, and results of runs are reused."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Cursor, iterate_steps

ROOT = Path(__file__).parents[2]
CURVES: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks/curves.py"))
ROWS = [{"number": i} for i in range(12)]


def rows_of_trainer(rows: list[dict[str, int]]) -> list[dict[str, int]]:
    """Returns the rows in the order of the trainer."""
    config = TrainConfig(model="m", data=("d",), out="o", batch_size=4, seed=3)
    steps = iterate_steps([1] * len(rows), config, Cursor(), 3)
    return [rows[i] for step, _ in steps for microbatch in step for i in microbatch]


def test_a_peer_gets_the_rows_in_the_order_of_the_trainer() -> None:
    assert CURVES["in_order"](ROWS, 3) == rows_of_trainer(ROWS) != ROWS


def test_a_run_is_computed_once(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert CURVES["cached"](path, lambda: [{"loss": 1.0}]) == [{"loss": 1.0}]
    assert CURVES["cached"](path, lambda: [{"loss": 2.0}]) == [{"loss": 1.0}]


def test_curves_are_compared_step_by_step() -> None:
    one, other = [{"loss": 1.0, "norm": 5.0}, {"loss": 2.0, "norm": 1.0}], [{"loss": 1.5, "norm": 5.0}] * 2
    assert CURVES["apart"](one, other) == {"largest loss": 0.5, "largest norm": 4.0, "mean loss": 0.5}
    with pytest.raises(ValueError, match="shorter"):
        CURVES["apart"](one, other[:1])


def test_a_peer_that_fails_says_why(tmp_path: Path) -> None:
    program = tmp_path / "peer.py"
    status = "'no such package' if 'wrong' in open(sys.argv[1]).read() else 0"
    program.write_text(f"import sys\nprint('[1]')\nsys.exit({status})\n")
    assert CURVES["peer"](sys.executable, program, tmp_path, {"rows": []}) == [1]
    with pytest.raises(SystemExit, match="no such package"):
        CURVES["peer"](sys.executable, program, tmp_path, {"wrong": []})
