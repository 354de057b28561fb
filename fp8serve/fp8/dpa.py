"""FP8 dot-product attention: QK^T and PV from FP8 operands, forward and backward (`fp8_dpa`, `fp8_mha`).

    S = Q K^T * softmax_scale      Q, K in the forward format
    O = P V,  P = softmax(S)       P, V in the forward format; softmax itself in FP32
    dV = P^T dO,  dP = dO V^T      dO in the backward format
    dQ = dS K,  dK = dS^T Q        dS in the backward format

Every operand is rounded to FP8 by the recipe (delayed: from its own history; current: from its own amax, per tensor
whatever the granularity: a score has no channels), every sum is FP32. `fp8_mha` leaves out the rounding to the
activation's dtype between the attention and the projection behind it: the output stays FP32, and the projection casts
that to FP8. Rotary embeddings stand between the projections and Q and K and stay in high precision.

The rounded operands are multiplied as FP32, which is exact for FP8 values: the same numbers as an FP8 tensor core with
FP32 accumulation. There is no fused kernel for this yet, so it costs time and memory, unlike its numbers.
Without fp8_dpa in the recipe in force, attention runs in high precision through `causal_attention`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from fp8serve.fp8.attention import causal_attention
from fp8serve.fp8.autocast import autocast, current, expect_backward, prepare, record
from fp8serve.fp8.ops import DTYPES
from fp8serve.fp8.recipe import DelayedScaling, Recipe
from fp8serve.fp8.scaling import Direction
from fp8serve.fp8.stateful import Stateful

FORWARD, BACKWARD = ("q", "k", "v", "p"), ("grad_output", "grad_scores")


class _Rounding:
    """How one call rounds its operands; the FP8 values come back in FP32."""

    def __init__(self, module: "DotProductAttention", context: autocast) -> None:
        self.recipe: Recipe = context.recipe
        self.module, self.rule = module, context.rule
        self.recording = torch.is_grad_enabled() or context.calibrating
        if isinstance(self.recipe, DelayedScaling):
            prepare(module.key, self.recipe.amax_history_len)

    def __call__(self, x: Tensor, name: str) -> Tensor:
        backward = name in BACKWARD
        fmt = self.recipe.fp8_format
        dtype = DTYPES[fmt.backward if backward else fmt.forward]
        if self.rule is None:
            power_2 = not isinstance(self.recipe, DelayedScaling) and self.recipe.power_2_scale
            q, scale_inv = torch.ops.fp8serve.quantize_current(x, dtype, power_2)
            return cast(Tensor, q.float() * scale_inv)
        state = self.module.scaling[name]
        q, amax = torch.ops.fp8serve.quantize(x, state.scale, dtype)
        if self.recording or backward:
            direction: Direction = "backward" if backward else "forward"
            record(direction, state.amax_history, amax, self.module.key, self.rule)
        return cast(Tensor, q.float() * state.scale.reciprocal())


class _Round(torch.autograd.Function):
    """Rounds a value in the forward pass; its gradient passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: _Rounding, name: str) -> Tensor:
        ctx.dtype = x.dtype
        return rounding(x, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.to(ctx.dtype), None, None


class _RoundGradient(torch.autograd.Function):
    """Passes a value through; rounds its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: _Rounding, name: str) -> Tensor:
        ctx.rounding, ctx.name = rounding, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.rounding(gradient, ctx.name), None, None


def _round(x: Tensor, rounding: _Rounding, name: str) -> Tensor:
    function = _RoundGradient if name in BACKWARD else _Round
    return cast(Tensor, function.apply(x, rounding, name))  # type: ignore[no-untyped-call]


class DotProductAttention(Stateful):
    """Causal attention over flattened sequences that runs in FP8 where the recipe in force says `fp8_dpa`."""

    tensors: ClassVar[dict[Direction, tuple[str, ...]]] = {"forward": FORWARD, "backward": BACKWARD}

    def __init__(self) -> None:
        super().__init__()
        self._begin()
        self._seen = torch.device("cpu")

    def state_device(self) -> torch.device:
        """Where the last query was: the module has no parameter."""
        return self._seen

    def prepare(self, length: int) -> None:
        """Create the delayed states, or resize them to this history length, on the device of the query."""
        super().prepare(length)
        for state in self.scaling.values():
            state.move(self._seen)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], softmax_scale: float) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim], sequences of these lengths -> like q.

        The result has q's dtype; FP32 under `fp8_mha`, for the projection behind it to cast.
        """
        context = current()
        recipe = context.recipe if context is not None and context.enabled else None
        if context is None or not (getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False)):
            return causal_attention(q, k, v, lengths, softmax_scale)
        self._seen = q.device
        rounding = _Rounding(self, context)
        if rounding.rule is not None and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            expect_backward(self.scaling["q"].amax_history, rounding.rule)
        q_r, k_r, v_r = (_round(t, rounding, name) for t, name in ((q, "q"), (k, "k"), (v, "v")))
        out = self._attend(q_r, k_r, v_r, lengths, softmax_scale, rounding)
        return out if getattr(recipe, "fp8_mha", False) else out.to(q.dtype)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], softmax_scale: float, rounding: _Rounding
    ) -> Tensor:
        """All sequences as one, with a mask that keeps them apart: one tensor P has one scale."""
        group = q.shape[1] // k.shape[1]
        q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        scores = _round(q @ k.transpose(1, 2) * softmax_scale, rounding, "grad_scores")  # [heads, T, T]
        weights = _round(scores.masked_fill(_hidden(lengths, q.device), -torch.inf).softmax(-1), rounding, "p")
        return _round(weights @ v, rounding, "grad_output").transpose(0, 1)


def _hidden(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[T, T], True where a token must not look: later ones, and those of other sequences."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    position = torch.arange(len(sequence), device=device)
    return (sequence.unsqueeze(1) != sequence) | (position > position.unsqueeze(1))
