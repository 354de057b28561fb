"""The series of a run: its table, its curves_of, and the log in which a run keeps it."""

import csv
import io
import json
from contextlib import closing
from pathlib import Path

import pytest

from fp8serve.errors import JobError
from fp8serve.train.events import EVENTS, FIRST_COLUMNS, EventLog, as_csv, curves_of, latest_rows, series_of_run

ROWS = [
    {"step": 1, "total_steps": 2, "train_loss": 2.5, "learning_rate": 1e-5, "rewards/chosen": -0.25},
    {"step": 2, "total_steps": 2, "train_loss": None, "learning_rate": 0.0, "valid_loss": 2.25},
]


def test_a_table_has_every_metric_and_an_empty_cell_for_what_is_no_number() -> None:
    found = list(csv.DictReader(io.StringIO(as_csv(ROWS))))
    assert list(found[0]) == [*FIRST_COLUMNS, "rewards/chosen"]
    assert [float(row["learning_rate"]) for row in found] == [1e-5, 0.0]
    assert [(row["step"], row["train_loss"], row["valid_loss"]) for row in found] == [
        ("1", "2.5", ""),
        ("2", "", "2.25"),
    ]
    assert found[0]["rewards/chosen"] == "-0.25"


def test_a_table_of_nothing_is_its_header() -> None:
    assert as_csv([]) == ",".join(FIRST_COLUMNS) + "\n"


def test_curves_leave_out_what_was_not_finite_and_what_was_never_measured() -> None:
    assert curves_of(ROWS) == {"training": [(1, 2.5)], "validation": [(2, 2.25)]}
    assert curves_of(ROWS, ["rewards/chosen"]) == {"rewards/chosen": [(1, -0.25)]}
    with pytest.raises(JobError, match=r"No step has reported reward; there are .*rewards/chosen.*valid_loss\."):
        curves_of(ROWS, ["reward"])
    with pytest.raises(JobError, match="No step has been reported yet"):
        curves_of([])


def test_the_log_of_a_run_is_read_while_it_is_written(tmp_path: Path) -> None:
    with closing(EventLog(tmp_path / EVENTS)) as log:
        assert not (tmp_path / EVENTS).exists()  # before the run's lock is held, nothing is touched
        log({"type": "message", "level": "info", "message": "data"})
        log({"type": "metrics", "level": "info", "message": "Step 1", **ROWS[0]})
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"type": "metr')
    assert series_of_run(tmp_path) == ROWS[:1]
    with closing(EventLog(tmp_path / EVENTS)) as log:  # the cut line goes, and a step is logged once
        for row in ROWS:
            log({"type": "metrics", "level": "info", "message": "Step", **row})
    assert series_of_run(tmp_path) == ROWS


def test_a_step_that_was_taken_again_counts_once_and_the_later_time(tmp_path: Path) -> None:
    def row(step: int, loss: float, **more: int) -> dict[str, float]:
        return {"step": step, "train_loss": loss, **more}

    first = [row(step, 9.0 + step) for step in (1, 2, 3, 4)]
    again = [row(step, float(step), returns=1) for step in (2, 3)]
    assert latest_rows([]) == []
    assert latest_rows(first) == first
    with closing(EventLog(tmp_path / EVENTS)) as log:
        for one in first + again:  # gone back to step 1, and now at 3: step 4 is taken back
            log({"type": "metrics", "level": "info", "message": "Step", **one})
    assert series_of_run(tmp_path) == [first[0], *again]
    assert curves_of(series_of_run(tmp_path))["training"] == [(1, 10.0), (2, 2.0), (3, 3.0)]


@pytest.mark.parametrize("content", [None, b"\xff\xfe\n", b"[1]\n", json.dumps({"step": 1}).encode() + b"\n"])
def test_what_is_no_log_is_said(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / EVENTS).write_bytes(content)
    with pytest.raises(JobError, match=r"events\.jsonl cannot be read as the log of a run"):
        series_of_run(tmp_path)
