"""`--report FILE` of calibrate, eval and inspect."""

import shlex
from pathlib import Path

import pytest

from fp8serve.calibration.result import read_report
from fp8serve.cli import main
from fp8serve.errors import DataError

SMALL = ("--samples", "8", "--seq-len", "32")


@pytest.fixture(scope="module")
def calibrated(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated model, with the page in a file whose name has a space."""
    folder = tmp_path_factory.mktemp("calibrated")
    arguments = ["calibrate", str(model_dir), "--out", str(folder / "out"), "--report", str(folder / "the page.html")]
    assert main([*arguments, *SMALL, "--generated-samples", "1"]) == 0
    return folder


def test_calibrate_writes_the_page_to_the_file_and_the_directory(calibrated: Path) -> None:
    assert (calibrated / "the page.html").read_bytes() == (calibrated / "out" / "report.html").read_bytes()


def test_the_page_contains_the_command_line(calibrated: Path, model_dir: Path) -> None:
    origin = read_report(calibrated / "out").origin
    assert origin is not None
    words = shlex.split(origin.command)
    assert words[:3] == ["fp8serve", "calibrate", str(model_dir)]
    assert words[words.index("--report") + 1] == str(calibrated / "the page.html")


def test_calibrate_without_weights_writes_the_page(model_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    out = str(tmp_path / "out")
    assert main(["calibrate", str(model_dir), "--out", out, "--scales-only", "--report", str(page), *SMALL]) == 0
    assert "KL divergence of each layer" in page.read_text()


def test_eval_writes_its_page(calibrated: Path, model_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "eval.html"
    arguments = ["eval", str(calibrated / "out"), "--against", str(model_dir), "--report", str(page), *SMALL]
    assert main(arguments) == 0
    text = page.read_text()
    assert "Evaluation of out" in text
    assert "Distribution of values over the exponents" in text
    assert f"fp8serve eval {calibrated / 'out'}" in text


def test_inspect_writes_the_page_of_a_calibrated_directory(calibrated: Path, tmp_path: Path) -> None:
    page = tmp_path / "again.html"
    assert main(["inspect", str(calibrated / "out"), "--report", str(page)]) == 0
    assert page.read_bytes() == (calibrated / "out" / "report.html").read_bytes()


def test_inspect_refuses_a_report_of_an_uncalibrated_model(
    calibrated: Path, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = str(tmp_path / "page.html")
    assert main(["inspect", str(model_dir), "--report", page]) == 1
    assert "holds no calibration.json" in capsys.readouterr().err
    assert main(["inspect", str(calibrated / "out"), str(model_dir), "--report", page]) == 1
    assert "leave OTHER out" in capsys.readouterr().err
    assert not Path(page).exists()


@pytest.mark.parametrize("command", [("calibrate", "--out", "out"), ("eval",), ("inspect",)])
def test_an_unwritable_report_path_is_reported_before_the_work(
    command: tuple[str, ...], model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    name, *options = command
    assert main([name, str(model_dir), *options, "--report", "nowhere/page.html"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "fp8serve: nowhere/page.html cannot be written: there is no directory nowhere.\n"
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text('{"model": 1}')
    with pytest.raises(DataError, match="This is not a calibration report: model must be text"):
        read_report(tmp_path)
