"""Reference models: tiny random models written by transformers, and attention as transformers computes it."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fp8serve.fp8.attention import causal_attention
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.checkpoint import ScalingCheckpoint, TensorScale, load_trainable
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.network.decoder import Decoder, make_attend
from fp8serve.model.network.rotary import Attend

SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
         "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
STRETCHED = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "final_logit_softcapping": 5.0, "pad_token_id": 2}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0], "long_factor": [1.5, 2.0, 3.0, 5.0, 7.0, 9.0]}  # fmt: skip
COHERE = {"pad_token_id": 2, "logit_scale": 0.25, "attention_bias": True}
EXPERTS = {"num_experts": 7, "moe_intermediate_size": 48}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
          "v_head_dim": 12, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4,
          "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 48}  # fmt: skip
SIGMOID = {key: LATENT[key] for key in ("num_hidden_layers", "first_k_dense_replace", "n_routed_experts", "n_group",
                                        "topk_group", "num_experts_per_tok", "moe_intermediate_size")}  # fmt: skip
# Equal factors for short and long sequences: transformers' class uses the short ones for long sequences, too.
MSCALES = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 5.0],
           "long_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 5.0], "short_mscale": 1.1, "long_mscale": 1.3,
           "original_max_position_embeddings": 64}  # fmt: skip
# Keys that transformers' default configuration does not set, by model_type.
REQUIRED = {"deepseek_v2": {"num_experts_per_tok": 6},
            "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 2}}  # fmt: skip
DEEPSEEK_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
LINEAR = "model.layers.0.mlp.up_proj"
IDS = list(range(3, 40))
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
    "gemma2": ("Gemma2", GEMMA | {"num_hidden_layers": 4, "sliding_window": 8, "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", GEMMA | {"num_hidden_layers": 6, "sliding_window": 8, "hidden_size": 80}),
    "gemma3-stretched": ("Gemma3", GEMMA | {"num_hidden_layers": 6, "sliding_window": 8, "rope_parameters": STRETCHED}),
    "granite": ("Granite", {"embedding_multiplier": 12.3, "residual_multiplier": 0.22, "attention_multiplier": 0.07,
                            "logits_scaling": 7.0}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", EXPERTS | {"num_experts_per_tok": 3, "shared_expert_intermediate_size": 112}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS | {"num_experts_per_tok": 4, "norm_topk_prob": True, "head_dim": 32}),
    "qwen3-moe-sparse": ("Qwen3Moe", EXPERTS | {"num_experts_per_tok": 2, "head_dim": 32, "num_hidden_layers": 4,
                                                "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "gpt-oss": ("GptOss", {"num_local_experts": 7, "num_experts_per_tok": 3, "num_hidden_layers": 4, "head_dim": 32,
                                     "sliding_window": 8, "rope_parameters": YARN, "swiglu_limit": 0.5}),
    "deepseek-v2": ("DeepseekV2", LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy",
                                            "routed_scaling_factor": 1.5, "n_shared_experts": 2}),
    "deepseek-v2-greedy": ("DeepseekV2", LATENT | {"q_lora_rank": 24}),
    "deepseek-v3": ("DeepseekV3", LATENT | {"q_lora_rank": 24, "rope_parameters": DEEPSEEK_YARN,
                                            "routed_scaling_factor": 1.0}),
    # All experts are chosen, so that rounding cannot change the choice.
    "deepseek-v3-halves": ("DeepseekV3", LATENT | {"q_lora_rank": None, "rope_interleave": False, "topk_group": 4,
                                                   "num_experts_per_tok": 8,
                                                   "norm_topk_prob": False, "attention_bias": True}),
    "dots1": ("Dots1", SIGMOID | {"n_shared_experts": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
                                  "head_dim": 32, "sliding_window": 8, "max_window_layers": 1}),
    "glm4-moe": ("Glm4Moe", SIGMOID | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True,
                                       "attention_bias": True, "head_dim": 32, "num_mtp_layers": 0}),
    "phimoe": ("Phimoe", {"num_local_experts": 5, "num_experts_per_tok": 2, "attention_bias": True,
                          "lm_head_bias": True, "pad_token_id": 2,
                          "rope_parameters": MSCALES, "router_jitter_noise": 0.3, "sliding_window": 100}),
    "apertus": ("Apertus", {"pad_token_id": 2, "rope_parameters": LLAMA3}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": 2}),
    "phi3": ("Phi3", {"pad_token_id": 2}),
    "phi3-window": ("Phi3", {"pad_token_id": 2, "sliding_window": 8}),
    "phi3-long": ("Phi3", {"pad_token_id": 2, "rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 8}),
    "olmo3-stretched": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 8, "rope_parameters": STRETCHED}),
    "glm": ("Glm", {"pad_token_id": 2, "head_dim": 32}),
    "glm4": ("Glm4", {"pad_token_id": 2, "head_dim": 32}),
    "ministral3": ("Ministral3", {"pad_token_id": 2, "head_dim": 32, "rope_parameters": YARN | {
        "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}}),
    "cohere": ("Cohere", COHERE),
    "cohere-qk-norm": ("Cohere", COHERE | {"use_qk_norm": True, "attention_bias": False}),
    "cohere2": ("Cohere2", COHERE | {"num_hidden_layers": 4, "sliding_window": 8}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True}),
}  # fmt: skip


def make_model(
    kind: str, out: Path, dtype: torch.dtype = torch.bfloat16, overrides: dict[str, Any] | None = None, **save: Any
) -> Any:
    """Write the model `kind` to `out` and return transformers' own module, loaded from there."""
    family, options = MODELS[kind]
    return make_random(family, SIZES | options | (overrides or {}), out, dtype, **save)


def class_of(family: str) -> Any:
    """Returns transformers' class for causal language models of the family."""
    return getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")


def make_random(
    family: str, options: dict[str, Any], out: Path, dtype: torch.dtype = torch.bfloat16, **save: Any
) -> Any:
    """Write a random model of transformers' class to `out`, and return it, loaded from there.

    The model is loaded again because `.to(bfloat16)` rounds its rotary frequencies; `from_pretrained` does not.
    """
    torch.manual_seed(0)
    architecture = class_of(family)
    config = architecture.config_class(**options)
    model = architecture(config).to(dtype).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, where a missing term would not show
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "_norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" not in name:
                parameter.mul_(4)  # so that attention and MLP are large relative to the residual
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(out, **save)
    how = (
        {"attn_implementation": "eager"} if family.startswith("Gemma") else {}
    )  # the other implementations ignore the soft cap
    if "num_experts_per_tok" in options:
        how["experts_implementation"] = "eager"  # the other implementations sum a token's experts in FP32
    return type(model).from_pretrained(out, dtype=dtype, **how).eval()


def full_attention(config: ModelConfig) -> Attend:
    """Returns attention of one sequence from position 0 on, by the same torch call and layout as transformers'
    default."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, head_dim]
        if config.model_type.startswith("gemma"):
            return eager(config, config.layer_windows[layer], q, k, v)
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

    return make_attend(attend)


def eager(config: ModelConfig, window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[1, heads, T, head_dim] -> [T, heads, head_dim], with the ops and roundings of transformers' eager attention."""
    groups, near = config.num_heads // config.num_kv_heads, torch.arange(q.shape[2])
    distance = near[:, None] - near[None, :]
    hidden = (distance < 0) | (distance >= (window or len(near)))
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * config.softmax_scale
    if config.attention_softcap is not None:
        scores = torch.tanh(scores / config.attention_softcap) * config.attention_softcap
    scores = scores + torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, torch.finfo(q.dtype).min)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v.repeat_interleave(groups, 1))[0].transpose(0, 1)


def with_sinks(model: Decoder) -> Attend:
    """Returns attention of one sequence with sinks, as calibration and training compute it."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, [len(q)], *model.attention_options(layer))

    return make_attend(attend)


def all_logits(model: Decoder, ids: list[int]) -> Tensor:
    """Returns the logits of one sequence, FP32 [T, vocab]."""
    attend = with_sinks(model) if model.config.attention_sinks else full_attention(model.config)
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), attend)
    return model.logits(hidden)


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def byte_level() -> tokenizers.Tokenizer:
    """Returns a byte-level BPE like those of GPT-2, Llama 3 and Qwen: 256 bytes, a few merges, BOS added by the
    post-processor."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet, "th", "the", "Ġthe", "in", "ing"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("in", "g")]
    backend = tokenizers.Tokenizer(BPE({w: i for i, w in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """A SentencePiece BPE like those of Llama 2 and Mistral: words begin with a marker, unknown characters become byte
    tokens."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "é", "▁a", "ab"]
    merges = [("▁", "a"), ("a", "b")]
    backend = tokenizers.Tokenizer(
        BPE({w: i for i, w in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def write_tokenizer(
    out: Path, backend: tokenizers.Tokenizer | None = None, template: str | None = CHAT_TEMPLATE
) -> transformers.PreTrainedTokenizerFast:
    """Write a tokenizer as transformers does, and return transformers' own."""
    make: Any = transformers.PreTrainedTokenizerFast
    fast = make(tokenizer_object=backend or byte_level(), bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(out)
    loaded: transformers.PreTrainedTokenizerFast = make.from_pretrained(out)
    return loaded


def state_for(model_dir: Path, recipe: str = "delayed") -> ScalingCheckpoint:
    """Returns a scaling state like that of a calibration: the amax of every input is 20, that of every weight its own.

    recipe: a name, or "delayed by row", with weights scaled by row.
    """
    if not recipe.startswith("delayed"):
        return ScalingCheckpoint(from_name(recipe), {})
    by_row = recipe == "delayed by row"
    rules = DelayedScaling(amax_history_len=3, weight_granularity="row" if by_row else "tensor")
    model = load_trainable(model_dir)
    tensors = {}
    for i, name in enumerate(model.linear_names()):
        amax = {
            "input": torch.tensor(20.0 + i / 8),
            "weight": model.get_parameter(f"{name}.weight").detach().abs().max(),
        }
        for role, value in list(amax.items())[: 1 if by_row else 2]:
            tensors[f"{name}.{role}"] = TensorScale(448 / value, torch.stack([value * 0, value / 2, value]))
    counts = dict.fromkeys(tensors, 2)
    return ScalingCheckpoint(rules, tensors, "", {"batches": 2, "tensors": counts})
