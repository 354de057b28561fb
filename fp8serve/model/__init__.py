"""Model directories: reading, writing and converting checkpoints, tokenizers and chat templates."""
