"""What a training step needs, from nothing: a decoder with random weights, and a batch of random tokens."""

import torch

from fp8serve.bench.training import Shape
from fp8serve.fp8.linear import convert
from fp8serve.model.config import parse_config
from fp8serve.model.decoder import Decoder
from fp8serve.train.batch import Batch


def random_decoder(shape: Shape, context: int) -> Decoder:
    """FP32 masters, linears converted for FP8, tied embeddings; for sequences of at most `context` tokens."""
    torch.manual_seed(0)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size, "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate_size, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "max_position_embeddings": context, "tie_word_embeddings": True,
    }  # fmt: skip
    decoder = Decoder(parse_config(config), dtype=torch.float32)
    convert(decoder)
    return decoder


def random_batch(shape: Shape, rows: int, seq_len: int) -> Batch:
    """`rows` sequences of `seq_len` random tokens; every one predicts the next."""
    tokens = torch.randint(shape.vocab_size, (rows * seq_len,), generator=torch.Generator().manual_seed(0))
    every = torch.arange(rows * seq_len)
    return Batch(tokens, every % seq_len, [seq_len] * rows, every, tokens.roll(-1))


def parameters(decoder: Decoder) -> int:
    return sum(p.numel() for p in decoder.parameters())
