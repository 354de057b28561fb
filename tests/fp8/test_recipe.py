"""Recipes: names, JSON, and a message for every parameter out of range."""

import dataclasses
from typing import get_args

import pytest

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Float8WeightOnly, Format, autocast
from fp8serve.errors import RecipeError
from fp8serve.fp8.recipe import Recipe, RecipeName, from_json, from_name, name_of, to_json

RECIPES = [
    DelayedScaling(margin=2, interval=3, fp8_format=Format.E4M3, amax_history_len=16, amax_compute_algo="most_recent"),
    DelayedScaling(override_linear_precision=(False, True, True), reduce_amax=False, fp8_dpa=True, fp8_mha=True),
    DelayedScaling(power_2_scale=True, weight_granularity="row"),
    Float8WeightOnly(),
    Float8WeightOnly(weight_granularity="tensor", power_2_scale=True),
    Float8CurrentScaling(power_2_scale=True, granularity="row"),
    Float8CurrentScaling(fp8_dpa=True),
    Float8BlockScaling(fp8_format=Format.HYBRID, power_2_scale=True, override_linear_precision=(True, False, True)),
]


@pytest.mark.parametrize("name", [*get_args(RecipeName), "w8a16"])
def test_name_round_trip(name: str) -> None:
    assert name_of(from_name(name)) == name


@pytest.mark.parametrize("recipe", [*RECIPES, None])
def test_json_round_trip(recipe: Recipe | None) -> None:
    assert from_json(to_json(recipe)) == recipe


def test_parameters_of_later_versions_are_written_only_if_they_are_not_the_default() -> None:
    """A recipe that uses none of them is written as before, so that older versions can read it."""
    assert to_json(DelayedScaling()) == (
        '{"recipe": "DelayedScaling", "margin": 0, "interval": 1, "fp8_format": "HYBRID", "amax_history_len": 1024,'
        ' "amax_compute_algo": "max", "scaling_factor_compute_algo": null,'
        ' "override_linear_precision": [false, false, false], "reduce_amax": true, "fp8_dpa": false, "fp8_mha": false}'
    )
    assert '"weight_granularity": "row"' in to_json(DelayedScaling(weight_granularity="row"))
    assert '"power_2_scale": false' in to_json(Float8CurrentScaling())  # as old as the recipe


def test_the_weight_only_recipe_is_refused_for_training() -> None:
    with pytest.raises(RecipeError, match="Float8WeightOnly is a recipe for serving; train with another"):
        autocast(recipe=Float8WeightOnly())


def test_defaults_do_not_change() -> None:
    assert repr(DelayedScaling()) == (
        "DelayedScaling(margin=0, interval=1, fp8_format=<Format.HYBRID: 'HYBRID'>, amax_history_len=1024,"
        " amax_compute_algo='max', scaling_factor_compute_algo=None, override_linear_precision=(False, False, False),"
        " reduce_amax=True, fp8_dpa=False, fp8_mha=False, power_2_scale=False, weight_granularity='tensor')"
    )
    assert Float8BlockScaling().fp8_format is Format.E4M3
    assert from_name("rowwise") == Float8CurrentScaling(granularity="row")
    assert from_name("delayed", margin=3) == DelayedScaling(margin=3)


def test_recipes_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DelayedScaling().margin = 1  # type: ignore[misc]


def test_formats_of_the_forward_and_the_backward_pass() -> None:
    assert (Format.HYBRID.forward, Format.HYBRID.backward) == ("e4m3", "e5m2")
    assert (Format.E4M3.forward, Format.E4M3.backward) == ("e4m3", "e4m3")
    assert (Format.E5M2.forward, Format.E5M2.backward) == ("e5m2", "e5m2")


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"margin": 0.5}, r"margin must be a whole number from -8 to 8, found 0.5"),
        ({"margin": 9}, r"margin must be a whole number from -8 to 8, found 9"),
        ({"interval": 0}, r"interval must be a whole number from 1 to"),
        ({"amax_history_len": 0}, r"amax_history_len must be a whole number from 1 to"),
        ({"amax_history_len": True}, r"amax_history_len must be a whole number"),
        (
            {"amax_compute_algo": "mean"},
            r'amax_compute_algo must be "max", "most_recent" or a callable, found \'mean\'',
        ),
        ({"scaling_factor_compute_algo": "x"}, r"scaling_factor_compute_algo must be None or a callable"),
        ({"override_linear_precision": (True, False)}, r"must be three booleans \(fprop, dgrad, wgrad\)"),
        ({"fp8_format": "E4M3"}, r"fp8_format must be a Format, found 'E4M3'"),
        ({"fp8_format": Format.E5M2}, r"use Format.HYBRID"),
        ({"power_2_scale": 1}, r"power_2_scale must be True or False, found 1"),
        ({"weight_granularity": "block"}, r'weight_granularity must be "tensor" or "row", found \'block\''),
        ({"reduce_amax": 1}, r"reduce_amax must be True or False, found 1"),
    ],
)
def test_a_parameter_out_of_range_is_named(parameters: dict[str, object], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        DelayedScaling(**parameters)  # type: ignore[arg-type]


def test_unknown_names_and_parameters_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"no recipe 'fast'; choose one of delayed, .*, mxfp4-w4a16, bf16"):
        from_name("fast")
    with pytest.raises(RecipeError, match=r"DelayedScaling has no parameter 'marign'"):
        from_name("delayed", marign=1)
    with pytest.raises(RecipeError, match=r"'bf16' has no parameters"):
        from_name("bf16", margin=1)
    with pytest.raises(RecipeError, match=r'granularity must be "tensor" or "row"'):
        Float8CurrentScaling(granularity="column")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"recipe": "Other"}', '{"recipe": "DelayedScaling", "x": 1}'])
def test_broken_json_is_refused(text: str) -> None:
    with pytest.raises(RecipeError):
        from_json(text)


def test_json_names_an_unknown_format() -> None:
    with pytest.raises(RecipeError, match="'E9M9' does not exist"):
        from_json('{"recipe": "DelayedScaling", "fp8_format": "E9M9"}')


def test_a_recipe_with_a_function_cannot_be_stored() -> None:
    with pytest.raises(RecipeError, match="amax_compute_algo is a function"):
        to_json(DelayedScaling(amax_compute_algo=lambda history: history.max()))
