"""A tiny model directory, and data for it, for tests that use the product as its users do."""

import json
from pathlib import Path

SENTENCES = [
    "The scale of a tensor is the largest number of the format divided by the largest value of the tensor.",
    "Once upon a time there was a small model that nobody trained.",
    "A history keeps the largest values of the last steps, and the newest of them comes last.",
    "Numbers that are too large become the largest number of the format; they never become infinite.",
]
_PAIRS = [("What is a scale?", "A multiplier."), ("What is an amax?", "The largest magnitude."), ("Why?", "Because.")]
CHATS = "".join(
    json.dumps({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}) + "\n"
    for q, a in _PAIRS
)


def write_tiny_model(out: Path) -> Path:
    """Writes a random Llama of 2 layers (150,000 parameters) with a byte-pair tokenizer and a chat template."""
    from fp8serve.train.scratch import write_random_model

    sizes = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 128}
    return write_random_model(out, SENTENCES, vocab_size=320, context=256, **sizes)
