"""Sequences are truncated to the trained context of the model; report and terminal say so."""

import json
import shutil
from pathlib import Path

import pytest

from fp8serve.calibration.checks import missing_samples_note
from fp8serve.calibration.evaluate import evaluate
from fp8serve.calibration.pipeline import calibrate
from fp8serve.calibration.reports.page import html_report
from fp8serve.calibration.result import CalibrationReport
from fp8serve.cli import main
from fp8serve.inspection import inspect

SMALL = {"samples": 4, "batch_size": 4}
CUT = "Sequences were cut to the model's context of 32 tokens instead of 48 tokens."


def edited(model_dir: Path, folder: Path, **changes: object) -> Path:
    """Returns a copy of the tiny model with changed values in its config.json."""
    shutil.copytree(model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.fixture(scope="module")
def short(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edited(model_dir, tmp_path_factory.mktemp("short") / "model", max_position_embeddings=32)


def test_calibration_and_evaluation_report_truncation(short: Path, model_dir: Path, tmp_path: Path) -> None:
    report = calibrate(short, out=tmp_path / "out", seq_len=48, **SMALL)  # type: ignore[arg-type]
    assert (report.notes, report.data.seq_len) == ((CUT,), 32)
    assert CalibrationReport.from_json((tmp_path / "out" / "calibration.json").read_text()) == report
    assert CUT.replace("'", "&#x27;") in html_report(report)
    assert evaluate(tmp_path / "out", seq_len=48, **SMALL).notes == (CUT,)  # type: ignore[arg-type]
    against = evaluate(model_dir, None, short, recipe="bf16", seq_len=48, **SMALL)  # type: ignore[arg-type]
    assert (against.notes, against.seq_len) == ((CUT,), 32)


def test_without_truncation_nothing_is_reported(short: Path, model_dir: Path) -> None:
    assert evaluate(short, recipe="bf16", seq_len=32, **SMALL).notes == ()  # type: ignore[arg-type]
    assert evaluate(model_dir, recipe="bf16", seq_len=48, **SMALL).notes == ()  # type: ignore[arg-type]


def test_a_sliding_window_does_not_truncate(model_dir: Path, tmp_path: Path) -> None:
    """Sequences are longer than the window of 32 tokens."""
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}
    unknown = dict.fromkeys(("attention_bias", "mlp_bias", "pretraining_tp"))
    windowed = edited(model_dir, tmp_path / "windowed", **mistral, **unknown)
    report = calibrate(windowed, out=tmp_path / "out", seq_len=96, **SMALL)  # type: ignore[arg-type]
    assert (report.notes, report.data.seq_len) == ((), 96)
    assert evaluate(tmp_path / "out", seq_len=96, **SMALL).notes == ()  # type: ignore[arg-type]
    assert inspect(windowed)["notes"] == []


def test_commands_report_truncation(short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--samples", "4", "--seq-len", "48", "--json"]
    for command in (
        ["eval", str(short), "--recipe", "bf16"],
        ["calibrate", str(short), "--out", str(tmp_path / "o")],
    ):
        assert main([*command, *few]) == 0
        out, err = capsys.readouterr()
        assert err.splitlines() == [CUT]
        assert json.loads(out)["notes"] == [CUT]


def test_far_less_data_than_requested_is_reported(model_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "few.jsonl"
    data.write_text("".join(json.dumps({"text": f"The text with number {i}."}) + "\n" for i in range(3)))
    report = calibrate(model_dir, data=data, out=tmp_path / "out", samples=16, seq_len=64)
    tokens = report.data.tokens
    gave = f"The data gave 3 samples with {tokens} tokens instead of"
    note = f"{gave} 16 samples of 64 tokens, because there is no more text."
    assert report.notes == (note,)
    assert (report.data.documents, report.data.held_out_documents) == (3, 2)
    result = evaluate(tmp_path / "out", data=data, samples=3, seq_len=128)
    note = f"{gave} 3 samples of 128 tokens, because short documents are not joined."
    assert result.notes == (note,)
    assert (result.documents, result.tokens, result.quality.tokens) == (3, tokens, tokens - 3)
    assert "3 samples from 3 documents" in html_report(report)


def test_the_last_window_of_a_text_may_be_short() -> None:
    assert missing_samples_note(4, 32, 4, 124) == missing_samples_note(4, 32, 4, 128) == ()
    assert all((missing_samples_note(4, 32, 4, 63), missing_samples_note(4, 32, 3, 96)))
