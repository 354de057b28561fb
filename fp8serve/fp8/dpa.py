"""FP8 dot-product attention: QK^T and PV from FP8 operands, forward and backward (`fp8_dpa`, `fp8_mha`).

    S = Q K^T * softmax_scale      Q, K in the forward format
    O = P V,  P = softmax(S)       P, V in the forward format; softmax itself in FP32
    dV = P^T dO,  dP = dO V^T      dO in the backward format
    dQ = dS K,  dK = dS^T Q        dS in the backward format

The recipe rounds every operand to FP8: delayed by its own history, current by its own amax. The scale is per tensor
whatever the granularity, because a score has no channels. Every sum is FP32. `fp8_mha` leaves out the rounding to the
activation's dtype between the attention and the projection after it: the output stays FP32, and the projection casts
that to FP8. Rotary embeddings, between the projections and Q and K, stay in high precision.

The rounded operands are multiplied as FP32, which is exact for FP8 values: the same numbers as an FP8 tensor core with
FP32 accumulation. There is no fused kernel for this yet, so it is slow and takes memory: scores of [heads, L, L] for
every sequence of L tokens. Without fp8_dpa in the recipe in force, attention runs in high precision as a server
computes it (`served_attention`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from fp8serve.fp8.attention import causal_weights, check_lengths
from fp8serve.fp8.autocast import current
from fp8serve.fp8.casting import Quantized, cast_by_content, cast_delayed, unhidden
from fp8serve.fp8.ops import arithmetic
from fp8serve.fp8.recipe import Recipe, attends_in_fp8, delayed
from fp8serve.fp8.recompute import planned
from fp8serve.fp8.recording import expect_backward, prepare, record
from fp8serve.fp8.scaling import Direction, ScalingState
from fp8serve.fp8.served_attention import served_attention
from fp8serve.fp8.stateful import Stateful

FORWARD, BACKWARD = ("q", "k", "v", "p"), ("grad_output", "grad_scores")


@dataclass(frozen=True)
class Rounding:
    """How one call rounds its operands, those of its backward pass included; the FP8 values come back in FP32."""

    module: int  # by key, as `record` wants it
    recipe: Recipe
    rule: int | None  # how delayed states are updated, by id; None for a recipe without state
    held: Any  # that rule itself, which exists as long as somebody holds it
    states: dict[str, ScalingState]  # empty for a recipe without state
    enabled: bool  # False while calibrating: operands stay as they are, only their amaxes are recorded
    recording: bool  # stage amaxes in the forward pass

    def __call__(self, x: Tensor, name: str) -> Tensor:
        spec = self.recipe.specs.attention[name]
        if spec.source == "current":
            return _values(cast_by_content(x, spec, infinity_is_nan=name in BACKWARD))
        if not self.enabled:
            self._stage(name, arithmetic.amax(x))
            return x.float()
        operand, amax = cast_delayed(x, spec, self.states[name].scale, columnwise=False)
        self._stage(name, amax)
        data = cast(Quantized, operand.rowwise)
        return _values(unhidden(data, amax.isinf()) if name in BACKWARD else data)

    def _stage(self, name: str, amax: Tensor) -> None:
        direction: Direction = "backward" if name in BACKWARD else "forward"
        if self.rule is not None and (self.recording or direction == "backward"):
            record(direction, self.states[name].amax_history, amax, self.module, self.rule)

    def repeated(self) -> "Rounding":
        """For the second run of recomputed activations: the scales as they are now, nothing recorded."""
        frozen = {n: replace(s, scale=s.scale.clone()) for n, s in self.states.items() if n in FORWARD}
        return replace(self, states={**self.states, **frozen}, recording=False)


def _values(data: Quantized) -> Tensor:
    return data.q.float() * data.scale_inv


class _Round(torch.autograd.Function):
    """Rounds a value in the forward pass; its gradient passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Rounding, name: str) -> Tensor:
        ctx.dtype = x.dtype
        return rounding(x, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.to(ctx.dtype), None, None


class _RoundGradient(torch.autograd.Function):
    """Passes a value through; rounds its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Rounding, name: str) -> Tensor:
        ctx.rounding, ctx.name = rounding, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.rounding(gradient, ctx.name), None, None


def _round(x: Tensor, rounding: Rounding, name: str) -> Tensor:
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
        """The device of the last query, because the module has no parameter."""
        return self._seen

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Sequence[int],
        softmax_scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim], sequences of these lengths -> like q.

        window, softcap and sinks are those of `causal_attention`; in FP8, too, scores are capped and joined in FP32.
        The result has q's dtype; FP32 under `fp8_mha`, for the projection behind it to cast. While calibrating without
        FP8 the operands' amaxes are recorded and none is rounded. Raises ValueError if the lengths do not add up.
        """
        self._seen = q.device
        rounding = planned(self.key, lambda: self._rounding(any(t.requires_grad for t in (q, k, v))))
        if rounding is None:
            return served_attention(q, k, v, lengths, softmax_scale, window, softcap, sinks)
        check_lengths(q, lengths)
        rounded = (_round(x, rounding, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
        sequences = zip(*(torch.split(x, list(lengths)) for x in rounded), strict=True)
        weigh = partial(causal_weights, window=window, softcap=softcap, sinks=sinks)
        mixed = torch.cat([_attend(a, b, c, softmax_scale, rounding, weigh) for a, b, c in sequences])
        out = _round(mixed, rounding, "grad_output")
        return out if rounding.enabled and rounding.recipe.specs.keeps_attention_wide else out.to(q.dtype)

    def _rounding(self, differentiable: bool) -> Rounding | None:
        """How this call rounds under the recipe in force; None: it does not round."""
        context = current()
        if context is None or not attends_in_fp8(context.recipe):
            return None
        recipe, graph = context.recipe, torch.is_grad_enabled()
        recording = graph or context.calibrating
        if (rules := delayed(recipe)) is not None and context.rule is not None:
            prepare(self, context.rule, context.held, rules.amax_history_len, recording)
        states = {} if rules is None else self.scaling
        if context.rule is not None and context.held is not None and graph and differentiable:
            expect_backward(states["q"].amax_history, context.rule, context.held)
        return Rounding(self.key, recipe, context.rule, context.held, states, context.enabled, recording)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, rounding: Rounding, weigh: Callable[[Tensor], Tensor]
) -> Tensor:
    """One sequence: rounded q [L, heads, head_dim], k and v [L, kv_heads, head_dim] -> FP32 like q.

    Under delayed scaling all sequences of a call share one scale of P and of dS, under current each has its own.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scores = _round(q @ k.transpose(1, 2) * softmax_scale, rounding, "grad_scores")  # [heads, L, L]
    weights = _round(weigh(scores), rounding, "p")
    return (weights @ v).transpose(0, 1)
