"""Reads MXFP8 and MXFP4 weights. In both, 32 consecutive numbers share an 8-bit exponent.

| format | weight [N, K]                                           | scales [N, K / 32]                  |
|--------|---------------------------------------------------------|-------------------------------------|
| MXFP8  | `weight`, E4M3                                          | E8M0, or its bits as uint8          |
| MXFP4  | `weight_packed`, uint8 [N, K / 2], the lower half first | under one of the names in `_SCALE_SUFFIXES` |
|        | the same under the name `weight`, as ModelOpt writes it |                                     |

Weights of the layers that a quantization configuration names are served as they are (fp8/ops/microscaling.py and
four_bit.py). Reading does not depend on the rule by which a project rounds a scale, because the scale is in the file.
Other weights in MX blocks become BF16, without a loss. An E8M0 number is the power of two 2^(bits - 127), or NaN if
all bits are set (OCP Microscaling Formats 1.0). A tensor is recognized by its type and shape, never by its name alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.fp8.ops.arithmetic import E8M0, MX_BLOCK, is_finite
from fp8serve.fp8.ops.four_bit import code_values, unpack_codes
from fp8serve.fp8.ops.microscaling import ONE, dequantize_to_bf16
from fp8serve.model.storage.shards import ComputedShards, Shards, StoredTensor

_SCALE_SUFFIXES = (".weight_scale", ".weight_scale_inv", ".scale")
EXPONENT_DTYPES = (torch.uint8, E8M0)
# The largest exponent with which the format's largest number, 448 or 6, is finite in BF16.
_MAX_EXPONENTS = {torch.float8_e4m3fn: 119, torch.uint8: 125}


class WidenedShards(ComputedShards):
    """Shards whose quantized weights become high precision when they are read.

    `note` is a sentence about them for the user, and `check` raises ModelError if a scale of theirs cannot be used.
    `notes` and `widened`, the names of the weights, include those of `stored`.
    """

    def __init__(
        self,
        stored: Shards,
        entries: dict[str, StoredTensor],
        computed: Mapping[str, Callable[[], Tensor]],
        note: str,
        check: Callable[[], None],
    ) -> None:
        super().__init__(stored, entries, computed)
        before = stored if isinstance(stored, WidenedShards) else None
        self.widened: tuple[str, ...] = (*(before.widened if before else ()), *computed)
        self.notes: tuple[str, ...] = (*(before.notes if before else ()), note)
        self._checks: tuple[Callable[[], None], ...] = (*(before._checks if before else ()), check)

    def check_scales(self) -> None:
        """Raises ModelError if a scale cannot be used. Reads only scales."""
        for check in self._checks:
            check()


def with_weight_names(shards: Shards) -> Shards:
    """Returns the tensors with the codes of 4-bit weights under the name `P.weight`, where ModelOpt has them."""
    entries = shards.entries
    packed = [key for key in entries if key.endswith(".weight_packed") and entries[key].dtype is torch.uint8]
    names = {key: key for key in entries} | {key: key.removesuffix("_packed") for key in packed}
    return shards.renamed(names) if packed else shards


def dequantize_mx(shards: Shards, keeps: Callable[[str, bool], bool] = lambda module, is_4bit: False) -> Shards:
    """Returns the tensors with every MX weight as BF16, under the name `P.weight`, and without its scales.

    Weights for which `keeps(P, whether it is MXFP4)` is True stay as they are.
    """
    entries, computed = dict(shards.entries), dict[str, Callable[[], Tensor]]()
    scales = {
        key: scale
        for key, scale in find_mx_scales(shards.entries).items()
        if not keeps(key.removesuffix(".weight"), entries[key].dtype is torch.uint8)
    }
    for key, scale in scales.items():
        rows, columns = shards.entries[scale].shape
        name = key.removesuffix("_packed")
        entry = replace(entries.pop(key), dtype=torch.bfloat16, shape=(rows, columns * MX_BLOCK), note=None)
        entries.pop(scale)
        entries[name], computed[name] = entry, partial(_dequantize, shards, key, scale)
    if not computed:
        return shards

    def check() -> None:
        for key, scale in scales.items():
            check_exponents(scale, shards[scale], shards.entries[key].dtype)

    note = (
        f"{len(computed)} weights, {next(iter(computed))} among them, are in MX blocks of {MX_BLOCK} and run in BF16, "
        "which holds them exactly; for FP8 calibrate the model, or serve with --recipe rowwise or block."
    )
    return WidenedShards(shards, entries, computed, note, check)


def find_mx_scales(entries: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Returns the key of every MX weight's scales, by the key of the weight."""
    keys = [key for key in entries if key.endswith((".weight", ".weight_packed"))]
    scales = {key: _scale_of(key, entries) for key in keys}
    return {key: scale for key, scale in scales.items() if scale is not None}


def widened_notes(shards: Shards) -> tuple[str, ...]:
    """Returns notes for the user about weights that become high precision when they are read."""
    return shards.notes if isinstance(shards, WidenedShards) else ()


def mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantizes codes uint8 [..., K / 2] with scales uint8 or E8M0 [..., K / 32] to BF16 [..., K]."""
    blocks = code_values(unpack_codes(codes)).reshape(*scales.shape, MX_BLOCK)
    return (blocks * scales.view(E8M0).float().unsqueeze(-1)).to(torch.bfloat16).flatten(-2)


def max_exponent_code(dtype: torch.dtype) -> int:
    """Returns the largest code of a scale with which weights of this dtype (uint8: MXFP4) are finite in BF16."""
    return ONE + _MAX_EXPONENTS[dtype]


def check_exponents(name: str, stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scales of a weight of this dtype as E8M0. Raises ModelError if one is NaN or too large for BF16."""
    codes = stored.view(torch.uint8)
    if bool((codes > max_exponent_code(dtype)).any()):
        raise _not_finite_error(name)
    return codes.view(E8M0)


def _scale_of(key: str, entries: Mapping[str, StoredTensor]) -> str | None:
    """Returns the key of the MX scales of the weight `key`, or None if it is no MX weight."""
    weight, owner = entries[key], key.rpartition(".")[0]
    is_packed = weight.dtype is torch.uint8
    if len(weight.shape) != 2 or not (is_packed or (weight.dtype is torch.float8_e4m3fn and key.endswith(".weight"))):
        return None
    rows, columns = weight.shape[0], weight.shape[1] * (2 if is_packed else 1)
    for name in (f"{owner}{suffix}" for suffix in _SCALE_SUFFIXES):
        entry = entries.get(name)
        shape = (rows, columns // MX_BLOCK)
        if entry is not None and entry.dtype in EXPONENT_DTYPES and entry.shape == shape and columns % MX_BLOCK == 0:
            return name
    return None


def _dequantize(shards: Shards, key: str, scale: str) -> Tensor:
    dequantize = mxfp4 if shards.entries[key].dtype is torch.uint8 else dequantize_to_bf16
    weight = dequantize(shards[key], shards[scale].view(E8M0))
    if not is_finite(weight):
        raise _not_finite_error(scale)
    return weight


def _not_finite_error(scale: str) -> ModelError:
    return ModelError(f"{scale} holds NaN or an exponent too large for BF16; quantize the model again.")
