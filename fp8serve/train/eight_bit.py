"""AdamW whose moments have 8 bits: torchao's, for matrices, each block of 256 numbers with a scale of its own (FP32).

A moment takes 1 1/64 bytes a parameter instead of 4. Masters and the update stay FP32. Matrices that have fewer than
4096 numbers, or not whole blocks, keep FP32 moments. torchao compiles its update by default, which takes a C++ compiler
and minutes at the first step. Here it runs op by op, which gives the same bits on all machines of one kind.

In a checkpoint such a moment is two tensors, `{moment}_codes` (uint8) and `{moment}_scale` (FP32).
"""

import logging
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

SMALLEST, BLOCK = 4096, 256  # torchao's: of numbers in a matrix, and in a block
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether the moment can be negative
PARTS = ("codes", "scale")


def has_blocks(elements: int) -> bool:
    """Whether a matrix of so many numbers has moments of 8 bits."""
    return elements >= SMALLEST and elements % BLOCK == 0


def adam(groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """torchao's AdamW over parameter groups."""
    made: torch.optim.Optimizer = _torchao().AdamW8bit(groups, lr=lr, betas=betas, eps=eps)
    return made


def step(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """One update at learning rate `rate`."""
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()


def flat(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A parameter's state as plain tensors."""
    found: dict[str, Tensor] = {}
    for name, value in entry.items():
        parts = {f"{name}_{part}": getattr(value, part) for part in PARTS if hasattr(value, part)}
        found |= parts or {name: value}
    return found


def whole(entry: Mapping[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """The reverse of `flat`, for the state of `parameter`, on its device."""
    found = {name: value for name, value in entry.items() if name.rpartition("_")[2] not in PARTS}
    for name, signed in MOMENTS.items():
        if f"{name}_codes" in entry:
            found[name] = _moment(entry[f"{name}_codes"], entry[f"{name}_scale"], signed, parameter)
    return found


def _moment(codes: Tensor, scale: Tensor, signed: bool, parameter: Tensor) -> Tensor:
    state: Any = _torchao().subclass_8bit.OptimState8bit
    block = codes.numel() // scale.numel()
    made: Tensor = state.zeros(parameter.shape, signed, block, parameter.device, dtype=parameter.dtype)
    for part, value in zip(PARTS, (codes, scale), strict=True):
        getattr(made, part).copy_(value)
    return made


def _torchao() -> Any:
    """`torchao.optim`, without the warnings of torchao's other parts about missing kernels that nothing here uses."""
    logs = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module("torchao.optim")
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
