"""AdamW with FP32 master weights, the learning-rate schedule, and gradient clipping.

`master_weights` says where the FP32 masters are:
* "model": the model's parameters are FP32 masters, and the forward pass casts them. This takes 16 bytes a parameter
  (weight, gradient, two moments).
* "optimizer": the model holds BF16 weights and the optimizer FP32 masters. After each microbatch, BF16 gradients are
  added to FP32 accumulators, so that accumulation loses no precision. This takes 20 bytes a parameter.

Moments and updates are those of the fused `torch.optim.AdamW`. Weight decay applies to matrices only, not to norms and
biases.

With `optimizer_states="8bit"` the moments of matrices are torchao's 8-bit moments. Each block of 256 elements has an
FP32 scale, so a moment takes 1 1/64 bytes a parameter instead of 4. Masters and updates are FP32. Matrices with fewer
than 4096 elements, or with an incomplete block, have FP32 moments. torchao compiles its update by default, which needs
a C++ compiler and minutes. Here the update runs eagerly, which gives the same bits on all machines of one kind. A
checkpoint stores an 8-bit moment as two tensors, `{moment}_codes` (uint8) and `{moment}_scale` (FP32).
"""

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from fp8serve.errors import JobError
from fp8serve.fp8.torch_private import multiply_each
from fp8serve.model.storage.mapping import release_pages
from fp8serve.train.config import TrainConfig

MIN_8BIT_ELEMENTS = 4096  # torchao gives smaller matrices FP32 moments
BLOCK = 256  # elements of a block of torchao's 8-bit moments
MOMENT_IS_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
PARTS = ("codes", "scale")
GradientNorm = Callable[[Mapping[str, Tensor]], float]


class EagerAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` for callers that compute no gradients and do not compile the update.

    torch decorates these methods for torch.compile, and the decorators import TorchDynamo and SymPy. In a process that
    trains a small model, this took as long as all other imports (1.5 s).
    """

    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    step = unwrap(torch.optim.AdamW.step)


def has_blocks(elements: int) -> bool:
    """Whether a matrix with this number of elements has 8-bit moments."""
    return elements >= MIN_8BIT_ELEMENTS and elements % BLOCK == 0


def plain_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a parameter's optimizer state with each 8-bit moment as two plain tensors."""
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        parts = {f"{name}_{part}": getattr(value, part) for part in PARTS if hasattr(value, part)}
        tensors |= parts or {name: value}
    return tensors


def optimizer_state(tensors: Mapping[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """Returns the optimizer state of `parameter` from the result of `plain_state`, on the parameter's device."""
    state = {name: value for name, value in tensors.items() if name.rpartition("_")[2] not in PARTS}
    for name, is_signed in MOMENT_IS_SIGNED.items():
        if f"{name}_codes" in tensors:
            state[name] = _8bit_moment(tensors[f"{name}_codes"], tensors[f"{name}_scale"], is_signed, parameter)
    return state


def _8bit_moment(codes: Tensor, scale: Tensor, is_signed: bool, parameter: Tensor) -> Tensor:
    tensor_class: Any = _torchao().subclass_8bit.OptimState8bit
    block = codes.numel() // scale.numel()
    moment: Tensor = tensor_class.zeros(parameter.shape, is_signed, block, parameter.device, dtype=parameter.dtype)
    for part, value in zip(PARTS, (codes, scale), strict=True):
        getattr(moment, part).copy_(value)
    return moment


def _torchao() -> Any:
    """Imports `torchao.optim`, without torchao's warnings about missing kernels that the optimizer does not use."""
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
    """Returns the learning rate of step `step` (from 0) of `total` steps.

    The rate rises linearly to `lr` during the warm-up. Then "cosine" (half a period) and "linear" lower it to
    `lr * min_lr_ratio`, and "constant" keeps it at `lr`.
    """
    warmup = warmup_steps(config, total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))  # of the decay
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    decay = {"cosine": cosine, "linear": 1 - progress, "constant": 1.0}[config.lr_schedule]
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * decay)


class Optimizer:
    """Holds the FP32 masters of `parameters` by name, and updates them with AdamW.

    With `master_weights="optimizer"` it converts the FP32 `parameters` to BF16 in place. A sharded run passes `norm`,
    which computes the norm of gradients from the shards by name. Then the parameters are FP32 masters in any case.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: TrainConfig, norm: GradientNorm | None = None
    ) -> None:
        self._parameters = dict(parameters)
        self._norm = global_norm if norm is None else norm
        self._has_copies = config.master_weights == "optimizer" and norm is None
        self.masters = {n: _move_to_master(p) if self._has_copies else p for n, p in self._parameters.items()}
        self._clip = config.clip
        matrices = [p for p in self.masters.values() if p.dim() >= 2]
        vectors = [p for p in self.masters.values() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
        self._adam_8bit: torch.optim.Optimizer | None = None
        if config.optimizer_states == "8bit":
            self._adam_8bit = _torchao().AdamW8bit(groups[:1], **options) if matrices else None
            groups = groups[1:]
        groups = [group for group in groups if group["params"]]
        self._adam = EagerAdamW(groups, **options, fused=True) if groups else None

    def accumulate_in_fp32(self) -> None:
        """Adds BF16 gradients to the FP32 accumulators and clears them. It must be called after each backward pass, and
        does nothing if the model holds the masters."""
        if not self._has_copies:
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                grad, master = parameter.grad.float(), self.masters[name]
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                parameter.grad = None

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Clips the gradients, updates the weights at learning rate `rate`, and clears the gradients.

        Returns the global gradient norm before clipping. If the norm is infinite or NaN, the weights do not change, and
        the caller reports the step as skipped.
        """
        grads = {name: p.grad for name, p in self.masters.items() if p.grad is not None}
        norm = self._norm(grads)
        if math.isfinite(norm):
            if self._clip is not None and norm > self._clip:
                multiply_each(list(grads.values()), self._clip / norm)
            self._update(rate)
        for parameter in (*self.masters.values(), *self._parameters.values()):
            parameter.grad = None
        return norm

    def _update(self, rate: float) -> None:
        if self._adam_8bit is not None:
            for group in self._adam_8bit.param_groups:
                group["lr"].fill_(rate)
            with torch.compiler.set_stance("force_eager"):
                self._adam_8bit.step()
        if self._adam is not None:
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
        if self._has_copies:
            for name, parameter in self._parameters.items():
                parameter.copy_(self.masters[name])

    def state(self) -> dict[str, Tensor]:
        """Returns the moments as `{name}.{exp_avg|exp_avg_sq|step}`; 8-bit moments are two tensors each.

        Parameters that never had a gradient have no moments.
        """
        states = {name: self._adam_of(master).state.get(master, {}) for name, master in self.masters.items()}
        return {f"{name}.{kind}": t for name, state in states.items() for kind, t in plain_state(state).items()}

    def _adam_of(self, master: nn.Parameter) -> torch.optim.Optimizer:
        adam = self._adam_8bit if self._adam_8bit is not None and master.dim() >= 2 else self._adam
        assert adam is not None
        return adam

    @torch.no_grad()
    def load(self, masters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Loads `masters` and the result of `state`, which may be views of files. Raises JobError if the names of the
        masters differ."""
        if set(masters) != set(self.masters):
            raise JobError(
                "The checkpoint's weights are not those of this model; start again in a new output directory."
            )
        for name, value in masters.items():
            self.masters[name].copy_(value)
            self._parameters[name].copy_(value)
            release_pages(value)
        moments: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, kind = key.rpartition(".")
            moments.setdefault(name, {})[kind] = value.to(self.masters[name].device, copy=True)
            release_pages(value)
        for name, tensors in moments.items():
            master = self.masters[name]
            self._adam_of(master).state[master] = optimizer_state(tensors, master)


def global_norm(grads: Mapping[str, Tensor]) -> float:
    """Returns the norm of all gradients as one vector.

    On a CPU it is computed in FP32 within a row and in FP64 over rows. On a GPU it is computed in FP32 by a few kernels
    for all gradients, because a kernel for each would take longer to launch than to run.

    FP64 within rows would copy every gradient. It is used only if a square exceeds FP32, to find out whether the
    gradient itself is finite.
    """
    tensors = list(grads.values())
    if _are_on_gpu(tensors):
        norm = float(torch.nn.utils.get_total_norm(tensors, foreach=True))
    else:
        norm = norm_of_rows([row_norms(grad) for grad in tensors])
    if math.isfinite(norm):
        return norm
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in tensors]
    return float(torch.stack(norms).square().sum().sqrt())


def _are_on_gpu(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.is_cuda for tensor in tensors)


def row_norms(grad: Tensor) -> Tensor:
    """Returns the norms of the rows of a gradient [..., n], flat, FP32."""
    norms: Tensor = torch.linalg.vector_norm(grad, dim=-1)
    return norms.flatten()


def norm_of_rows(norms: Sequence[Tensor]) -> float:
    """Returns the norm of gradients from the norms of their rows. It is infinite or NaN if a square exceeds FP32."""
    return float(torch.cat(list(norms)).double().square().sum().sqrt())


def _move_to_master(parameter: nn.Parameter) -> nn.Parameter:
    """Returns an FP32 copy of `parameter`, and converts `parameter` to BF16 in place."""
    master = nn.Parameter(parameter.detach().float().clone())
    parameter.data = parameter.data.to(torch.bfloat16)
    return master
