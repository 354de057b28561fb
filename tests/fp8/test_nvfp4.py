"""NVFP4 for all operands: the cast, the random numbers and the rotation against models in NumPy that share no code with
them; the product; layers in training and in serving."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fp8serve import Linear, NVFP4BlockScaling, autocast
from fp8serve.errors import RecipeError
from fp8serve.fp8 import ops
from fp8serve.fp8.casting import cast_nvfp4, cast_weight, draw_seed
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops import LEVELS, cases, reference
from fp8serve.fp8.ops.e2m1 import dequantize
from fp8serve.fp8.ops.nvfp4 import philox
from fp8serve.fp8.recipe import (
    can_train,
    depends_on_batch,
    from_json,
    from_name,
    name_of,
    recipe_for_calibration,
    to_json,
)
from fp8serve.fp8.spec import NVFP4, QuantSpec

F32 = np.float32
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
E4M3 = np.array(
    [(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:127], F32
)
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
OP = torch.ops.fp8serve
Array = NDArray[np.float32]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """An instruction-set level of the kernels; skipped where the processor does not have it."""
    if ops.cpu_isa() is None:
        pytest.skip("the kernels are not compiled")
    if torch.ops.fp8serve.cpu_isa(request.param) != request.param:
        torch.ops.fp8serve.cpu_isa("best")
        pytest.skip("the processor does not have this level")
    yield request.param
    torch.ops.fp8serve.cpu_isa("best")


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.randn(*shape, generator=generator).mul(2).exp()


# --- models


def nearest(grid: Array, x: Array) -> Array:
    """The nearest number of the grid, that with the even index of two that are as near."""
    distance = np.abs(grid.astype(np.float64) - np.abs(x.astype(np.float64))[..., None])
    index = distance.argmin(-1)
    above = np.minimum(index + 1, len(grid) - 1)
    is_tie = np.take_along_axis(distance, above[..., None], -1)[..., 0] == distance.min(-1)
    return grid[np.where(is_tie & (index % 2 == 1), above, index)]


def philox_words(seed: int, counter: int, stream: int) -> list[int]:
    """Philox4x32-10 as Salmon et al. (2011) define it, in whole numbers."""
    words, key = [counter % 2**32, counter >> 32, stream, 0], [seed % 2**32, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [b >> 32 ^ words[1] ^ key[0], b % 2**32, a >> 32 ^ words[3] ^ key[1], a % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return words


def drawn(seed: int, rows: int, columns: int, stream: int) -> Array:
    """The random number in [0, 1) of every element, by the rule in ops/nvfp4.py."""
    quarter = -(-columns // 16) * 4
    words = np.array([[philox_words(seed, r * quarter + i, stream) for i in range(quarter)] for r in range(rows)])
    return (words.transpose(0, 2, 1).reshape(rows, -1)[:, :columns] >> 8).astype(F32) * F32(2.0**-24)


def stochastic(x: Array, random: Array) -> Array:
    magnitude = np.minimum(np.abs(x), F32(6))
    below = np.searchsorted(GRID, magnitude, side="right") - 1
    high = GRID[np.minimum(below + 1, 7)]
    gap = np.where(below == 7, F32(1), high - GRID[below])
    return np.where(random < (magnitude - GRID[below]) / gap, high, GRID[below])


def model(x: Array, by_row: bool, rows: int, seed: int | None, stream: int) -> tuple[Array, Array]:
    """Values and the dequantizing scale: Transformer Engine's order of operations, and a smallest block scale."""
    with np.errstate(over="ignore", divide="ignore"):
        amax = np.abs(x).max(1, keepdims=True) if by_row else np.abs(x).max()
        encode = np.where(amax == 0, F32(1), np.minimum(F32(448 * 6) / amax, np.finfo(F32).max)).astype(F32)
        decode = F32(1) / encode
        scales = np.zeros_like(x)
        for r, c in product(range(0, len(x), rows), range(0, x.shape[1], 16)):
            block = np.abs(x[r : r + rows, c : c + 16]).max()
            per_row = block * (np.broadcast_to(encode, (len(x), 1))[r : r + rows] * F32(1 / 6))
            scales[r : r + rows, c : c + 16] = np.maximum(nearest(E4M3, per_row), F32(2.0**-9))
        scaled = x * np.minimum(F32(1) / (scales * decode), np.finfo(F32).max)
        random = None if seed is None else drawn(seed, *x.shape, stream)
        magnitude = nearest(GRID, scaled) if random is None else stochastic(scaled, random)
        return np.copysign(magnitude * scales, x), decode


def bits(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), 0x7FC0, x.view(torch.int16).int())


# --- casts


@pytest.mark.parametrize("seed", [None, 7 * 2**40 + 3])
@pytest.mark.parametrize(("by_row", "rows"), [*product((False, True), (1, 16))])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_the_cast_has_the_bits_of_the_model(by_row: bool, rows: int, seed: int | None, size: float, level: str) -> None:
    for shape, dtype in (((37, 80), torch.float32), ((18, 21), torch.bfloat16)):
        x = (noise(*shape) * size).to(dtype)
        x[3] = 0
        values, scale_inv = OP.cast_nvfp4(x, by_row, rows, None if seed is None else torch.tensor(seed), 1)
        expected, decode = model(x.float().numpy(), by_row, rows, seed, 1)
        assert np.array_equal(values.float().numpy(), expected)
        assert np.array_equal(np.signbit(values.float().numpy()), np.signbit(expected))
        assert np.array_equal(scale_inv.numpy(), decode)


@pytest.mark.parametrize("name", ["cast_nvfp4", "rotate"])
def test_kernels_have_the_bits_of_the_reference(name: str, level: str) -> None:
    for case in cases(name):
        actual, expected = getattr(OP, name)(*case.make()), getattr(reference, name)(*case.make())
        actual, expected = ((t,) if isinstance(t, Tensor) else t for t in (actual, expected))
        assert torch.equal(bits(actual[0]), bits(expected[0])), case.name
        assert all(map(torch.equal, *([t.nan_to_num(-1) for t in r[1:]] for r in (actual, expected)))), case.name


def test_no_number_of_threads_changes_a_bit() -> None:
    x, seed, threads = noise(300, 512), torch.tensor(5), torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(OP.cast_nvfp4(x, False, 1, seed, 0)[0])
    torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results)


def test_random_numbers_are_philox() -> None:
    """The known answers of Random123 for counters and keys of zeros and of ones."""
    assert philox_words(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    counters = torch.tensor([0, 5, 2**32 - 1, 2**40 + 17])
    for seed, stream in ((0, 0), (2**62 + 12345, 1)):
        words = philox(torch.tensor(seed), counters, stream)
        assert words.t().tolist() == [philox_words(seed, int(c), stream) for c in counters]


def test_stochastic_rounding_has_the_mean_of_its_element(level: str) -> None:
    """Over 4,000 seeds, for numbers between all codes; a code itself is never changed."""
    row = torch.cat([torch.tensor([6.0]), torch.linspace(-5.9, 5.9, 14), torch.tensor([0.0])])
    codes = torch.tensor([*GRID, *(-GRID)])
    x = torch.stack([row, codes])
    casts = [OP.cast_nvfp4(x, False, 1, torch.tensor(seed), 0) for seed in range(4000)]
    values = torch.stack([q.double() * scale_inv.double() for q, scale_inv in casts])
    assert (values[:, 1] - codes).abs().max() < 1e-6  # 6 x 448 times the FP32 reciprocal of 448
    gap = torch.where(row.abs() < 2, 0.5, torch.where(row.abs() < 4, 1.0, 2.0))
    assert ((values[:, 0].mean(0) - row) / gap).abs().max() < 4 * 0.5 / 4000**0.5
    assert values[:, 0].std(0)[1:-1].min() > 0.01  # it is random


@pytest.mark.parametrize("low", range(7))
def test_the_probability_is_the_distance_from_the_code_below(low: int, level: str) -> None:
    """At every border: just above the code, at quarters, and just below the next one."""
    a, b = float(GRID[low]), float(GRID[low + 1])
    for fraction in (0.0, 2.0**-20, 0.25, 0.5, 0.75, 1 - 2.0**-20):
        x = torch.full((512, 64), a + (b - a) * fraction)
        x[:, ::16] = 6.0
        values = OP.cast_nvfp4(x, False, 1, torch.tensor(3), 0)[0].float() / 448
        sample = values.view(512, 4, 16)[..., 1:]
        assert set(sample.unique().tolist()) <= {a, b}
        share = (sample == b).double().mean() if b > a else 0.0
        assert abs(share - fraction) < 4 * 0.5 / sample.numel() ** 0.5
        if fraction == 0:
            assert share == 0


def test_seeds_and_streams_give_other_numbers() -> None:
    x = noise(16, 64)
    first, *others = (
        OP.cast_nvfp4(x, False, 1, torch.tensor(seed), stream)[0] for seed, stream in ((1, 0), (2, 0), (1, 1))
    )
    assert not any(torch.equal(first, other) for other in others)
    assert torch.equal(first, OP.cast_nvfp4(x, False, 1, torch.tensor(1), 0)[0])


def test_rotation_is_the_signed_hadamard_transform(level: str) -> None:
    hadamard = np.array([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    matrix = np.diag(SIGNS) @ hadamard / 4
    assert np.array_equal(matrix @ matrix.T, np.eye(16))
    x = noise(7, 45)
    padded = np.pad(x.double().numpy(), ((0, 0), (0, 3))).reshape(7, 3, 16)  # elements of a column lie along its rows
    exact = (padded @ matrix).reshape(7, 48)
    rotated = OP.rotate(x.t()).t()
    assert rotated.dtype is torch.bfloat16
    assert (np.abs(rotated.double().numpy() - exact) <= np.abs(exact) * 2.0**-8 + 1e-5 * np.abs(padded).max()).all()
    unit = torch.eye(16) * 4
    assert np.array_equal(OP.rotate(unit.t()).t().double().numpy(), np.diag(SIGNS) @ hadamard)


def test_the_product_of_rotated_operands_is_the_product() -> None:
    a, b = noise(20, 64, seed=1).bfloat16(), noise(30, 64, seed=2).bfloat16()
    exact = a.double() @ b.double().t()
    rotated = OP.rotate(a.t()).double().t() @ OP.rotate(b.t()).double()
    assert (rotated - exact).norm() < 2.0**-7 * a.double().norm() * b.double().norm()
    whole = torch.randint(-8, 9, (2, 9, 48)).to(torch.bfloat16) * 4  # no rounding at all
    x, y = (OP.rotate(t.t()).double() for t in whole)
    assert torch.equal(x.t() @ y, whole[0].double() @ whole[1].double().t())


def test_rotation_spreads_an_outlier() -> None:
    x = noise(64, 256) * 0.01
    x[5] = 100.0
    plain, spread = x.bfloat16(), OP.rotate(x)
    assert spread.abs().amax() < 0.3 * plain.abs().amax()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_seen(bad: float, level: str) -> None:
    """Rows N1 and N2."""
    x = noise(32, 64)
    x[17, 33] = bad
    values, scale_inv = cast_nvfp4(x, NVFP4)
    assert (values.isnan().sum() == 16) if np.isnan(bad) else bool(scale_inv.isnan())
    by_row = cast_nvfp4(x, QuantSpec("e2m1", "block1x16", "e4m3", row_scaled=True))
    exact = by_row.q.float() * by_row.scale_inv
    assert exact[17].isnan().any()
    assert exact.isnan().any(1).sum() == 1


def test_a_block_far_below_its_tensor_keeps_a_scale(level: str) -> None:
    """Row N3."""
    unit = 2.0**-9 / 448  # the values of code 1 in a block whose scale is the smallest
    x = torch.full((1, 48), 6.0)
    x[0, 16:32], x[0, 32:] = unit, 0.249 * unit
    values, scale_inv = cast_nvfp4(x, NVFP4)
    assert (values[0, 16:32] == 2.0**-9).all()
    assert (values[0, 16:32] * scale_inv - unit).abs().max() < 1e-6 * unit
    assert (values[0, 32:] == 0).all()


# --- product


def test_the_product_is_that_of_the_dequantized_operands_and_has_the_bits_of_mm(level: str) -> None:
    for case in cases("nvfp4_mm"):
        a, b, a_scale, b_scale, bias, out = case.make()
        actual = OP.nvfp4_mm(a, b, a_scale, b_scale, bias, out)
        exact = (a.double() * a_scale.double()) @ (b.double() * b_scale.double()).t()
        exact = exact if bias is None else exact + bias.double()
        tolerance = 1e-5 if out is torch.float32 else 2.0**-8
        assert (actual.double() - exact).norm() <= tolerance * exact.norm(), case.name
        sums = OP.mm(a, b, None, torch.float32)
        if a_scale.numel() == 1 and a_scale > 2.0**-64:
            scaled = sums * a_scale * b_scale
            assert torch.equal(actual, (scaled if bias is None else scaled + bias.float()).to(out)), case.name


# --- recipe and layers

RECIPES = {
    "default": NVFP4BlockScaling(),
    "by row": NVFP4BlockScaling(row_scaled_activation=True),
    "1d": NVFP4BlockScaling(disable_2d_quantization=True),
    "plain": NVFP4BlockScaling(True, True, True),
}


def test_the_recipe_has_transformer_engines_parameters() -> None:
    assert NVFP4BlockScaling() == NVFP4BlockScaling(False, False, False, False)
    assert from_name("nvfp4") == RECIPES["by row"]
    for recipe in RECIPES.values():
        assert name_of(recipe) == "nvfp4"
        assert from_json(to_json(recipe)) == recipe
        assert can_train(recipe)
        assert recipe_for_calibration(recipe).specs.linear["weight"] == NVFP4
    assert depends_on_batch(NVFP4BlockScaling())
    assert not depends_on_batch(from_name("nvfp4"))
    assert NVFP4BlockScaling(backward_override="high_precision").override_linear_precision == (False, True, True)
    with pytest.raises(RecipeError, match="disable_rht must be True or False, found 1"):
        NVFP4BlockScaling(disable_rht=1)  # type: ignore[arg-type]
    with (
        pytest.raises(RecipeError, match="in NVFP4 needs a multiple of 16 input features, found 40"),
        autocast(recipe=NVFP4BlockScaling()),
    ):
        Linear(40, 8)(torch.randn(2, 40))


def rotated(x: Array) -> Array:
    return OP.rotate(torch.from_numpy(x).t()).t().float().numpy()


def operand(x: Tensor, spec: QuantSpec, columnwise: bool, seed: int | None) -> NDArray[np.float64]:
    """The operand of a GEMM that the recipe describes, dequantized."""
    values = np.ascontiguousarray(x.t().numpy() if columnwise else x.numpy()).astype(F32)
    if columnwise and spec.rotated:
        values = rotated(values)
    rows = spec.block[0] or 1
    q, scale = model(
        values, spec.row_scaled and not columnwise, rows, seed if spec.stochastic else None, int(columnwise)
    )
    return q.astype(np.float64) * scale.astype(np.float64)


@pytest.mark.parametrize(
    "override", [(False, False, False), (True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("name", RECIPES)
def test_every_gemm_reads_the_operands_of_the_recipe(name: str, override: tuple[bool, bool, bool]) -> None:
    """37 tokens and 50 outputs: contracted dimensions of the backward pass end with a partial block."""
    flags = RECIPES[name]
    recipe = from_json(to_json(flags))
    assert isinstance(recipe, NVFP4BlockScaling)
    recipe = NVFP4BlockScaling(
        recipe.disable_rht, recipe.disable_stochastic_rounding, recipe.disable_2d_quantization,
        recipe.row_scaled_activation, override,
    )  # fmt: skip
    specs = recipe.specs.linear
    x, w, dy = noise(37, 96, seed=1).requires_grad_(), noise(50, 96, seed=2), noise(37, 50, seed=3) * 1e-6
    layer = Linear(96, 50, bias=False)
    layer.weight.data.copy_(w)
    torch.manual_seed(11)
    with autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)
    torch.manual_seed(11)
    seed = int(draw_seed()) if specs["grad_output"].stochastic else None

    def of(tensor: Tensor, role: str, columnwise: bool, in_high_precision: bool) -> NDArray[np.float64]:
        plain = tensor.t() if columnwise else tensor
        return plain.double().numpy() if in_high_precision else operand(tensor, specs[role], columnwise, seed)

    values = x.detach()
    weight = of(w, "weight", False, override[1])
    transposed = (
        weight.T if not recipe.disable_2d_quantization and not override[1] else of(w, "weight", True, override[1])
    )
    exact = (
        of(values, "input", False, override[0]) @ of(w, "weight", False, override[0]).T,
        of(dy, "grad_output", False, override[1]) @ transposed.T,
        of(dy, "grad_output", True, override[2]) @ of(values, "input", True, override[2]).T,
    )
    assert x.grad is not None
    assert layer.weight.grad is not None
    for actual, expected in zip((y, x.grad, layer.weight.grad), exact, strict=True):
        error = np.linalg.norm(actual.detach().double().numpy() - expected)
        assert error < 1e-5 * np.linalg.norm(expected)


def test_a_2d_weight_has_the_same_values_in_both_directions_and_in_files() -> None:
    weight, spec = noise(50, 96), NVFP4BlockScaling().specs.linear["weight"]
    values, global_scale = cast_nvfp4(weight, spec)
    stored = cast_weight(weight, spec)
    assert tuple(stored.scale_inv.shape) == (50, 6)
    assert stored.global_scale is not None
    assert torch.equal(stored.global_scale, global_scale)
    assert torch.equal(dequantize(stored.q, stored.scale_inv, None).bfloat16(), values)
    assert torch.equal(stored.scale_inv[:16].float(), stored.scale_inv[:1].float().expand(16, 6))
    back, _ = cast_nvfp4(weight.t().contiguous(), spec)
    assert torch.equal(back[:, :48], values.t()[:, :48])


def test_gradients_repeat_with_torchs_seed_and_differ_without() -> None:
    layer, x, dy = Linear(64, 48), torch.randn(40, 64), torch.randn(40, 48)

    def gradient(seed: int) -> Tensor:
        torch.manual_seed(seed)
        layer.zero_grad()
        with autocast(recipe=NVFP4BlockScaling()):
            y = layer(x)
        y.backward(dy)
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    assert torch.equal(gradient(1), gradient(1))
    assert not torch.equal(gradient(1), gradient(2))


def test_evaluation_draws_no_random_number() -> None:
    layer, state = Linear(64, 48), torch.get_rng_state()
    with torch.no_grad(), autocast(recipe=NVFP4BlockScaling()):
        layer(torch.randn(3, 64, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_layer_has_the_bits_of_the_trained_one(dtype: torch.dtype, bias: bool) -> None:
    """Its weight is packed in codes, and the trained one's values are BF16."""
    recipe, x = from_name("nvfp4"), noise(21, 128).to(torch.bfloat16)
    layer = Linear(128, 48, bias=bias, dtype=dtype)
    with torch.no_grad(), autocast(recipe=recipe):
        expected = layer(x)
    assert recipe is not None
    frozen = FrozenLinear.from_linear(layer, recipe)
    assert torch.equal(frozen(x), expected)
    assert torch.equal(torch.cat([frozen(x[:5]), frozen(x[5:])]), expected)
    frozen.pack(torch.empty(frozen.weight_q.numel(), dtype=torch.uint8))
    assert torch.equal(frozen(x), expected)
    assert torch.equal(frozen(x[:1]), expected[:1])


def test_a_frozen_layer_of_the_library_recipe_scales_rows_in_a_server() -> None:
    frozen = FrozenLinear.from_linear(nn.Linear(64, 16), NVFP4BlockScaling())
    assert frozen.input_spec.depends_on_batch
    frozen.make_rows_independent()
    x = noise(4, 64).bfloat16()
    assert torch.equal(frozen(x)[2:3], frozen(x[2:3]))


def test_an_input_of_4_bits_needs_a_weight_in_nvfp4() -> None:
    q, scale = torch.zeros(16, 64, dtype=torch.float8_e4m3fn), torch.tensor(1.0)
    with pytest.raises(ValueError, match="Inputs of 4 bits are in NVFP4, and so is the weight"):
        FrozenLinear(q, scale, input_spec=NVFP4)
