"""The input of a layer before it is multiplied: cast as torch.autocast says, and refused where FP8 cannot follow.

nn.Linear accepts more than FP8 kernels do: nested and sparse tensors, FP64 and complex numbers, the transforms of
torch.func and torch.jit.trace. In high precision a converted layer accepts them, too, because it calls torch's own
function there. In FP8 the failure would come from the inside, as a message about an op that the caller has not called,
or not at all: zero tokens of a wrong width pass every reshape. So inputs are checked before anything is cast or
recorded.
"""

import torch
from torch import Tensor

from fp8serve.fp8.torch_private import is_transformed

QUANTIZABLE = frozenset({torch.float32, torch.bfloat16, torch.float16})
FLOATS = QUANTIZABLE | {torch.float64}
_IN_HIGH_PRECISION = "run the layer in high precision, under autocast(enabled=False)"


def cast_by_torch_autocast(x: Tensor) -> Tensor:
    """x in the dtype of torch.autocast, where that is active and casts it: it leaves FP64 and what is no float.

    TypeError: x is no tensor.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"A linear layer takes a tensor, found {type(x).__name__}.")
    kind = x.device.type
    # torch knows no autocast of "meta", and raises.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind)) if x.is_floating_point() and x.dtype != torch.float64 else x


def check_operands(x: Tensor, weight: Tensor, in_features: int) -> None:
    """Raise unless a layer can multiply x [..., in_features] by its weight in FP8.

    ValueError: another width, or another device than the weight's. TypeError: a type or a layout that has no cast.
    RuntimeError: torch.jit.trace, a transform of torch.func or differentiation in forward mode is running.
    """
    if x.dtype not in QUANTIZABLE or weight.dtype not in QUANTIZABLE:
        raise TypeError(
            "A layer in FP8 takes an input and a weight of float32, bfloat16 or float16, found "
            f"{_name(x)} and {_name(weight)}; convert them, or {_IN_HIGH_PRECISION}."
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


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
