"""Reads the language model inside a multimodal checkpoint: its part of config.json and its tensors.

fp8serve serves only text. It does not load the image modules (`Checkpoint.omitted_modules` names them), and it writes
only the language model, under the language model's own class.

Tensor names have two spellings: `language_model.model.layers.0...` (transformers 4) and
`model.language_model.layers.0...` (transformers 5). Whether embeddings and head are tied follows from the tensors,
because multimodal configs and their `text_config` contradict each other about it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8serve.errors import ModelError, shown
from fp8serve.model.config.encoder import is_encoder
from fp8serve.model.config.families import FAMILIES
from fp8serve.model.config.modules_json import lacks_head
from fp8serve.model.storage.files import read_json

if TYPE_CHECKING:
    from fp8serve.model.storage.shards import Shards

# The class of each multimodal model_type, and the model_types of its language model; the first is the default.
WRAPPERS = {
    "mistral3": ("Mistral3ForConditionalGeneration", ("mistral", "ministral3")),
    "gemma3": ("Gemma3ForConditionalGeneration", ("gemma3_text",)),
}
_IMAGE_MODULES = ("vision_tower", "multi_modal_projector")
_TEXT_PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.",
                  "language_model.lm_head.": "lm_head."}  # fmt: skip
_INHERITED_KEYS = ("dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")


def read_text_config(model_dir: Path) -> dict[str, Any]:
    """Returns config.json of the language model in `model_dir`, as if that model were published alone.

    The missing head of an embedding model counts as tied to the embedding. Raises ModelError if config.json cannot be
    read, or if a multimodal config has no supported `text_config`.
    """
    raw = read_json(model_dir / "config.json", ModelError)
    if not is_wrapper(raw):
        return raw | {"tie_word_embeddings": True} if not is_encoder(raw) and lacks_head(model_dir, raw) else raw
    from fp8serve.model.storage.shards import open_shards  # imported here because it imports safetensors

    text = extract_text_config(raw, str(model_dir / "config.json"))
    has_head = any(text_tensor_name(key) == "lm_head.weight" for key in open_shards(model_dir))
    return text | {"tie_word_embeddings": not has_head}


def is_wrapper(raw: Mapping[str, Any]) -> bool:
    """Returns whether config.json belongs to a multimodal model whose language model is supported."""
    return str(raw.get("model_type")) in WRAPPERS


def extract_text_config(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the config of the language model inside the multimodal config `raw`. Raises ModelError if it has none."""
    name, supported = WRAPPERS[raw["model_type"]]
    text = raw.get("text_config")
    if raw.get("architectures") not in (None, [name]) or not isinstance(text, Mapping):
        architectures = raw.get("architectures") if isinstance(text, Mapping) else text
        raise ModelError(f"{where} must be that of {name} with a text_config, but it has {shown(architectures)}.")
    model_type = text.get("model_type") or supported[0]
    if model_type not in supported:
        raise ModelError(
            f"{where}: the text_config of {name} is of the type {shown(model_type)}, which is not supported."
        )
    inherited = {key: raw[key] for key in _INHERITED_KEYS if raw.get(key) is not None and text.get(key) is None}
    return {**text, **inherited, "architectures": [FAMILIES[model_type].architecture], "model_type": model_type}


def text_tensor_name(key: str) -> str | None:
    """Returns the name of a multimodal model's tensor in the language model, or None for an image tensor."""
    for prefix, text_prefix in _TEXT_PREFIXES.items():
        if key.startswith(prefix):
            return text_prefix + key.removeprefix(prefix)
    return None if _module(key) in _IMAGE_MODULES else key


def text_shards(shards: "Shards", model_dir: Path) -> tuple["Shards", tuple[str, ...]]:
    """Returns the language model's tensors by their own names, and the names of the modules that are not loaded.
    `shards` are all tensors of the model in `model_dir`."""
    if not is_wrapper(read_json(model_dir / "config.json")):
        return shards, ()
    names = {key: name for key in shards if (name := text_tensor_name(key)) is not None}
    return shards.renamed(names), tuple(dict.fromkeys(_module(key) for key in shards if key not in names))


def _module(key: str) -> str:
    return key.removeprefix("model.").partition(".")[0]


def unused_part_notes(model_dir: Path, modules: Iterable[str]) -> tuple[str, ...]:
    """Returns a note for the user if only the language model is loaded, otherwise an empty tuple."""
    names = " and ".join(modules)
    return (f"Only the language model in {model_dir} is used; {names} are left out.",) if names else ()
