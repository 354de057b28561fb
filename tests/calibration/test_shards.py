"""`max_shard_size`: weights are written to several files with the same contents, which every command reads."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fp8serve.cli import app
from fp8serve.model.checkpoint import open_checkpoint

OPTIONS = ["--samples", "4", "--seq-len", "24", "--batch-size", "2"]


@pytest.fixture(scope="module")
def sharded(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sharded") / "out"
    called("calibrate", str(model_dir), "--out", str(out), "--max-shard-size", "64kB", *OPTIONS)
    return out


def called(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_files_stay_within_the_size_and_have_the_same_contents(sharded: Path, model_dir: Path, tmp_path: Path) -> None:
    files = sorted(sharded.glob("model-*.safetensors"))
    assert len(files) > 3
    largest = 512 * 64 * 2  # the embedding is larger than the limit and gets its own file
    assert all(file.stat().st_size < largest + 4096 for file in files)
    called("calibrate", str(model_dir), "--out", str(tmp_path / "one"), *OPTIONS)
    one, many = open_checkpoint(tmp_path / "one"), open_checkpoint(sharded)
    assert set(one) == set(many)
    assert all(torch.equal(one[name].float(), many[name].float()) for name in one)


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "{}"],
        ["eval", "{}", *OPTIONS],
        ["generate", "{}", "Once", "--max-new-tokens", "2"],
    ],
    ids=lambda command: command[0],
)
def test_commands_read_sharded_models(command: list[str], sharded: Path) -> None:
    assert called(*[part.format(sharded) for part in command])


def test_fine_tuning_starts_from_a_sharded_model(sharded: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "What is a scale?", "completion": "A multiplier."}\n' * 4)
    called(
        "finetune",
        str(sharded),
        "--data",
        str(data),
        "--out",
        str(tmp_path / "tuned"),
        "--epochs",
        "1",
        "--seq-len",
        "64",
    )
    assert list((tmp_path / "tuned").rglob("model*.safetensors"))
