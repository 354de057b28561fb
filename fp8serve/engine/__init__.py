"""Turns requests into tokens. `request`, `kv_cache` and `scheduler` never import torch."""
