"""Writes a small Llama model with random weights and a byte-level BPE tokenizer that is trained on given texts.

`fp8serve demo` trains such a model, and tests use it. It is a Hugging Face directory (config, safetensors, tokenizer
with a chat template) that every command accepts. Weights are normal with standard deviation 0.02, which is divided by
sqrt(2 * layers) for projections into the residual stream, as in GPT-2 (Radford et al. 2019, section 2.3). Norms are
one.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from fp8serve.model.config.decoder import read_config
from fp8serve.model.network.decoder import Decoder
from fp8serve.model.storage.files import atomic_directory, write_json
from fp8serve.model.storage.shards import SAFE_WEIGHTS, save_tensors, write_index

END, USER, ASSISTANT, SYSTEM = "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIAL_TOKENS = (END, USER, ASSISTANT, SYSTEM)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_random_model(
    out: Path,
    texts: Iterable[str],
    *,
    vocab_size: int = 2048,
    hidden_size: int = 256,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate_size: int | None = None,
    context: int = 512,
    seed: int = 0,
) -> Path:
    """Writes the model directory `out` atomically, and returns it.

    The tokenizer is trained on `texts`. It has at most `vocab_size` tokens, of which 256 are bytes and 4 are special
    tokens for chat turns. Raises ModelError if `out` exists or the sizes are invalid.
    """
    with atomic_directory(Path(out)) as directory:
        tokenizer = train_tokenizer(texts, vocab_size)
        tokenizer.save(str(directory / "tokenizer.json"))
        write_json(directory / "tokenizer_config.json", _tokenizer_config(context))
        end = tokenizer.token_to_id(END)
        config = llama_config(
            hidden_size=hidden_size,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            intermediate_size=intermediate_size or 128 * math.ceil(hidden_size * 8 / 3 / 128),
            vocab_size=tokenizer.get_vocab_size(),
            context=context,
        )
        config |= {"bos_token_id": end, "eos_token_id": end}
        write_json(directory / "config.json", config)
        write_json(directory / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
        save_tensors(directory / SAFE_WEIGHTS, random_weights(directory, seed), {"format": "pt"})
        write_index(directory)
    return Path(out)


def llama_config(
    *, hidden_size: int, layers: int, heads: int, kv_heads: int, intermediate_size: int, vocab_size: int, context: int
) -> dict[str, Any]:
    """Returns the config.json of a Llama with tied embeddings, for sequences of at most `context` tokens."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
    }


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Returns a byte-level BPE tokenizer. The same texts give the same tokenizer."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    special = [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _tokenizer_config(context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }


def random_weights(directory: Path, seed: int) -> dict[str, Tensor]:
    """Returns random BF16 weights for the config.json in `directory`, by name."""
    decoder = Decoder(read_config(directory), device="meta")
    generator = torch.Generator().manual_seed(seed)
    return {n: _random_weight(n, p.shape, decoder.config.num_layers, generator) for n, p in decoder.named_parameters()}


def _random_weight(name: str, shape: torch.Size, layers: int, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    std = 0.02 / math.sqrt(2 * layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
    return (torch.randn(shape, generator=generator) * std).to(torch.bfloat16)


def write_texts(path: Path, texts: Iterable[str]) -> Path:
    """Writes `texts` as JSON lines of training data, and returns the path."""
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return path
