"""The bytes that a layer saves for its backward pass, for each token: FP8 for the inputs of linear layers.

Everything else is BF16 and is needed as it is: the inputs of both norms, the queries, keys and values of attention, and
the products of gate and up.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8serve.fp8.conversion import convert
from fp8serve.fp8.recipe import from_name
from fp8serve.model.checkpoint import load_trainable
from fp8serve.train.data import Row
from fp8serve.train.forward import Forward, collate
from fp8serve.train.scratch import write_random_model

from .conftest import TEXTS

HIDDEN, INNER, QUERIES, KEYS = 128, 384, 128, 64
LAYERS, TOKENS = (2, 4), (128, 256)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    sizes = {"vocab_size": 320, "hidden_size": HIDDEN, "heads": 4, "kv_heads": 2, "intermediate_size": INNER}
    root = tmp_path_factory.mktemp("models")
    return {n: write_random_model(root / str(n), TEXTS, layers=n, context=256, **sizes) for n in LAYERS}


def saved_bytes(model: Path, tokens: int, recipe: str) -> Counter[torch.dtype]:
    """Returns the bytes that autograd holds after a forward pass over one row, by dtype, without the parameters."""
    decoder = load_trainable(model)
    if recipe != "bf16":
        convert(decoder)
    forward = Forward(decoder, from_name(recipe))
    parameters = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    storages: dict[int, Tensor] = {}  # holds the tensors, whose addresses would be used again

    def pack(tensor: Tensor) -> Tensor:
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    row = Row(np.zeros(tokens + 1, np.int32), np.ones(tokens + 1, np.bool_))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward.logits(collate([row], "cpu"))
    sizes: Counter[torch.dtype] = Counter()
    for address, tensor in storages.items():
        if address not in parameters:
            sizes[tensor.dtype] += tensor.untyped_storage().nbytes()
    return sizes


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "rowwise", "block"])
def test_the_inputs_of_linear_layers_are_saved_once_in_fp8(models: dict[int, Path], recipe: str) -> None:
    sizes = {(n, t): saved_bytes(models[n], t, recipe) for n in LAYERS for t in TOKENS}

    def per_token_and_layer(dtype: torch.dtype) -> float:
        (few, many), (short, long) = LAYERS, TOKENS
        grown = [sizes[n, long][dtype] - sizes[n, short][dtype] for n in (few, many)]
        return (grown[1] - grown[0]) / (many - few) / (long - short)

    linear_inputs = 2 * HIDDEN + QUERIES + INNER  # of q, k and v; of gate and up; of o; of down
    others = 2 * HIDDEN + QUERIES + 2 * KEYS + 2 * INNER
    in_fp8 = 0 if recipe == "bf16" else linear_inputs
    assert per_token_and_layer(torch.float8_e4m3fn) == in_fp8
    assert per_token_and_layer(torch.bfloat16) == 2 * (others + linear_inputs - in_fp8)
    blocks = linear_inputs / 128 if recipe == "block" else 0  # a scale for 1x128 elements of the transposed input
    assert per_token_and_layer(torch.float32) == 4 * blocks
