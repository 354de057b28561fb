"""The metrics of a run, step by step: as a CSV table, as curves, and in the event log that the run writes."""

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


def test_csv_has_every_metric_and_an_empty_cell_for_a_missing_value() -> None:
    table = list(csv.DictReader(io.StringIO(as_csv(ROWS))))
    assert list(table[0]) == [*FIRST_COLUMNS, "rewards/chosen"]
    assert [float(row["learning_rate"]) for row in table] == [1e-5, 0.0]
    assert [(row["step"], row["train_loss"], row["valid_loss"]) for row in table] == [
        ("1", "2.5", ""),
        ("2", "", "2.25"),
    ]
    assert table[0]["rewards/chosen"] == "-0.25"


def test_csv_of_no_rows_is_the_header() -> None:
    assert as_csv([]) == ",".join(FIRST_COLUMNS) + "\n"


def test_curves_leave_out_missing_and_nonfinite_values() -> None:
    assert curves_of(ROWS) == {"training": [(1, 2.5)], "validation": [(2, 2.25)]}
    assert curves_of(ROWS, ["rewards/chosen"]) == {"rewards/chosen": [(1, -0.25)]}
    with pytest.raises(JobError, match=r"No step has reported reward; there are .*rewards/chosen.*valid_loss\."):
        curves_of(ROWS, ["reward"])
    with pytest.raises(JobError, match="No step has been reported yet"):
        curves_of([])


def test_a_log_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    with closing(EventLog(tmp_path / EVENTS)) as log:
        assert not (tmp_path / EVENTS).exists()  # the file is created by the first event, once the run holds its lock
        log({"type": "message", "level": "info", "message": "data"})
        log({"type": "metrics", "level": "info", "message": "Step 1", **ROWS[0]})
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"type": "metr')
    assert series_of_run(tmp_path) == ROWS[:1]
    with closing(EventLog(tmp_path / EVENTS)) as log:  # the truncated line is removed, and step 1 is not logged twice
        for row in ROWS:
            log({"type": "metrics", "level": "info", "message": "Step", **row})
    assert series_of_run(tmp_path) == ROWS


def test_of_a_repeated_step_only_the_later_row_counts(tmp_path: Path) -> None:
    def row(step: int, loss: float, **more: int) -> dict[str, float]:
        return {"step": step, "train_loss": loss, **more}

    first = [row(step, 9.0 + step) for step in (1, 2, 3, 4)]
    again = [row(step, float(step), returns=1) for step in (2, 3)]
    assert latest_rows([]) == []
    assert latest_rows(first) == first
    with closing(EventLog(tmp_path / EVENTS)) as log:
        for one in first + again:  # the run returned to step 1 and is now at step 3, so the old step 4 no longer counts
            log({"type": "metrics", "level": "info", "message": "Step", **one})
    assert series_of_run(tmp_path) == [first[0], *again]
    assert curves_of(series_of_run(tmp_path))["training"] == [(1, 10.0), (2, 2.0), (3, 3.0)]


@pytest.mark.parametrize("content", [None, b"\xff\xfe\n", b"[1]\n", json.dumps({"step": 1}).encode() + b"\n"])
def test_an_invalid_log_is_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / EVENTS).write_bytes(content)
    with pytest.raises(JobError, match=r"events\.jsonl cannot be read as the log of a run"):
        series_of_run(tmp_path)
