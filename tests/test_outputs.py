"""Every command refuses an output that it cannot write before it starts to work."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fp8serve.calibration.pipeline import calibrate
from fp8serve.cli import main
from fp8serve.errors import MachineError
from fp8serve.model.storage import files
from fp8serve.model.storage.files import check_writable
from tests.tiny import write_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A path below a file, where even root cannot write."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "out"


COMMANDS = (
    "calibrate {model} --out {out}",
    "calibrate {model} --out {model}/new --report {out}",
    "calibrate {model} --out {model}/new --report {model}",
    "convert {model} --format gguf --out {out}",
    "merge {model} {model} --out {out}",
    "eval {model} --report {out}",
    "finetune {model} --data {data} --out {out}",
    "bench ops --out {out}",
    "bench ops --out {model}/config.json",
)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    line: str, model: Path, blocked: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = model.parent / "rows.txt"
    data.write_text("some text to learn " * 100)

    def work(*_: object, **__: object) -> Any:
        raise AssertionError("the work began")

    for place in ("fp8serve.calibration.pipeline._text_job", "fp8serve.calibration.evaluate.evaluate",
                  "fp8serve.train.trainer._Attempt", "fp8serve.model.adapter_merge.read_adapter"):  # fmt: skip
        monkeypatch.setattr(place, work)
    before = sorted(model.parent.rglob("*"))
    assert main(line.format(model=model, out=blocked, data=data).split()) != 0
    err = capsys.readouterr().err
    assert "the work began" not in err
    assert "internal error" not in err
    assert "cannot be written" in err or "is a directory" in err or "is a file" in err
    assert sorted(model.parent.rglob("*")) == before


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_full_disk_is_noticed_before_the_work(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: Usage(10, 10, 1000))
    with pytest.raises(MachineError, match=r"needs at least 0.0 GiB, and its disk has 0.0 GiB free"):
        calibrate(model, out=tmp_path / "out")
    check_writable(tmp_path / "out", 1000)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["finetune", "convert", "gguf"])
def test_every_command_that_writes_a_model_checks_the_free_disk_space(
    command: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (data := tmp_path / "rows.txt").write_text("some text to learn " * 100)
    options = "--samples 4 --seq-len 16 --generated-samples 0"
    if command == "convert":
        assert main(f"calibrate {model} --out {tmp_path / 'fp8'} {options}".split()) == 0
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: Usage(10, 10, 1000))
    line = {
        "finetune": f"finetune {model} --data {data} --out {tmp_path / 'run'} --max-steps 1 --seq-len 16",
        "convert": f"convert {tmp_path / 'fp8'} --out {tmp_path / 'out'} --format modelopt",
        "gguf": f"convert {model} --out {tmp_path / 'out.gguf'} --format gguf",
    }[command]
    assert main(line.split()) == 1
    assert "needs at least 0.0 GiB, and its disk has 0.0 GiB free" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_places_that_can_be_written_are_left_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("content")
    for path in (tmp_path, tmp_path / "there", tmp_path / "new" / "deep"):
        check_writable(path)
    assert (tmp_path / "there").read_text() == "content"
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_calibrate_says_that_the_reference_is_quantized_already(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--samples 4 --seq-len 16 --generated-samples 0"
    assert main(f"calibrate {model} --out {tmp_path / 'once'} {options}".split()) == 0
    assert "quantized already" not in capsys.readouterr().err
    assert main(f"calibrate {tmp_path / 'once'} --out {tmp_path / 'twice'} {options}".split()) == 0
    assert capsys.readouterr().err.count("once is quantized already. The reference in high precision") == 1
    assert "is quantized already" in (tmp_path / "twice" / "report.html").read_text()
    assert "is quantized already" in (tmp_path / "twice" / "calibration.json").read_text()
