"""The small files of a model directory, kept in memory so that every checkpoint can be a model directory of its own.

They are read once, at the start: the base model may be moved or removed while a long job runs.
"""

from collections.abc import Callable
from pathlib import Path

from fp8serve.model.files import read_json, regular_file, write_json

# Tokenizer, chat template and generation defaults under the names that Hugging Face libraries write.
_NAMES = ("generation_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt")
_PREFIXES = ("tokenizer", "chat_template", "LICENSE")


def carried_files(source: Path) -> Callable[[Path], None]:
    """A function that writes the files of `source` into a directory; config.json loses its `quantization_config`."""
    config = {k: v for k, v in read_json(source / "config.json").items() if k != "quantization_config"}
    contents = {p.name: p.read_bytes() for p in sorted(source.iterdir()) if _carried(p)}

    def write(directory: Path) -> None:
        write_json(directory / "config.json", config)
        for name, content in contents.items():
            (directory / name).write_bytes(content)

    return write


def _carried(path: Path) -> bool:
    return (path.name in _NAMES or path.name.startswith(_PREFIXES)) and regular_file(path)
