"""`fp8serve.finetune`: a fine-tune as one call, on files or on rows in memory."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8serve.errors import DataError
from fp8serve.model.storage.files import whole_file
from fp8serve.model.text.chat_rows import foreign_value
from fp8serve.train.config import TrainConfig
from fp8serve.train.events import OnEvent
from fp8serve.train.trainer import Trainer, TrainResult

Data = str | Path | Sequence[str | Path | Mapping[str, Any]]
"""A file, several files, or rows: dicts such as `{"prompt": ..., "completion": ...}` or `{"messages": [...]}`."""


def finetune(
    model_dir: Path | str,
    *,
    data: Data,
    out: Path | str,
    eval_data: Data = (),
    on_event: OnEvent = lambda event: None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> TrainResult:
    """Fine-tune the Hugging Face directory `model_dir` in FP8; the servable result is `out/model`.

    The model may be in high precision or in FP8; training starts from the scales of an FP8 directory. `data`, and
    `eval_data` for validation, are files or rows (docs/data.md); rows are kept in `out`, as JSON lines. options: the
    other fields of `TrainConfig`, as in `finetune(model, data=rows, out="run", recipe="rowwise", lora_rank=8)`.
    The same call again continues from the newest checkpoint in `out`.

    on_event(event) is called for every event, a dict with `type` and `message`: losses, checkpoints, warnings.
    stop() is called between steps; True ends the run after a checkpoint, with the status "stopped".
    Returns the last metrics, the newest checkpoint and the model's directory. ModelError, DataError, RecipeError and
    ScalesError: an input cannot be used. JobError: an option cannot be used, or the run diverged.
    """
    out, rows = Path(out), dict[Path, Sequence[Any]]()
    arguments = {
        name: _files(of, out / f"{name}.jsonl", rows) for name, of in (("data", data), ("eval_data", eval_data))
    }
    config = TrainConfig.from_dict({"model": str(model_dir), "out": str(out), **arguments, **options})
    for path, some in rows.items():  # not before the options are checked
        _write(some, path)
    return Trainer(config).run(on_event, stop)


def _files(data: Data, path: Path, rows: dict[Path, Sequence[Any]]) -> list[str]:
    """The paths that `data` gives; for rows it is `path`, and they are noted in `rows`."""
    if isinstance(data, str | Path):
        return [str(data)]
    items = list(data)
    if all(isinstance(item, str | Path) for item in items):
        return [str(item) for item in items]
    if not all(isinstance(item, Mapping) for item in items):
        raise DataError("Data are files or rows (dicts), not some of each.")
    rows[path] = items
    return [str(path)]


def _write(rows: Iterable[Any], path: Path) -> None:
    """Writes rows whole or not at all. DataError names a row that is not JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as new, new.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, 1):
            try:
                file.write(json.dumps(dict(row), ensure_ascii=False) + "\n")
            except (TypeError, ValueError, RecursionError):
                value = foreign_value(dict(row)) or "a list or an object that contains itself"
                raise DataError(f"Row {number} cannot be written as JSON: it holds {value}.") from None
