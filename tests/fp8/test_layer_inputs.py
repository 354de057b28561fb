"""A converted layer accepts the inputs of nn.Linear, by the same names, and refuses others; in FP8 in one sentence."""

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast, convert
from fp8serve.fp8.batch_invariant import BatchInvariantLinear
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.lora import LoraLinear
from fp8serve.fp8.recipe import Recipe

RECIPES: list[Recipe] = [DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling()]
HIGH_PRECISION = "or run the layer in high precision, under autocast(enabled=False)."
DTYPES = "A layer in FP8 takes an input and a weight of float32, bfloat16 or float16, found "


def linear(dtype: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(32, 16, dtype=dtype)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape or (4, 32), generator=torch.Generator().manual_seed(1)).to(dtype)


@contextmanager
def under_torch_autocast() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def message(call: Callable[[], Any]) -> str:
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        call()
    return str(caught.value)


NOT_QUANTIZED = [torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64]


@pytest.mark.parametrize("surroundings", [None, under_torch_autocast])
@pytest.mark.parametrize("dtype", NOT_QUANTIZED, ids=str)
def test_in_high_precision_a_converted_layer_raises_torchs_error(dtype: torch.dtype, surroundings: Any) -> None:
    """Regression: integers gave zeros, because the weight was rounded to integers, too."""
    original, converted = linear(), convert(linear())
    inputs = x(dtype=dtype)
    if surroundings is None:
        expected = message(lambda: original(inputs))
        assert message(lambda: converted(inputs)) == expected
        assert "must have the same dtype" in expected
        return
    with surroundings():
        if dtype is torch.float8_e4m3fn:  # torch.autocast casts every float but FP64
            assert torch.equal(converted(inputs), original(inputs))
        else:
            assert message(lambda: converted(inputs)) == message(lambda: original(inputs))


def test_torch_autocast_leaves_fp64_as_it_is() -> None:
    original, converted = linear(torch.float64), convert(linear(torch.float64))
    inputs = x(dtype=torch.float64)
    with under_torch_autocast():
        assert converted(inputs).dtype == original(inputs).dtype == torch.float64
        assert torch.equal(converted(inputs), original(inputs))


def test_complex_layers_stay_as_they_are_in_high_precision() -> None:
    original, converted = linear(torch.complex64), convert(linear(torch.complex64))
    inputs = x(dtype=torch.complex64)
    assert torch.equal(converted(inputs), original(inputs))
    assert message(lambda: converted(inputs.real)) == message(
        lambda: original(inputs.real)
    )  # regression: the imaginary part was dropped


def nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: nested tensors may change
        return torch.nested.nested_tensor([x(3, 32), x(5, 32)], layout=layout)


def in_forward_mode(layer: nn.Module) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(x(), x()))).tangent  # type: ignore[no-any-return]


def traced(layer: nn.Module) -> Tensor:
    return torch.jit.trace(layer, x())(x())  # type: ignore[no-any-return,no-untyped-call]


TRANSFORMS: dict[str, Callable[[nn.Module], Tensor]] = {
    "vmap": lambda layer: torch.vmap(layer)(x()),
    "grad": lambda layer: torch.func.grad(lambda inputs: layer(inputs).sum())(x()),
    "jvp": lambda layer: torch.func.jvp(layer, (x(),), (x(),))[1],
    "jacrev": lambda layer: torch.func.jacrev(layer)(x(32)),
    "forward mode": in_forward_mode,
    "jit.trace": traced,
    "sparse": lambda layer: layer(torch.eye(32).to_sparse()),
    "jagged": lambda layer: layer(nested(torch.jagged)).values(),
    "meta": lambda layer: torch.zeros(copy.deepcopy(layer).to("meta")(x().to("meta")).shape),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_in_high_precision_a_converted_layer_accepts_what_nn_linear_accepts(name: str) -> None:
    original = linear()
    assert torch.equal(TRANSFORMS[name](convert(copy.deepcopy(original))), TRANSFORMS[name](original))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("dtype", [*NOT_QUANTIZED, torch.float64], ids=str)
def test_a_dtype_without_a_cast_is_refused_in_one_sentence(dtype: torch.dtype, recipe: Recipe) -> None:
    name = str(dtype).removeprefix("torch.")
    with autocast(recipe=recipe):
        text = message(lambda: convert(linear())(x(dtype=dtype)))
        assert text == f"{DTYPES}{name} and float32; convert them, {HIGH_PRECISION}"
        if dtype in (torch.float64, torch.complex64):
            text = message(lambda: convert(linear(dtype))(x()))
            assert text == f"{DTYPES}float32 and {name}; convert them, {HIGH_PRECISION}"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("shape", [(4, 16), (0, 16), (2, 0, 31), (16,), (32, 1)])
def test_a_wrong_width_is_refused_in_one_sentence_and_stages_nothing(shape: tuple[int, ...], recipe: Recipe) -> None:
    layer = convert(linear())
    with autocast(recipe=recipe):
        text = message(lambda: layer(x(*shape)))
        assert text == f"The input of this layer must be [..., 32], found {list(shape)}."
        text = message(lambda: layer(torch.ones(())))
        assert text == "The input of this layer must be [..., 32], found []."
    assert layer.scaling == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jagged", f"A layer in FP8 takes a dense tensor, found nested; give it its values(), {HIGH_PRECISION}"),
        ("sparse", f"A layer in FP8 takes a dense tensor, found sparse_coo; give it its to_dense(), {HIGH_PRECISION}"),
        ("jit.trace", "torch.jit.trace cannot follow a layer in FP8; use torch.compile or torch.export"),
        *((name, "has no rule for the transforms of torch.func") for name in ("vmap", "grad", "jvp", "jacrev")),
        (
            "forward mode",
            "has no rule for the transforms of torch.func (vmap, grad, jvp and others) and none for forwa",
        ),
    ],
)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_inputs_and_transforms_without_fp8_are_refused_in_one_sentence(
    name: str, expected: str, recipe: Recipe
) -> None:
    with autocast(recipe=recipe):
        assert expected in message(lambda: TRANSFORMS[name](convert(linear())))


@pytest.mark.parametrize("value", [None, [1.0] * 32], ids=["None", "list"])
def test_an_input_that_is_no_tensor_is_refused_by_its_type(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^A linear layer takes a tensor, found {type(value).__name__}\.$"):
        convert(linear())(value)


def adapted() -> nn.Module:
    return LoraLinear(linear(torch.bfloat16), 4, 1.0)


def frozen() -> nn.Module:
    return FrozenLinear.from_linear(linear(), Float8CurrentScaling())  # type: ignore[arg-type]


REPLACEMENTS: list[Callable[[], nn.Module]] = [
    lambda: convert(linear()),
    lambda: BatchInvariantLinear.convert(linear(torch.bfloat16)),  # type: ignore[arg-type]
    frozen,
    adapted,
]


@pytest.mark.parametrize("make", REPLACEMENTS, ids=lambda make: type(make()).__name__)
def test_the_argument_is_called_input_as_in_torch(make: Callable[[], nn.Module]) -> None:
    layer = make()
    inputs = x(dtype=torch.bfloat16) if isinstance(layer, BatchInvariantLinear | LoraLinear) else x()
    assert torch.equal(layer(input=inputs), layer(inputs))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_an_exported_layer_gives_the_bits_of_the_layer(recipe: Recipe, strict: bool) -> None:
    """Gradients may be enabled, and the module may have no states yet: the graph stages no amaxes."""
    layer = convert(linear())
    with autocast(recipe=recipe):
        expected = copy.deepcopy(layer)(x())
        exported = torch.export.export(layer, (x(),), strict=strict).module()
        assert torch.equal(exported(x()), expected)
    with autocast(recipe=recipe):
        layer(x()).sum().backward()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_a_whole_module_is_saved_and_copied_with_its_states(recipe: Recipe) -> None:
    layer = convert(linear())
    with autocast(recipe=recipe):
        layer(3 * x()).sum().backward()
    torch.save(layer, file := io.BytesIO())
    file.seek(0)
    restored, shallow = torch.load(file, weights_only=False), copy.copy(layer)
    assert isinstance(restored, Linear)
    for twin in (restored, shallow, copy.deepcopy(layer)):
        with torch.no_grad(), autocast(recipe=recipe):
            assert torch.equal(twin(x()), layer(x()))


def test_tied_layers_each_quantize_the_one_weight() -> None:
    tied = convert(nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)))
    tied[1].weight = tied[0].weight  # type: ignore[index]
    with autocast(recipe=RECIPES[0]):
        tied(x()).sum().backward()
    assert len(list(tied.parameters())) == 1
    assert copy.deepcopy(tied)[0].weight is not tied[0].weight  # type: ignore[index]
    assert tied[0].scaling["weight"].scale == tied[1].scaling["weight"].scale  # type: ignore[index]
