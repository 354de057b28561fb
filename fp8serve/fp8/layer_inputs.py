"""The preparation of a linear layer's input: the cast for torch.autocast, and checks of what FP8 supports.

nn.Linear accepts more than FP8 kernels do: nested and sparse tensors, FP64 and complex numbers, the transforms of
torch.func and torch.jit.trace. In high precision a converted layer accepts them, too, because it calls torch's own
function. In FP8 they would fail in an op that the caller does not know, or would not fail at all: an input of zero
tokens and a wrong width passes every reshape. So inputs are checked before they are cast and their amax is recorded.
"""

import torch
from torch import Tensor

from fp8serve.errors import RecipeError
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.torch_private import is_transformed

QUANTIZABLE = frozenset({torch.float32, torch.bfloat16, torch.float16})
FLOATS = QUANTIZABLE | {torch.float64}
_IN_HIGH_PRECISION = "run the layer in high precision, under autocast(enabled=False)"


def cast_by_torch_autocast(x: Tensor) -> Tensor:
    """Returns x in the dtype of torch.autocast if that is active, as torch does for nn.Linear.

    FP64 tensors and tensors that are not floating-point are not cast. Raises TypeError if x is not a tensor.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"A linear layer takes a tensor, found {type(x).__name__}.")
    kind = x.device.type
    # torch raises an error for autocast on "meta".
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind)) if x.is_floating_point() and x.dtype != torch.float64 else x


def check_operands(x: Tensor, weight: Tensor, in_features: int) -> None:
    """Raises an error unless a layer can multiply x [..., in_features] by its weight in FP8.

    Raises ValueError for a wrong width or another device than the weight's, TypeError for a dtype or layout without a
    cast to FP8, and RuntimeError inside torch.jit.trace, a transform of torch.func or forward-mode differentiation.
    """
    if x.dtype not in QUANTIZABLE or weight.dtype not in QUANTIZABLE:
        raise TypeError(
            "A layer in FP8 takes an input and a weight of float32, bfloat16 or float16, found "
            f"{_dtype_name(x)} and {_dtype_name(weight)}; convert them, or {_IN_HIGH_PRECISION}."
        )
    if x.layout is not torch.strided or x.is_nested:
        kind, dense = ("nested", "its values()") if x.is_nested else (f"{x.layout}", "its to_dense()")
        raise TypeError(
            f"A layer in FP8 takes a dense tensor, found {kind.removeprefix('torch.')}; give it {dense}, or "
            f"{_IN_HIGH_PRECISION}."
        )
    _check_transforms()
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise ValueError(f"The input of this layer must be [..., {in_features}], found {list(x.shape)}.")
    if x.device != weight.device:
        raise ValueError(f"The input is on {x.device} and the weight on {weight.device}; move one of them.")


def check_whole_blocks(recipe: Recipe, in_features: int, layer: str = "A layer") -> None:
    """Raises RecipeError if the layer's weight does not consist of whole blocks of MXFP8, MXFP4 or NVFP4, which formats
    cannot express."""
    spec = recipe.specs.linear["weight"]
    if (spec.is_mx or spec.is_4bit) and in_features % (spec.block[1] or 1):
        raise RecipeError(
            f"{layer} in {spec.name} needs a multiple of {spec.block[1]} input features, found {in_features}; leave it "
            "in high precision, or use another recipe."
        )


def _check_transforms() -> None:
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        raise RuntimeError(
            f"torch.jit.trace cannot follow a layer in FP8; use torch.compile or torch.export, or {_IN_HIGH_PRECISION}."
        )
    if not torch.compiler.is_compiling() and is_transformed():
        raise RuntimeError(
            "A layer in FP8 has no rule for the transforms of torch.func (vmap, grad, jvp and others) and none for "
            f"forward mode; use backward without them, or {_IN_HIGH_PRECISION}."
        )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
