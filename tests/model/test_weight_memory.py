"""The memory estimate equals the bytes of the loaded weights, whatever types the file has."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fp8serve.fp8.recipe import HeadDtype, Recipe, from_name
from fp8serve.model.checkpoint import load_any_servable, load_servable
from fp8serve.model.device import estimate_weight_memory
from tests.compatibility.cases import NAMES, make

from . import checkpoints, encoders


def loaded_bytes(model: nn.Module) -> int:
    """Returns the bytes of all parameters and buffers, each counted once, without masks."""
    tensors = (*model.parameters(), *model.buffers())
    return sum({t.data_ptr(): t.nbytes for t in tensors if t.dtype is not torch.bool}.values())


def recipe_of(name: str) -> Recipe | None:
    return from_name(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_and_architecture_is_counted(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    for recipe in ("rowwise", "bf16"):
        model = load_servable(tmp_path, recipe_of(recipe))
        assert estimate_weight_memory(tmp_path, recipe).served == pytest.approx(loaded_bytes(model), rel=0.1), recipe


@pytest.mark.parametrize("head", ["bf16", "fp8"])
def test_a_head_that_is_cast_is_counted(head: HeadDtype, tmp_path: Path) -> None:
    make("mixtral", tmp_path)
    model = load_servable(tmp_path, from_name("block"), head=head)
    assert estimate_weight_memory(tmp_path, "block", head).served == pytest.approx(loaded_bytes(model), rel=0.1)


def test_an_fp32_encoder_is_counted_in_its_serving_dtype(tmp_path: Path) -> None:
    encoders.make(tmp_path, encoders.BERT)
    for recipe in ("rowwise", "bf16"):
        model = load_any_servable(tmp_path, recipe_of(recipe))
        assert estimate_weight_memory(tmp_path, recipe).served == pytest.approx(loaded_bytes(model), rel=0.1), recipe


@pytest.mark.parametrize("draft", [checkpoints.blocks, checkpoints.static, checkpoints.sharded])
def test_a_directory_in_fp8_is_counted_as_it_is_served(draft: Callable[[], checkpoints.Draft], tmp_path: Path) -> None:
    path = draft().write(tmp_path / "model")
    for recipe in ("stored", "bf16"):
        model = load_servable(path, "stored" if recipe == "stored" else None)
        assert estimate_weight_memory(path, recipe).served == pytest.approx(loaded_bytes(model), rel=0.1), recipe


def test_scales_of_one_byte_are_counted_as_such(tmp_path: Path) -> None:
    estimates = []
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        draft = checkpoints.mx(8)
        draft.tensors = {n: t.view(dtype) if n.endswith("_scale") else t for n, t in draft.tensors.items()}
        estimates.append(estimate_weight_memory(draft.write(tmp_path / str(dtype)), "stored"))
    assert estimates[0] == estimates[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_a_few_bits_are_counted_as_they_are_widened(bits: int, tmp_path: Path) -> None:
    path = checkpoints.mx(bits).write(tmp_path / "model")
    for recipe in ("stored", "rowwise"):
        model = load_servable(path, "stored" if recipe == "stored" else from_name(recipe))
        assert estimate_weight_memory(path, recipe).served == pytest.approx(loaded_bytes(model), rel=0.1), recipe
