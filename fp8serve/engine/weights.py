"""Replaces the weights of a served model by others of the same shapes, in place, all or none.

They have the names of the served model. An FP8 linear `P` has `P.weight_q` (E4M3 [N, K]), the multipliers that
dequantize it, `P.weight_scale_inv` (FP32, of the shape that the model's recipe has), and, if inputs have a stored
scale, the multiplier `P.input_scale` (FP32 []) that quantizes them. Everything else is the parameter, in the type in
which it is served. Matrices that are packed, joined or stacked are given in rows and separately, as they come from
training and from files. The model then computes the same bits as one that was loaded with these weights.

All errors are found before anything is written.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from fp8serve.errors import ModelError, ScalesError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops.packing import GROUP, RUN
from fp8serve.model.building import Model
from fp8serve.model.storage.shards import type_name

E4M3 = torch.float8_e4m3fn
FP8_NAN = 0x7F  # without the sign


@torch.no_grad()
def replace_weights(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Replaces all weights of `model` by `given`. ModelError, ScalesError: they do not fit."""
    held, aliases = _held(model)
    _check_names(held, aliases, tensors)
    for name, tensor in held.items():
        _check(name, tensor, tensors[name], model)
    for alias, name in aliases.items():
        if alias in tensors and not _is_same(tensors[alias], tensors[name]):
            raise ModelError(f"{alias} is {name} in this model, and the new weights differ between the two.")
    scales = {name for name in held if name.endswith(".input_scale")}
    _write_input_scales(model, {name.removesuffix(".input_scale"): tensors[name] for name in scales})
    model.load_state_dict({name: _shaped(tensors[name], held[name]) for name in held.keys() - scales}, strict=False)


def _shaped(new: Tensor, held: Tensor) -> Tensor:
    """A single scale in the shape that the model has it: for every row, or as a single block."""
    return new.reshape(()).expand(held.shape).clone() if new.numel() == 1 else new


def _held(model: Model) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors by name, further names of some of them: a head that is the embedding)."""
    held: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = names.get(id(tensor), name)
        if first == name:
            held[name] = tensor
        else:
            aliases[name] = first
    return held, aliases


def _check_names(held: Mapping[str, Tensor], aliases: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    if missing := sorted(held.keys() - tensors.keys()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"The weights lack {missing[0]}{more}; all of a model are replaced together.")
    if unknown := sorted(tensors.keys() - held.keys() - aliases.keys()):
        raise ModelError(f"The model that is served has no {unknown[0]}; load weights of the same model.")


def _check(name: str, held: Tensor, new: Tensor, model: Model) -> None:
    """ModelError, ScalesError: `new` cannot replace `held`, or is not finite."""
    layer, shape, dtype = model.get_submodule(name.rpartition(".")[0]), tuple(held.shape), held.dtype
    if held.dim() == 3 and name.endswith((".weight_q", ".weight")) and _is_packed(held, layer):
        shape = GROUP * held.shape[0], RUN * held.shape[1]
    is_one = name.endswith(".weight_scale_inv") and new.numel() == 1 and shape[1:] in ((), (1,))  # see `_shaped`
    if not (is_one or tuple(new.shape) == shape) or new.dtype is not dtype:
        expected = f"{type_name(dtype)} {list(shape)}"
        raise ModelError(f"{name} is {expected} in this model, found {type_name(new.dtype)} {list(new.shape)}.")
    if name.endswith(("_scale", "_scale_inv")):
        if not bool((torch.isfinite(new) & (new > 0)).all()):
            raise ScalesError(f"{name} holds a scale that is not a positive finite number.")
    elif not _is_finite(new):
        raise ModelError(f"{name} holds NaN or an infinity; a model that diverged is not served.")


def _is_packed(held: Tensor, layer: torch.nn.Module) -> bool:
    if isinstance(layer, FrozenLinear):
        return layer.is_packed
    return isinstance(layer, torch.nn.Linear)


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype is E4M3:
        return not bool(((tensor.view(torch.uint8) & FP8_NAN) == FP8_NAN).any())
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same tensor, or have the same numbers."""
    alike = a.shape == b.shape and a.dtype is b.dtype
    return alike and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))


def _write_input_scales(model: Model, scales: Mapping[str, Tensor]) -> None:
    """Layers that read one input share one scale: it is overwritten if the new ones agree; otherwise each layer gets
    its own."""
    sharing: dict[int, list[tuple[FrozenLinear, Tensor]]] = {}
    for name, scale in scales.items():
        layer = cast(FrozenLinear, model.get_submodule(name))
        sharing.setdefault(id(layer.input_scale), []).append((layer, scale))
    for group in sharing.values():
        agree = all(torch.equal(group[0][1], scale) for _, scale in group)
        for layer, scale in group:
            _write_input_scale(layer, scale, in_place=agree)


def _write_input_scale(layer: FrozenLinear, scale: Tensor, *, in_place: bool) -> None:
    held, inverse = cast(Tensor, layer.input_scale), cast(Tensor, layer.input_scale_inv)
    if in_place:
        held.copy_(scale)
        inverse.copy_(scale.reciprocal())
    else:
        layer.input_scale = scale.to(held.device, copy=True)
        layer.input_scale_inv = layer.input_scale.reciprocal()
