"""Monitor: its readings, its counts, its warnings, and its output."""

import copy
import logging
import math

import pytest
import torch
from torch import Tensor, nn

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast, convert, scaling_state
from fp8serve.fp8.dpa import DotProductAttention
from fp8serve.fp8.fused import NormLinear
from fp8serve.fp8.monitor import PROMETHEUS_METRICS, Monitor, Reading
from fp8serve.fp8.ops import quantize
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.stateful import Stateful

SHORT = DelayedScaling(amax_history_len=4)


def model() -> nn.Module:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 16, bias=False)))


def train(module: nn.Module, x: Tensor, recipe: Recipe = SHORT) -> None:
    with autocast(recipe=recipe):
        y = module(x)
    y.square().sum().backward()
    module.zero_grad()


def reading_of(monitor: Monitor, layer: str, tensor: str) -> Reading:
    return next(r for r in monitor.readings if (r.layer, r.tensor) == (layer, tensor))


def batch(magnitude: float = 1.0) -> Tensor:
    return torch.linspace(-magnitude, magnitude, 128).view(8, 16)


def test_every_tensor_of_every_layer_is_read_at_every_step() -> None:
    module = model()
    monitor = Monitor(module, every=100)
    for _ in range(3):
        train(module, batch())
        names = {(r.layer, r.tensor) for r in monitor.step()}
        assert names == {(layer, t) for layer in "02" for t in ("input", "weight", "grad_output")}
    reading = reading_of(monitor, "0", "input")
    assert (reading.step, reading.amax, reading.scale) == (2, 1.0, 448.0)
    assert reading.headroom == 0.0


def test_headroom_is_that_of_the_scale_of_the_step() -> None:
    module = model()
    monitor = Monitor(module)
    headrooms = []
    for magnitude in (1.0, 1.0, 4.0, 4.0):
        train(module, batch(magnitude))
        monitor.step()
        headrooms.append(reading_of(monitor, "0", "input").headroom)
    assert headrooms == [pytest.approx(math.log2(448)), 0.0, -2.0, 0.0]


def test_fractions_are_counted_every_few_steps_and_kept_between() -> None:
    module = model()
    monitor = Monitor(module, every=2)
    train(module, batch())
    monitor.step()  # counted: scale 1
    zeros = (batch().to(torch.float8_e4m3fn).float() == 0).float().mean().item()
    assert reading_of(monitor, "0", "input").zeros == pytest.approx(zeros)
    train(module, torch.zeros(8, 16) + 1e-9)
    monitor.step()  # not counted
    assert reading_of(monitor, "0", "input").zeros == pytest.approx(zeros)
    train(module, torch.zeros(8, 16) + 1e-9)
    monitor.step()  # counted: all values underflow, since the scale is that of amax 1
    assert reading_of(monitor, "0", "input").zeros == 1.0


def test_saturation_is_the_fraction_beyond_the_range() -> None:
    module = model()
    monitor = Monitor(module, every=1)
    train(module, batch())
    monitor.step()
    assert reading_of(monitor, "0", "input").saturated == 0.0
    train(module, batch(4.0))
    monitor.step()
    products = batch(4.0).abs() * 448
    top = (products >= 432).float().mean().item()  # 432 and more round to the largest code
    cut = (products > 448).float().mean().item()
    assert top > cut > 0
    reading = reading_of(monitor, "0", "input")
    assert reading.saturated == pytest.approx(cut)
    assert reading.rounded_to_top == pytest.approx(top - cut)


def test_a_scale_from_the_largest_value_saturates_nothing() -> None:
    """Row C7: FP32 roundings of the scale, of its inverse and of the product do not count as saturation."""
    module = model()
    monitor = Monitor(module, every=1)
    for seed in range(40):
        x = torch.rand(8, 16, generator=torch.Generator().manual_seed(seed)) * (seed + 1)
        train(module, x, Float8CurrentScaling())
        monitor.step()
        assert reading_of(monitor, "0", "input").saturated == 0.0
        assert reading_of(monitor, "0", "input").rounded_to_top > 0.0  # type: ignore[operator]


def test_zeros_of_the_input_are_no_underflow() -> None:
    module = model()
    monitor = Monitor(module, every=1)
    train(module, batch())
    monitor.step()
    half = batch().relu()  # half of the values are zero, as after a ReLU
    half[4] = 0.0
    train(module, half)
    monitor.step()
    reading = reading_of(monitor, "0", "input")
    assert reading.zeros is not None
    assert reading.zeros > 0.5
    assert (reading.underflowed, reading.troubles) == (0.0, ())


@pytest.mark.parametrize("recipe", [SHORT, Float8CurrentScaling(granularity="row"), Float8BlockScaling()])
def test_every_granularity_counts_the_values_of_its_own_scales(recipe: Recipe) -> None:
    """Rows and column blocks have very different magnitudes, so that every row and block has another scale."""
    torch.manual_seed(0)
    module = convert(nn.Sequential(nn.Linear(300, 48, bias=False)))
    monitor = Monitor(module, every=1)
    x = torch.randn(160, 300) * torch.logspace(-3, 3, 160).unsqueeze(1)
    x[:, 100:200] *= 1e-9
    train(module, x, recipe)
    monitor.step()
    train(module, x, recipe)
    monitor.step()
    reading = reading_of(monitor, "0", "input")
    q = cast_as(recipe, x, float(reading.scale))
    share = ((q.float() == 0) & (x != 0)).float().mean().item()
    assert reading.saturated == 0.0
    assert reading.underflowed == pytest.approx(share, abs=0.01)
    assert reading.underflowed > 0.05


def cast_as(recipe: Recipe, x: Tensor, scale: float) -> Tensor:
    if isinstance(recipe, DelayedScaling):
        return quantize(x, scale=scale)[0]
    return quantize(x, granularity="block1x128" if isinstance(recipe, Float8BlockScaling) else "row")[0]


@pytest.mark.parametrize("recipe", [SHORT, Float8CurrentScaling(granularity="row")])
def test_a_fused_input_is_counted_like_a_plain_one(recipe: Recipe) -> None:
    torch.manual_seed(0)
    norm, linear = nn.RMSNorm(64, eps=1e-5), Linear(64, 48)
    layer = NormLinear(norm, linear)
    monitor = Monitor(layer, every=1)
    x = torch.randn(2, 32, 64)
    for _ in range(2):
        train(layer, x, recipe)
        monitor.step()
    reading = reading_of(monitor, "linear", "input")
    assert (reading.saturated, reading.underflowed) == (0.0, 0.0)
    assert reading.rounded_to_top is not None
    assert reading.rounded_to_top > 0


def test_troubles_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    module = model()
    monitor = Monitor(module, every=1)
    spike = batch(8.0)
    hostile = batch()
    hostile[0, 0] = torch.inf
    with caplog.at_level(logging.WARNING, "fp8serve.monitor"):
        for x in (batch(), spike, batch() * 1e-9, hostile, hostile):
            train(module, x)
            monitor.step()
    logged = [m for m in caplog.messages if m.startswith("input of 0 ")]
    assert logged == [
        "input of 0 at step 1: overflow",
        "input of 0 at step 2: underflow",
        "input of 0 at step 3: non-finite",
    ]


@pytest.mark.parametrize(
    "recipe", [Float8CurrentScaling(), Float8CurrentScaling(granularity="row"), Float8BlockScaling()]
)
def test_recipes_without_state_are_read_from_their_data(recipe: Recipe) -> None:
    module = model()
    monitor = Monitor(module, every=2)
    train(module, batch(), recipe)
    monitor.step()
    reading = reading_of(monitor, "0", "input")
    assert (reading.headroom, reading.saturated) == (0.0, 0.0)
    assert reading.amax == pytest.approx(1.0)
    train(module, batch(), recipe)
    assert monitor.step() == []


def test_a_monitor_changes_no_state_and_removes_its_observers() -> None:
    module = model()
    twin = copy.deepcopy(module)
    with Monitor(module, every=1) as monitor:
        for _ in range(2):
            train(module, batch())
            train(twin, batch())
            monitor.step()
    for a, b in zip(module.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert all(getattr(m, "observer", None) is None for m in module.modules())


def test_a_monitor_created_later_reads_the_current_scales() -> None:
    module = model()
    train(module, batch())
    monitor = Monitor(module)
    train(module, batch(2.0))
    monitor.step()
    assert reading_of(monitor, "0", "input").headroom == -1.0
    assert scaling_state(module[0])["input"].scale.item() == 224.0  # type: ignore[index, arg-type]


def test_callback_table_and_prometheus() -> None:
    module, calls = model(), []
    monitor = Monitor(module, callback=calls.append)
    train(module, batch(2.0))
    monitor.step()
    assert calls == [monitor.readings]
    line = next(t for t in monitor.table().splitlines() if t.startswith("0 ") and " input " in t)
    assert line.split()[:4] == ["0", "input", "2", "1"]
    text = monitor.prometheus()
    assert 'fp8serve_amax{layer="0",tensor="input"} 2\n' in text
    assert "# TYPE fp8serve_nonfinite_total counter" in text
    assert all(f"# HELP {name} " in text for name, _ in PROMETHEUS_METRICS.values())


def test_a_monitor_refuses_an_interval_below_one_step() -> None:
    with pytest.raises(ValueError, match="every must be at least 1 step, found 0"):
        Monitor(model(), every=0)


@pytest.mark.gpu
def test_states_of_attention_that_has_not_run_are_read_with_states_on_a_gpu() -> None:
    """This happens after a restart from a checkpoint: attention has no parameter that shows its device."""
    layers = convert(nn.ModuleList([nn.Linear(16, 16, bias=False), DotProductAttention()])).cuda()
    for module, name in zip(layers, ("input", "k"), strict=True):
        assert isinstance(module, Stateful)
        module.prepare(4)
        module.scaling[name].amax_history[-1] = 2.0
    assert {(r.layer, r.tensor): r.amax for r in Monitor(layers).step()} == {("0", "input"): 2.0, ("1", "k"): 2.0}
