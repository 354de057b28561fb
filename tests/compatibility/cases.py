"""A tiny random model of every supported architecture, written by transformers' own class.

Every family of `families.py` needs an entry in KINDS; its tests fail without one.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8serve.model.config.families import FAMILIES
from fp8serve.model.config.wrappers import WRAPPERS
from tests.model import test_wrappers
from tests.model.oracle import SIZES, class_of, make_model, make_random
from tests.model.published import CONFIGS

# model_type -> the entry of `oracle.MODELS` with most of the family's features.
KINDS = {
    "llama": "llama", "mistral": "mistral-window", "qwen2": "qwen2-window", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3_text": "gemma3-stretched", "granite": "granite", "smollm3": "smollm3", "phi3": "phi3-long",
    "olmo2": "olmo2", "olmo3": "olmo3-stretched", "glm": "glm", "glm4": "glm4", "ministral3": "ministral3",
    "cohere": "cohere-qk-norm", "cohere2": "cohere2", "stablelm": "stablelm", "mixtral": "mixtral",
    "qwen2_moe": "qwen2-moe", "qwen3_moe": "qwen3-moe-sparse", "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek-v2", "deepseek_v3": "deepseek-v3", "dots1": "dots1", "glm4_moe": "glm4-moe",
    "phimoe": "phimoe", "apertus": "apertus",
}  # fmt: skip
MIXTURE = {"num_experts_per_tok": 2, "pad_token_id": 2}
OLD_SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 96}
# Architectures that transformers' own class computes: model_type -> (class prefix, config options, a published model).
BY_TRANSFORMERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt_neox": (
        "GPTNeoX",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        "EleutherAI/pythia-160m",
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}, "bigcode/starcoder2-3b"),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 2}, "facebook/opt-125m"),
    "phi": ("Phi", {"qk_layernorm": True}, "microsoft/phi-2"),
    "nemotron": ("Nemotron", {"head_dim": 16}, "nvidia/Minitron-4B-Base"),
    "exaone4": (
        "Exaone4",
        {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 4},
        "LGAI-EXAONE/EXAONE-4.0-1.2B",
    ),
    "seed_oss": ("SeedOss", {"head_dim": 32, "attention_bias": True}, "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    "gpt_bigcode": ("GPTBigCode", OLD_SIZES, "bigcode/gpt_bigcode-santacoder"),
    "gpt2": ("GPT2", OLD_SIZES, "openai-community/gpt2"),
    "olmoe": ("Olmoe", MIXTURE | {"num_experts": 5, "num_experts_per_tok": 5}, "allenai/OLMoE-1B-7B-0924"),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        MIXTURE | {"moe_num_experts": 7, "moe_intermediate_size": 48, "moe_k": 2, "moe_layer_start_index": 1},
        "baidu/ERNIE-4.5-21B-A3B-PT",
    ),
    "helium": ("Helium", {"head_dim": 16}, "kyutai/helium-1-2b"),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}, "baidu/ERNIE-4.5-0.3B-PT"),
}
# model_type of a wrapper -> model_type of its language model.
TEXTS = {"mistral3": "ministral3", "gemma3": "gemma3_text"}
PUBLISHED = {"mistral3": "mistralai/Mistral-Small-3.1-24B-Instruct-2503", "gemma3": "google/gemma-3-4b-it"}
# transformers reads only stacked experts of these families; our files have one tensor for each expert.
NOT_READ_BY_TRANSFORMERS = {"gpt_oss"}
NAMES = [*FAMILIES, *WRAPPERS, *BY_TRANSFORMERS]
Make = Callable[..., Any]  # (directory, **options of save_pretrained) -> transformers' model


def make(name: str, out: Path, **save: Any) -> Any:
    """Writes the model to `out` in BF16; returns transformers' model."""
    if name in WRAPPERS:
        return test_wrappers.make(TEXTS[name], out, **save)
    if name in BY_TRANSFORMERS:
        family, options, _ = BY_TRANSFORMERS[name]
        return make_random(family, SIZES | options, out, **save)
    return make_model(KINDS[name], out, **save)


def repository(name: str) -> str:
    """Returns the repository of a published model of this architecture."""
    if name in BY_TRANSFORMERS:
        return BY_TRANSFORMERS[name][2]
    return PUBLISHED.get(name) or next(repository for repository, raw in CONFIGS.items() if raw["model_type"] == name)


def architecture(name: str) -> str:
    """Returns the name of transformers' class."""
    if name in BY_TRANSFORMERS:
        return str(class_of(BY_TRANSFORMERS[name][0]).__name__)
    return WRAPPERS[name][0] if name in WRAPPERS else FAMILIES[name].architecture
