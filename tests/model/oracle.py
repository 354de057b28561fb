"""Tiny random models written by transformers itself, and attention as transformers computes it."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fp8serve.model.config import ModelConfig
from fp8serve.model.decoder import Attend, Decoder

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5}),
    "llama-wide-head": ("Llama", {"head_dim": 32}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-rope-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-rope-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


def make_model(kind: str, out: Path, dtype: torch.dtype = torch.bfloat16, **save: Any) -> Any:
    """Write the model `kind` to `out` and return transformers' own module, loaded from there.

    Loaded again, because `.to(bfloat16)` would round transformers' rotary frequencies, which `from_pretrained` does not.
    """
    family, options = MODELS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SIZES | options))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, where a missing term would not show
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" not in name:
                parameter.mul_(4)  # attention and MLP that matter beside the residual
    model.save_pretrained(out, **save)
    return type(model).from_pretrained(out, dtype=dtype).eval()


def full_attention(config: ModelConfig) -> Attend:
    """One sequence from position 0 on, as transformers' default: the same call to torch on the same layout."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, head_dim]
        window = config.layer_windows[layer]
        groups = config.num_heads // config.num_kv_heads
        mask = None
        if window is not None:
            near = torch.arange(q.shape[2])
            distance = near[:, None] - near[None, :]
            mask = (distance >= 0) & (distance < window)
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=config.softmax_scale, enable_gqa=mask is None
        )
        return out[0].transpose(0, 1)

    return attend


def all_logits(model: Decoder, ids: list[int]) -> Tensor:
    """FP32 [T, vocab] for one sequence."""
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), full_attention(model.config))
    return model.logits(hidden)
