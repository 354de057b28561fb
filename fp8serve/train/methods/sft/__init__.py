"""Supervised fine-tuning: the mean cross-entropy of all tokens that carry loss."""
