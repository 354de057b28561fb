"""Resolves the name of a model to a directory.

The name is a directory, a GGUF file, `smollm2` or a repository on the Hugging Face hub. A GGUF file is converted, a
repository is downloaded, and both results are cached. The weights of `smollm2` come from a Python package. With
HF_HUB_OFFLINE=1, huggingface_hub only finds models in its cache.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from fp8serve.errors import ModelError, suggestion
from fp8serve.terminal import remark

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_FILE_SUFFIXES = (".gguf", ".safetensors")  # names with these suffixes are files, not repositories
MAX_COMPARED_ENTRIES = 1000  # entries of a directory that are compared with a mistyped name
_DOWNLOADED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]  # no pickled weights and no code


def find_model(name: str) -> Path:
    """Returns the directory of a model, converting or downloading the model if needed. Raises ModelError if the model
    does not exist or cannot be fetched."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        return _convert(path)
    if name == "smollm2":
        from fp8serve.model.gguf import smollm2

        return smollm2(remark)
    if path.suffix in _FILE_SUFFIXES:
        raise ModelError(f"There is no {name}.{_suggestion(path)}")
    if not _HUB_NAME.fullmatch(name):
        raise ModelError(
            f"{name} is not a directory; give a model directory in Hugging Face format, a GGUF file, or a hub name "
            f"such as org/name.{_suggestion(path)}"
        )
    return _download(name)


def _suggestion(path: Path) -> str:
    """Returns the suggestion of a model with a similar name: smollm2, or a model in the parent directory of `path`."""
    with suppress(OSError):
        entries = list(islice(path.parent.iterdir(), MAX_COMPARED_ENTRIES))
        models = {str(entry) for entry in entries if entry.suffix in _FILE_SUFFIXES or (entry / "config.json").exists()}
        return suggestion(str(path), models | ({"smollm2"} if path.parent == Path() else set()))
    return ""


def resolve_draft(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns engine options whose `draft_model`, if set, is a directory. Raises ModelError like `find_model`."""
    name = options.get("draft_model")
    return dict(options) if name is None else {**options, "draft_model": str(find_model(str(name)))}


def find_checkpoint(name: str) -> Path:
    """Returns the directory of a model, or the path of a file of scales or tensors. Raises ModelError like
    `find_model`."""
    from fp8serve.model.gguf.reader import is_gguf
    from fp8serve.model.storage.opening import real_path

    path = Path(name).expanduser()
    return real_path(path) if path.is_file() and not is_gguf(path) else find_model(name)


def _convert(path: Path) -> Path:
    from fp8serve.model.gguf import convert_cached
    from fp8serve.model.gguf.reader import is_gguf

    if not is_gguf(path):
        raise ModelError(
            f"{path} is a file and no GGUF; give the directory that holds config.json and the safetensors files."
        )
    return convert_cached(path, remark)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_DOWNLOADED_FILES))
    except Exception as error:  # huggingface_hub raises exceptions of a dozen classes, some from other libraries
        reason = str(error).strip().split("\n")[0].rstrip(".")
        message = f"{name} is not a directory, and it could not be downloaded from the hub ({reason})."
        raise ModelError(f"{message}{_suggestion(Path(name))}") from error
