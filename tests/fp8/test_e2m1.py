"""Casts to NVFP4 and MXFP4, bit for bit against a model in NumPy that shares no code with them."""

from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fp8serve import Float4WeightOnly
from fp8serve.errors import RecipeError
from fp8serve.fp8.casting import QuantizedWeight, cast_weight
from fp8serve.fp8.frozen import FrozenLinear, input_gradient
from fp8serve.fp8.joined import JoinedLinear, can_join
from fp8serve.fp8.lora import LoraLinear, row_norms, squared_norms
from fp8serve.fp8.ops import e2m1
from fp8serve.fp8.recipe import can_train, from_json, from_name, name_of, to_json
from fp8serve.fp8.spec import MXFP4, NVFP4, QuantSpec

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
F32 = np.float32
FLT_MAX = np.finfo(F32).max
E4M3 = np.array(
    [(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:127], F32
)
RECIPES = [Float4WeightOnly("nvfp4"), Float4WeightOnly("nvfp4", four_over_six=True), Float4WeightOnly("mxfp4")]
Array = NDArray[np.float32]


def nearest(grid: NDArray[np.floating], x: Array) -> NDArray[np.int64]:
    """Returns the index of the nearest number of the grid, the even one of two that are as near."""
    distances = np.abs(grid.astype(np.float64)[:, None] - np.abs(x.astype(np.float64)).ravel())
    rank = distances * 1.0
    first = rank.argmin(0)
    tie = (first + 1 < len(grid)) & (
        np.take_along_axis(rank, np.minimum(first + 1, len(grid) - 1)[None], 0)[0] == rank.min(0)
    )
    return np.where(tie & (first % 2 == 1), first + 1, first).reshape(x.shape)


def e4m3(x: Array) -> Array:
    return E4M3[nearest(E4M3, x)]


def nvfp4(x: Array) -> tuple[NDArray[np.int64], Array, np.float32]:
    """Codes without their sign, block scales and the tensor's dequantizing scale, in Transformer Engine's order."""
    with np.errstate(over="ignore", divide="ignore"):
        amax = np.abs(x).max()
        encode = F32(1) if amax == 0 else min(F32(448 * 6) / amax, FLT_MAX)
        decode = F32(1) / encode
        tiles = x.reshape(len(x), -1, 16)
        scales = e4m3(np.abs(tiles).max(2) * (encode * F32(1 / 6)))
        scales = np.maximum(scales, F32(2.0**-9))
        factor = np.minimum(F32(1) / (scales * decode), FLT_MAX)
        return nearest(GRID, tiles * factor[..., None]).reshape(x.shape), scales, decode


def mxfp4(x: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Codes without their sign, and the exponents: the smallest power of two with which nothing is above 6."""
    tiles = x.reshape(len(x), -1, 32).astype(np.float64)
    powers = np.array([2.0 ** (code - 127) for code in range(253)])
    fits = np.abs(tiles).max(2)[..., None] <= 6 * powers
    codes = np.where(fits.any(2), fits.argmax(2), 252)
    return nearest(GRID, (tiles / powers[codes][..., None]).astype(F32)).reshape(x.shape), codes


def unpacked(codes: Tensor) -> NDArray[np.int64]:
    raw = codes.numpy().astype(np.int64)
    return np.stack([raw % 16, raw // 16], 2).reshape(len(raw), -1)


def matrices(block: int) -> list[Tensor]:
    """Noise of several sizes, blocks whose amaxes lie on both sides of every border, zeros and subnormal numbers."""
    noise = torch.randn(8, 16 * block, generator=torch.Generator().manual_seed(3))
    mantissas = [1.0, 1.25, 1.5, 1.5 + 2**-23, 1.75, 1.75 + 2**-23, 2 - 2**-23]
    exponents = (-149, -127, -126, -125, -124, -100, -9, 0, 1, 2, 7, 100, 125, 126, 127)
    sizes = torch.tensor([m * 2.0**e for m, e in product(mantissas, exponents)])
    spread = torch.linspace(-1, 1, block)
    edges = torch.cat([sizes, torch.zeros(1)]).unsqueeze(1) * spread
    values = torch.tensor([*e2m1._LIMITS, *(limit * (1 + 2.0**-23) for limit in e2m1._LIMITS), *GRID.tolist(), 7.0])
    ties = torch.nn.functional.pad(torch.cat([values, -values]), (0, -2 * len(values) % (block - 1))).view(
        -1, block - 1
    )
    ties = torch.cat([torch.full((len(ties), 1), 6.0), ties.clamp(-6, 6)], 1)
    tiny = noise * torch.where(torch.arange(noise.shape[1]) < 5 * block, 2.0**-14, 1.0)
    return [noise, noise * 1e-30, edges, *(row[None] for row in edges[::9]), ties, tiny, noise.bfloat16(), 0 * noise]


@pytest.mark.parametrize("index", range(len(matrices(16))))
def test_nvfp4_has_the_bits_of_transformer_engines_order(index: int) -> None:
    x = matrices(16)[index]
    codes, scales, decode = e2m1.quantize_nvfp4(x)
    expected, expected_scales, expected_decode = nvfp4(x.float().numpy())
    assert decode.item() == expected_decode
    assert np.array_equal(scales.float().numpy(), expected_scales)
    assert np.array_equal(unpacked(codes) & 7, expected)
    assert np.array_equal(unpacked(codes) >> 3, np.signbit(x.float().numpy()))


@pytest.mark.parametrize("index", range(len(matrices(32))))
def test_mxfp4_takes_the_smallest_power_that_clips_nothing(index: int) -> None:
    x = matrices(32)[index]
    codes, scales = e2m1.quantize_mxfp4(x)
    expected, expected_codes = mxfp4(x.float().numpy())
    assert np.array_equal(scales.view(torch.uint8).numpy(), expected_codes)
    assert np.array_equal(unpacked(codes) & 7, expected)
    if x.abs().max() < 2.0**127:
        assert e2m1.dequantize(codes, scales, None).bfloat16().isfinite().all()


def test_every_code_is_rounded_to_itself_and_ties_go_to_the_even_code() -> None:
    values = torch.tensor([*GRID, *(-GRID)], dtype=torch.float32)
    assert e2m1.to_codes(values).tolist() == list(range(16))
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
    assert e2m1.to_codes(torch.tensor([*ties])).tolist() == list(ties.values())
    above = torch.nextafter(torch.tensor([*ties]), torch.tensor(9.0))
    below = torch.nextafter(torch.tensor([*ties]), torch.tensor(0.0))
    assert e2m1.to_codes(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert e2m1.to_codes(below).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert e2m1.to_codes(torch.tensor([6.5, torch.inf, -torch.inf, -0.0])).tolist() == [7, 7, 15, 8]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("spec", [NVFP4, MXFP4])
def test_a_block_that_is_not_finite_has_a_scale_that_is_nan_and_changes_no_other(spec: QuantSpec, bad: float) -> None:
    x = torch.randn(4, 64)
    clean = cast_weight(torch.where(torch.arange(64) < 32, x, 0.0), spec)
    weight = torch.where(torch.arange(64) < 32, x, 0.0)
    weight[2, 40] = bad
    result = cast_weight(weight, spec)
    scales = result.scale_inv.float()
    assert int(scales.isnan().sum()) == 1
    assert scales[2, 40 // (spec.block[1] or 1)].isnan()
    assert torch.equal(result.q[:, :16], clean.q[:, :16])
    assert result.global_scale == clean.global_scale


def test_four_over_six_takes_the_better_scale_of_every_block() -> None:
    weight = torch.randn(16, 256)
    chosen = QuantizedWeight(*e2m1.quantize_nvfp4(weight, four_over_six=True))
    six = QuantizedWeight(*e2m1.quantize_nvfp4(weight))

    def errors(quantized: QuantizedWeight) -> Tensor:
        return (quantized.dequantize() - weight).square().view(16, 16, 16).sum(2)

    encode = F32(256 * 6) / weight.abs().max().numpy()
    assert chosen.global_scale is not None
    assert chosen.global_scale.item() == F32(1) / encode
    tiles = weight.view(16, 16, 16)
    bases = [e4m3(tiles.abs().amax(2).numpy() * (encode * F32(1 / 6)) * F32(ratio)) for ratio in (1, 1.5)]
    assert all(map(np.any, np.where(chosen.scale_inv.float().numpy()[None] == bases, 1, 0)))  # both occur
    assert (np.stack(bases) == chosen.scale_inv.float().numpy()).any(0).all()
    other = torch.from_numpy(np.where(chosen.scale_inv.float().numpy() == bases[0], bases[1], bases[0]))
    step = (other * chosen.global_scale).unsqueeze(2)
    rounded = torch.from_numpy(GRID[nearest(GRID, (tiles / step).numpy())]).float() * tiles.sign() * step
    assert (errors(chosen) <= (rounded - tiles).square().sum(2) * (1 + 1e-5)).all()
    assert errors(chosen).sum() < 0.95 * errors(six).sum()


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_have_names_and_json_and_cannot_train(recipe: Float4WeightOnly) -> None:
    assert from_json(to_json(recipe)) == recipe
    assert name_of(recipe) == f"{recipe.format}-w4a16"
    assert from_name(name_of(recipe), four_over_six=recipe.four_over_six) == recipe
    assert not can_train(recipe)


def test_values_that_a_recipe_cannot_have_are_refused() -> None:
    with pytest.raises(RecipeError, match='format must be "nvfp4" or "mxfp4"'):
        Float4WeightOnly("int4")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="four_over_six needs the format nvfp4"):
        Float4WeightOnly("mxfp4", four_over_six=True)
    with pytest.raises(RecipeError, match="Only e2m1 in blocks of 1x16 or 16x16 has E4M3 scales"):
        QuantSpec("e4m3", "block1x16", "e4m3")
    with pytest.raises(RecipeError, match="Only e2m1 in blocks of 1x16 or 16x16 has E4M3 scales"):
        QuantSpec("e2m1", "row")
    with pytest.raises(RecipeError, match="in NVFP4 needs a multiple of 16 input features, found 40"):
        FrozenLinear.from_linear(nn.Linear(40, 8), Float4WeightOnly("nvfp4"))
    with pytest.raises(RecipeError, match="in MXFP4 needs a multiple of 32 input features, found 48"):
        FrozenLinear.from_linear(nn.Linear(48, 8), Float4WeightOnly("mxfp4"))


def layer_of(recipe: Float4WeightOnly, rows: int = 48, bias: bool = True) -> FrozenLinear:
    return FrozenLinear.from_linear(nn.Linear(64, rows, bias=bias, dtype=torch.bfloat16), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_multiplies_the_dequantized_weight(recipe: Float4WeightOnly) -> None:
    layer, x = layer_of(recipe), torch.randn(5, 64, dtype=torch.bfloat16)
    weight, bias = layer.quantized_weight.dequantize(), layer.bias
    assert bias is not None
    expected = x.float() @ weight.t() + bias.float()
    assert torch.allclose(layer(x).float(), expected, rtol=2**-8, atol=1e-4)
    residual = torch.randn(5, 48, dtype=torch.bfloat16)
    assert torch.equal(layer.forward_add(residual, x), residual + layer(x))
    dy = torch.randn(5, 48, dtype=torch.bfloat16)
    assert torch.allclose(input_gradient(layer, dy).float(), dy.float() @ weight, rtol=2**-7, atol=2e-2)
    assert torch.allclose(squared_norms(layer), weight.square().sum(1))
    a, b = torch.randn(4, 64).bfloat16(), torch.randn(48, 4).bfloat16()
    norms = row_norms(layer, squared_norms(layer), a, b, 0.5)
    assert torch.allclose(norms, (weight + 0.5 * b.float() @ a.float()).norm(dim=1), rtol=1e-2)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_adapter_on_a_layer_of_4_bits_has_gradients(recipe: Float4WeightOnly, dora: bool) -> None:
    layer = layer_of(recipe)
    weight = layer.quantized_weight.dequantize()
    lora = LoraLinear(layer, 4, 2.0, dora=dora, generator=torch.Generator().manual_seed(0))
    nn.init.normal_(lora.lora_B)
    x = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
    y, dy = lora(x), torch.randn(5, 48, dtype=torch.bfloat16)
    y.backward(dy)
    changed = weight + 2 * lora.lora_B.detach() @ lora.lora_A.detach()
    if dora:
        changed = changed * (weight.norm(dim=1) / changed.norm(dim=1)).unsqueeze(1)
    assert layer.bias is not None
    expected = x.detach().float() @ changed.t() + layer.bias.float()
    assert torch.allclose(y.float(), expected, rtol=2e-2, atol=5e-2)
    assert x.grad is not None
    assert torch.allclose(x.grad.float(), dy.float() @ changed, rtol=3e-2, atol=0.2)
    assert all(p.grad is not None and bool(p.grad.any()) for p in (lora.lora_A, lora.lora_B))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
def test_joined_layers_have_the_bits_of_single_ones(recipe: Float4WeightOnly, bias: bool) -> None:
    layers = {name: layer_of(recipe, rows, bias) for name, rows in {"q": 48, "k": 20, "v": 16}.items()}
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    single = [layer(x) for layer in layers.values()]
    assert can_join(list(layers.values()))
    joined = JoinedLinear(layers, (set(), 0))
    assert all(map(torch.equal, joined(x), single))
    assert all(map(torch.equal, (layer(x) for layer in layers.values()), single))
    assert joined.is_current(layers)


@pytest.mark.parametrize("recipe", RECIPES)
def test_packed_layers_keep_their_bits_alone_and_joined(recipe: Float4WeightOnly) -> None:
    layers = {name: layer_of(recipe, rows) for name, rows in {"q": 48, "k": 32}.items()}
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    single, squares = [layer(x) for layer in layers.values()], squared_norms(layers["q"])
    joined = JoinedLinear(layers, (set(), 0))
    assert joined.is_packable
    joined.pack(torch.empty(joined.weight.numel(), dtype=torch.uint8))
    assert layers["q"].is_packed
    assert (layers["q"].out_features, layers["q"].in_features) == (48, 64)
    assert all(map(torch.equal, joined(x), single))
    assert all(map(torch.equal, (layer(x) for layer in layers.values()), single))
    assert torch.allclose(squared_norms(layers["q"]), squares)
    alone = layer_of(recipe)
    expected = alone(x)
    alone.pack(torch.empty(alone.weight_q.numel(), dtype=torch.uint8))
    assert torch.equal(alone(x), expected)
    with pytest.raises(ValueError, match="A packed weight has no transpose"):
        input_gradient(alone, expected)


def test_layers_in_different_formats_are_not_joined() -> None:
    eight = FrozenLinear.from_linear(nn.Linear(64, 48, dtype=torch.bfloat16), from_name("w8a16"))  # type: ignore[arg-type]
    layers = [layer_of(recipe) for recipe in (RECIPES[0], RECIPES[2])]
    assert not can_join(layers)
    assert not can_join([layers[0], eight])
