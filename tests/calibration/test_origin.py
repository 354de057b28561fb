from pathlib import Path

from fp8serve.calibration.evaluate import evaluate
from fp8serve.calibration.output import call_text
from fp8serve.calibration.pipeline import calibrate
from fp8serve.fp8.recipe import DelayedScaling

SMALL = {"samples": 8, "seq_len": 32}


def test_call_text_is_a_valid_python_call() -> None:
    text = call_text("calibrate", Path("model"), out=Path("out"), recipe=DelayedScaling(), data=None, samples=3)
    assert text.startswith("fp8serve.calibrate('model', out='out', recipe=DelayedScaling(")
    assert text.endswith(", samples=3)")
    assert call_text("evaluate", Path("model")) == "fp8serve.evaluate('model')"


def test_reports_contain_the_call_date_and_machine(model_dir: Path, tmp_path: Path) -> None:
    report = calibrate(model_dir, out=tmp_path / "out", generated_samples=0, **SMALL)  # type: ignore[arg-type]
    assert report.origin is not None
    assert report.origin.command.startswith(
        f"fp8serve.calibrate('{model_dir}', out='{tmp_path / 'out'}', recipe=Delayed"
    )
    assert report.origin.date.endswith("+00:00")
    assert "threads" in report.origin.machine
    measured = evaluate(tmp_path / "out", command="fp8serve eval out", **SMALL)  # type: ignore[arg-type]
    assert measured.origin is not None
    assert measured.origin.command == "fp8serve eval out"
