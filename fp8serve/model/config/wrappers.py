"""Language models that are published inside a multimodal one: the text's part of config.json and of the tensors.

Only text is served. The parts for images are named (`Checkpoint.left_out`) and left out, and only the language model is
written, under its own class. The wrapper's keys about images are not read.

The keys of tensors have two spellings, transformers 4's (`language_model.model.layers.0...`) and 5's
(`model.language_model.layers.0...`). The tensors decide whether embeddings and head are tied, because wrappers and
their text_config contradict each other about it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8serve.errors import Fp8ServeError, ModelError, shown
from fp8serve.model.config.encoder import is_encoder
from fp8serve.model.config.families import FAMILIES
from fp8serve.model.config.sentence import lacks_head
from fp8serve.model.storage.files import read_json

if TYPE_CHECKING:
    from fp8serve.model.storage.shards import Shards

# By the wrapper's model_type: its class, and the language models that it may hold, the usual one first.
WRAPPERS = {
    "mistral3": ("Mistral3ForConditionalGeneration", ("mistral", "ministral3")),
    "gemma3": ("Gemma3ForConditionalGeneration", ("gemma3_text",)),
}
_PARTS = ("vision_tower", "multi_modal_projector")
_RENAMED = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}
_OF_BOTH = ("dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")


def read_text_config(model_dir: Path, error: type[Fp8ServeError] = ModelError) -> dict[str, Any]:
    """config.json of the language model in `model_dir`, as it would be published alone.

    If an embedding model was published without a head, its head counts as tied to the embedding; no logits are
    computed. `error` as for `read_json`; ModelError: a wrapper's text_config is missing or of a model that it cannot
    hold.
    """
    raw = read_json(model_dir / "config.json", error)
    if not is_wrapper(raw):
        return raw | {"tie_word_embeddings": True} if not is_encoder(raw) and lacks_head(model_dir, raw) else raw
    from fp8serve.model.storage.shards import open_shards  # here: a configuration is read without safetensors

    text = text_part(raw, str(model_dir / "config.json"))
    has_head = any(text_key(key) == "lm_head.weight" for key in open_shards(model_dir))
    return text | {"tie_word_embeddings": not has_head}


def is_wrapper(raw: Mapping[str, Any]) -> bool:
    """Whether this config.json belongs to a multimodal model with a language model that is served."""
    return str(raw.get("model_type")) in WRAPPERS


def text_part(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The language model's configuration, of the wrapper's."""
    name, (usual, *others) = WRAPPERS[raw["model_type"]]
    text = raw.get("text_config")
    if raw.get("architectures") not in (None, [name]) or not isinstance(text, Mapping):
        architectures = raw.get("architectures") if isinstance(text, Mapping) else text
        raise ModelError(f"{where} is not that of {name} with a text_config; it says {shown(architectures)}.")
    kind = text.get("model_type") or usual
    if kind not in (usual, *others):
        raise ModelError(f"{where}: the text_config of {name} is of the type {shown(kind)}, which is not supported.")
    own = {"architectures": [FAMILIES[kind].architecture], "model_type": kind}
    of_both = {key: raw[key] for key in _OF_BOTH if raw.get(key) is not None and text.get(key) is None}
    return dict(text) | of_both | own


def text_key(key: str) -> str | None:
    """The name that a tensor of a wrapper has in the language model alone; None: it belongs to another part."""
    for theirs, ours in _RENAMED.items():
        if key.startswith(theirs):
            return ours + key.removeprefix(theirs)
    return None if _part(key) in _PARTS else key


def text_shards(model_dir: Path) -> tuple["Shards", tuple[str, ...]]:
    """(the tensors of the language model by its own names, the parts that are left out) of a model's directory."""
    from fp8serve.model.storage.shards import open_shards

    shards = open_shards(model_dir)
    if not is_wrapper(read_json(model_dir / "config.json")):
        return shards, ()
    names = {key: ours for key in shards if (ours := text_key(key)) is not None}
    return shards.renamed(names), tuple(dict.fromkeys(_part(key) for key in shards if key not in names))


def _part(key: str) -> str:
    return key.removeprefix("model.").partition(".")[0]


def left_out_notes(model_dir: Path, parts: Iterable[str]) -> tuple[str, ...]:
    """A sentence for the owner of a directory of which only the language model is served; empty where all of it is."""
    named = " and ".join(parts)
    return (f"Only the language model in {model_dir} is used; {named} are left out.",) if named else ()
