"""The tables of docs/transformer-engine.md name existing tests; the tests here check the claims that no other does."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8serve
from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast
from fp8serve.errors import RecipeError
from fp8serve.fp8.casting import cast_current_rowwise
from fp8serve.fp8.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "transformer-engine.md").read_text()


def rows() -> list[list[str]]:
    tables = PAGE.partition("## Where we differ")[2]
    lines = [line.strip("|").split(" | ") for line in tables.splitlines() if line.startswith("|")]
    return [cells for cells in lines if not set(cells[0]) <= set("-| ")]


def all_tests() -> set[str]:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    return {name for text in texts for name in re.findall(r"def (test_\w+)", text)}


def test_every_row_names_a_test_that_exists() -> None:
    cells_of_rows = [cells for cells in rows() if "held by" not in cells[-1]]
    assert len(cells_of_rows) > 25
    named = [set(re.findall(r"`(test_\w+)`", cells[-1])) for cells in cells_of_rows if len(cells) == 5]
    assert len(named) == len(cells_of_rows)
    assert all(named)
    assert set().union(*named) <= all_tests()


ABSENT: list[tuple[Any, str]] = [
    *((recipe, name) for recipe in (Float8CurrentScaling, Float8BlockScaling) for name in
      ("amax_epsilon", "fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad", "fp8_gemm_fprop")),
    (Float8BlockScaling, "x_block_scaling_dim"), (Float8BlockScaling, "fp8_dpa"), (DelayedScaling, "backward_override"),
    (autocast, "fp8_recipe"), (autocast, "fp8_group"),
    *((Linear, name) for name in ("tp_group", "tp_size", "parallel_mode", "sequence_parallel", "init_method")),
]  # fmt: skip
MODULES = ("LayerNormLinear", "LayerNormMLP", "GroupedLinear", "TransformerLayer", "quantized_model_init",
           "fp8_autocast", "CustomRecipe")  # fmt: skip


@pytest.mark.parametrize(("owner", "name"), ABSENT)
def test_parameters_that_do_not_exist_are_refused(owner: Any, name: str) -> None:
    sizes = (16, 16) if owner is Linear else ()
    with pytest.raises(TypeError, match=name):
        owner(*sizes, **{name: None})
    assert not any(hasattr(fp8serve, module) for module in MODULES)


@pytest.mark.parametrize("weight", [True, False])
def test_block_scales_are_powers_of_two_on_request(weight: bool) -> None:
    x = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    assert Float8BlockScaling().power_2_scale is False
    for power_2_scale in (True, False):
        recipe = Float8BlockScaling(power_2_scale=power_2_scale)
        operand = cast_current_rowwise(x, recipe.specs.linear["weight" if weight else "input"])
        assert bool((operand.scale_inv.frexp().mantissa == 0.5).all()) is power_2_scale


@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8BlockScaling])
def test_backward_override_is_override_linear_precision(kind: Any) -> None:
    same: Recipe = kind(override_linear_precision=(False, True, True))
    assert kind(backward_override="high_precision") == same
    assert kind(backward_override=None) == kind()
    assert repr(kind(backward_override="high_precision")) == repr(same)
    for invalid in ("dequantized", "bf16"):
        with pytest.raises(RecipeError, match=f"None or \"high_precision\", found '{invalid}'"):
            kind(backward_override=invalid)


def test_gradients_under_backward_override_are_those_of_high_precision() -> None:
    layer, x = Linear(16, 16, bias=False), torch.randn(8, 16, requires_grad=True)
    with autocast(recipe=Float8CurrentScaling(backward_override="high_precision")):
        y = layer(x)
    assert not torch.equal(y, x @ layer.weight.t())
    y.backward(dy := torch.randn(8, 16))
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert torch.equal(x.grad, dy @ layer.weight)
    assert torch.equal(layer.weight.grad, dy.t() @ x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_params_dtype_is_dtype(dtype: torch.dtype) -> None:
    assert Linear(4, 4, params_dtype=dtype).weight.dtype is dtype
    assert Linear(4, 4, dtype=dtype, params_dtype=dtype).weight.dtype is dtype
    with pytest.raises(TypeError, match="two names of one parameter"):
        Linear(4, 4, dtype=torch.float32, params_dtype=dtype)


def test_a_linear_is_initialized_as_in_torch() -> None:
    torch.manual_seed(0)
    ours = Linear(16, 16, False)
    torch.manual_seed(0)
    assert torch.equal(ours.weight, nn.Linear(16, 16, False).weight)
    assert ours.bias is None


def test_no_recipe_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [repr(kind()) for kind in (DelayedScaling, Float8CurrentScaling, Float8BlockScaling)]
    for name in ("BACKWARD_OVERRIDE", "FP8_CURRENT_SCALING_POWER_2_SCALES", "FP8_BLOCK_SCALING_FP32_SCALES"):
        monkeypatch.setenv(f"NVTE_{name}", "1")
    assert [repr(kind()) for kind in (DelayedScaling, Float8CurrentScaling, Float8BlockScaling)] == before
