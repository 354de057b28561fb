"""Finds the model of a name: a directory, a GGUF file that is converted once, SmolLM2 from a Python package, or a name
on the Hugging Face hub that is downloaded once.

A name on the hub is only tried when no such directory exists. HF_HUB_OFFLINE=1 is honoured by huggingface_hub itself:
then only models that were downloaded before are found.
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
_FILE_NAMES = (".gguf", ".safetensors")  # no model on the hub has this name
MAX_LISTED = 1000  # entries of a directory that are compared with a mistyped name
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]  # never pickled weights, never code


def find_model(name: str) -> Path:
    """The directory of a model. ModelError when there is none, and no way to get it."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        return _convert(path)
    if name == "smollm2":
        from fp8serve.model.gguf import smollm2

        return smollm2(remark)
    if path.suffix in _FILE_NAMES:
        raise ModelError(f"There is no {name}.{_similar(path)}")
    if not _HUB_NAME.fullmatch(name):
        raise ModelError(
            f"{name} is not a directory; give a model directory in Hugging Face format, a GGUF file, or a hub name "
            f"such as org/name.{_similar(path)}"
        )
    return _download(name)


def _similar(path: Path) -> str:
    """The question whether another model was meant: smollm2, or one that lies where `path` should lie."""
    with suppress(OSError):
        there = list(islice(path.parent.iterdir(), MAX_LISTED))
        models = {str(item) for item in there if item.suffix in _FILE_NAMES or (item / "config.json").exists()}
        return suggestion(str(path), models | ({"smollm2"} if path.parent == Path() else set()))
    return ""


def find_draft(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an engine with the directory of the draft model that they name. ModelError as `find_model`."""
    name = options.get("draft_model")
    return dict(options) if name is None else {**options, "draft_model": str(find_model(str(name)))}


def find_checkpoint(name: str) -> Path:
    """The directory of a model, or a file of scales or tensors by itself. ModelError as `find_model`."""
    from fp8serve.model.gguf.reader import is_gguf
    from fp8serve.model.storage.opening import real_path

    path = Path(name).expanduser()
    return real_path(path) if path.is_file() and not is_gguf(path) else find_model(name)


def _convert(path: Path) -> Path:
    from fp8serve.model.gguf import cached
    from fp8serve.model.gguf.reader import is_gguf

    if not is_gguf(path):
        raise ModelError(
            f"{path} is a file and no GGUF; give the directory that holds config.json and the safetensors files."
        )
    return cached(path, remark)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except (
        Exception
    ) as error:  # the hub library raises a dozen classes, some of them from requests; one sentence covers all
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ModelError(
            f"{name} is not a directory, and the hub did not give it ({reason}).{_similar(Path(name))}"
        ) from error
