"""The numbers in a GGUF file: single ones as they were before their rounding to FP32, and tensors dequantized."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

_ELEMENTS_AT_ONCE = 2**20  # only so much of a tensor exists in FP32 at a time


def decimal(value: Any) -> Any:
    """An FP32 as the decimal number that was meant: 1e-5 and not 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def dequantized(tensor: Any, dtype: torch.dtype = torch.bfloat16, expert: int | None = None) -> Tensor:
    """A `gguf.ReaderTensor` as `dtype`, in the shape that PyTorch gives it; FP32 of a few rows at a time.

    expert: the number of an expert in a stack, to get it alone.
    """
    import gguf

    shape = tuple(int(size) for size in reversed(tensor.shape))
    data = tensor.data if expert is None else tensor.data[expert]
    shape = shape if expert is None else shape[1:]
    rows = data.reshape(-1, data.shape[-1])
    out = torch.empty(len(rows), shape[-1], dtype=dtype)
    step = max(1, _ELEMENTS_AT_ONCE // shape[-1])
    for at in range(0, len(rows), step):
        with np.errstate(all="ignore"):  # NaN and infinities are found, and refused, when the tensor is written
            part = gguf.dequantize(rows[at : at + step], tensor.tensor_type)
        out[at : at + step] = torch.from_numpy(np.array(part, dtype=np.float32))
    return out.reshape(shape)
