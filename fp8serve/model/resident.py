"""The memory that the weights of a directory take once they are served, from headers and config.json, without torch.

An FP8 recipe stores each element of a linear's weight in one byte, with a scale for each row. Embeddings, norms,
routers, and the matrix of latent attention that is applied head by head are served in BF16, whatever the file holds.
Linears are recognised by names and shapes, because the network that knows them needs torch. Parts of the file that do
not belong to the language model are not loaded, and not counted.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8serve.errors import ModelError
from fp8serve.fp8.recipe import HeadDtype, from_json
from fp8serve.model.config.decoder import read_any_config
from fp8serve.model.config.model_config import AnyConfig, ModelConfig
from fp8serve.model.config.wrappers import is_wrapper, text_key
from fp8serve.model.storage.files import present, read_json
from fp8serve.model.storage.headers import header_json
from fp8serve.model.storage.memory import RETAINED

HEAD = "lm_head.weight"
SCALES = "scales.safetensors"
BF16, FP32 = 2, 4  # bytes
_IN_FP8 = ("F8_E4M3", "F8_E5M2")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NO_LINEAR = re.compile(r"embed|wpe|wte|router|\.gate\.|shared_expert_gate|kv_b_proj|bias|norm")
_BLOCKS = re.compile(r"[._](blocks|weight_packed)$")  # two elements of four bits a byte, see formats/microscaling.py
_SCALE = re.compile(r"scale")


@dataclass(frozen=True)
class Resident:
    """Bytes of weights: `held` while they are served, `peak` while they are loaded and packed."""

    held: int
    peak: int


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a file; elements: their number once it is widened."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * (2 if _BLOCKS.search(self.name) else 1)


def resident(model_dir: Path, recipe: str, head: HeadDtype = "bf16", scales: str | None = None) -> Resident:
    """See the module. recipe, head, scales: as in `EngineOptions`. ModelError: a damaged header or config."""
    config = read_any_config(model_dir)
    casts = _casts(model_dir, recipe, scales)
    tensors = list(_tensors(model_dir, config))
    # weights in MX blocks, whose scales are exponents, are widened to BF16
    has_exponents = any(_SCALE.search(tensor.name) and tensor.dtype in ("U8", "F8_E8M0") for tensor in tensors)
    as_stored = recipe == "stored" and not casts and not has_exponents
    held = cast = 0
    for tensor in tensors:
        if head == "fp8" and tensor.name == HEAD:  # freed once it is cast
            continue
        if _SCALE.search(tensor.name):
            held += FP32 * tensor.elements if as_stored else 0
        elif _is_linear(tensor, config) and casts:
            cast += tensor.elements + FP32 * tensor.elements // tensor.shape[-1]
        else:
            in_fp8 = as_stored and tensor.dtype in _IN_FP8
            held += tensor.elements * (1 if in_fp8 else BF16)
    if head == "fp8" and isinstance(config, ModelConfig):  # FP8 elements, and an FP32 scale for each row
        held += config.vocab_size * (config.hidden_size + FP32)
    held += cast
    # a weight that was cast lies beside its packed copy until malloc returns what is free
    return Resident(held, held + min(cast, RETAINED))


def _casts(model_dir: Path, recipe: str, scales: str | None) -> bool:
    """Whether every linear is cast to FP8, by its content or by calibrated scales, rather than read as it is stored."""
    if recipe.lstrip().startswith("{"):
        parsed = from_json(recipe)
        return parsed is not None and not parsed.override_linear_precision[0]
    if recipe == "stored":
        return scales is not None or present(model_dir / SCALES)
    return recipe != "bf16"


def _tensors(model_dir: Path, config: AnyConfig) -> Iterator[_Tensor]:
    """The model's tensors, as the files have them."""
    wrapped = is_wrapper(read_json(model_dir / "config.json", ModelError))
    for path in _files(model_dir):
        for stored, entry in header_json(path).tensors.items():
            name = text_key(stored) if wrapped else stored
            if name is not None and stored != "__metadata__" and not _is_left_out(name, config):
                yield _Tensor(name, _shape(path, stored, entry), str(entry.get("dtype")))


def _files(model_dir: Path) -> list[Path]:
    """The weights' files. Loading (storage/shards.py) decides which of them are read, and reports what is wrong."""
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if present(single) or not present(index):
        return [single] if single.is_file() else []
    weight_map = read_json(index, ModelError).get("weight_map")
    names = {Path(str(name)).name for name in weight_map.values()} if isinstance(weight_map, dict) else set()
    return [path for name in sorted(names) if (path := model_dir / name).is_file()]


def _shape(path: Path, name: str, entry: Any) -> tuple[int, ...]:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ModelError(f"{path}: tensor {name[:80]} has no shape.")
    return tuple(shape)


def _is_left_out(name: str, config: AnyConfig) -> bool:
    """Whether it belongs to a layer that predicts further tokens, or is a head that the embedding replaces."""
    if not isinstance(config, ModelConfig):
        return False
    layer = _LAYER.match(name)
    beyond = layer is not None and int(layer[1]) >= config.num_layers
    return beyond or (config.tie_word_embeddings and name == HEAD)


def _is_linear(tensor: _Tensor, config: AnyConfig) -> bool:
    """Whether a recipe makes it FP8."""
    is_matrix = len(tensor.shape) > 1 and min(tensor.shape) > 1
    return is_matrix and config.vocab_size not in tensor.shape and _NO_LINEAR.search(tensor.name) is None
