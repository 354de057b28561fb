"""MX blocks: 32 numbers in a row share an exponent of 8 bits. They are read as BF16, which holds them exactly.

| format | weight [N, K]                                           | scales [N, K / 32]                  |
|--------|---------------------------------------------------------|-------------------------------------|
| MXFP8  | `weight`, E4M3                                          | E8M0, or its bits as uint8          |
| MXFP4  | `weight_packed`, uint8 [N, K / 2], the lower half first | under one of the names in `_SCALES` |
|        | the same under the name `weight`, as ModelOpt writes it |                                     |

No GEMM here takes a scale for 32 values, so such a layer runs in BF16 unless it is quantized again: calibrate, or serve
with a recipe that needs no calibration. E8M0 is a power of two, 2^(bits - 127), and NaN where all bits are set (OCP
Microscaling Formats 1.0). Types and shapes decide what the bits mean, never names alone.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.model.storage.shards import Shards, StoredTensor

BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALES = (".weight_scale", ".weight_scale_inv", ".scale")
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_BIAS = 127
# The largest exponent of a block whose largest number, 448 or 6, is finite in BF16.
_LARGEST = {torch.float8_e4m3fn: 119, torch.uint8: 125}


class Widened(Shards):
    """Shards in which the tensors in `made` are computed when they are read."""

    def __init__(
        self, stored: Shards, entries: dict[str, StoredTensor], computed: Mapping[str, Callable[[], Tensor]]
    ) -> None:
        super().__init__(entries, stored.metadata)
        self.stored, self.computed = stored, computed

    def __getitem__(self, name: str) -> Tensor:
        compute = self.computed.get(name)
        return self.stored[name] if compute is None else compute()

    def check_exponents(self) -> None:
        """ModelError: a block of numbers is NaN, or too large for BF16. Reads the exponents alone."""
        for key, scale in pairs(self.stored.entries).items():
            largest = _LARGEST[self.stored.entries[key].dtype]
            if bool((self.stored[scale].view(torch.uint8) > _BIAS + largest).any()):
                raise _not_finite(scale)


def widen(shards: Shards) -> Shards:
    """The same tensors with every MX weight as BF16, under the name `P.weight`, and without its scales."""
    entries, computed = dict(shards.entries), dict[str, Callable[[], Tensor]]()
    for key, scale in pairs(shards.entries).items():
        rows, columns = shards.entries[scale].shape
        name = key.removesuffix("_packed")
        described = replace(entries.pop(key), dtype=torch.bfloat16, shape=(rows, columns * BLOCK), note=None)
        entries.pop(scale)
        entries[name], computed[name] = described, _maker(shards, key, scale)
    return Widened(shards, entries, computed) if computed else shards


def pairs(entries: Mapping[str, StoredTensor]) -> dict[str, str]:
    """The key of every MX weight's scales, by the key of the weight."""
    keys = [key for key in entries if key.endswith((".weight", ".weight_packed"))]
    scales = {key: _scale_of(key, entries) for key in keys}
    return {key: scale for key, scale in scales.items() if scale is not None}


def widened_note(shards: Shards) -> tuple[str, ...]:
    """A sentence for the owner of a model with MX weights; empty where there are none."""
    if not isinstance(shards, Widened):
        return ()
    return (
        f"{len(shards.computed)} weights, {next(iter(shards.computed))} among them, are in MX blocks of {BLOCK} and "
        "run in BF16, which holds them exactly; for FP8 calibrate the model, or serve with --recipe rowwise or block.",
    )


def mxfp8(codes: Tensor, scales: Tensor) -> Tensor:
    """codes E4M3 [..., K], scales uint8 or E8M0 [..., K / 32] -> BF16 [..., K]."""
    return _scaled(codes.float(), scales)


def mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """packed uint8 [..., K / 2], scales uint8 or E8M0 [..., K / 32] -> BF16 [..., K]."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return _scaled(values[codes.long()], scales)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    powers = scales.view(torch.float8_e8m0fnu).float().unsqueeze(-1)
    blocks = values.reshape(*scales.shape, BLOCK)
    return (blocks * powers).to(torch.bfloat16).flatten(-2)


def _scale_of(key: str, entries: Mapping[str, StoredTensor]) -> str | None:
    weight, owner = entries[key], key.rpartition(".")[0]
    packed = weight.dtype is torch.uint8
    if len(weight.shape) != 2 or not (packed or (weight.dtype is torch.float8_e4m3fn and key.endswith(".weight"))):
        return None
    rows, columns = weight.shape[0], weight.shape[1] * (2 if packed else 1)
    fits = (rows, columns // BLOCK)
    named = (f"{owner}{suffix}" for suffix in _SCALES)
    return next((name for name in named if name in entries and _is_exponents(entries[name], fits)), None)


def _is_exponents(entry: StoredTensor, shape: Iterable[int]) -> bool:
    return entry.dtype in _EXPONENTS and entry.shape == tuple(shape)


def _maker(shards: Shards, key: str, scale: str) -> Callable[[], Tensor]:
    dequantize = mxfp4 if shards.entries[key].dtype is torch.uint8 else mxfp8

    def make() -> Tensor:
        weight = dequantize(shards[key], shards[scale])
        if not bool(weight.isfinite().all()):
            raise _not_finite(scale)
        return weight

    return make


def _not_finite(scale: str) -> ModelError:
    return ModelError(f"{scale} holds NaN or an exponent too large for BF16; quantize the model again.")
