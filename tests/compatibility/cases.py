"""Every architecture that is served, as the tiny random model that transformers' own class writes of it.

A family without a row here fails its tests, so a new row of `families.py` comes with one.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8serve.model.families import FAMILIES
from fp8serve.model.wrappers import WRAPPERS
from tests.model import test_wrappers
from tests.model.oracle import make_model
from tests.model.published import CONFIGS

# By model_type, the kind of `oracle.MODELS` with most of what the family has of its own.
KINDS = {
    "llama": "llama", "mistral": "mistral-window", "qwen2": "qwen2-window", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3_text": "gemma3-stretched", "granite": "granite", "smollm3": "smollm3", "phi3": "phi3-long",
    "olmo2": "olmo2", "olmo3": "olmo3-stretched", "glm": "glm", "glm4": "glm4", "ministral3": "ministral3",
    "cohere": "cohere-qk-norm", "cohere2": "cohere2", "stablelm": "stablelm", "mixtral": "mixtral",
    "qwen2_moe": "qwen2-moe", "qwen3_moe": "qwen3-moe-sparse", "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek-v2", "deepseek_v3": "deepseek-v3",
}  # fmt: skip
# By the wrapper's model_type, the language model in it.
TEXTS = {"mistral3": "ministral3", "gemma3": "gemma3_text"}
PUBLISHED = {"mistral3": "mistralai/Mistral-Small-3.1-24B-Instruct-2503", "gemma3": "google/gemma-3-4b-it"}
# Their files hold experts stacked, and transformers reads no other; ours hold them one by one.
NOT_READ_BY_TRANSFORMERS = {"gpt_oss"}
NAMES = [*FAMILIES, *WRAPPERS]
Make = Callable[..., Any]  # (directory, **of save_pretrained) -> transformers' model, in the type that is asked for


def make(name: str, out: Path, **save: Any) -> Any:
    """Write the model to `out` in BF16 and return transformers' own."""
    if name in WRAPPERS:
        return test_wrappers.make(TEXTS[name], out, **save)
    return make_model(KINDS[name], out, **save)


def repository(name: str) -> str:
    """One that holds such a model."""
    return PUBLISHED.get(name) or next(repository for repository, raw in CONFIGS.items() if raw["model_type"] == name)


def architecture(name: str) -> str:
    """transformers' class."""
    return WRAPPERS[name][0] if name in WRAPPERS else FAMILIES[name].architecture
