"""Requests become tokens. `request`, `kv_cache` and `scheduler` never import torch."""
