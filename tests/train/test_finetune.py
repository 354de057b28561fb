"""`fp8serve.finetune`: data as files and as rows in memory, options, resuming, and refused calls."""

from pathlib import Path
from typing import Any

import pytest

import fp8serve
from fp8serve.errors import DataError, JobError, ModelError, RecipeError
from tests.model.oracle import make_model
from tests.train.conftest import TEXTS, write_lines

ROWS = [{"prompt": text[:40], "completion": text[40:80]} for text in TEXTS[:8]]
SMALL: dict[str, Any] = {"batch_size": 4, "seq_len": 64, "max_steps": 2, "lr": 1e-3}


def model_bytes(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def test_rows_in_memory_train_the_same_bytes_as_a_file(model_dir: Path, tmp_path: Path) -> None:
    result = fp8serve.finetune(model_dir, data=ROWS, out=tmp_path / "rows", **SMALL)
    assert (result.status, result.step, result.model) == ("succeeded", 2, str(tmp_path / "rows" / "model"))
    fp8serve.finetune(str(model_dir), data=write_lines(tmp_path / "file.jsonl", ROWS), out=tmp_path / "file", **SMALL)
    assert model_bytes(tmp_path / "rows") == model_bytes(tmp_path / "file")
    answer = fp8serve.Engine(tmp_path / "rows" / "model").generate(["red green"], max_new_tokens=4)[0]
    assert len(answer.token_ids) <= 4


def test_a_stopped_run_is_resumed_by_the_same_call(model_dir: Path, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    whole = fp8serve.finetune(model_dir, data=ROWS, out=tmp_path / "whole", eval_data=ROWS[:2], **SMALL)

    def after_one() -> bool:
        return any(event["type"] == "metrics" for event in events)

    def run(**more: Any) -> str:
        call = {"data": ROWS, "out": tmp_path / "cut", "eval_data": ROWS[:2], "on_event": events.append}
        return fp8serve.finetune(model_dir, **call, **SMALL, **more).status

    assert run(stop=after_one) == "stopped"
    assert run() == "succeeded"
    assert whole.metrics["valid_loss"] > 0
    assert model_bytes(tmp_path / "cut") == model_bytes(tmp_path / "whole")


def test_resuming_with_other_rows_is_refused(model_dir: Path, tmp_path: Path) -> None:
    fp8serve.finetune(model_dir, data=ROWS, out=tmp_path / "out", **SMALL)
    with pytest.raises(JobError, match="data"):
        fp8serve.finetune(model_dir, data=ROWS[1:], out=tmp_path / "out", **SMALL | {"max_steps": 4})


def test_invalid_data_and_options_are_refused(model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match="not a mixture of both"):
        fp8serve.finetune(model_dir, data=["a.jsonl", ROWS[0]], out=out, **SMALL)
    with pytest.raises(DataError, match="Row 2 cannot be written as JSON"):
        fp8serve.finetune(model_dir, data=[ROWS[0], {"prompt": {1}}], out=out, **SMALL)
    with pytest.raises(JobError, match="learning_rate"):
        fp8serve.finetune(model_dir, data=ROWS, out=out, learning_rate=1e-3)
    with pytest.raises(JobError):
        fp8serve.finetune(model_dir, data=[], out=out)
    with pytest.raises(DataError, match=":1"):
        fp8serve.finetune(model_dir, data=[{"question": "?"}], out=out, **SMALL)


def test_a_refused_call_does_not_overwrite_the_stored_rows(model_dir: Path, tmp_path: Path) -> None:
    fp8serve.finetune(model_dir, data=ROWS, out=tmp_path / "out", **SMALL)
    stored = (tmp_path / "out" / "data.jsonl").read_bytes()
    with pytest.raises(JobError):
        fp8serve.finetune(model_dir, data=ROWS[1:], out=tmp_path / "out", learning_rate=1)
    assert (tmp_path / "out" / "data.jsonl").read_bytes() == stored


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recipe": "mxfp8", "format": "fp8"}, ModelError, "The format 'fp8' cannot express the recipe 'mxfp8'"),
        (
            {"recipe": "delayed", "recipe_options": {"weight_granularity": "row"}, "format": "fp8"},
            ModelError,
            "The format 'fp8' has no scale per output channel",
        ),
        ({"recipe": "nvfp4", "format": "fp8"}, ModelError, "The format 'fp8' cannot express the recipe 'nvfp4'"),
        (
            {"recipe": "nvfp4", "format": "modelopt"},
            ModelError,
            "The format 'modelopt' needs a scale for every input in NVFP4, which calibration measures",
        ),
        (
            {"recipe": "mxfp8"},
            RecipeError,
            "^model.layers.0.mlp.down_proj in MXFP8 needs a multiple of 32",
        ),
    ],
)
def test_a_call_that_is_refused_for_its_format_writes_nothing(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    make_model("llama", tmp_path / "base", overrides={"hidden_size": 64, "intermediate_size": 144})
    with pytest.raises(error, match=message):
        fp8serve.finetune(tmp_path / "base", data=ROWS, out=tmp_path / "out", **SMALL | options)
    assert not (tmp_path / "out").exists()
