"""A model that computes no sequence as long as the one asked for says so, in the report and on the terminal."""

import json
import shutil
from pathlib import Path

import pytest

from fp8serve.calibration.evaluate import evaluate
from fp8serve.calibration.pipeline import calibrate
from fp8serve.calibration.report import html_report
from fp8serve.calibration.result import CalibrationReport
from fp8serve.cli import main
from fp8serve.inspection import inspect

SMALL = {"samples": 4, "batch_size": 4}
CUT = "Sequences were cut to 32 tokens, the model's attention window, instead of the 48 asked for."


@pytest.fixture(scope="module")
def windowed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a Mistral whose layers see 32 of its 128 tokens."""
    folder = Path(shutil.copytree(model_dir, tmp_path_factory.mktemp("windowed") / "model"))
    config = json.loads((folder / "config.json").read_text())
    for key in ("attention_bias", "mlp_bias", "pretraining_tp"):
        config.pop(key, None)
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_calibration_and_evaluation_say_that_they_cut(windowed: Path, model_dir: Path, tmp_path: Path) -> None:
    report = calibrate(windowed, out=tmp_path / "out", seq_len=48, **SMALL)  # type: ignore[arg-type]
    assert (report.notes, report.data.seq_len) == ((CUT,), 32)
    assert CalibrationReport.from_json((tmp_path / "out" / "calibration.json").read_text()) == report
    assert CUT.replace("'", "&#x27;") in html_report(report)
    assert evaluate(tmp_path / "out", seq_len=48, **SMALL).notes == (CUT,)  # type: ignore[arg-type]
    against = evaluate(model_dir, None, windowed, recipe="bf16", seq_len=48, **SMALL)  # type: ignore[arg-type]
    assert (against.notes, against.seq_len) == ((CUT,), 32)


def test_nothing_is_said_where_nothing_is_cut(windowed: Path, model_dir: Path) -> None:
    assert evaluate(windowed, recipe="bf16", seq_len=32, **SMALL).notes == ()  # type: ignore[arg-type]
    assert evaluate(model_dir, recipe="bf16", seq_len=48, **SMALL).notes == ()  # type: ignore[arg-type]
    longer = evaluate(model_dir, recipe="bf16", seq_len=200, **SMALL)  # type: ignore[arg-type]
    assert [note.split(",")[:2] for note in longer.notes] == [
        ["Sequences were cut to 128 tokens", " the model's trained context"]
    ]


def test_commands_say_it_beside_the_result(windowed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--samples", "4", "--seq-len", "48", "--json"]
    for command in (
        ["eval", str(windowed), "--recipe", "bf16"],
        ["calibrate", str(windowed), "--out", str(tmp_path / "o")],
    ):
        assert main([*command, *few]) == 0
        out, err = capsys.readouterr()
        assert err.splitlines() == [CUT]
        assert json.loads(out)["notes"] == [CUT]
    assert main(["generate", str(windowed), "The", "--recipe", "bf16", "--max-new-tokens", "2"]) == 0
    assert "sequences end at 32 tokens instead of the 128" in capsys.readouterr().err


def test_inspection_shows_the_window(windowed: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(model_dir)["notes"] == []
    assert ["sequences end at 32 tokens" in note for note in inspect(windowed)["notes"]] == [True]
    assert main(["inspect", str(windowed)]) == 0
    assert "sequences end at 32 tokens" in capsys.readouterr().out
