"""Replaces the weights of a served model in place by weights of the same shapes. All tensors are checked before the
first is written, so an error leaves the model unchanged. `exchange_weights` also returns the old weights, so that they
can serve again.

The new tensors have the names of the served model. An FP8 linear layer `P` has these tensors:

* `P.weight_q`: the quantized weight, E4M3 [N, K];
* `P.weight_scale_inv`: the scales that dequantize it, FP32, with the shape of the model's recipe;
* `P.weight_global_scale`: of NVFP4, FP32 []. A 4-bit weight is uint8 [N, K/2], its scales are E4M3 or E8M0;
* `P.input_scale`: the scale that quantizes the inputs, FP32 [], if the layer has a stored scale.

All other tensors are parameters in the dtype in which they are served. The caller passes matrices unpacked and one by
one, as in a checkpoint, even if the model has packed, fused or stacked them. Afterwards the model computes the same
bits as a model that was loaded with these weights.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from fp8serve.errors import IncompleteError, ModelError, ScalesError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops.arithmetic import is_finite
from fp8serve.fp8.ops.four_bit import pack_4bit_into
from fp8serve.fp8.ops.packing import GROUP, RUN
from fp8serve.model.building import Model
from fp8serve.model.storage.shards import type_name

E4M3 = torch.float8_e4m3fn


@torch.no_grad()
def replace_weights(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Replaces all weights of `model` by `tensors`. Raises ModelError or ScalesError if they do not suit the model."""
    check_weights(model, tensors)
    tensors = dict(tensors)
    _pack_4bit_weights(model, tensors)
    current, _ = _current_tensors(model)
    others = current.keys() - _write_scales(model, tensors)
    model.load_state_dict({name: _expand_scalar(tensors[name], current[name]) for name in others}, strict=False)


@torch.no_grad()
def check_weights(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Raises ModelError or ScalesError if `tensors` cannot replace the weights of `model`; the ModelError is an
    IncompleteError if weights are missing."""
    current, aliases = _current_tensors(model)
    _check_names(current, aliases, tensors)
    for name, tensor in current.items():
        _check_tensor(name, tensor, tensors[name], model)
    for alias, name in aliases.items():
        if alias in tensors and not _is_same(tensors[alias], tensors[name]):
            raise ModelError(f"{alias} is {name} in this model, and the new weights differ between the two.")


@torch.no_grad()
def exchange_weights(model: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Writes `tensors`, which passed `check_weights`, into `model` and returns the tensors that they replaced.

    The returned tensors can be passed to this function again. They are on the device of `tensors`. Each tensor is
    removed from `tensors` when it is written, so memory holds two versions of the weights, and a third version of one
    tensor at a time. If a tensor cannot be written, the model gets its old weights back, and the error is raised.
    """
    current, _ = _current_tensors(model)
    scales = {name for group in _shared_scales(model).values() for _, name in group}
    previous = {name: current[name].clone() for name in scales}
    _pack_4bit_weights(model, tensors)
    try:
        _write_scales(model, tensors)
        for name in current.keys() - scales:
            new = tensors.pop(name)
            previous[name] = torch.empty_like(current[name], device=new.device).copy_(current[name])
            _write_tensor(model, name, _expand_scalar(new, current[name]))
    except BaseException:
        for name in previous.keys() - _write_scales(model, previous):
            _write_tensor(model, name, previous[name])
        raise
    tensors.clear()  # of aliases and scales
    return previous


def _pack_4bit_weights(model: Model, tensors: dict[str, Tensor]) -> None:
    """Packs the 4-bit weights in `tensors` that the model has packed, with their scales."""
    for prefix, layer in model.named_modules():
        codes, scales = f"{prefix}.weight_q", f"{prefix}.weight_scale_inv"
        is_packed = isinstance(layer, FrozenLinear) and layer.is_4bit and layer.is_packed
        if is_packed and tensors[codes].dim() == 2:
            out = torch.empty_like(tensors[codes], memory_format=torch.contiguous_format).view(-1)
            tensors[codes], tensors[scales] = pack_4bit_into(tensors[codes], tensors[scales], out)


def _write_tensor(model: Model, name: str, tensor: Tensor) -> None:
    """Overwrites one parameter or buffer. If the model has packed it, `load_state_dict` packs the new tensor, too."""
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner).load_state_dict({leaf: tensor}, strict=False)


def _expand_scalar(new: Tensor, current: Tensor) -> Tensor:
    """Expands a single scale to the shape that the model has for it. Returns other tensors unchanged."""
    return new.reshape(()).expand(current.shape).clone() if new.numel() == 1 else new


def _current_tensors(model: Model) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the model's tensors by name, and the names of tied weights, mapped to the name of their tensor."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = names.get(id(tensor), name)
        if first == name:
            tensors[name] = tensor
        else:
            aliases[name] = first
    return tensors, aliases


def _check_names(current: Mapping[str, Tensor], aliases: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    if missing := sorted(current.keys() - tensors.keys()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise IncompleteError(f"The new weights lack {missing[0]}{more}; provide all weights of the model.")
    if unknown := sorted(tensors.keys() - current.keys() - aliases.keys()):
        raise ModelError(f"The model that is served has no {unknown[0]}; load weights of the same model.")


def _check_tensor(name: str, current: Tensor, new: Tensor, model: Model) -> None:
    """Raises ModelError or ScalesError if `new` cannot replace `current` or is not finite."""
    layer, shape, dtype = model.get_submodule(name.rpartition(".")[0]), tuple(current.shape), current.dtype
    if current.dim() == 3 and name.endswith((".weight_q", ".weight")) and _is_packed(layer):
        shape = GROUP * current.shape[0], (RUN // 2 if dtype is torch.uint8 else RUN) * current.shape[1]
    if current.dim() == 3 and name.endswith(".weight_scale_inv"):  # packed with a 4-bit weight; E8M0 has one row more
        shape = GROUP * current.shape[0], current.shape[1] - (dtype is torch.float8_e8m0fnu)
    is_scale = name.endswith((".weight_scale_inv", ".weight_global_scale"))
    is_scalar = is_scale and new.numel() == 1 and shape[1:] in ((), (1,))  # `_expand_scalar`
    if name.endswith(".weight_scale_inv") and isinstance(layer, FrozenLinear) and layer.shares_weight_scale:
        shape = shape if is_scalar else (layer.out_features, 1)  # the layer gets scales of its own
    if not (is_scalar or tuple(new.shape) == shape) or new.dtype is not dtype:
        expected = f"{type_name(dtype)} {list(shape)}"
        raise ModelError(f"{name} must be {expected} in this model, found {type_name(new.dtype)} {list(new.shape)}.")
    if name.endswith(("_scale", "_scale_inv")):
        value = new.float()
        if not bool((torch.isfinite(value) & (value > 0)).all()):
            raise ScalesError(f"{name} holds a scale that is not a positive finite number.")
    elif not _is_finite(new):
        raise ModelError(f"{name} holds NaN or an infinity; the training of these weights has diverged.")


def _is_packed(layer: torch.nn.Module) -> bool:
    """Returns whether a three-dimensional weight of this layer is packed; it may also be a stack of experts."""
    if isinstance(layer, FrozenLinear):
        return layer.is_packed
    return isinstance(layer, torch.nn.Linear)


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype is E4M3 and tensor.numel():  # the largest codes, without and with a sign, are NaN
        return all(int(tensor.view(code).amax()) != torch.iinfo(code).max for code in (torch.int8, torch.uint8))
    return not tensor.is_floating_point() or is_finite(tensor)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors share their memory or have equal contents."""
    is_comparable = a.shape == b.shape and a.dtype is b.dtype
    if is_comparable and a.dtype is torch.float8_e8m0fnu:  # which torch does not compare
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return is_comparable and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))


def _write_scales(model: Model, tensors: Mapping[str, Tensor]) -> set[str]:
    """Writes the scales that layers can share and returns their names. If the new scales of the layers that share one
    are equal, the shared tensor is overwritten. Otherwise each layer gets a tensor of its own."""
    sharing = _shared_scales(model)
    for group in sharing.values():
        first = tensors[group[0][1]]
        are_equal = all(torch.equal(first, tensors[name]) for _, name in group)
        for layer, name in group:
            if name.endswith(".input_scale"):
                _write_input_scale(layer, tensors[name], in_place=are_equal)
            elif are_equal and first.numel() == 1:
                layer.weight_scale_inv.copy_(first.reshape(()))
            else:
                _write_tensor(model, name, tensors[name])
    return {name for group in sharing.values() for _, name in group}


def _shared_scales(model: Model) -> dict[int, list[tuple[FrozenLinear, str]]]:
    """Returns, for every input scale and every weight scale that joined layers share (joined.py), by address: the
    layers that hold the tensor, with its name in each."""
    sharing: dict[int, list[tuple[FrozenLinear, str]]] = {}
    for prefix, layer in model.named_modules():
        if isinstance(layer, FrozenLinear) and layer.input_scale is not None:
            sharing.setdefault(layer.input_scale.data_ptr(), []).append((layer, f"{prefix}.input_scale"))
        if isinstance(layer, FrozenLinear) and layer.shares_weight_scale:
            sharing.setdefault(layer.weight_scale_inv.data_ptr(), []).append((layer, f"{prefix}.weight_scale_inv"))
    return sharing


def _write_input_scale(layer: FrozenLinear, scale: Tensor, *, in_place: bool) -> None:
    current, inverse = cast(Tensor, layer.input_scale), cast(Tensor, layer.input_scale_inv)
    if in_place:
        current.copy_(scale)
        inverse.copy_(scale.reciprocal())
    else:
        layer.input_scale = scale.to(current.device, copy=True)
        layer.input_scale_inv = layer.input_scale.reciprocal()
