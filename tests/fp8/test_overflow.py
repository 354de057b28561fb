"""Although casts saturate, an infinite or NaN output gradient makes the gradients of inputs and weights non-finite, and
is reported (row G5 of docs/numerics.md)."""

import logging
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8serve import (
    DelayedScaling,
    DotProductAttention,
    Float8BlockScaling,
    Float8CurrentScaling,
    Linear,
    Monitor,
    NormLinear,
    SiluMulLinear,
    autocast,
    scaling_state,
)
from fp8serve.fp8.recipe import Format, MXFP8BlockScaling, NVFP4BlockScaling, Recipe

KINDS: dict[str, Any] = {
    "delayed": lambda **more: DelayedScaling(amax_history_len=4, **more),
    "delayed e4m3": lambda **more: DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3, **more),
    "current": Float8CurrentScaling,
    "rowwise": lambda **more: Float8CurrentScaling(granularity="row", **more),
    "block": Float8BlockScaling,
    "block power 2": lambda **more: Float8BlockScaling(power_2_scale=True, **more),
}
OVERRIDES = list(product((False, True), repeat=3))


def gradients(layer: nn.Module, recipe: Recipe, dy: Tensor, *sources: Tensor) -> list[Tensor]:
    layer.zero_grad()
    sources = tuple(s.clone().requires_grad_() for s in sources)
    with autocast(recipe=recipe):
        y = layer(*sources)
    y.backward(dy.to(y.dtype))
    return [t.grad for t in (*sources, *layer.parameters()) if t.grad is not None]


def gradient_with(rows: int, cols: int, value: float) -> Tensor:
    """Returns a random gradient [rows, cols] with `value` as one of its elements."""
    dy = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    dy[rows // 2, cols // 3] = value
    return dy


@pytest.mark.pairwise
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("override", OVERRIDES, ids=lambda o: "hp:" + "".join("01"[b] for b in o))
@pytest.mark.parametrize("kind", KINDS)
def test_a_nonfinite_gradient_reaches_every_gradient_of_a_linear(
    kind: str, override: tuple[bool, bool, bool], value: float
) -> None:
    recipe = KINDS[kind](override_linear_precision=override)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer, x = Linear(40, 150), torch.randn(9, 40).to(dtype)
        finite = gradients(layer, recipe, gradient_with(9, 150, 1.0), x)
        assert all(g.isfinite().all() for g in finite)
        grads = gradients(layer, recipe, gradient_with(9, 150, value), x)
        assert len(grads) == 3
        assert not any(g.isfinite().all() for g in grads)
        assert all(g.isfinite().all() for g in gradients(layer, recipe, gradient_with(9, 150, 1.0), x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_the_largest_number_is_not_taken_for_infinite(kind: str) -> None:
    """A gradient of this size has scale 1, like one with an infinity."""
    for top in (448.0, 57344.0):
        assert all(
            g.isfinite().all()
            for g in gradients(Linear(40, 150), KINDS[kind](), gradient_with(9, 150, top), torch.randn(9, 40))
        )


@pytest.mark.parametrize("kind", KINDS)
def test_an_infinite_gradient_reaches_every_gradient_of_fused_layers(kind: str) -> None:
    norm, gated = NormLinear(nn.LayerNorm(40), Linear(40, 16)), SiluMulLinear(Linear(40, 16))
    x, recipe, dy = torch.randn(9, 40), KINDS[kind](), gradient_with(9, 16, torch.inf)
    for layer, sources in ((norm, (x,)), (gated, (x, x + 1))):
        for _ in range(2):
            assert not any(g.isfinite().all() for g in gradients(layer, recipe, dy, *sources))


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_an_infinite_gradient_reaches_every_gradient_of_attention(kind: str) -> None:
    attention, q = DotProductAttention(), torch.randn(6, 2, 8)
    recipe = KINDS[kind](fp8_dpa=True)
    for value, finite in ((1.0, True), (torch.inf, False)):
        sources = [q.clone().requires_grad_() for _ in range(3)]
        with autocast(recipe=recipe):
            y = attention(*sources, (6,), 0.3)
        dy = torch.ones_like(y)
        dy[5, 0, 0] = value
        y.backward(dy)
        assert all(bool(s.grad is not None and s.grad.isfinite().all()) is finite for s in sources)


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_skips_the_loss_scalers_step_and_fails_gradient_clipping(kind: str) -> None:
    layer = Linear(40, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    with autocast(recipe=KINDS[kind]()):
        y = layer(torch.randn(9, 40).half())
    before = layer.weight.detach().clone()
    scaler.scale(y.float().square().mean() * 2.0**10).backward()  # above 65504, the largest number of FP16
    with pytest.raises(RuntimeError, match="total norm"):
        torch.nn.utils.clip_grad_norm_([layer.weight], 1.0, error_if_nonfinite=True)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
    assert scaler.get_scale() == 2.0**19


@pytest.mark.parametrize("kind", KINDS)
def test_a_nonfinite_gradient_is_reported_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    layer = Linear(40, 16)
    with Monitor(layer, every=1) as monitor, caplog.at_level(logging.WARNING, "fp8serve.monitor"):
        for value in (1.0, torch.inf, torch.inf):
            gradients(layer, KINDS[kind](), gradient_with(9, 16, value), torch.randn(9, 40))
            monitor.step()
    assert [r.getMessage().partition(" of ")[0] for r in caplog.records if "non-finite" in r.message] == ["grad_output"]
    if "delayed" in kind:
        state = scaling_state(layer)["grad_output"]
        assert (state.nonfinite.item(), state.steps.item()) == (2, 1)


def test_an_infinite_activation_saturates_and_is_counted() -> None:
    """Forward and backward pass use the saturated value, so that all gradients are finite."""
    layer, x = Linear(40, 16), torch.randn(9, 40)
    x[4, 4] = torch.inf
    grads = gradients(layer, KINDS["delayed"](), torch.ones(9, 16), x)
    assert all(g.isfinite().all() for g in grads)
    assert scaling_state(layer)["input"].nonfinite.item() == 1


SMALL_BLOCKS: dict[str, Recipe] = {
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "nvfp4": NVFP4BlockScaling(),
    "nvfp4 by row": NVFP4BlockScaling(row_scaled_activation=True),
    "nvfp4 1d": NVFP4BlockScaling(disable_2d_quantization=True),
    "nvfp4 plain": NVFP4BlockScaling(True, True, True),
}


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("recipe", SMALL_BLOCKS.values(), ids=SMALL_BLOCKS)
def test_an_infinite_gradient_in_small_blocks_is_seen(recipe: Recipe, value: float) -> None:
    of_input, of_weight = gradients(
        Linear(64, 50, bias=False), recipe, gradient_with(40, 50, value), torch.randn(40, 64)
    )
    assert not of_input.isfinite().all()
    assert not of_weight.isfinite().all()
