"""Reads a model's hyper-parameters from `config.json`, with the table of families. Does not import torch."""
