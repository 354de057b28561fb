"""The public module of the recipes: `from fp8serve.recipe import DelayedScaling`. It does not import torch."""

from fp8serve.fp8.recipe import (
    DelayedScaling,
    Float4WeightOnly,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8WeightOnly,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    from_json,
    from_name,
    name_of,
    to_json,
)

__all__ = [
    "DelayedScaling",
    "Float4WeightOnly",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8WeightOnly",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
    "from_json",
    "from_name",
    "name_of",
    "to_json",
]
