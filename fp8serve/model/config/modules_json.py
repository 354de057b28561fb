"""Reads `modules.json` of sentence-transformers, the list of modules that process a text. Does not import torch."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8serve.errors import ModelError, shown
from fp8serve.model.storage.files import MAX_COPIED_FILE_BYTES, present, read_text, reject_duplicate_keys

FILE_NAME = "modules.json"
LOGIT_SCORE = "LogitScore"


def read_modules(model_dir: Path | str) -> dict[str, str]:
    """Returns the folder of each module by its class name, in the file's order; empty if there is no such file.

    Raises ModelError if the file is damaged or lists two modules of one class.
    """
    path = Path(model_dir) / FILE_NAME
    if not present(path):
        return {}
    try:
        rows = json.loads(read_text(path, MAX_COPIED_FILE_BYTES), object_pairs_hook=reject_duplicate_keys)
        paths = {str(row["type"]).rpartition(".")[2]: str(row["path"]) for row in rows}
    except (ValueError, RecursionError, KeyError, TypeError):
        raise ModelError(f"{path} is not a list of modules with a type and a path.") from None
    if len(paths) < len(rows):
        raise ModelError(f"{path} lists two modules of one type among {', '.join(paths)}, which is not supported.")
    return paths


def check_module_folder(folder: str, module: str, model_dir: Path) -> str:
    """Returns `folder`. Raises ModelError unless it has the usual name of the module's folder, such as 1_Pooling."""
    if not re.fullmatch(rf"[0-9]{{1,2}}_{module}", folder):
        raise ModelError(f"{model_dir / FILE_NAME} names the folder {shown(folder)} for {module}, not N_{module}.")
    return folder


def has_pooling(model_dir: Path | str) -> bool:
    """Returns whether the directory contains an embedding model."""
    return "Pooling" in read_modules(model_dir)


def lacks_head(model_dir: Path, raw: Mapping[str, Any]) -> bool:
    """Returns whether the decoder with the config.json `raw` is an embedding model without an `lm_head`."""
    if raw.get("tie_word_embeddings") or not has_pooling(model_dir):
        return False
    from fp8serve.model.storage.shards import open_shards  # imported here because it imports safetensors

    return "lm_head.weight" not in open_shards(model_dir)
