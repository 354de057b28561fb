"""Computes log-probabilities of given tokens with training's forward pass: the bits that a server on a CPU returns.

This is for code that compares the two, such as a test, or a reinforcement trainer whose importance ratios must begin at
1. A run's own `Forward` computes them with gradients (`Forward.log_probs`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fp8serve.errors import RecipeError, RequestError, ScalesError
from fp8serve.fp8.batch_invariant_linear import has_batch_invariant_products, use_batch_invariant_products
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import Recipe, from_name
from fp8serve.fp8.served_attention import KvScale
from fp8serve.model import parity
from fp8serve.model.checkpoint import kv_scales, load_servable
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.train.data import Row
from fp8serve.train.forward import Forward, Network, collate, target_log_probs

ROWS = 256  # of logits at a time, as in a server
KvDtype = Literal["bf16", "fp8"]
Scorer = Callable[[Sequence[int]], Tensor]


@torch.no_grad()
def log_probs(
    model: Forward | Path | str,
    sequences: Sequence[Sequence[int]],
    *,
    recipe: Recipe | str = "stored",
    scales: Path | str | None = None,
    kv_cache_dtype: KvDtype = "bf16",
    max_model_len: int | None = None,
) -> list[Tensor]:
    """For every sequence of token ids [n], the log-probabilities FP32 [n - 1] of all tokens but the first, each given
    those before it.

    model: a model directory, computed as `fp8serve serve` with these options computes it, or a trainer's forward pass,
    which takes no options. The values equal those of a server for prompt and answer to the last bit, however it divides
    the prompt, batches or caches; RecipeError, with the reason, if that is impossible. RequestError for a sequence
    without tokens, with a token that the model does not have, or longer than the model takes; ModelError, ScalesError
    for a directory that cannot be served with these options.
    """
    if isinstance(model, Forward):
        if (recipe, scales, kv_cache_dtype, max_model_len) != ("stored", None, "bf16", None):
            raise RequestError("A trainer's forward pass has its recipe and scales already; leave the options out.")
        score, config = _of_trainer(model), model.network.decoder.config
    else:
        network = served_network(Path(model), recipe, scales, kv_cache_dtype, max_model_len)
        score, config = _of_network(network), network.decoder.config
    for ids in sequences:
        _check(ids, config, max_model_len or config.max_length)
    return [score(ids) if len(ids) > 1 else torch.empty(0) for ids in sequences]


def _check(ids: Sequence[int], config: ModelConfig, longest: int) -> None:
    if not 0 < len(ids) <= longest:
        raise RequestError(f"A sequence has from 1 to {longest} tokens here; found {len(ids)}.")
    if not all(0 <= token < config.vocab_size for token in ids):
        raise RequestError(f"Token ids go from 0 to {config.vocab_size - 1} here; found {min(ids)} to {max(ids)}.")


def served_network(
    model_dir: Path,
    recipe: Recipe | str = "stored",
    scales: Path | str | None = None,
    kv_cache_dtype: KvDtype = "bf16",
    max_model_len: int | None = None,
) -> Network:
    """A directory's model with frozen FP8 weights and scales in the trainer's forward pass. See `log_probs`."""
    named = from_name(recipe) if isinstance(recipe, str) and recipe != "stored" else recipe
    model = load_servable(model_dir, "bf16" if named is None else named, scales)  # type: ignore[arg-type]
    for layer in (m for m in model.modules() if isinstance(m, FrozenLinear)):
        layer.make_rows_independent()
    if has_batch_invariant_products("cpu"):
        use_batch_invariant_products(model)
    model.expect(max_model_len or model.config.max_length)
    reasons = parity.differences(None, model.config, "cpu", 1)  # rows are apart, and the longest sequence is known
    _refuse(list(reasons))
    return Network(model, _cache(model_dir, scales) if kv_cache_dtype == "fp8" else None)


def _cache(model_dir: Path, scales: Path | str | None) -> list[KvScale]:
    result = kv_scales(model_dir, scales)
    if not result:
        raise ScalesError(f"{model_dir} has no scales of keys and values; calibrate with --kv-cache.")
    return [KvScale.of(*result[layer]) for layer in sorted(result)]


def _refuse(reasons: Sequence[str]) -> None:
    if reasons:
        raise RecipeError(f"These log-probabilities would not be a server's: {reasons[0]}")


def _of_trainer(forward: Forward) -> Scorer:
    _refuse(forward.differences())
    return lambda ids: forward.log_probs(collate([_row(ids)], forward.device))


def _of_network(network: Network) -> Scorer:
    def score(ids: Sequence[int]) -> Tensor:
        batch = collate([_row(ids)], "cpu")
        parts = zip(torch.split(network.hidden(batch), ROWS), torch.split(batch.targets, ROWS), strict=True)
        narrow = network.decoder.narrow_logits
        return torch.cat([target_log_probs(narrow(rows), targets) for rows, targets in parts])

    return score


def _row(ids: Sequence[int]) -> Row:
    return Row(np.asarray(ids, np.int32), np.ones(len(ids), bool))
