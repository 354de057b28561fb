"""Linear: gradients of every recipe and override, saved tensors, convert, state dicts, copies."""

import copy
import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast, convert, scaling_state
from fp8serve.errors import ScalesError
from fp8serve.fp8.ops import arithmetic, reference
from fp8serve.fp8.recipe import Format, Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHORT = DelayedScaling(amax_history_len=4)
RECIPES: dict[str, Recipe] = {
    "delayed": SHORT,
    "delayed e4m3": DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3),
    "delayed, weights by row": DelayedScaling(amax_history_len=4, weight_granularity="row"),
    "delayed power 2": DelayedScaling(amax_history_len=4, power_2_scale=True),
    "delayed power 2, weights by row": DelayedScaling(amax_history_len=4, power_2_scale=True, weight_granularity="row"),
    "current": Float8CurrentScaling(),
    "current power 2": Float8CurrentScaling(power_2_scale=True),
    "rowwise": Float8CurrentScaling(granularity="row"),
    "rowwise e4m3": Float8CurrentScaling(granularity="row", fp8_format=Format.E4M3),
    "block": Float8BlockScaling(),
    "block hybrid power 2": Float8BlockScaling(fp8_format=Format.HYBRID, power_2_scale=True),
}
OVERRIDES = list(product((False, True), repeat=3))


def with_override(recipe: Recipe, override: tuple[bool, bool, bool]) -> Recipe:
    fields = {name: getattr(recipe, name) for name in type(recipe).__dataclass_fields__}
    return type(recipe)(**fields | {"override_linear_precision": override})


def rounded(x: Tensor, dtype: torch.dtype, recipe: Recipe, weight: bool, scale: Tensor) -> Tensor:
    """Returns the operand x [rows, K] of a GEMM that contracts K, quantized and dequantized, in FP64."""
    if weight and isinstance(recipe, DelayedScaling) and recipe.weight_granularity == "row":
        q, s = reference.quantize_rowwise(x, dtype, recipe.power_2_scale)
        return q.double() * s.double()
    if isinstance(recipe, DelayedScaling):
        return reference.quantize(x, scale, dtype)[0].double() / scale.double()
    if isinstance(recipe, Float8BlockScaling):
        q, s = reference.quantize_block(x, dtype, 128 if weight else 1, recipe.power_2_scale)
    elif recipe.granularity == "row":
        q, s = reference.quantize_rowwise(x, dtype, recipe.power_2_scale)
    else:
        q, s = reference.quantize_current(x, dtype, recipe.power_2_scale)
    return q.double() * arithmetic.expand(s, *x.shape).double()


def emulated(
    x: Tensor, w: Tensor, dy: Tensor, recipe: Recipe, scales: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (Y, dX, dW) in FP64. The operands of every GEMM are rounded along the dimension that it contracts."""
    backward = E5M2 if recipe.fp8_format is Format.HYBRID else E4M3

    def operand(t: Tensor, name: str, hp: bool) -> Tensor:
        dtype = backward if name == "grad_output" else E4M3
        return t.double() if hp else rounded(t, dtype, recipe, name == "weight", scales.get(name, torch.tensor(1.0)))

    fprop, dgrad, wgrad = recipe.override_linear_precision
    y = operand(x, "input", fprop) @ operand(w, "weight", fprop).t()
    dx = operand(dy, "grad_output", dgrad) @ operand(w.t(), "weight", dgrad).t()
    dw = operand(dy.t(), "grad_output", wgrad) @ operand(x.t(), "input", wgrad).t()
    return y, dx, dw


def tensors(m: int = 48, n: int = 150, k: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, w and dy, whose rows and columns all have different magnitudes."""
    noise = torch.Generator().manual_seed(m + n + k)

    def uneven(rows: int, cols: int) -> Tensor:
        rough = torch.randn(rows, cols, generator=noise)
        return rough * torch.randn(rows, 1, generator=noise).exp() * torch.randn(cols, generator=noise).exp()

    return uneven(m, k), uneven(n, k) * 0.01, uneven(m, n) * 1e-4


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda o: "hp:" + "".join("01"[b] for b in o))
@pytest.mark.parametrize("name", RECIPES)
def test_every_gemm_of_every_recipe(name: str, override: tuple[bool, bool, bool]) -> None:
    """Y, dX and dW equal FP64 products of the rounded operands to FP32 accuracy; bias and its gradient too."""
    recipe = with_override(RECIPES[name], override)
    x, w, dy = tensors()
    layer = Linear(200, 150)
    with torch.no_grad():
        layer.weight.copy_(w)
    x.requires_grad_()
    for _ in range(2):  # the second step of delayed scaling runs with real scales
        layer.zero_grad()
        x.grad = None
        scales = {key: s.scale.clone() for key, s in scaling_state(layer).items()}
        with autocast(recipe=recipe):
            y = layer(x)
        y.backward(dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    expected = emulated(x.detach(), w, dy, recipe, scales)
    for actual, exact in zip((y - layer.bias, x.grad, layer.weight.grad), expected, strict=True):
        assert (actual - exact).norm() < 1e-5 * exact.norm()
    torch.testing.assert_close(layer.bias.grad, dy.sum(0))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 7), (17, 130, 31), (33, 16, 257), (0, 4, 8)])
@pytest.mark.parametrize("name", RECIPES)
def test_any_sizes(name: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    layer, x = Linear(k, n), torch.randn(m, k).requires_grad_()
    with autocast(recipe=RECIPES[name]):
        y = layer(x)
    y.sum().backward()
    assert y.shape == (m, n)
    assert x.grad is not None
    assert x.grad.shape == (m, k)


@pytest.mark.pairwise
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0, 3), (2, 3, 0)])
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0), (4, 5)])
@pytest.mark.parametrize("name", RECIPES)
def test_no_features_and_no_tokens(name: str, sizes: tuple[int, int], shape: tuple[int, ...]) -> None:
    """As with nn.Linear, an empty sum gives the bias, and gradients are zero; x may have any leading dimensions."""
    layer, plain = Linear(*sizes), nn.Linear(*sizes)
    plain.load_state_dict(layer.state_dict())
    x = torch.zeros(*shape, sizes[0])
    results = []
    for module in (layer, plain):
        leaf = x.clone().requires_grad_()
        with autocast(recipe=RECIPES[name]):
            y = module(leaf)
        y.sum().backward()
        assert leaf.grad is not None
        assert module.weight.grad is not None
        results.append((y.detach(), leaf.grad.shape, module.weight.grad.shape, module.bias.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:3] == results[1][1:3]
    assert torch.equal(results[0][3], results[1][3])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_master_weights_stay_fp32_under_low_precision_activations(dtype: torch.dtype) -> None:
    layer, x = Linear(32, 16), torch.randn(2, 3, 32).to(dtype).requires_grad_()
    for context in (autocast(recipe=SHORT), autocast(recipe=Float8BlockScaling()), autocast(enabled=False)):
        layer.zero_grad()
        with context:
            y = layer(x)
        y.float().sum().backward()
        assert (y.dtype, tuple(y.shape)) == (dtype, (2, 3, 16))
        assert x.grad is not None
        assert layer.weight.grad is not None
        assert (x.grad.dtype, layer.weight.grad.dtype) == (dtype, torch.float32)


def test_torch_autocast_sets_the_output_dtype() -> None:
    layer, x = Linear(32, 16), torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16), autocast(recipe=Float8CurrentScaling()):
        y = layer(x)
    with autocast(recipe=Float8CurrentScaling()):
        expected = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)


@pytest.mark.parametrize("name", RECIPES)
def test_backward_keeps_fp8_data_not_the_input(name: str) -> None:
    """One byte for each element of X and of W is saved for the backward pass, with every granularity."""
    packed: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    layer, x = Linear(128, 256, bias=False), torch.randn(64, 128).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), autocast(recipe=RECIPES[name]):
        layer(x)
    assert {t.dtype for t in packed if t.numel() > 300} == {E4M3}
    assert sum(t.numel() for t in packed if t.dtype == E4M3) == 64 * 128 + 256 * 128


def test_convert_keeps_parameters_hooks_and_identity() -> None:
    model = nn.ModuleDict(
        {"a": nn.Linear(4, 4), "lm_head": nn.Linear(4, 9), "b": nn.Sequential(nn.Linear(4, 4), nn.ReLU())}
    )
    before, called = dict(model.named_parameters()), []
    model["a"].register_forward_hook(lambda *args: called.append(1))
    assert convert(model) is model
    assert type(model["a"]) is type(model["b"][0]) is Linear  # type: ignore[index]
    assert type(model["lm_head"]) is nn.Linear
    assert all(p is before[name] for name, p in model.named_parameters())
    model["a"](torch.ones(1, 4))
    assert called == [1]


@pytest.mark.parametrize(
    ("skip", "count"), [((), 0), (("lm_head",), 1), (("b.*",), 1), (("a", "b.0"), 2), ("lm_head", 1)]
)
def test_convert_skips_by_name(skip: Any, count: int) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "lm_head": nn.Linear(4, 9), "b": nn.Sequential(nn.Linear(4, 4))})
    convert(model, skip=skip)
    assert sum(type(m) is nn.Linear for m in model.modules()) == count


def test_convert_takes_a_bare_linear_and_leaves_subclasses() -> None:
    assert type(convert(nn.Linear(2, 2))) is Linear
    model = nn.Sequential(Special(2, 2), nn.Linear(2, 2))
    with pytest.warns(UserWarning, match=r"left 50% of the weights in high precision \(Special\.weight\)"):
        convert(model)
    assert [type(layer) for layer in model.children()] == [Special, Linear]


class Conv1D(nn.Module):
    """The linear layer of GPT-2, which is no nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))


class Special(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("model", "skip", "message"),
    [
        (nn.Sequential(nn.Embedding(2, 2), nn.ReLU()), (), "converted nothing: Sequential has no nn.Linear."),
        (nn.Sequential(nn.Embedding(2, 2), Conv1D()), (), "Sequential has no nn.Linear; other weights are in Conv1D."),
        (nn.Sequential(nn.Linear(2, 2)), "*", "of 1 linear layer in Sequential, 1 named by skip=('*',)."),
        (nn.Sequential(Linear(2, 2), Linear(2, 2)), (), "of 2 linear layers in Sequential, 2 converted already."),
        (nn.Sequential(nn.Linear(2, 2), Conv1D()), "0", "1 named by skip=('0',); other weights are in Conv1D."),
        (nn.Sequential(Special(2, 2)), (), "1 of subclasses of nn.Linear (Special)."),
        (nn.Sequential(Linear(2, 2), nn.Linear(2, 2)), ("1",), "1 converted already, 1 named by skip=('1',)."),
    ],
)
def test_convert_that_converts_nothing_says_why(model: nn.Module, skip: Any, message: str) -> None:
    before = [type(m) for m in model.modules()]
    with pytest.warns(UserWarning, match=re.escape(message)) as record:
        convert(model, skip=skip)
    assert record[0].filename == __file__
    assert [type(m) for m in model.modules()] == before


@pytest.mark.parametrize("skip", ["bloc", "blocks", ("blocks.0.*", "head.*")])
def test_a_warning_names_an_entry_of_skip_that_matches_nothing(skip: Any) -> None:
    model = nn.ModuleDict({"blocks": nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))})
    with pytest.warns(UserWarning, match=r"skipped nothing for '(bloc|blocks|head\.\*)', which matches the name of no"):
        convert(model, skip=skip)


def trained(seed: int = 0, steps: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    convert(model)
    for step in range(steps):
        with autocast(recipe=SHORT):
            y = model(torch.randn(4, 24) * (step + 1))
        y.square().sum().backward()
    return model


def next_step(model: nn.Sequential) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    with autocast(recipe=SHORT):
        y = model(torch.linspace(-3, 3, 96).view(4, 24))
    y.square().sum().backward()
    gradient = model[0].weight.grad
    assert isinstance(gradient, Tensor)
    return y, gradient


def test_state_dict_round_trip_continues_with_the_same_bits() -> None:
    model, fresh = trained(), trained(seed=5, steps=0)
    fresh.load_state_dict(model.state_dict())
    for a, b in zip(next_step(model), next_step(fresh), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True))


def test_state_dict_has_the_names_of_a_scaling_checkpoint() -> None:
    names = set(trained().state_dict())
    assert {"0.input.scale", "0.input.amax_history", "1.weight.scale", "1.grad_output.amax_history"} <= names
    assert all(isinstance(v, Tensor) for v in trained().state_dict().values())


def test_a_state_dict_without_scaling_state_loads() -> None:
    plain = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    trained().load_state_dict(plain.state_dict())
    convert(plain).load_state_dict(trained().state_dict())
    assert scaling_state(plain[0])["input"].steps.item() == 3  # type: ignore[arg-type]


def test_a_state_dict_with_a_part_of_a_state_is_refused() -> None:
    state = trained().state_dict()
    del state["0.input.scale"]
    with pytest.raises(
        ScalesError, match=r"holds a part of 0.input only; it needs 0.input.scale and 0.input.amax_history"
    ):
        trained().load_state_dict(state)


@pytest.mark.parametrize("converted", ["before", "after"])
def test_a_model_on_meta_gets_weights_and_states_from_a_state_dict(converted: str) -> None:
    """The usual way to load with little memory: modules on the device "meta", and `assign=True`."""
    source = trained()
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
        empty = convert(empty) if converted == "before" else empty
    if converted == "after":
        empty = convert(empty)
    empty.load_state_dict(copy.deepcopy(source.state_dict()), assign=True)
    assert not any(t.is_meta for t in empty.state_dict().values())
    for a, b in zip(next_step(empty), next_step(source), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_module_on_another_device_is_refused_in_one_sentence(recipe: str) -> None:
    with (
        autocast(recipe=RECIPES[recipe]),
        pytest.raises(ValueError, match="input is on cpu and the weight on meta; move one"),
    ):
        Linear(8, 8, device="meta")(torch.ones(2, 8))


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("scale", 0.0, "0.input.scale must be positive and finite, found 0.0"),
        ("scale", -1.0, "must be positive and finite, found -1.0"),
        ("scale", torch.nan, "must be positive and finite, found nan"),
        ("scale", [1.0, 2.0], r"must be one number .* found shapes \[2\] and"),
        ("amax_history", [], r"found shapes \[\] and \[0\]"),
        ("amax_history", [[1.0]], r"found shapes \[\] and \[1, 1\]"),
        ("amax_history", [0.0, -1.0], "0.input.amax_history holds NaN or negative numbers"),
        ("amax_history", [0.0, torch.nan], "0.input.amax_history holds NaN or negative numbers"),
    ],
)
def test_a_state_with_unusable_values_is_refused(name: str, value: Any, match: str) -> None:
    state = trained().state_dict() | {f"0.input.{name}": torch.tensor(value)}
    with pytest.raises(ScalesError, match=match):
        trained().load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_loaded_states_are_fp32_whatever_their_stored_dtype(dtype: torch.dtype) -> None:
    model = trained()
    model.load_state_dict({k: v.to(dtype) for k, v in model.state_dict().items()})
    state = scaling_state(model[0])["input"]  # type: ignore[arg-type]
    assert (state.scale.dtype, state.amax_history.dtype) == (torch.float32, torch.float32)
    assert state.steps.dtype == torch.int64
    next_step(model)


def test_changing_the_history_length_after_a_load_keeps_the_newest() -> None:
    model = trained()
    newest = scaling_state(model[0])["input"].amax_history[-1].item()  # type: ignore[arg-type]
    with autocast(recipe=DelayedScaling(amax_history_len=2)):
        model(torch.full((1, 24), 1e-3))
    history = scaling_state(model[0])["input"].amax_history  # type: ignore[arg-type]
    assert history.shape == (2,)
    assert scaling_state(model[0])["input"].scale.item() == (torch.tensor(448.0) / newest).item()  # type: ignore[arg-type]


def test_a_copy_has_its_own_state() -> None:
    model = trained()
    twin = copy.deepcopy(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    next_step(twin)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert scaling_state(twin[0])["input"].steps.item() == 4  # type: ignore[arg-type]
    assert scaling_state(model[0])["input"].steps.item() == 3  # type: ignore[arg-type]
    for a, b in zip(next_step(copy.deepcopy(model)), next_step(model), strict=True):
        assert torch.equal(a, b)


def test_casting_the_module_does_not_round_its_scales() -> None:
    model = trained()
    before = scaling_state(model[0])["input"].scale.clone()  # type: ignore[arg-type]
    model.bfloat16()
    after = scaling_state(model[0])["input"]  # type: ignore[arg-type]
    assert torch.equal(after.scale, before)
    assert after.amax_history.dtype == torch.float32


def test_a_shared_linear_is_converted_once_and_records_both_calls_as_one_step() -> None:
    shared = nn.Linear(8, 8)
    model = convert(nn.Sequential(shared, nn.ReLU(), shared))
    with autocast(recipe=SHORT):
        model(torch.ones(2, 8))
    assert model[0] is model[2] is shared  # type: ignore[index]
    assert scaling_state(shared)["input"].steps.item() == 1  # type: ignore[arg-type]
