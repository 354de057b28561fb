"""Tokenizers, chat templates, loss masks of conversations, and training data. This package does not import torch."""
