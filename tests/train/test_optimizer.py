"""Learning-rate schedules, gradient clipping, skipped steps, and master weights in the model and in the optimizer."""

import math

import pytest
import torch
from torch import Tensor, nn

from fp8serve.errors import JobError
from fp8serve.train import optimizer as optimizer_module
from fp8serve.train.config import TrainConfig
from fp8serve.train.optimizer import Optimizer, global_norm, learning_rate


def config(**values: object) -> TrainConfig:
    return TrainConfig.from_dict({"model": "m", "data": ["d"], "out": "o", "lr": 1e-2, **values})


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = {"w": torch.randn(8, 4, generator=generator), "b": torch.randn(4, generator=generator)}
    return {n: nn.Parameter(v.to(dtype)) for n, v in values.items()}


def give_gradients(params: dict[str, nn.Parameter], seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params.values():
        p.grad = (torch.randn(p.shape, generator=generator) * size).to(p.dtype)


def test_learning_rate_rises_linearly_and_falls_as_a_cosine() -> None:
    cfg = config(lr=1.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(cfg, s, 24) for s in range(24)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[14] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[23] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 19 / 20)))
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize(("schedule", "middle", "last"), [("linear", 0.55, 0.1 + 0.9 / 20), ("constant", 1.0, 1.0)])
def test_other_schedules_have_their_learning_rates(schedule: str, middle: float, last: float) -> None:
    cfg = config(lr=1.0, warmup_steps=4, min_lr_ratio=0.1, lr_schedule=schedule)
    assert [learning_rate(cfg, s, 24) for s in (1, 4, 14, 23)] == pytest.approx([0.5, 1.0, middle, last])


def test_warm_up_is_three_percent_unless_given() -> None:
    assert learning_rate(config(lr=1.0), 0, 100) == pytest.approx(1 / 3)
    assert learning_rate(config(lr=1.0, warmup_steps=0), 0, 100) == 1.0


def test_step_is_adamw_with_decay_on_matrices_only() -> None:
    mine, theirs = parameters(), parameters()
    optimizer = Optimizer(mine, config(weight_decay=0.1, clip=None))
    reference = torch.optim.AdamW(
        [{"params": [theirs["w"]], "weight_decay": 0.1}, {"params": [theirs["b"]], "weight_decay": 0.0}],
        lr=3e-3, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    for seed in range(3):
        give_gradients(mine, seed)
        give_gradients(theirs, seed)
        optimizer.step(3e-3)
        reference.step()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], atol=1e-7, rtol=1e-6)


def test_clipping_scales_all_gradients_by_the_global_norm() -> None:
    params = parameters()
    give_gradients(params, 0, size=100.0)
    grads = {n: g.clone() for n, p in params.items() if (g := p.grad) is not None}
    optimizer = Optimizer(params, config(clip=0.5))
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    assert optimizer.step(1e-3) == pytest.approx(expected)
    for name, grad in grads.items():  # the first moment is (1 - beta1) times the clipped gradient
        torch.testing.assert_close(optimizer.state()[f"{name}.exp_avg"], 0.1 * grad * (0.5 / expected))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    params = parameters()
    optimizer = Optimizer(params, config())
    give_gradients(params, 0)
    optimizer.step(1e-2)
    before = {n: p.detach().clone() for n, p in params.items()}
    moments = {n: t.clone() for n, t in optimizer.state().items()}
    give_gradients(params, 1)
    params["w"].grad = torch.full_like(params["w"], bad)
    assert not math.isfinite(optimizer.step(1e-2))
    assert all(torch.equal(before[n], p) and p.grad is None for n, p in params.items())
    assert all(torch.equal(moments[n], t) for n, t in optimizer.state().items())


def test_masters_in_the_optimizer_keep_what_bf16_would_round_away() -> None:
    params = parameters()
    optimizer = Optimizer(params, config(master_weights="optimizer", clip=None, weight_decay=0.0))
    assert params["w"].dtype == torch.bfloat16
    start = optimizer.masters["w"].detach().clone()
    for _ in range(3):
        params["w"].grad = torch.ones_like(params["w"])
        optimizer.accumulate_in_fp32()
        optimizer.step(1e-6)  # less than BF16 can represent at these weights
    moved = start - optimizer.masters["w"]
    torch.testing.assert_close(moved, torch.full_like(moved, 3e-6), atol=5e-7, rtol=0)
    assert torch.equal(params["w"], optimizer.masters["w"].to(torch.bfloat16))


def test_masters_in_the_optimizer_accumulate_in_fp32() -> None:
    params = parameters()
    optimizer = Optimizer(params, config(master_weights="optimizer"))
    for value in (1.0, 2.0**-10):  # their sum is not a BF16 number
        params["b"].grad = torch.full_like(params["b"], value)
        optimizer.accumulate_in_fp32()
    assert torch.equal(grad_of(optimizer.masters["b"]), torch.full((4,), 1 + 2.0**-10))


def grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("place", ["model", "optimizer"])
def test_a_restored_optimizer_goes_on_with_the_same_bits(place: str) -> None:
    cfg = config(master_weights=place)
    whole_params, first_params, second_params = parameters(), parameters(), parameters()
    whole, before, after = Optimizer(whole_params, cfg), Optimizer(first_params, cfg), Optimizer(second_params, cfg)
    for seed in range(4):
        run(whole, whole_params, seed)
        if seed < 2:
            run(before, first_params, seed)
    after.load({n: m.detach().clone() for n, m in before.masters.items()}, before.state())
    for seed in (2, 3):
        run(after, second_params, seed)
    assert all(torch.equal(whole.masters[n], after.masters[n]) for n in whole_params)
    assert all(torch.equal(whole_params[n], second_params[n]) for n in whole_params)


def run(optimizer: Optimizer, params: dict[str, nn.Parameter], seed: int) -> None:
    give_gradients(params, seed)
    optimizer.accumulate_in_fp32()
    optimizer.step(1e-2)


def test_weights_of_another_model_are_refused() -> None:
    optimizer = Optimizer(parameters(), config())
    with pytest.raises(JobError, match="not those of this model"):
        optimizer.load({"other": torch.zeros(1)}, {})


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_norm_beyond_fp32_is_still_a_norm(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares that overflow FP32 do not make a finite gradient infinite; one infinite element does."""
    monkeypatch.setattr(optimizer_module, "_are_on_gpu", lambda tensors: on_gpu)
    grads = {"matrix": torch.full((3, 4), 1e30), "vector": torch.full((4,), -1e30)}
    assert global_norm(grads) == pytest.approx(4e30)
    assert global_norm({"matrix": torch.full((2, 8), 3.0)}) == pytest.approx(12)
    assert global_norm({"matrix": torch.full((2, 8), 3.0), "vector": torch.full((5,), -2.0)}) == pytest.approx(164**0.5)
    assert global_norm({**grads, "other": torch.tensor([torch.inf])}) == math.inf
    assert math.isnan(global_norm({**grads, "other": torch.tensor([torch.nan])}))
