"""The inputs of a training step: a decoder with random weights, and a batch of random tokens."""

from dataclasses import asdict

import torch

from fp8serve.bench.options import Shape
from fp8serve.fp8.conversion import convert
from fp8serve.model.config.decoder import parse_config
from fp8serve.model.network.decoder import Decoder
from fp8serve.train.forward import PackedBatch
from fp8serve.train.scratch import llama_config


def random_decoder(shape: Shape, context: int) -> Decoder:
    """FP32 masters, linears converted for FP8, tied embeddings; for sequences of at most `context` tokens."""
    torch.manual_seed(0)
    config = llama_config(context=context, **asdict(shape))
    decoder = Decoder(parse_config(config), dtype=torch.float32)
    convert(decoder)
    return decoder


def random_batch(shape: Shape, rows: int, seq_len: int) -> PackedBatch:
    """`rows` sequences of `seq_len` random tokens; every one predicts the next."""
    tokens = torch.randint(shape.vocab_size, (rows * seq_len,), generator=torch.Generator().manual_seed(0))
    every = torch.arange(rows * seq_len)
    return PackedBatch(tokens, every % seq_len, [seq_len] * rows, every, tokens.roll(-1))


def parameters(decoder: Decoder) -> int:
    return sum(p.numel() for p in decoder.parameters())
