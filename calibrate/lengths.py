"""How long the sequences of a calibration or an evaluation may be, and what is said when they are cut."""

from fp8serve.model.config import ModelConfig


def fitting(seq_len: int, *models: ModelConfig) -> tuple[int, tuple[str, ...]]:
    """(`seq_len`, or less where one of `models` computes no longer sequence; a sentence on it when it is less)."""
    longest = min(config.max_position_embeddings for config in models)
    if seq_len <= longest:
        return seq_len, ()
    bound = f"{longest} tokens, the model's trained context"
    return longest, (f"Sequences were cut to {bound}, instead of the {seq_len} asked for.",)
