"""The rule by which vLLM and SGLang find the weights of a directory, reimplemented here because the tests do not
install them.

benchmarks/peer_programs/vllm_loads.py runs vLLM's own code on a directory.

Both collect every `*.safetensors` of the directory and load every tensor in them into the model; a tensor that is no
parameter ends the load. Only where `model.safetensors.index.json` is there are files that it does not name left out
(vLLM's `filter_duplicate_safetensors_files`, written for `consolidated.safetensors`). They do not look at config.json.
"""

import json
from pathlib import Path

from safetensors import safe_open


def tensors_taken(folder: Path) -> list[str]:
    """Returns the names of all tensors that these readers would load, in order, with duplicates."""
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = set(json.loads(index.read_text())["weight_map"].values())
        files = [file for file in files if file.name in named]
    return sorted(name for file in files for name in _names(file))


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())
