"""AdamW on FP32 master weights, the learning-rate curve, and gradient clipping.

Two places for the masters:
* "model": the model's own parameters are FP32 and are the masters; every use casts them on the fly. 16 bytes a
  parameter (weight, gradient, two moments), nothing is copied.
* "optimizer": the model holds BF16 and the optimizer an FP32 copy; after each microbatch, BF16 gradients are
  added to an FP32 accumulator, so accumulation loses nothing. 20 bytes a parameter.

The moments and the update are `torch.optim.AdamW` in its fused form: one pass over weight, gradient and moments.
Weight decay touches matrices only: norms and biases are left alone.

With `optimizer_states="8bit"` the moments of matrices have 8 bits: torchao's, each block of 256 numbers with a scale of
its own (FP32), which takes 1 1/64 bytes a parameter instead of 4. Masters and the update stay FP32. Matrices that have
fewer than 4096 numbers, or not whole blocks, keep FP32 moments. torchao compiles its update by default, which takes a
C++ compiler and minutes at the first step. Here it runs op by op, which gives the same bits on all machines of one
kind. In a checkpoint such a moment is two tensors, `{moment}_codes` (uint8) and `{moment}_scale` (FP32).
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from fp8serve.errors import JobError
from fp8serve.model.storage.shards import release_pages
from fp8serve.train.config import TrainConfig

SMALLEST, BLOCK = 4096, 256  # torchao's: of numbers in a matrix, and in a block
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether the moment can be negative
PARTS = ("codes", "scale")
Norm = Callable[[Mapping[str, Tensor]], float]


def has_blocks(elements: int) -> bool:
    """Whether a matrix of so many numbers has moments of 8 bits."""
    return elements >= SMALLEST and elements % BLOCK == 0


def _adamw_8bit(
    groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """torchao's AdamW over parameter groups."""
    created: torch.optim.Optimizer = _torchao().AdamW8bit(groups, lr=lr, betas=betas, eps=eps)
    return created


def _step_8bit(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """One update at learning rate `rate`."""
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()


def flat_state(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A parameter's state as plain tensors."""
    results: dict[str, Tensor] = {}
    for name, value in entry.items():
        parts = {f"{name}_{part}": getattr(value, part) for part in PARTS if hasattr(value, part)}
        results |= parts or {name: value}
    return results


def whole_state(entry: Mapping[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """The reverse of `flat_state`, for the state of `parameter`, on its device."""
    results = {name: value for name, value in entry.items() if name.rpartition("_")[2] not in PARTS}
    for name, signed in MOMENTS.items():
        if f"{name}_codes" in entry:
            results[name] = _moment(entry[f"{name}_codes"], entry[f"{name}_scale"], signed, parameter)
    return results


def _moment(codes: Tensor, scale: Tensor, signed: bool, parameter: Tensor) -> Tensor:
    state: Any = _torchao().subclass_8bit.OptimState8bit
    block = codes.numel() // scale.numel()
    created: Tensor = state.zeros(parameter.shape, signed, block, parameter.device, dtype=parameter.dtype)
    for part, value in zip(PARTS, (codes, scale), strict=True):
        getattr(created, part).copy_(value)
    return created


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


def warmup_steps(config: TrainConfig, total: int) -> int:
    return config.warmup_steps if config.warmup_steps is not None else math.ceil(0.03 * total)


def learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """Rate of step `step` (from 0): linear to `lr` over the warm-up, then by the schedule down to `lr * min_lr_ratio`.

    "cosine" is half a period, "linear" a straight line; "constant" stays at `lr`.
    """
    warm = warmup_steps(config, total)
    if step < warm:
        return config.lr * (step + 1) / warm
    done = min(1.0, (step - warm) / max(1, total - warm))
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[config.lr_schedule]
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


class Optimizer:
    """The masters of `parameters` by name, their gradients and their moments.

    With `master_weights="optimizer"` the FP32 parameters that are handed in become BF16. norm: of gradients of which
    this process has only a part, by name; then the parameters are the masters in any case, and stay FP32.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainConfig, norm: Norm | None = None) -> None:
        self._model = dict(parameters)
        self._norm = global_norm if norm is None else norm
        self._own = config.master_weights == "optimizer" and norm is None
        self.masters = {n: _move_out(p) if self._own else p for n, p in self._model.items()}
        self._clip = config.clip
        decayed = [p for p in self.masters.values() if p.dim() >= 2]
        plain = [p for p in self.masters.values() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        about: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
        self._small: torch.optim.Optimizer | None = None  # for the matrices, with moments of 8 bits
        if config.optimizer_states == "8bit":
            self._small = _adamw_8bit(groups[:1], **about) if decayed else None
            groups = groups[1:]
        groups = [group for group in groups if group["params"]]
        self._adam = torch.optim.AdamW(groups, **about, fused=True) if groups else None

    def collect(self) -> None:
        """After each backward: move BF16 gradients into the FP32 accumulators ("optimizer" masters only)."""
        if not self._own:
            return
        for name, parameter in self._model.items():
            if parameter.grad is not None:
                grad, master = parameter.grad.float(), self.masters[name]
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                parameter.grad = None

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Clip, update at learning rate `rate`, clear the gradients; returns the global gradient norm before clipping.

        If the norm is infinite or NaN, it only clears the gradients, and the caller reports the step as skipped.
        """
        grads = {name: p.grad for name, p in self.masters.items() if p.grad is not None}
        norm = self._norm(grads)
        if math.isfinite(norm):
            self._clip_to(grads.values(), norm)
            self._update(rate)
        for parameter in (*self.masters.values(), *self._model.values()):
            parameter.grad = None
        return norm

    def _clip_to(self, grads: Iterable[Tensor], norm: float) -> None:
        if self._clip is not None and norm > self._clip:
            for grad in grads:
                grad.mul_(self._clip / norm)

    def _update(self, rate: float) -> None:
        if self._small is not None:
            _step_8bit(self._small, rate)
        if self._adam is not None:
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
        if self._own:
            for name, parameter in self._model.items():
                parameter.copy_(self.masters[name])

    def state(self) -> dict[str, Tensor]:
        """Moments as `{name}.{exp_avg|exp_avg_sq|step}`, those of 8 bits as `eight_bit` says.

        A parameter that never had a gradient has none.
        """
        entries = {name: self._of(parameter).state.get(parameter, {}) for name, parameter in self.masters.items()}
        flat = {name: flat_state(entry) for name, entry in entries.items()}
        return {f"{name}.{kind}": value for name, entry in flat.items() for kind, value in entry.items()}

    def _of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """The optimizer that updates a parameter."""
        result = self._small if self._small is not None and parameter.dim() >= 2 else self._adam
        assert result is not None
        return result

    @torch.no_grad()
    def load(self, masters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Restores `masters` and `state()`, which may be views of files. Raises JobError when names or shapes do not
        fit."""
        if set(masters) != set(self.masters):
            raise JobError(
                "The checkpoint's weights are not those of this model; start again in a fresh output directory."
            )
        for name, value in masters.items():
            self.masters[name].copy_(value)
            self._model[name].copy_(value)
            release_pages(value)
        moments: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, kind = key.rpartition(".")
            moments.setdefault(name, {})[kind] = value.to(self.masters[name].device, copy=True)
            release_pages(value)
        for name, entry in moments.items():
            master = self.masters[name]
            self._of(master).state[master] = whole_state(entry, master)


def global_norm(grads: Mapping[str, Tensor]) -> float:
    """The norm of all gradients as one vector: FP32 within a row, FP64 over rows.

    FP64 throughout would copy every gradient. It is only used when a square exceeds FP32's range, to find out whether
    the gradient itself is finite.
    """
    norm = norm_of_rows([row_norms(grad) for grad in grads.values()])
    if math.isfinite(norm):
        return norm
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads.values()]
    return float(torch.stack(norms).square().sum().sqrt())


def row_norms(grad: Tensor) -> Tensor:
    """FP32, flat: the norm of each row of a gradient [..., n]."""
    norms: Tensor = torch.linalg.vector_norm(grad, dim=-1)
    return norms.flatten()


def norm_of_rows(norms: Sequence[Tensor]) -> float:
    """The norm of what has these norms of rows; infinite or NaN where a square is beyond FP32."""
    return float(torch.cat(list(norms)).double().square().sum().sqrt())


def _move_out(parameter: nn.Parameter) -> nn.Parameter:
    """An FP32 copy of `parameter`, which itself becomes BF16 in place."""
    master = nn.Parameter(parameter.detach().float().clone())
    parameter.data = parameter.data.to(torch.bfloat16)
    return master
