"""Specs: shapes of scales, errors, and the specs of every recipe."""

import pickle
from dataclasses import replace

import pytest
import torch

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, quantize
from fp8serve.errors import RecipeError
from fp8serve.fp8.casting import cast_current_rowwise
from fp8serve.fp8.ops import DTYPES
from fp8serve.fp8.recipe import Recipe, as_delayed
from fp8serve.fp8.spec import ATTENTION_TENSORS, LINEAR_TENSORS, Granularity, QuantSpec, ScaleFormat, block_of

GRANULARITIES: tuple[Granularity, ...] = ("tensor", "row", "block1x128", "block128x128")


@pytest.mark.parametrize("scale_format", ["fp32", "power_of_2"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_cast_by_a_spec_has_the_bits_of_quantize(granularity: Granularity, scale_format: ScaleFormat) -> None:
    x = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    for element in ("e4m3", "e5m2"):
        spec = QuantSpec(element, granularity, scale_format)
        q, scale_inv = cast_current_rowwise(x, spec)
        expected, expected_inv = quantize(x, element, granularity, power_2_scale=scale_format == "power_of_2")
        assert q.dtype is DTYPES[element]
        assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scale_inv, expected_inv)
        assert spec.scale_shape(*x.shape) == tuple(scale_inv.shape)
        assert block_of(tuple(scale_inv.shape), *x.shape) == spec.block


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"element": "e3m4"}, "no element format 'e3m4'; use e4m3, e5m2, bf16 or e2m1"),
        (
            {"granularity": "column"},
            "no granularity 'column'; use tensor, row, block1x128, block128x128, block1x32, block1x16",
        ),
        ({"scale_format": "bf16"}, "no scale format 'bf16'; use fp32, power_of_2, e8m0 or e4m3"),
        ({"source": "nowhere"}, "no source of scales 'nowhere'; use delayed, current or stored"),
    ],
)
def test_unknown_values_are_refused(fields: dict[str, str], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        QuantSpec(**fields)  # type: ignore[arg-type]


def test_a_shape_that_no_granularity_gives_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Scales of the shape \[7\] fit no \[300, 200\] matrix"):
        block_of((7,), 300, 200)
    assert QuantSpec(granularity="block128x128").divides(256, 128)
    assert not QuantSpec(granularity="block128x128").divides(256, 192)


def test_specs_of_delayed_scaling() -> None:
    specs = DelayedScaling(fp8_mha=True).specs
    assert specs.linear == {
        "input": QuantSpec(source="delayed"),
        "weight": QuantSpec(source="delayed"),
        "grad_output": QuantSpec("e5m2", source="delayed"),
    }
    assert {role for role, spec in specs.attention.items() if spec.element == "e5m2"} == {"grad_output", "grad_scores"}
    assert specs.keeps_attention_in_fp32
    assert specs.linear["input"].for_serving() == QuantSpec(source="stored")


def test_specs_of_current_and_block_scaling() -> None:
    by_row = Float8CurrentScaling(granularity="row", power_2_scale=True, fp8_dpa=True).specs
    assert set(by_row.linear.values()) == {
        QuantSpec("e4m3", "row", "power_of_2"),
        QuantSpec("e5m2", "row", "power_of_2"),
    }
    assert {spec.granularity for spec in by_row.attention.values()} == {"tensor"}
    block = Float8BlockScaling(fp8_format=Format.HYBRID).specs
    assert [block.linear[role] for role in LINEAR_TENSORS] == [
        QuantSpec("e4m3", "block1x128"),
        QuantSpec("e4m3", "block128x128"),
        QuantSpec("e5m2", "block1x128"),
    ]
    assert block.linear["input"].for_serving() == block.linear["input"]
    assert not block.attention


@pytest.mark.parametrize("recipe", [DelayedScaling(fp8_dpa=True), Float8CurrentScaling(), Float8BlockScaling()])
def test_every_recipe_has_a_spec_for_every_role(recipe: Recipe) -> None:
    assert tuple(recipe.specs.linear) == LINEAR_TENSORS
    assert tuple(recipe.specs.attention) in (ATTENTION_TENSORS, ())
    assert recipe.specs.cache["k"] == QuantSpec(source="stored")
    assert recipe.specs.element("grad_output") == recipe.fp8_format.backward
    assert recipe.specs.element("v") == recipe.fp8_format.forward
    assert as_delayed(recipe) is (recipe if isinstance(recipe, DelayedScaling) else None)


def test_specs_of_a_copied_recipe_are_recomputed_and_not_shown() -> None:
    recipe = DelayedScaling()
    assert replace(recipe, fp8_format=Format.E4M3).specs.element("grad_output") == "e4m3"
    assert pickle.loads(pickle.dumps(recipe)).specs == recipe.specs
    assert "specs" not in repr(recipe)
