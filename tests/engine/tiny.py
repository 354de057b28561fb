"""Tiny models with random weights and a byte-level tokenizer, written as Hugging Face directories."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from fp8serve.engine.engine import Engine
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.model.config.decoder import read_config
from fp8serve.model.formats.scales import ScalingCheckpoint, TensorScale, fingerprint, save_scales
from fp8serve.model.network.decoder import Decoder

VOCAB = 260  # 256 bytes, <s>, </s>, and two unused tokens
BOS, EOS = 256, 257
_GEMMA = {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 12}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], **_GEMMA},
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"], **_GEMMA, "sliding_window_pattern": 2},
    "granite": {"architectures": ["GraniteForCausalLM"], "embedding_multiplier": 6.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.2, "logits_scaling": 2.0},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"architectures": ["Qwen2MoeForCausalLM"], **_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], **_EXPERTS, "head_dim": 32, "norm_topk_prob": True},
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
                "head_dim": 32, "sliding_window": 12, "swiglu_limit": 1.0},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0], "pad_token_id": 0},
}  # fmt: skip


# Families whose layers have another structure. tests/compatibility compares their tokens with those of transformers.
OTHERS: dict[str, dict[str, Any]] = {
    "phi3": {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75, "sliding_window": 12},
    "olmo3": {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 12},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "head_dim": 32},
    "ministral3": {"architectures": ["Ministral3ForCausalLM"], "head_dim": 32},
    "cohere2": {"architectures": ["Cohere2ForCausalLM"], "sliding_window": 12},
    "stablelm": {"architectures": ["StableLmForCausalLM"], "use_qkv_bias": True},
}


def write_model(path: Path, model_type: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Writes config, BF16 weights and tokenizer to `path`, and returns it."""
    path.mkdir(parents=True, exist_ok=True)
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "torch_dtype": "bfloat16"}
    config = {"model_type": model_type, **sizes, **ids, **(ARCHITECTURES | OTHERS)[model_type], **overrides}
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    decoder = Decoder(read_config(path))
    weights = {
        name: (torch.randn(p.shape) * 0.15 + (p.dim() == 1)).bfloat16() for name, p in decoder.named_parameters()
    }
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """Writes a tokenizer in which every byte is a token, so that characters and stop strings span several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def call_each_layer(engine: Engine) -> None:
    """From now on the engine calls every FP8 layer as a module: no projections are joined, and no ops fused."""
    for layer in engine.loaded.frozen.values():
        layer.register_forward_hook(lambda *_: None)


def write_scales(path: Path, out: Path, *, kv: bool = False, shared: bool = True, scale: float = 20.0) -> Path:
    """Made-up scales for every linear of the model, and for its cache when `kv`. Unless `shared`, adjacent weights have
    different scales."""
    names = Decoder(read_config(path), device="meta").linear_names()
    keys = {f"{name}.{role}": scale for name in names for role in ("input", "weight")}
    if not shared:
        keys |= {f"{name}.weight": 16.0 + index % 7 for index, name in enumerate(names)}
    if kv:
        keys |= {f"model.layers.{i}.self_attn.{role}": 30.0 for i in range(2) for role in "kv"}
    tensors = {key: TensorScale(torch.tensor(scale)) for key, scale in keys.items()}
    save_scales(out, ScalingCheckpoint(DelayedScaling(), tensors, fingerprint(path)))
    return out
