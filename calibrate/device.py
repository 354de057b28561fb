"""The device of a pass; a device that this machine does not have is refused in one sentence."""

import torch

from fp8serve.errors import MachineError
from fp8serve.fp8.selfcheck import prepare_device


def check_device(device: str) -> str:
    """`device` if this torch can compute on it ("cpu", "cuda", "cuda:1"); else MachineError."""
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise MachineError(f"The device {device!r} does not exist; use cpu or cuda.") from None
    if wanted.type not in ("cpu", "cuda"):
        raise MachineError(f"The device {device!r} is not supported; use cpu or cuda.")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise MachineError(f"The device {device!r} was asked for, but this torch sees no such GPU; use --device cpu.")
    prepare_device(wanted)
    return device
