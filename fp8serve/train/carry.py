"""The small files of a model directory, kept in memory so that every checkpoint can be a model directory of its own.

They are read once, at the start: the base model may be moved or removed while a long job runs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8serve.model.config.wrappers import read_text_config
from fp8serve.model.export import CARRIED
from fp8serve.model.storage.files import MAX_CARRIED_BYTES, read_file, write_json
from fp8serve.model.storage.opening import regular_file


def carried_files(source: Path) -> Callable[[Path], None]:
    """A function that writes the files of `source` into a directory; config.json as `training_config` makes it."""
    contents = {n: read_file(source / n, MAX_CARRIED_BYTES) for n in CARRIED if regular_file(source / n)}
    config = training_config(read_text_config(source))

    def write(directory: Path) -> None:
        write_json(directory / "config.json", config)
        for name, content in contents.items():
            (directory / name).write_bytes(content)

    return write


def training_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of the model in training: not quantized, and BF16, which is what activations are computed in."""
    named = "torch_dtype" if "torch_dtype" in config else "dtype"
    kept = {k: v for k, v in config.items() if k not in ("quantization_config", "dtype", "torch_dtype")}
    return {**kept, named: "bfloat16"}
