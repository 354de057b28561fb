"""Computes log-probabilities of given tokens with the forward pass of training. On a CPU they have a server's bits.

Use it to compare training and serving, for example in a reinforcement trainer whose importance ratios must start at 1.
`Forward.log_probs` computes the same numbers with gradients.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fp8serve.errors import RecipeError, RequestError, ScalesError
from fp8serve.fp8.attention import KvScale
from fp8serve.fp8.recipe import Recipe, from_name
from fp8serve.model import parity
from fp8serve.model.checkpoint import kv_scales, load_servable
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.train.data import Row
from fp8serve.train.forward import Forward, Network, collate, prepare_as_server, target_log_probs

ROWS_PER_CHUNK = 256  # rows of logits at a time, as in a server
KvDtype = Literal["bf16", "fp8"]


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
    """Returns, for every sequence of token ids [n], the log-probabilities FP32 [n - 1] of all tokens except the first.

    `model` is a model directory, or a trainer's forward pass, which takes no options. A directory is loaded as
    `fp8serve serve` loads it with the same options. The values are bit-identical to a server's for prompts and outputs,
    whatever chunks, batches or caches the server uses.

    Raises RecipeError, with the reason, if they would not be bit-identical. Raises RequestError for a sequence that is
    empty, too long, or has an invalid token id, and ModelError or ScalesError for a directory that cannot be served.
    """
    if isinstance(model, Forward):
        if (recipe, scales, kv_cache_dtype, max_model_len) != ("stored", None, "bf16", None):
            raise RequestError("A trainer's forward pass has its recipe and scales already; leave the options out.")
        _check_parity(model.differences())
        score, config = partial(_score_as_trainer, model), model.network.decoder.config
    else:
        network = served_network(Path(model), recipe, scales, kv_cache_dtype, max_model_len)
        score, config = partial(_score_as_server, network), network.decoder.config
    for ids in sequences:
        _check_ids(ids, config, max_model_len or config.max_length)
    return [score(ids) if len(ids) > 1 else torch.empty(0) for ids in sequences]


def _check_ids(ids: Sequence[int], config: ModelConfig, max_length: int) -> None:
    if not 0 < len(ids) <= max_length:
        raise RequestError(f"A sequence must have from 1 to {max_length} tokens; found {len(ids)}.")
    if not all(0 <= token < config.vocab_size for token in ids):
        raise RequestError(f"Token ids must be from 0 to {config.vocab_size - 1}; found {min(ids)} to {max(ids)}.")


def served_network(
    model_dir: Path, recipe: Recipe | str, scales: Path | str | None, kv_cache_dtype: KvDtype, max_model_len: int | None
) -> Network:
    """Returns the trainer's forward pass of a directory, with the FP8 weights and scales of a server."""
    loaded_recipe = from_name(recipe) if isinstance(recipe, str) and recipe != "stored" else recipe
    model = load_servable(model_dir, "bf16" if loaded_recipe is None else loaded_recipe, scales)  # type: ignore[arg-type]
    prepare_as_server(model, "cpu", max_model_len or model.config.max_length)
    # Neither the recipe nor the length makes a difference: rows are independent here, and the maximum length is set.
    _check_parity(list(parity.differences(None, model.config, "cpu", 1)))
    return Network(model, _cache_scales(model_dir, scales) if kv_cache_dtype == "fp8" else None)


def _cache_scales(model_dir: Path, scales: Path | str | None) -> list[KvScale]:
    layers = kv_scales(model_dir, scales)
    if not layers:
        raise ScalesError(f"{model_dir} has no scales of keys and values; calibrate with --kv-cache.")
    return [KvScale.of(*layers[layer]) for layer in sorted(layers)]


def _check_parity(differences: Sequence[str]) -> None:
    if differences:
        raise RecipeError(f"These log-probabilities would differ from a server's: {differences[0]}")


def _score_as_trainer(forward: Forward, ids: Sequence[int]) -> Tensor:
    return forward.log_probs(collate([_row(ids)], forward.device))


def _score_as_server(network: Network, ids: Sequence[int]) -> Tensor:
    batch = collate([_row(ids)], "cpu")
    chunks = zip(
        torch.split(network.hidden(batch), ROWS_PER_CHUNK), torch.split(batch.targets, ROWS_PER_CHUNK), strict=True
    )
    logits = network.decoder.logits_in_weight_dtype
    return torch.cat([target_log_probs(logits(hidden), targets) for hidden, targets in chunks])


def _row(ids: Sequence[int]) -> Row:
    return Row(np.asarray(ids, np.int32), np.ones(len(ids), bool))
