"""States that are created, calibrated, loaded or monitored in torch.inference_mode() train as after no_grad."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fp8serve import DelayedScaling, DotProductAttention, Monitor, NormLinear, SiluMulLinear, autocast, convert
from fp8serve.fp8.linear import Linear

SHORT, LONG = DelayedScaling(amax_history_len=4, fp8_dpa=True), DelayedScaling(amax_history_len=8, fp8_dpa=True)
Mode = Callable[[], AbstractContextManager[Any]]


class Network(nn.Module):
    """Every kind of module that has states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = NormLinear(nn.LayerNorm(16), Linear(16, 16))
        self.attention = DotProductAttention()
        self.gated = SiluMulLinear(Linear(16, 16))
        self.last = convert(nn.Sequential(nn.Linear(16, 16)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).view(4, 2, 8)
        h = self.attention(h, h, h, (4,), 0.3).reshape(4, 16)
        return self.last(self.gated(h, h))  # type: ignore[no-any-return]


def batch(size: float) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(2)) * size


def train(model: nn.Module, recipe: DelayedScaling) -> None:
    for size in (1.0, 3.0, 2.0):
        with autocast(recipe=recipe):
            loss = model(batch(size)).square().sum()
        loss.backward()


def first_use(model: nn.Module, mode: Mode) -> None:
    with mode(), autocast(recipe=SHORT):
        model(batch(1.0))
    train(model, SHORT)


def resize(model: nn.Module, mode: Mode) -> None:
    train(model, SHORT)
    with mode(), autocast(recipe=LONG):
        model(batch(1.0))
    train(model, LONG)


def calibrate(model: nn.Module, mode: Mode) -> None:
    for enabled in (False, True):
        with mode(), autocast(enabled=enabled, recipe=SHORT, calibrating=True):
            model(batch(1.0))
    train(model, SHORT)


def load(model: nn.Module, mode: Mode) -> None:
    other = Network()
    train(other, SHORT)
    with mode():
        model.load_state_dict({n: t.clone() for n, t in other.state_dict().items()})
    train(model, SHORT)


def move(model: nn.Module, mode: Mode) -> None:
    train(model, SHORT)
    with mode():
        model.to("cpu").float()
    train(model, SHORT)


def watch(model: nn.Module, mode: Mode) -> None:
    with Monitor(model, every=1) as monitor:
        with mode(), autocast(recipe=SHORT):
            model(batch(1.0))
        train(model, SHORT)
        assert monitor.step()
        with mode():
            monitor.step()
        train(model, SHORT)


def cache(model: nn.Module, mode: Mode) -> None:
    """An FP8 weight that an evaluation has cached is not used in a backward pass."""
    with mode(), autocast(recipe=SHORT, is_first_microbatch=True):
        model(batch(1.0))
    with autocast(recipe=SHORT, is_first_microbatch=False):
        loss = model(batch(1.0)).square().sum()
    loss.backward()


@pytest.mark.filterwarnings("ignore:.*evaluated under delayed scaling with scale 1:UserWarning")
@pytest.mark.parametrize("use", [first_use, resize, calibrate, load, move, watch, cache])
def test_training_afterwards_is_as_after_no_grad(use: Callable[[nn.Module, Mode], None]) -> None:
    results = []
    for mode in (torch.inference_mode, torch.no_grad):
        model = Network()
        use(model, cast(Mode, mode))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        results.append(gradients + list(model.state_dict().values()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
