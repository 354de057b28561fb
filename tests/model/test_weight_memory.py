"""The memory estimate equals the bytes of the loaded weights, whatever types the file has."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from fp8serve.fp8.recipe import DelayedScaling, HeadDtype, Recipe, from_name
from fp8serve.model.checkpoint import load_any_servable, load_servable, open_checkpoint
from fp8serve.model.device import estimate_weight_memory
from fp8serve.model.formats.scales import FILE_NAME, ScalingCheckpoint, TensorScale, fingerprint, save_scales
from fp8serve.model.storage.mapping import span_of
from tests.compatibility.cases import NAMES, make
from tests.model.test_experts import write_gpt_oss
from tests.model.test_int4 import configuration, quantized

from . import checkpoints, encoders
from .oracle import make_model


def loaded_bytes(model: nn.Module) -> int:
    """Returns the bytes of all parameters and buffers, each counted once, without masks."""
    tensors = (*model.parameters(), *model.buffers())
    return sum({t.data_ptr(): t.nbytes for t in tensors if t.dtype is not torch.bool}.values())


def copied_bytes(model: nn.Module) -> int:
    """Returns the bytes of all parameters and buffers that are no parts of mapped files."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if span_of(tensor) is None)


def recipe_of(name: str) -> Recipe | None:
    return from_name(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_and_architecture_is_counted(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    for recipe in ("rowwise", "bf16"):
        model = load_servable(tmp_path, recipe_of(recipe))
        assert estimate_weight_memory(tmp_path, recipe).served == pytest.approx(loaded_bytes(model), rel=0.1), recipe


@pytest.mark.parametrize("kind", ["deepseek-v3", "phi3", "qwen3-moe", "gpt-oss", "gpt-oss in MXFP4"])
def test_copies_are_counted(kind: str, tmp_path: Path) -> None:
    in_4_bits = kind == "gpt-oss in MXFP4"
    if in_4_bits:
        write_gpt_oss(tmp_path)
    else:
        make_model(kind, tmp_path)
    copied = copied_bytes(load_servable(tmp_path, "stored" if in_4_bits else None))
    estimate = estimate_weight_memory(tmp_path, "stored" if in_4_bits else "bf16")
    assert estimate.copied == pytest.approx(copied, rel=0.02, abs=100)


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


def test_layers_of_several_widths_are_counted_each_in_its_own(tmp_path: Path) -> None:
    """Layers in FP8 with a file of their scales beside layers in BF16, and beside layers in INT4, which are widened."""
    draft, plain = checkpoints.static(), checkpoints.plain()
    for name in checkpoints.NAMES[::2]:
        draft.tensors[f"{name}.weight"] = plain.tensors[f"{name}.weight"]
        del draft.tensors[f"{name}.weight_scale"], draft.tensors[f"{name}.input_scale"]
    path = draft.write(tmp_path / "mixed")
    checkpoint = open_checkpoint(path)
    inputs = checkpoint.read_quantized(checkpoint.quantized_linears)
    scales = {f"{name}.input": TensorScale(cast(Tensor, matrix.input_scale)) for name, matrix in inputs.items()}
    for with_scales in (False, True):
        if with_scales:
            save_scales(path / FILE_NAME, ScalingCheckpoint(DelayedScaling(), scales, fingerprint(path)))
        model = load_servable(path)
        assert estimate_weight_memory(path, "stored").served == pytest.approx(loaded_bytes(model), rel=0.02)
    group = configuration(32, True)["config_groups"]["group_0"]
    draft.config["quantization_config"]["config_groups"]["int4"] = group | {"targets": checkpoints.NAMES[::2]}
    for name in checkpoints.NAMES[::2]:
        weight = draft.tensors.pop(f"{name}.weight")
        parts = quantized(weight, 32, True, torch.bfloat16)
        draft.tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in parts.items()}
    path = draft.write(tmp_path / "int4")
    model = load_servable(path)
    assert estimate_weight_memory(path, "stored").served == pytest.approx(loaded_bytes(model), rel=0.02)


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
