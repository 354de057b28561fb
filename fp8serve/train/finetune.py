"""`fp8serve.finetune`: fine-tunes a model on files or on rows in memory."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8serve.errors import DataError
from fp8serve.model.device import resolve_device
from fp8serve.model.storage.files import atomic_file
from fp8serve.model.text.chat_rows import non_json_value
from fp8serve.options import AUTO
from fp8serve.train.config import TrainConfig
from fp8serve.train.events import OnEvent, ignore
from fp8serve.train.trainer import Trainer, TrainResult

Data = str | Path | Sequence[str | Path | Mapping[str, Any]]
"""A file, several files, or rows: dicts such as `{"prompt": ..., "completion": ...}` or `{"messages": [...]}`."""


def finetune(
    model_dir: Path | str,
    *,
    data: Data,
    out: Path | str,
    eval_data: Data = (),
    on_event: OnEvent = ignore,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> TrainResult:
    """Fine-tunes the Hugging Face model in `model_dir` in FP8, and writes the servable result to `out/model`.

    The same call again resumes from the newest checkpoint in `out`.

    Args:
        model_dir: A model in high precision or in FP8. Training starts from the scales of an FP8 model.
        data: Files or rows to train on (docs/data.md). Rows are written into `out` as JSON lines.
        out: The output directory.
        eval_data: Files or rows for validation.
        on_event: A function that receives every event, a dict with `type` and `message`: losses, checkpoints, warnings.
        stop: A function that is called between steps. If it returns True, the run ends after a checkpoint, with the
            status "stopped".
        options: The other fields of `TrainConfig`, such as `recipe="rowwise"` or `lora_rank=8`. The device is a GPU if
            there is one that fits the model, unless `device` says otherwise.

    Returns the last metrics, the newest checkpoint and the model's directory. Raises ModelError, DataError, RecipeError
    or ScalesError for an invalid input, and JobError for an invalid option or a run that diverged.
    """
    out = Path(out)
    data_files, data_rows = _files_and_rows(data, out / "data.jsonl")
    eval_files, eval_rows = _files_and_rows(eval_data, out / "eval_data.jsonl")
    options["device"] = resolve_device(options.get("device", AUTO), Path(model_dir))
    config = TrainConfig.from_dict(
        {"model": str(model_dir), "out": str(out), "data": data_files, "eval_data": eval_files, **options}
    )
    trainer = Trainer(config)
    trainer.check()
    for rows, files in ((data_rows, data_files), (eval_rows, eval_files)):
        if rows:
            _write_rows(rows, Path(files[0]))
    return trainer.run(on_event, stop)


def _files_and_rows(data: Data, path: Path) -> tuple[list[str], Sequence[Any]]:
    """Returns the files of `data` and no rows, or `path` and the rows of `data`, which must be written there."""
    if isinstance(data, str | Path):
        return [str(data)], ()
    items = list(data)
    if all(isinstance(item, str | Path) for item in items):
        return [str(item) for item in items], ()
    if not all(isinstance(item, Mapping) for item in items):
        raise DataError("Data are files or rows (dicts), not a mixture of both.")
    return [str(path)], items


def _write_rows(rows: Iterable[Any], path: Path) -> None:
    """Writes rows to a file atomically. Raises DataError that names a row that is not JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as new, new.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, 1):
            try:
                file.write(json.dumps(dict(row), ensure_ascii=False) + "\n")
            except (TypeError, ValueError, RecursionError):
                value = non_json_value(dict(row)) or "a list or an object that contains itself"
                raise DataError(f"Row {number} cannot be written as JSON: it contains {value}.") from None
