"""`modules.json`, which sentence-transformers writes beside a model: the modules that a text goes through. No torch
here."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8serve.errors import ModelError, shown
from fp8serve.model.storage.files import MAX_CARRIED_BYTES, no_duplicates, present, read_text

FILE_NAME = "modules.json"
LOGIT_SCORE = "LogitScore"


def modules_of(model_dir: Path | str) -> dict[str, str]:
    """The folder of each module, by the last word of its type, in their order; none where there is no such file.

    ModelError: the file is damaged, or has two modules of a type.
    """
    path = Path(model_dir) / FILE_NAME
    if not present(path):
        return {}
    try:
        rows = json.loads(read_text(path, MAX_CARRIED_BYTES), object_pairs_hook=no_duplicates)
        paths = {str(row["type"]).rpartition(".")[2]: str(row["path"]) for row in rows}
    except (ValueError, RecursionError, KeyError, TypeError):
        raise ModelError(f"{path} is not a list of modules with a type and a path.") from None
    if len(paths) < len(rows):
        raise ModelError(f"{path} lists two modules of one type among {', '.join(paths)}, which is not supported.")
    return paths


def one_folder(folder: str, module: str, model_dir: Path) -> str:
    """The folder of a module's configuration, in the directory. ModelError: it has an unusual name."""
    if not re.fullmatch(rf"[0-9]{{1,2}}_{module}", folder):
        raise ModelError(f"{model_dir / FILE_NAME} names the folder {shown(folder)} for {module}, not N_{module}.")
    return folder


def has_pooling(model_dir: Path | str) -> bool:
    """Whether the directory is that of an embedding model."""
    return "Pooling" in modules_of(model_dir)


def lacks_head(model_dir: Path, raw: Mapping[str, Any]) -> bool:
    """Whether a decoder with the config.json `raw` was published as an embedding model, without the matrix of its
    logits."""
    if raw.get("tie_word_embeddings") or not has_pooling(model_dir):
        return False
    from fp8serve.model.storage.shards import open_shards  # here: a configuration is read without safetensors

    return "lm_head.weight" not in open_shards(model_dir)
