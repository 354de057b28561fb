"""FP8 attention: operands rounded by the recipe, sums in FP32, gradients through the same rounded operands."""

import copy

import pytest
import torch
from torch import Tensor

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast
from fp8serve.fp8 import reference
from fp8serve.fp8.attention import causal_attention
from fp8serve.fp8.dpa import DotProductAttention
from fp8serve.fp8.recipe import Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LENGTHS = [5, 3]
DELAYED = DelayedScaling(amax_history_len=4, fp8_dpa=True)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    heads = {"q": 4, "k": 2, "v": 2}
    q, k, v = (torch.randn(8, n, 16, generator=noise).to(dtype).requires_grad_() for n in heads.values())
    return q, k, v


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    q, scale_inv = reference.quantize_current(x.float(), dtype, False)
    return q.double() * scale_inv.double()


def by_hand(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, scale: float) -> list[Tensor]:
    """Forward and gradients in FP64 from the rounded operands, by the formulas of attention."""
    q, k, v = (rounded(t.detach(), E4M3).transpose(0, 1) for t in (q, k, v))
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    hidden = torch.ones(8, 8).triu(1).bool()
    hidden[5:, :5] = True
    p = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    p_q, d_out_q = rounded(p, E4M3), rounded(d_out.transpose(0, 1), E5M2)
    d_p = d_out_q @ v.transpose(1, 2)
    d_s = rounded(p * (d_p - (d_p * p).sum(-1, keepdim=True)), E5M2) * scale
    d_k, d_v = d_s.transpose(1, 2) @ q, p_q.transpose(1, 2) @ d_out_q
    folded = [t.view(2, 2, 8, 16).sum(1).transpose(0, 1) for t in (d_k, d_v)]
    return [(p_q @ v).transpose(0, 1), (d_s @ k).transpose(0, 1), *folded]


def test_values_and_gradients_are_those_of_the_rounded_operands() -> None:
    q, k, v = tensors()
    d_out = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(3))
    with autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        out = DotProductAttention()(q, k, v, LENGTHS, 0.25)
    out.backward(d_out)
    for found, exact in zip((out, q.grad, k.grad, v.grad), by_hand(q, k, v, d_out, 0.25), strict=True):
        assert found is not None
        assert (found.detach() - exact).norm() < 2e-3 * exact.norm()  # a tie may round the other way in FP32


@pytest.mark.parametrize("recipe", [None, DelayedScaling(), Float8BlockScaling()], ids=repr)
def test_without_fp8_dpa_attention_stays_in_high_precision(recipe: Recipe | None) -> None:
    q, k, v = tensors()
    with autocast(enabled=recipe is not None, recipe=recipe):
        out = DotProductAttention()(q, k, v, LENGTHS, 0.25)
    assert torch.equal(out, causal_attention(q, k, v, LENGTHS, 0.25))


def run(module: DotProductAttention, recipe: Recipe = DELAYED, factor: float = 1.0) -> Tensor:
    q, k, v = tensors()
    with autocast(recipe=recipe):
        out: Tensor = module(q * factor, k, v, LENGTHS, 0.25)
    out.square().sum().backward()
    return out


def test_delayed_states_of_every_operand_are_kept() -> None:
    module = DotProductAttention()
    for _ in range(3):
        run(module)
    assert {name: s.steps.item() for name, s in module.scaling.items()} == dict.fromkeys(
        ("q", "k", "v", "p", "grad_output", "grad_scores"), 3
    )
    assert module.scaling["q"].scale.item() == (torch.tensor(448.0) / tensors()[0].abs().max()).item()
    assert module.scaling["p"].scale.item() == 448.0  # the first token looks at itself alone
    assert module.scaling["grad_output"].scale.item() > 57344 / 100


def test_the_second_step_is_close_to_high_precision() -> None:
    module = DotProductAttention()
    run(module)
    q, k, v = tensors()
    exact = causal_attention(q, k, v, LENGTHS, 0.25)
    assert (run(module) - exact).norm() < 0.06 * exact.norm()


def test_no_grad_freezes_and_copies_are_independent() -> None:
    module = DotProductAttention()
    run(module)
    twin = copy.deepcopy(module)
    with torch.no_grad(), autocast(recipe=DELAYED):
        module(*tensors(), LENGTHS, 0.25)
    run(twin, factor=5.0)
    assert module.scaling["q"].steps.item() == 1
    assert twin.scaling["q"].steps.item() == 2
    assert module.scaling["q"].amax_history.tolist() != twin.scaling["q"].amax_history.tolist()


def test_state_dict_round_trip() -> None:
    module, fresh = DotProductAttention(), DotProductAttention()
    run(module)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(run(module), run(fresh))


def test_fp8_mha_does_not_round_between_attention_and_projection() -> None:
    q, k, v = tensors(torch.bfloat16)
    attention, projection = DotProductAttention(), Linear(64, 32)
    with autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        narrow = attention(q, k, v, LENGTHS, 0.25)
    with autocast(recipe=Float8CurrentScaling(fp8_mha=True)):
        wide = attention(q, k, v, LENGTHS, 0.25)
        y = projection(wide.flatten(1))
    assert (narrow.dtype, wide.dtype, y.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(wide.bfloat16(), narrow)
    y.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.bfloat16
