"""The config.json of widely used repositories of the served architectures: facts, written down by hand.

A row is a repository's sizes, (vocabulary, hidden, intermediate, layers, heads, KV heads, context), and the keys beside
those that every repository has. `null` is left out where transformers writes it for a key that is not set.
"""

from typing import Any

Sizes = tuple[int, int, int, int, int, int, int]
_COMMON = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-5,
           "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True}  # fmt: skip
_LLAMA = {"attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 1, "rope_scaling": None}
_LLAMA3 = {"attention_bias": False, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "mlp_bias": False,
           "pretraining_tp": 1, "rope_theta": 500000.0}  # fmt: skip
_SCALED = {"rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                            "original_max_position_embeddings": 8192, "rope_type": "llama3"}}  # fmt: skip
_QWEN = {"bos_token_id": 151643, "eos_token_id": 151645, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
         "use_sliding_window": False}  # fmt: skip
_QWEN3 = _QWEN | {"attention_bias": False, "head_dim": 128, "rope_scaling": None, "sliding_window": None}
_MISTRAL = {"bos_token_id": 1, "eos_token_id": 2, "rope_theta": 1000000.0, "sliding_window": None}
_JS = {"transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}}
_NANOTRON = {"is_llama_config": True, "rope_interleaved": False, "rope_theta": 100000}
_YARN = {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}}


def _types(layers: int) -> dict[str, Any]:
    return {"layer_types": ["full_attention"] * layers}


LLAMA: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "HuggingFaceTB/SmolLM-135M": ((49152, 576, 1536, 30, 9, 3, 2048), _LLAMA | {"tie_word_embeddings": True}),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        (49152, 576, 1536, 30, 9, 3, 8192),
        _LLAMA | _NANOTRON | _JS | {"pad_token_id": 2, "tie_word_embeddings": True, "mlp_bias": False},
    ),
    "HuggingFaceTB/SmolLM2-360M-Instruct": (
        (49152, 960, 2560, 32, 15, 5, 8192),
        _LLAMA | _NANOTRON | _JS | {"pad_token_id": 2, "tie_word_embeddings": True},
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (
        (49152, 2048, 8192, 24, 32, 32, 8192),
        _LLAMA | _JS | {"pad_token_id": 2, "rope_theta": 130000, "tie_word_embeddings": True, "mlp_bias": False},
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ((32000, 2048, 5632, 22, 32, 4, 2048), _LLAMA | {"rope_theta": 10000.0}),
    "meta-llama/Llama-2-7b-chat-hf": ((32000, 4096, 11008, 32, 32, 32, 4096), _LLAMA | {"_name_or_path": "x"}),
    "meta-llama/Llama-2-13b-chat-hf": ((32000, 5120, 13824, 40, 40, 40, 4096), _LLAMA),
    "meta-llama/Llama-2-70b-hf": ((32000, 8192, 28672, 80, 64, 8, 4096), _LLAMA),
    "meta-llama/CodeLlama-7b-hf": ((32016, 4096, 11008, 32, 32, 32, 16384), _LLAMA | {"rope_theta": 1000000}),
    "meta-llama/Meta-Llama-3-8B-Instruct": ((128256, 4096, 14336, 32, 32, 8, 8192), _LLAMA3),
    "meta-llama/Llama-3.1-8B-Instruct": ((128256, 4096, 14336, 32, 32, 8, 131072), _LLAMA3 | _SCALED),
    "meta-llama/Llama-3.1-70B-Instruct": ((128256, 8192, 28672, 80, 64, 8, 131072), _LLAMA3 | _SCALED),
    "meta-llama/Llama-3.2-1B-Instruct": (
        (128256, 2048, 8192, 16, 32, 8, 131072),
        _LLAMA3 | _SCALED | {"head_dim": 64, "tie_word_embeddings": True},
    ),
    "meta-llama/Llama-3.2-3B-Instruct": (
        (128256, 3072, 8192, 28, 24, 8, 131072),
        _LLAMA3 | _SCALED | {"head_dim": 128, "tie_word_embeddings": True},
    ),
    "meta-llama/Llama-3.3-70B-Instruct": (
        (128256, 8192, 28672, 80, 64, 8, 131072),
        _LLAMA3 | _SCALED | {"head_dim": 128},
    ),
    "meta-llama/Llama-Guard-3-8B": ((128256, 4096, 14336, 32, 32, 8, 131072), _LLAMA3 | _SCALED),
    "unsloth/Llama-3.2-1B-Instruct": (
        (128256, 2048, 8192, 16, 32, 8, 131072),
        _LLAMA3
        | _SCALED
        | {"head_dim": 64, "pad_token_id": 128004, "tie_word_embeddings": True, "unsloth_fixed": True},
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": ((128256, 4096, 14336, 32, 32, 8, 131072), _LLAMA3 | _SCALED),
    "deepseek-ai/deepseek-coder-6.7b-instruct": (
        (32256, 4096, 11008, 32, 32, 32, 16384),
        _LLAMA | {"rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000},
    ),
    "deepseek-ai/deepseek-llm-7b-chat": ((102400, 4096, 11008, 30, 32, 32, 4096), _LLAMA),
    "lmsys/vicuna-7b-v1.5": (
        (32000, 4096, 11008, 32, 32, 32, 4096),
        _LLAMA | {"max_sequence_length": 4096, "pad_token_id": 0},
    ),
    "01-ai/Yi-1.5-9B-Chat": ((64000, 4096, 11008, 48, 32, 4, 4096), _LLAMA | {"rope_theta": 5000000.0}),
    "upstage/SOLAR-10.7B-Instruct-v1.0": ((32000, 4096, 14336, 48, 32, 8, 4096), _LLAMA),
    "tiiuae/Falcon3-1B-Instruct": (
        (131072, 2048, 8192, 18, 8, 4, 8192),
        _LLAMA | {"activation": "swiglu", "eos_token_id": 11, "head_dim": 256, "rope_theta": 1000042},
    ),
    "NousResearch/Hermes-3-Llama-3.1-8B": ((128256, 4096, 14336, 32, 32, 8, 131072), _LLAMA3 | _SCALED),
    "nvidia/Llama-3.1-Nemotron-70B-Instruct-HF": ((128256, 8192, 28672, 80, 64, 8, 131072), _LLAMA3 | _SCALED),
    "allenai/Llama-3.1-Tulu-3-8B": ((128264, 4096, 14336, 32, 32, 8, 131072), _LLAMA3 | _SCALED | {"use_cache": False}),
    "JackFram/llama-68m": ((32000, 768, 3072, 2, 12, 12, 2048), _LLAMA | {"_name_or_path": "x", "pad_token_id": 1}),
    "openlm-research/open_llama_3b_v2": ((32000, 3200, 8640, 26, 32, 32, 2048), _LLAMA),
    "a Llama that a trainer saved with its arguments": (
        (32256, 2048, 5504, 24, 16, 16, 16384),
        _LLAMA | {"model_max_length": 4096, "neftune_noise_alpha": 5, "attn_implementation": "flash_attention_2"},
    ),
    "a Llama saved by a trainer on transformers 5": (
        (32000, 1024, 2816, 16, 16, 16, 4096),
        _LLAMA | _types(16) | {"neftune_noise_alpha": 0.0, "max_window_layers": 16, "model_max_length": 4096},
    ),
}
MISTRAL: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "mistralai/Mistral-7B-v0.1": (
        (32000, 4096, 14336, 32, 32, 8, 32768),
        _MISTRAL | {"rope_theta": 10000.0, "sliding_window": 4096},
    ),
    "mistralai/Mistral-7B-Instruct-v0.2": ((32000, 4096, 14336, 32, 32, 8, 32768), _MISTRAL),
    "mistralai/Mistral-7B-Instruct-v0.3": ((32768, 4096, 14336, 32, 32, 8, 32768), _MISTRAL),
    "mistralai/Mistral-Nemo-Instruct-2407": ((131072, 5120, 14336, 40, 32, 8, 131072), _MISTRAL | {"head_dim": 128}),
    "mistralai/Ministral-8B-Instruct-2410": (
        (131072, 4096, 12288, 36, 32, 8, 32768),
        _MISTRAL | {"head_dim": 128, "rope_theta": 100000000.0, "sliding_window": 32768},
    ),
    "mistralai/Mistral-Small-24B-Instruct-2501": (
        (131072, 5120, 32768, 40, 32, 8, 32768),
        _MISTRAL | {"head_dim": 128, "rope_theta": 100000000.0},
    ),
    "HuggingFaceH4/zephyr-7b-beta": (
        (32000, 4096, 14336, 32, 32, 8, 32768),
        _MISTRAL | {"pad_token_id": 2, "rope_theta": 10000.0, "sliding_window": 4096, "_name_or_path": "x"},
    ),
    "teknium/OpenHermes-2.5-Mistral-7B": (
        (32002, 4096, 14336, 32, 32, 8, 32768),
        _MISTRAL | {"eos_token_id": 32000, "rope_theta": 10000.0, "sliding_window": 4096, "use_cache": False},
    ),
    "NousResearch/Yarn-Mistral-7b-64k": (
        (32000, 4096, 14336, 32, 32, 8, 65536),
        _MISTRAL
        | {"auto_map": {"AutoConfig": "x.Y"}, "max_sequence_length": 65536, "rope_theta": 10000.0}
        | {
            "rope_scaling": {"factor": 8.0, "finetuned": True, "original_max_position_embeddings": 8192, "type": "yarn"}
        },
    ),
}
QWEN2: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "Qwen/Qwen1.5-0.5B-Chat": (
        (151936, 1024, 2816, 24, 16, 16, 32768),
        _QWEN | {"max_window_layers": 21, "sliding_window": 32768, "tie_word_embeddings": True},
    ),
    "Qwen/Qwen2-7B-Instruct": (
        (152064, 3584, 18944, 28, 28, 4, 32768),
        _QWEN | {"max_window_layers": 28, "sliding_window": 131072},
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": (
        (151936, 896, 4864, 24, 14, 2, 32768),
        _QWEN | {"max_window_layers": 21, "sliding_window": 32768, "tie_word_embeddings": True},
    ),
    "Qwen/Qwen2.5-1.5B": (
        (151936, 1536, 8960, 28, 12, 2, 131072),
        _QWEN | {"max_window_layers": 28, "sliding_window": 131072, "tie_word_embeddings": True, "use_mrope": False},
    ),
    "Qwen/Qwen2.5-7B-Instruct": (
        (152064, 3584, 18944, 28, 28, 4, 32768),
        _QWEN | {"max_window_layers": 28, "sliding_window": 131072},
    ),
    "Qwen/Qwen2.5-Coder-7B-Instruct": (
        (152064, 3584, 18944, 28, 28, 4, 32768),
        _QWEN | {"max_window_layers": 28, "sliding_window": 131072},
    ),
    "Qwen/Qwen2.5-72B-Instruct": (
        (152064, 8192, 29568, 80, 64, 8, 32768),
        _QWEN | _YARN | {"max_window_layers": 70, "sliding_window": 131072},
    ),
    "Qwen/QwQ-32B": (
        (152064, 5120, 27648, 64, 40, 8, 40960),
        _QWEN | {"max_window_layers": 64, "sliding_window": 32768},
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (
        (152064, 3584, 18944, 28, 28, 4, 131072),
        _QWEN | {"max_window_layers": 28, "rope_theta": 10000, "sliding_window": 4096, "use_mrope": False},
    ),
    "unsloth/Qwen2.5-7B-Instruct": (
        (152064, 3584, 18944, 28, 28, 4, 32768),
        _QWEN | _types(28) | {"max_window_layers": 28, "sliding_window": None, "unsloth_version": "x"},
    ),
}
QWEN3: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "Qwen/Qwen3-0.6B": (
        (151936, 1024, 3072, 28, 16, 8, 40960),
        _QWEN3 | {"max_window_layers": 28, "tie_word_embeddings": True},
    ),
    "Qwen/Qwen3-8B": ((151936, 4096, 12288, 36, 32, 8, 40960), _QWEN3 | {"max_window_layers": 36}),
    "Qwen/Qwen3-32B": ((151936, 5120, 25600, 64, 64, 8, 40960), _QWEN3 | {"max_window_layers": 64}),
    "Qwen/Qwen3-4B-Instruct-2507": (
        (151936, 2560, 9728, 36, 32, 8, 262144),
        _QWEN3 | {"max_window_layers": 36, "rope_theta": 5000000, "tie_word_embeddings": True},
    ),
    "Qwen/Qwen3-Embedding-0.6B": (
        (151669, 1024, 3072, 28, 16, 8, 32768),
        _QWEN3 | {"max_window_layers": 28, "tie_word_embeddings": True},
    ),
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": (
        (151936, 4096, 12288, 36, 32, 8, 131072),
        _QWEN3 | _YARN | _types(36) | {"max_window_layers": 36},
    ),
}
_GEMMA = {"attention_bias": False, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 107],
          "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0, "query_pre_attn_scalar": 256,
          "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": True}  # fmt: skip
_GEMMA2 = _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh"}
_GEMMA3 = _GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "eos_token_id": [1, 106],
                    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
                    "sliding_window": 512}  # fmt: skip
GEMMA2: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "google/gemma-2-2b-it": ((256000, 2304, 9216, 26, 8, 4, 8192), _GEMMA2),
    "google/gemma-2-9b-it": ((256000, 3584, 14336, 42, 16, 8, 8192), _GEMMA2 | {"sliding_window_size": 4096}),
    "google/gemma-2-27b-it": (
        (256000, 4608, 36864, 46, 32, 16, 8192),
        _GEMMA2 | {"head_dim": 128, "query_pre_attn_scalar": 144, "sliding_window_size": 4096},
    ),
}
GEMMA3: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "google/gemma-3-1b-it": ((262144, 1152, 6912, 26, 4, 1, 32768), _GEMMA3 | {"sliding_window_pattern": 6}),
    "google/gemma-3-270m-it": (
        (262144, 640, 2048, 18, 4, 1, 32768),
        _GEMMA3
        | {"_sliding_window_pattern": 6, "use_bidirectional_attention": False}
        | {"layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)]},
    ),
}
_GRANITE = {"attention_bias": False, "attention_dropout": 0.1, "bos_token_id": 0, "embedding_multiplier": 12.0,
            "eos_token_id": 0, "mlp_bias": False, "pad_token_id": 0, "residual_multiplier": 0.22,
            "rope_scaling": None, "tie_word_embeddings": True}  # fmt: skip
GRANITE: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "ibm-granite/granite-3.1-2b-instruct": (
        (49155, 2048, 8192, 40, 32, 8, 131072),
        _GRANITE | {"attention_multiplier": 0.015625, "logits_scaling": 8.0, "rope_theta": 5000000.0},
    ),
    "ibm-granite/granite-3.3-8b-instruct": (
        (49159, 4096, 12800, 40, 32, 8, 131072),
        _GRANITE | {"attention_multiplier": 0.0078125, "logits_scaling": 16.0, "rope_theta": 10000000.0},
    ),
}
SMOLLM3: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "HuggingFaceTB/SmolLM3-3B": (
        (128256, 2048, 11008, 36, 16, 4, 65536),
        {"attention_bias": False, "bos_token_id": 128000, "eos_token_id": 128012, "max_window_layers": 28,
         "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "pad_token_id": 128004,
         "pretraining_tp": 2, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5000000.0,
         "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False} | _types(36),
    ),
}  # fmt: skip
_PHI3 = {"attention_bias": False, "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "pad_token_id": 32000,
         "original_max_position_embeddings": 4096, "resid_pdrop": 0.0, "rope_theta": 10000.0}  # fmt: skip
_LONG = {"rope_scaling": {"long_factor": [1.08] * 48, "short_factor": [1.05] * 48, "type": "longrope"},
         "sliding_window": 262144}  # fmt: skip  # the files hold 48 different numbers each
PHI3: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "microsoft/Phi-3-mini-4k-instruct": (
        (32064, 3072, 8192, 32, 32, 32, 4096),
        _PHI3 | {"rope_scaling": None, "sliding_window": 2047},
    ),
    "microsoft/Phi-3-mini-128k-instruct": ((32064, 3072, 8192, 32, 32, 32, 131072), _PHI3 | _LONG),
    "microsoft/phi-4": (
        (100352, 5120, 17920, 40, 40, 10, 16384),
        _PHI3 | {"bos_token_id": 100257, "eos_token_id": 100265, "original_max_position_embeddings": 16384,
                 "pad_token_id": 100349, "rope_scaling": None, "rope_theta": 250000, "sliding_window": None},
    ),
    "microsoft/Phi-4-mini-instruct": (
        (200064, 3072, 8192, 32, 24, 8, 131072),
        _PHI3 | _LONG | {"bos_token_id": 199999, "eos_token_id": 199999, "full_attn_mod": 1, "interpolate_factor": 1,
                         "lm_head_bias": False, "mlp_bias": False, "pad_token_id": 199999,
                         "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    ),
}  # fmt: skip
_OLMO = {"attention_bias": False, "eos_token_id": 100257, "pad_token_id": 100277, "rms_norm_eps": 1e-6,
         "rope_theta": 500000}  # fmt: skip
OLMO2: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "allenai/OLMo-2-1124-7B-Instruct": ((100352, 4096, 11008, 32, 32, 32, 4096), _OLMO | {"rope_scaling": None}),
    "allenai/OLMo-2-0425-1B-Instruct": ((100352, 2048, 8192, 16, 16, 16, 4096), _OLMO | {"rope_scaling": None}),
}
OLMO3: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "allenai/Olmo-3-7B-Instruct": (
        (100278, 4096, 11008, 32, 32, 32, 65536),
        _OLMO
        | {"rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                            "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "sliding_window": 4096}
        | {"layer_types": ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(32)]},
    ),
}  # fmt: skip
_GLM = {"attention_bias": True, "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "pad_token_id": 151329,
        "partial_rotary_factor": 0.5, "rope_theta": 10000.0}  # fmt: skip
GLM: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "THUDM/glm-4-9b-chat-hf": (
        (151552, 4096, 13696, 40, 32, 2, 131072),
        _GLM | {"rms_norm_eps": 1.5625e-07},
    ),
}
GLM4: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "THUDM/GLM-4-9B-0414": ((151552, 4096, 13696, 40, 32, 2, 32768), _GLM),
    "THUDM/GLM-4-32B-0414": ((151552, 6144, 23040, 61, 48, 2, 32768), _GLM | {"attention_bias": False}),
}
MINISTRAL3: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "mistralai/Ministral-3-8B-Instruct-2512": (  # the text_config of its wrapper
        (131072, 4096, 14336, 34, 32, 8, 262144),
        {"bos_token_id": 1, "eos_token_id": 2, "head_dim": 128, "pad_token_id": 11, "sliding_window": None,
         "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
                             "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
                             "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn"}},
    ),
}  # fmt: skip
_COHERE = {"attention_bias": False, "bos_token_id": 5, "eos_token_id": 255001, "layer_norm_eps": 1e-5,
           "pad_token_id": 0, "tie_word_embeddings": True}  # fmt: skip
COHERE: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "CohereForAI/c4ai-command-r-v01": (
        (256000, 8192, 22528, 40, 64, 64, 8192),
        _COHERE | {"logit_scale": 0.0625, "model_max_length": 131072, "rope_theta": 8000000.0, "use_qk_norm": False},
    ),
    "CohereForAI/c4ai-command-r-plus": (
        (256000, 12288, 33792, 64, 96, 8, 8192),
        _COHERE | {"logit_scale": 0.8333333333333334, "rope_theta": 75000000.0, "use_qk_norm": True},
    ),
}
COHERE2: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "CohereForAI/c4ai-command-r7b-12-2024": (
        (256000, 4096, 14336, 32, 32, 8, 8192),
        _COHERE
        | {"cache_implementation": "hybrid", "head_dim": 128, "layer_switch": 4, "logit_scale": 0.25,
           "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
           "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096,
           "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True,
           "use_parallel_block": True, "use_parallel_embedding": True},
    ),
}  # fmt: skip
_STABLELM = {"hidden_dropout": 0.0, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "rope_theta": 10000}
STABLELM: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "stabilityai/stablelm-3b-4e1t": (
        (50304, 2560, 6912, 32, 32, 32, 4096),
        _STABLELM | {"bos_token_id": 0, "eos_token_id": 0, "use_qkv_bias": False},
    ),
    "stabilityai/stablelm-2-zephyr-1_6b": (
        (100352, 2048, 5632, 24, 32, 32, 4096),
        _STABLELM | {"bos_token_id": 100257, "eos_token_id": 100257, "qk_layernorm": False, "use_qkv_bias": True,
                     "use_parallel_residual": False},
    ),
}  # fmt: skip
_ROUTER = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
_MIXTRAL = _MISTRAL | _ROUTER | {"num_experts_per_tok": 2, "num_local_experts": 8}
_QWEN_MOE = _QWEN | _ROUTER | {"decoder_sparse_step": 1, "norm_topk_prob": False}
_QWEN3_MOE = _QWEN3 | _ROUTER | {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
                                 "num_experts": 128, "num_experts_per_tok": 8}  # fmt: skip
MIXTRAL: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ((32000, 4096, 14336, 32, 32, 8, 32768), _MIXTRAL),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": (
        (32768, 6144, 16384, 56, 48, 8, 65536),
        _MIXTRAL | {"router_jitter_noise": 0.0},
    ),
}
QWEN2_MOE: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": (
        (151936, 2048, 5632, 24, 16, 16, 8192),
        _QWEN_MOE
        | {"max_window_layers": 21, "moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4}
        | {"shared_expert_intermediate_size": 5632, "sliding_window": 32768},
    ),
    "Qwen/Qwen2-57B-A14B-Instruct": (
        (151936, 3584, 18944, 28, 28, 4, 32768),
        _QWEN_MOE
        | {"max_window_layers": 28, "moe_intermediate_size": 2560, "num_experts": 64, "num_experts_per_tok": 8}
        | {"shared_expert_intermediate_size": 20480, "sliding_window": 65536},
    ),
}
QWEN3_MOE: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "Qwen/Qwen3-30B-A3B": (
        (151936, 2048, 6144, 48, 32, 4, 40960),
        _QWEN3_MOE | {"max_window_layers": 48, "moe_intermediate_size": 768},
    ),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": (
        (151936, 4096, 12288, 94, 64, 4, 262144),
        _QWEN3_MOE | {"max_window_layers": 94, "moe_intermediate_size": 1536, "rope_theta": 5000000},
    ),
}
_GPT_OSS = {"attention_bias": True, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64,
            "initial_context_length": 4096, "num_experts_per_tok": 4, "output_router_logits": False,
            "pad_token_id": 199999, "router_aux_loss_coef": 0.9, "rope_theta": 150000, "sliding_window": 128,
            "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]},
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                             "original_max_position_embeddings": 4096, "truncate": False}}  # fmt: skip


def _alternating(layers: int) -> dict[str, Any]:
    return {"layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]}


GPT_OSS: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "openai/gpt-oss-20b": (
        (201088, 2880, 2880, 24, 64, 8, 131072),
        _GPT_OSS | _alternating(24) | {"num_local_experts": 32},
    ),
    "openai/gpt-oss-120b": (
        (201088, 2880, 2880, 36, 64, 8, 131072),
        _GPT_OSS | _alternating(36) | {"num_local_experts": 128},
    ),
}
_DEEPSEEK = {"attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1, "kv_lora_rank": 512, "moe_layer_freq": 1,
             "pretraining_tp": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
             "rope_theta": 10000, "seq_aux": True, "v_head_dim": 128, "tie_word_embeddings": False}  # fmt: skip
_DEEPSEEK_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096,
                  "type": "yarn"}  # fmt: skip
_DEEPSEEK_V2 = _DEEPSEEK | {"bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1,
                            "n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6,
                            "scoring_func": "softmax",
                            "rope_scaling": _DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}  # fmt: skip
_DEEPSEEK_V3 = _DEEPSEEK | {"bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 3, "n_group": 8,
                            "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
                            "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
                            "q_lora_rank": 1536, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
                            "topk_group": 4, "topk_method": "noaux_tc",
                            "rope_scaling": _DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}  # fmt: skip
DEEPSEEK_V2: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "deepseek-ai/DeepSeek-V2-Lite-Chat": (
        (102400, 2048, 10944, 27, 16, 16, 163840),
        _DEEPSEEK_V2
        | {"q_lora_rank": None, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64}
        | {"routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy"},
    ),
    "deepseek-ai/DeepSeek-V2-Chat": (
        (102400, 5120, 12288, 60, 128, 128, 163840),
        _DEEPSEEK_V2
        | {"q_lora_rank": 1536, "moe_intermediate_size": 1536, "n_group": 8, "n_routed_experts": 160}
        | {"routed_scaling_factor": 16.0, "topk_group": 3, "topk_method": "group_limited_greedy"},
    ),
}
DEEPSEEK_V3: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "deepseek-ai/DeepSeek-V3": ((129280, 7168, 18432, 61, 128, 128, 163840), _DEEPSEEK_V3),
    "deepseek-ai/DeepSeek-R1": ((129280, 7168, 18432, 61, 128, 128, 163840), _DEEPSEEK_V3),
}
_MSCALES = {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 4096, "short_factor": [1.0] * 64,
                             "long_factor": [8.0] * 64, "short_mscale": 1.243163121016122,
                             "long_mscale": 1.243163121016122}}  # fmt: skip
PHIMOE: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "microsoft/Phi-3.5-MoE-instruct": (
        (32064, 4096, 6400, 32, 32, 8, 131072),
        _MSCALES
        | {"architectures": ["PhiMoEForCausalLM"], "attention_bias": True, "bos_token_id": 1, "eos_token_id": 32000}
        | {"hidden_dropout": 0.0, "input_jitter_noise": 0.01, "lm_head_bias": True, "num_experts_per_tok": 2}
        | {"num_local_experts": 16, "original_max_position_embeddings": 4096, "output_router_logits": False}
        | {"rope_theta": 10000.0, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01, "sliding_window": 131072},
    ),
}
_SIGMOID = {"n_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "topk_group": 1}
DOTS1: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "rednote-hilab/dots.llm1.inst": (
        (152064, 4096, 10944, 62, 32, 32, 32768),
        _SIGMOID
        | {"attention_bias": False, "first_k_dense_replace": 1, "head_dim": 128, "moe_intermediate_size": 1408}
        | {"moe_layer_freq": 1, "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6}
        | {"pretraining_tp": 1, "rope_scaling": None, "rope_theta": 10000000, "scoring_func": "noaux_tc"}
        | {"sliding_window": None},
    ),
}
_GLM4_MOE = _SIGMOID | {"attention_bias": True, "eos_token_id": [151329, 151336, 151338], "head_dim": 128,
                        "n_shared_experts": 1, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
                        "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rope_scaling": None,
                        "rope_theta": 1000000}  # fmt: skip
GLM4_MOE: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "zai-org/GLM-4.5-Air": (
        (151552, 4096, 10944, 46, 96, 8, 131072),
        _GLM4_MOE
        | {"first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_routed_experts": 128, "use_qk_norm": False}
        | {"routed_scaling_factor": 1.0},
    ),
    "zai-org/GLM-4.5": (
        (151552, 5120, 12288, 92, 96, 8, 131072),
        _GLM4_MOE
        | {"first_k_dense_replace": 3, "moe_intermediate_size": 1536, "n_routed_experts": 160, "use_qk_norm": True},
    ),
}
APERTUS: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "swiss-ai/Apertus-8B-Instruct-2509": (
        (131072, 4096, 21504, 32, 32, 8, 65536),
        {"attention_bias": False, "bos_token_id": 1, "eos_token_id": [68, 72, 2], "hidden_act": "xielu",
         "mlp_bias": False, "pad_token_id": 3, "post_norm": False, "qk_norm": True, "rope_theta": 12000000,
         "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3", "type": "llama3"}},
    ),
}  # fmt: skip
_FAMILIES = {"phimoe": ("Phimoe", PHIMOE), "dots1": ("Dots1", DOTS1), "glm4_moe": ("Glm4Moe", GLM4_MOE),
             "apertus": ("Apertus", APERTUS), "deepseek_v2": ("DeepseekV2", DEEPSEEK_V2),
             "deepseek_v3": ("DeepseekV3", DEEPSEEK_V3),
             "gpt_oss": ("GptOss", GPT_OSS), "mixtral": ("Mixtral", MIXTRAL), "qwen2_moe": ("Qwen2Moe", QWEN2_MOE),
             "qwen3_moe": ("Qwen3Moe", QWEN3_MOE), "llama": ("Llama", LLAMA), "mistral": ("Mistral", MISTRAL),
             "qwen2": ("Qwen2", QWEN2),
             "qwen3": ("Qwen3", QWEN3), "gemma2": ("Gemma2", GEMMA2), "gemma3_text": ("Gemma3", GEMMA3),
             "granite": ("Granite", GRANITE), "smollm3": ("SmolLM3", SMOLLM3), "phi3": ("Phi3", PHI3),
             "olmo2": ("Olmo2", OLMO2), "olmo3": ("Olmo3", OLMO3), "glm": ("Glm", GLM), "glm4": ("Glm4", GLM4),
             "ministral3": ("Ministral3", MINISTRAL3), "cohere": ("Cohere", COHERE), "cohere2": ("Cohere2", COHERE2),
             "stablelm": ("StableLm", STABLELM)}  # fmt: skip


def _config(model_type: str, name: str, sizes: Sizes, keys: dict[str, Any]) -> dict[str, Any]:
    named = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "max_position_embeddings")  # fmt: skip
    kind = {"architectures": [f"{name}ForCausalLM"], "model_type": model_type, "tie_word_embeddings": False}
    return kind | _COMMON | dict(zip(named, sizes, strict=True)) | keys


CONFIGS: dict[str, dict[str, Any]] = {
    repository: _config(model_type, name, *row)
    for model_type, (name, rows) in _FAMILIES.items()
    for repository, row in rows.items()
}
