"""Numbers on their way from Python to the device, without waiting for it.

`torch.tensor(values, device="cuda")` waits until all work that was queued before is done, because it copies from memory
that may change. From pinned memory the copy is queued like a kernel; torch keeps the memory until it is done. A step of
the engine waits for the device once: when it reads the tokens that were sampled.
"""

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` (numbers, nested lists of them, or a NumPy array) as a tensor on `device`."""
    if device.type == "cpu":
        return torch.as_tensor(values, dtype=dtype)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)
