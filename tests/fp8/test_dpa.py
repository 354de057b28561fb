"""FP8 attention: operands rounded by the recipe, sums in FP32, gradients through the same rounded operands."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast
from fp8serve.fp8.attention import causal_attention
from fp8serve.fp8.dpa import DotProductAttention
from fp8serve.fp8.ops import reference
from fp8serve.fp8.recipe import Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LENGTHS, SCALE = [5, 3], 0.25
DELAYED = DelayedScaling(amax_history_len=4, fp8_dpa=True)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    heads = {"q": 4, "k": 2, "v": 2}
    q, k, v = (torch.randn(8, n, 16, generator=noise).to(dtype).requires_grad_() for n in heads.values())
    return q, k, v


Rounded = Callable[[Tensor, str], Tensor]  # rounds (values, name of the operand) to FP8; returns FP64


def by_current(x: Tensor, name: str) -> Tensor:
    q, scale_inv = reference.quantize_current(x.float(), E5M2 if name.startswith("grad") else E4M3, False)
    return q.double() * scale_inv.double()


def by_scales(scales: dict[str, Tensor]) -> Rounded:
    def rounded(x: Tensor, name: str) -> Tensor:
        q, _ = reference.quantize(x.float(), scales[name], E5M2 if name.startswith("grad") else E4M3)
        return q.double() / scales[name].double()

    return rounded


def by_hand(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, rounded: Rounded) -> list[Tensor]:
    """Returns the output and the gradients in FP64, computed by the formulas of attention from the rounded operands."""
    operands = (rounded(t.detach(), name) for t, name in ((q, "q"), (k, "k"), (v, "v"), (d_out, "grad_output")))
    sequences = zip(*(t.split(LENGTHS) for t in operands), strict=True)
    parts = [one_by_hand(*(t.transpose(0, 1) for t in sequence), rounded=rounded) for sequence in sequences]
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def one_by_hand(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, rounded: Rounded) -> list[Tensor]:
    """`by_hand` of one sequence; operands are [heads, tokens, dim], results [tokens, heads, dim]."""
    length = q.shape[1]
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    later = torch.ones(length, length).triu(1).bool()
    p = (q @ k.transpose(1, 2) * SCALE).masked_fill(later, -torch.inf).softmax(-1)
    p_q, d_p = rounded(p, "p"), d_out @ v.transpose(1, 2)
    d_s = rounded(p * (d_p - (d_p * p).sum(-1, keepdim=True)), "grad_scores") * SCALE
    d_k, d_v = d_s.transpose(1, 2) @ q, p_q.transpose(1, 2) @ d_out
    folded = [t.view(2, 2, length, 16).sum(1).transpose(0, 1) for t in (d_k, d_v)]
    return [(p_q @ v).transpose(0, 1), (d_s @ k).transpose(0, 1), *folded]


def test_values_and_gradients_are_those_of_the_rounded_operands() -> None:
    check_by_hand(DotProductAttention(), Float8CurrentScaling(fp8_dpa=True), by_current)


def test_delayed_scales_round_values_and_gradients() -> None:
    module = DotProductAttention()
    for _ in range(2):
        run(module)
    check_by_hand(module, DELAYED, by_scales({name: state.scale.clone() for name, state in module.scaling.items()}))


def check_by_hand(module: DotProductAttention, recipe: Recipe, rounded: Rounded) -> None:
    q, k, v = tensors()
    d_out = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(3))
    with autocast(recipe=recipe):
        out = module(q, k, v, LENGTHS, SCALE)
    out.backward(d_out)
    for actual, exact in zip((out, q.grad, k.grad, v.grad), by_hand(q, k, v, d_out, rounded), strict=True):
        assert actual is not None
        assert (actual.detach() - exact).norm() < 2e-3 * exact.norm()  # a tie may round the other way in FP32


@pytest.mark.parametrize("recipe", [None, DelayedScaling(), Float8BlockScaling()], ids=repr)
def test_without_fp8_dpa_attention_stays_in_high_precision(recipe: Recipe | None) -> None:
    q, k, v = tensors()
    with autocast(enabled=recipe is not None, recipe=recipe):
        out = DotProductAttention()(q, k, v, LENGTHS, SCALE)
    assert torch.equal(out, causal_attention(q, k, v, LENGTHS, SCALE))


def run(module: DotProductAttention, recipe: Recipe = DELAYED, factor: float = 1.0) -> Tensor:
    q, k, v = tensors()
    with autocast(recipe=recipe):
        out: Tensor = module(q * factor, k, v, LENGTHS, SCALE)
    out.square().sum().backward()
    return out


def test_every_operand_of_attention_has_a_delayed_state() -> None:
    module = DotProductAttention()
    for _ in range(3):
        run(module)
    assert {name: s.steps.item() for name, s in module.scaling.items()} == dict.fromkeys(
        ("q", "k", "v", "p", "grad_output", "grad_scores"), 3
    )
    assert module.scaling["q"].scale.item() == (torch.tensor(448.0) / tensors()[0].abs().max()).item()
    assert (
        module.scaling["p"].scale.item() == 448.0
    )  # the first token attends to itself alone, so the largest probability is 1
    assert module.scaling["grad_output"].scale.item() > 57344 / 100


def test_the_second_step_is_close_to_high_precision() -> None:
    module = DotProductAttention()
    run(module)
    q, k, v = tensors()
    exact = causal_attention(q, k, v, LENGTHS, SCALE)
    assert (run(module) - exact).norm() < 0.06 * exact.norm()


@pytest.mark.parametrize(("window", "softcap"), [(2, None), (None, 0.5), (3, 1.0)])
def test_windows_soft_caps_and_sinks_are_those_of_high_precision(window: int | None, softcap: float | None) -> None:
    sinks = torch.randn(4, requires_grad=True)
    q, k, v = tensors()
    exact = causal_attention(q, k, v, LENGTHS, SCALE, window, softcap, sinks)
    exact.square().sum().backward()
    expected, sinks.grad = sinks.grad, None
    with autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        actual = DotProductAttention()(q, k, v, LENGTHS, SCALE, window, softcap, sinks)
    actual.square().sum().backward()
    assert expected is not None
    assert sinks.grad is not None
    assert (actual - exact).norm() < 0.06 * exact.norm()
    assert (sinks.grad - expected).norm() < 0.1 * expected.norm()


def test_no_grad_freezes_and_copies_are_independent() -> None:
    module = DotProductAttention()
    run(module)
    twin = copy.deepcopy(module)
    with torch.no_grad(), autocast(recipe=DELAYED):
        module(*tensors(), LENGTHS, SCALE)
    run(twin, factor=5.0)
    assert module.scaling["q"].steps.item() == 1
    assert twin.scaling["q"].steps.item() == 2
    assert module.scaling["q"].amax_history.tolist() != twin.scaling["q"].amax_history.tolist()


def test_calibrating_records_every_operand_and_rounds_none() -> None:
    module = DotProductAttention()
    q, k, v = tensors()
    with autocast(enabled=False, recipe=DELAYED, calibrating=True):
        out = module(q, k, v, LENGTHS, SCALE)
    out.square().sum().backward()
    torch.testing.assert_close(out, causal_attention(q, k, v, LENGTHS, SCALE))
    newest = {name: state.amax_history[-1] for name, state in module.scaling.items()}
    assert newest["k"] == k.detach().abs().max()
    assert newest["grad_output"] == (2 * out.detach()).abs().max()
    assert all(value > 0 for value in newest.values())


def test_under_delayed_scaling_a_sequence_does_not_depend_on_its_neighbour() -> None:
    module = DotProductAttention()
    run(module)
    q, k, v = tensors()
    with torch.no_grad(), autocast(recipe=DELAYED):
        together = module(q, k, v, LENGTHS, SCALE)
        alone = module(q[5:], k[5:], v[5:], [3], SCALE)
    assert torch.equal(together[5:], alone)


def test_recomputed_attention_uses_the_scales_of_its_first_run() -> None:
    plain, repeated = DotProductAttention(), DotProductAttention()
    for _ in range(3):  # the scales change in every step, before its backward pass
        tensors_of = [tensors() for _ in range(2)]
        for module, (q, k, v), recompute in zip((plain, repeated), tensors_of, (False, True), strict=True):
            with autocast(recipe=DELAYED):
                args = (q, k, v, LENGTHS, SCALE)
                out = checkpoint(module, *args, use_reentrant=False) if recompute else module(*args)
            out.square().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(*tensors_of, strict=True) if a.grad is not None)
        assert all(t.grad is not None for ts in tensors_of for t in ts)
    for name, state in plain.scaling.items():
        assert torch.equal(state.amax_history, repeated.scaling[name].amax_history), name


def test_lengths_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="add up to 7, but there are 8"), autocast(recipe=DELAYED):
        DotProductAttention()(*tensors(), [4, 3], SCALE)


def test_state_dict_round_trip() -> None:
    module, fresh = DotProductAttention(), DotProductAttention()
    run(module)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(run(module), run(fresh))


def test_fp8_mha_does_not_round_between_attention_and_projection() -> None:
    q, k, v = tensors(torch.bfloat16)
    attention, projection = DotProductAttention(), Linear(64, 32)
    with autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        narrow = attention(q, k, v, LENGTHS, SCALE)
    with autocast(recipe=Float8CurrentScaling(fp8_mha=True)):
        wide = attention(q, k, v, LENGTHS, SCALE)
        y = projection(wide.flatten(1))
    assert (narrow.dtype, wide.dtype, y.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(wide.bfloat16(), narrow)
    y.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.bfloat16
