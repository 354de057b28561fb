"""FP8 dot-product attention: QK^T and PV with FP8 operands, forward and backward (`fp8_dpa`, `fp8_mha`).

    S = Q K^T * softmax_scale      Q, K in the forward format
    O = P V,  P = softmax(S)       P, V in the forward format; softmax itself in FP32
    dV = P^T dO,  dP = dO V^T      dO in the backward format
    dQ = dS K,  dK = dS^T Q        dS in the backward format

The recipe rounds every operand to FP8: delayed scaling uses the operand's amax history, current scaling its own amax.
The scale is per tensor whatever the recipe's granularity, because scores have no channels. Every sum is FP32. With
`fp8_mha` the attention output is not rounded to the dtype of activations: it stays FP32, and the projection after it
casts it to FP8. Rotary embeddings are applied to Q and K in high precision.

The rounded operands are multiplied in FP32, which is exact for FP8 values, so the results are those of an FP8 tensor
core with FP32 accumulation. There is no fused kernel yet: this attention is slow and stores scores of [heads, L, L] for
every sequence of L tokens. If the recipe has no `fp8_dpa`, attention runs in high precision and gives the same bits as
a server (`served_attention`), and `KvRecordingAttention` also records the amaxes that the scales of an FP8 KV cache
need.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from fp8serve.fp8.attention import causal_weights, check_lengths, served_attention
from fp8serve.fp8.autocast import Frame, current_frame
from fp8serve.fp8.casting import Quantized, cast_current_rowwise, cast_delayed, with_nan_scale
from fp8serve.fp8.ops import arithmetic
from fp8serve.fp8.recipe import Recipe, as_delayed, uses_fp8_attention
from fp8serve.fp8.recompute import plan_call
from fp8serve.fp8.recording import ModuleKey, expect_backward, module_key, prepare_module, record_amax
from fp8serve.fp8.scaling import Direction, ScalingState
from fp8serve.fp8.session import UpdateConfig
from fp8serve.fp8.stateful import Stateful

FORWARD, BACKWARD = ("q", "k", "v", "p"), ("grad_output", "grad_scores")


@dataclass(frozen=True)
class AttentionQuantizer:
    """Rounds the operands of one attention call, in its forward and its backward pass, to FP8 values in FP32."""

    module_key: ModuleKey
    recipe: Recipe
    config_id: int | None  # the id of `config`; None for a recipe without states
    config: UpdateConfig | None  # how delayed states are updated; the registry holds it only weakly
    states: dict[str, ScalingState]  # empty for a recipe without states
    enabled: bool  # False for calibration in high precision: operands are not rounded, only their amaxes are recorded
    is_recording: bool  # whether the forward pass stages amaxes

    def quantize(self, x: Tensor, name: str) -> Tensor:
        """Returns the FP8 values of the operand of this name, in FP32, and stages its amax if the recipe has states."""
        spec = self.recipe.specs.attention[name]
        if spec.source == "current":
            return _dequantized(cast_current_rowwise(x, spec, infinity_is_nan=name in BACKWARD))
        if not self.enabled:
            self.stage_amax(name, arithmetic.amax(x))
            return x.float()
        operand, amax = cast_delayed(x, spec, self.states[name].scale, columnwise=False)
        self.stage_amax(name, amax)
        data = cast(Quantized, operand.rowwise)
        return _dequantized(with_nan_scale(data, amax.isinf()) if name in BACKWARD else data)

    def stage_amax(self, name: str, amax: Tensor) -> None:
        """Stages the amax of the operand of this name, if the recipe has states and this pass records amaxes."""
        direction: Direction = "backward" if name in BACKWARD else "forward"
        if self.config_id is not None and (self.is_recording or direction == "backward"):
            record_amax(direction, self.states[name].amax_history, amax, self.module_key, self.config_id)

    def for_second_run(self) -> "AttentionQuantizer":
        """Returns the quantizer for recomputing the forward pass, with copied scales and without recording."""
        forward_states = {n: replace(s, scale=s.scale.clone()) for n, s in self.states.items() if n in FORWARD}
        return replace(self, states={**self.states, **forward_states}, is_recording=False)


def _dequantized(data: Quantized) -> Tensor:
    return data.q.float() * data.scale_inv


class _RoundValue(torch.autograd.Function):
    """Rounds a value in the forward pass and passes its gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: AttentionQuantizer, name: str) -> Tensor:
        ctx.dtype = x.dtype
        return quantizer.quantize(x, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.to(ctx.dtype), None, None


class _RoundGradient(torch.autograd.Function):
    """Passes a value through and rounds its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: AttentionQuantizer, name: str) -> Tensor:
        ctx.quantizer, ctx.name = quantizer, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.quantizer.quantize(gradient, ctx.name), None, None


def _round(x: Tensor, quantizer: AttentionQuantizer, name: str) -> Tensor:
    function = _RoundGradient if name in BACKWARD else _RoundValue
    return cast(Tensor, function.apply(x, quantizer, name))  # type: ignore[no-untyped-call]


class DotProductAttention(Stateful):
    """Causal attention over flattened sequences. It runs in FP8 inside an `autocast` whose recipe has `fp8_dpa`."""

    tensors: ClassVar[dict[Direction, tuple[str, ...]]] = {"forward": FORWARD, "backward": BACKWARD}

    def __init__(self) -> None:
        super().__init__()
        self._init_states()
        self._query_device = torch.device("cpu")

    def state_device(self) -> torch.device:
        """Returns the device of the last query, because the module has no parameter."""
        return self._query_device

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
        """Returns the attention output in q's shape, for q [T, heads, head_dim] and k, v [T, kv_heads, head_dim].

        `lengths`, `window`, `softcap` and `sinks` are those of `causal_attention`. Scores are capped and joined with
        sinks in FP32. The output has q's dtype, or FP32 with `fp8_mha`. With `calibrating=True` and `enabled=False`,
        amaxes of the operands are recorded but no operand is rounded. Raises ValueError if the lengths do not add up.
        """
        self._query_device = q.device
        quantizer = plan_call(self.key, lambda: self._create_quantizer(any(t.requires_grad for t in (q, k, v))))
        if quantizer is None:
            return served_attention(q, k, v, lengths, softmax_scale, window, softcap, sinks)
        check_lengths(q, lengths)
        rounded = (_round(x, quantizer, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
        sequences = zip(*(torch.split(x, list(lengths)) for x in rounded), strict=True)
        compute_weights = partial(causal_weights, window=window, softcap=softcap, sinks=sinks)
        outputs = [_attend(a, b, c, softmax_scale, quantizer, compute_weights) for a, b, c in sequences]
        out = _round(torch.cat(outputs), quantizer, "grad_output")
        return out if quantizer.enabled and quantizer.recipe.specs.keeps_attention_in_fp32 else out.to(q.dtype)

    def _create_quantizer(self, is_differentiable: bool) -> AttentionQuantizer | None:
        """Returns the quantizer of this call, or None if attention runs in high precision."""
        frame = current_frame()
        if frame is None or not uses_fp8_attention(frame.recipe):
            return None
        quantizer = self._quantizer_of(frame, is_recording=torch.is_grad_enabled() or frame.calibrating)
        if frame.config_id is not None and frame.config is not None and torch.is_grad_enabled() and is_differentiable:
            expect_backward(self.scaling["q"].amax_history, frame.config_id, frame.config)
        return quantizer

    def _quantizer_of(self, frame: Frame, is_recording: bool) -> AttentionQuantizer:
        recipe, delayed = frame.recipe, as_delayed(frame.recipe)
        if delayed is not None and frame.config_id is not None:
            prepare_module(self, frame.config_id, frame.config, delayed.amax_history_len, is_recording)
        states = {} if delayed is None else self.scaling
        return AttentionQuantizer(
            module_key(self), recipe, frame.config_id, frame.config, states, frame.enabled, is_recording
        )


class KvRecordingAttention(DotProductAttention):
    """Attention in high precision that records the amaxes of keys and values in delayed scaling states.

    The states are those of an FP8 KV cache, which stores keys after their rotary embedding. The recipe must not have
    `fp8_dpa` or `fp8_mha`. The output is bit-equal to that of `served_attention`.
    """

    tensors: ClassVar[dict[Direction, tuple[str, ...]]] = {"forward": ("k", "v"), "backward": ()}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *options: Any, **named_options: Any) -> Tensor:
        """Returns the output of `served_attention`. Records amaxes under a delayed recipe, unless gradients are off."""
        self._query_device = q.device
        recorder = plan_call(self.key, self._create_recorder)
        if recorder is not None and recorder.is_recording:  # False in the second run of a checkpointed region
            recorder.stage_amax("k", arithmetic.fast_amax(k.detach()))
            recorder.stage_amax("v", arithmetic.fast_amax(v.detach()))
        return served_attention(q, k, v, *options, **named_options)

    def _create_recorder(self) -> AttentionQuantizer | None:
        """Returns the object that stages the amaxes of this call, or None if the call records nothing."""
        frame = current_frame()
        if frame is None or frame.config_id is None or not (torch.is_grad_enabled() or frame.calibrating):
            return None
        return self._quantizer_of(frame, is_recording=True)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    quantizer: AttentionQuantizer,
    compute_weights: Callable[[Tensor], Tensor],
) -> Tensor:
    """Returns the attention output of one sequence, FP32 in q's shape, for q [L, heads, head_dim] rounded to FP8.

    Under delayed scaling all sequences of a call share one scale of P and one of dS. Under current scaling each
    sequence has its own.
    """
    group_size = q.shape[1] // k.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)))
    scores = _round(q @ k.transpose(1, 2) * softmax_scale, quantizer, "grad_scores")  # [heads, L, L]
    weights = _round(compute_weights(scores), quantizer, "p")
    return (weights @ v).transpose(0, 1)
