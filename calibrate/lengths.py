"""How long the sequences of a calibration or an evaluation may be, and the notes when they are cut or too few."""

from fp8serve.model.config.decoder import ModelConfig


def fitting(seq_len: int, *models: ModelConfig) -> tuple[int, tuple[str, ...]]:
    """(`seq_len`, or less where one of `models` has a shorter context; a sentence about it when it is less)."""
    longest = min(config.max_position_embeddings for config in models)
    if seq_len <= longest:
        return seq_len, ()
    bound = f"{longest} tokens, the model's trained context"
    return longest, (f"Sequences were cut to {bound}, instead of the {seq_len} asked for.",)


def shortfall(asked: int, seq_len: int, samples: int, tokens: int) -> tuple[str, ...]:
    """A sentence where `asked` samples of `seq_len` tokens became fewer, or ones with less than half of the tokens."""
    if samples == asked and 2 * tokens >= asked * seq_len:
        return ()
    why = "there is no more text" if samples < asked else "short documents are not joined"
    wanted, gave = f"{asked:,} samples of {seq_len:,} tokens", f"{samples:,} samples with {tokens:,} tokens"
    return (f"{wanted} were asked for; the data gave {gave}, because {why}.",)
