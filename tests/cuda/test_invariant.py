"""In the invariant mode a row has the same bits however many rows are computed with it, and wherever it stands."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.fp8 import batch_invariant
from fp8serve.fp8.ops.libraries import INVARIANT_SWITCH
from tests.csrc.helpers import assert_bits_equal, tame
from tests.csrc.test_gemm import E4M3, E5M2, quantized
from tests.cuda import emulated
from tests.cuda.conftest import Kernels
from tests.cuda.race_run import CHIP, HOPPER
from tests.cuda.test_attention import Paged

BF16 = torch.bfloat16
BATCHES = (1, 2, 17, 64, 129)  # rows
KINDS = [("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("block1x128", "block128x128")]


@pytest.fixture(params=[CHIP, HOPPER], ids=["one team", "two teams"])
def mode(kernels: Kernels, request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Kernels in the invariant mode. In the skinny kernel, one team of warps adds up a sum on CHIP and two teams on
    HOPPER, so the order of the additions differs."""
    if kernels.device == "cpu":
        emulated.emulator().set_chip(*request.param)
    elif request.param is HOPPER:
        pytest.skip("a real GPU has one of the two orders, and the other parameter tests it")
    default = disable_kernels(kernels, "")
    disable_kernels(kernels, INVARIANT_SWITCH)
    yield kernels
    disable_kernels(kernels, default or "none")
    if kernels.device == "cpu":
        emulated.emulator().set_chip(89, 4, 99 * 1024)


def disable_kernels(kernels: Kernels, names: str) -> str:
    """Returns the names that were disabled before. "" changes nothing, and "none" enables all kernels."""
    return str(kernels.ops.gemm_kernels(kernels.here(torch.zeros(1)), names))


def assert_rows_independent(run: Callable[[Tensor], Tensor], rows: int = BATCHES[-1]) -> None:
    """`run(indices)` computes these rows. Compares the first and the last row of batches of shuffled rows with the same
    row computed alone."""
    alone = {}
    for size in BATCHES:
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(size))[:size]
        together = run(order)
        for position in {0, size - 1}:
            row = int(order[position])
            if row not in alone:
                alone[row] = run(order[position : position + 1])[0]
            assert_bits_equal(together[position], alone[row])
    assert len(alone) > len(BATCHES)


def rows_of(scale: Tensor, order: Tensor) -> Tensor:
    return scale[order] if scale.dim() else scale


@pytest.mark.pairwise
@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(("n", "k"), [(24, 2304), (136, 400)])  # 18 and 4 blocks of K
def test_rows_of_a_product_are_independent(mode: Kernels, kinds: Any, formats: Any, n: int, k: int) -> None:
    a, a_scale = quantized(tame(BATCHES[-1], k, seed=1), kinds[0], formats[0])
    b, b_scale = quantized(tame(n, k, seed=2), kinds[1], formats[1])
    bias = tame(1, n, seed=3)[0]
    assert_rows_independent(
        lambda order: mode.run("scaled_mm", a[order], b, rows_of(a_scale, order), b_scale, bias, torch.float32)
    )


def test_joined_weights_give_the_bits_of_separate_ones(mode: Kernels) -> None:
    """A server joins the weights of projections that a fine-tune multiplies one by one."""
    a, a_scale = quantized(tame(BATCHES[-1], 2304, seed=1), "tensor")
    b, b_scale = quantized(tame(256, 2304, seed=2), "row")
    for rows in (5, BATCHES[-1]):
        joined, first, second = (
            mode.run("scaled_mm", a[:rows], b[part], a_scale, b_scale[part], None, torch.float32)
            for part in (slice(None), slice(0, 64), slice(64, None))
        )
        assert_bits_equal(joined, torch.cat([first, second], 1))


def test_other_kernels_add_in_another_order(kernels: Kernels) -> None:
    """If they added in the same order, the tests of this file would show nothing."""
    if kernels.device == "cuda":
        pytest.skip("the kernels differ from GPU to GPU")
    a, a_scale = quantized(tame(129, 2304, seed=1), "row")
    b, b_scale = quantized(tame(48, 2304, seed=2), "row")
    alone = kernels.run("scaled_mm", a[:1], b, a_scale[:1], b_scale, None, torch.float32)
    together = kernels.run("scaled_mm", a, b, a_scale, b_scale, None, torch.float32)
    assert not torch.equal(alone, together[:1])


@pytest.mark.parametrize(("n", "k"), [(24, 1200), (128, 264)])
def test_rows_of_bf16_products_are_independent(mode: Kernels, n: int, k: int) -> None:
    a, b = tame(BATCHES[-1], k, seed=1).to(BF16), tame(n, k, seed=2).to(BF16)
    assert_rows_independent(lambda order: mode.run("mm", a[order], b, None, torch.float32))


@pytest.mark.parametrize(
    "op", ["stored_mm", "scaled_mm_add", "watched_mm_add", "stored_gated_mm", "scaled_mm_quantize"]
)
def test_rows_of_fused_products_are_independent(mode: Kernels, op: str) -> None:
    """Few rows run in one launch. More rows (over 16 or 64, by the op) take a GEMM and a second launch."""
    n, k = 32, 1200
    x, one = tame(BATCHES[-1], k, seed=1).to(BF16), torch.tensor(1.0)
    a, a_scale = quantized(x.float(), "tensor")
    b, b_scale = quantized(tame(n, k, seed=2), "row")
    residual = tame(BATCHES[-1], n, seed=4).to(BF16)

    def run(order: Tensor) -> Tensor:
        counters = torch.zeros(()), torch.zeros((), dtype=torch.int64), None
        if op == "stored_mm":
            return mode.run(op, a[order], b, a_scale, b_scale, None, BF16)  # type: ignore[no-any-return]
        if op == "scaled_mm_add":
            return mode.run(op, a[order], b, a_scale, b_scale, None, residual[order])  # type: ignore[no-any-return]
        if op == "watched_mm_add":
            arguments = one / a_scale, *counters, b, a_scale, b_scale, None, residual[order]
            return mode.run(op, x[order], *arguments)  # type: ignore[no-any-return]
        if op == "stored_gated_mm":
            product = mode.run(op, a[order], b, a_scale, b_scale, None, one, *counters)
        else:
            product = mode.run(op, a[order], b, a_scale, b_scale, None, one, E4M3)[0]
        return product.float()  # type: ignore[no-any-return]

    assert_rows_independent(run)


@pytest.mark.parametrize("op", ["stored_mm", "stored_gated_mm", "stored_rotary_mm"])
def test_rows_of_products_of_a_norm_are_independent(mode: Kernels, op: str) -> None:
    """Up to 4 rows the GEMM kernel casts the norm's output itself. Up to 16 rows the kernel also casts gate and up, or
    applies the rotary embedding."""
    n, k, dim = 48, 1200, 16
    x, one = tame(BATCHES[-1], k, seed=1).to(BF16), torch.tensor(1.0)
    b, b_scale = quantized(tame(n, k, seed=2), "row")
    angle = tame(BATCHES[-1], dim, seed=3).unsqueeze(1)

    def run(order: Tensor) -> Tensor:
        counters = torch.zeros(()), torch.zeros((), dtype=torch.int64), None
        norm = tame(1, k, seed=4)[0].to(BF16), 1e-5, one, *counters
        product = x[order], b, one, b_scale, None
        if op == "stored_mm":
            return mode.run(op, *product, BF16, *norm)  # type: ignore[no-any-return]
        if op == "stored_gated_mm":
            cast = torch.zeros(()), torch.zeros((), dtype=torch.int64), None
            return mode.run(op, *product, one, *cast, *norm).float()  # type: ignore[no-any-return]
        keys, values = (mode.here(torch.zeros(len(order), 1, 1, dim, dtype=BF16)) for _ in range(2))
        rotation = angle[order].cos().to(BF16), angle[order].sin().to(BF16)
        queries = mode.run(op, *product, *rotation, keys, values, torch.arange(len(order)), None, None, *norm)
        return torch.cat([queries, keys[:, 0].cpu(), values[:, 0].cpu()], 1)

    assert_rows_independent(run)


def test_the_tall_kernel_equals_the_skinny_one(mode: Kernels) -> None:
    for kinds in KINDS:
        a, a_scale = quantized(tame(64, 2304, seed=1), kinds[0])
        b, b_scale = quantized(tame(80, 2304, seed=2), kinds[1])
        arguments = a, b, a_scale, b_scale, None, torch.float32
        tall, skinny = (mode.run("scaled_mm_by", *arguments, name, 1) for name in ("tall", "skinny"))
        assert_bits_equal(tall, skinny)


def test_the_mode_uses_no_other_kernels(mode: Kernels) -> None:
    if mode.device == "cuda":
        pytest.skip("launches are known on the emulated GPU only")
    a, a_scale = quantized(tame(129, 256, seed=1), "tensor")
    b, b_scale = quantized(tame(48, 256, seed=2), "tensor")
    launches = {}
    for rows in BATCHES:
        emulated.emulator().launches()
        mode.run("scaled_mm", a[:rows], b, a_scale, b_scale, None, BF16)
        launches[rows] = [name for name, _ in emulated.emulator().launches()]
    for rows, names in launches.items():
        assert len(names) == 1
        assert ("gemm_stream" if rows <= 64 else "multiply_tall") in names[0]


@pytest.mark.parametrize("cache", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("dim", [64, 20])  # on tensor cores, and in FP32
def test_a_token_attends_alike_in_a_prompt_and_decoded(mode: Kernels, cache: torch.dtype, dim: int) -> None:
    paged = Paged([330, 40, 270, 16], heads=8, kv_heads=2, dim=dim, dtype=cache)
    decoded = [paged.attend(mode, [(0, token, token + 1)])[0] for token in (199, 255, 256, 329)]
    for begin, cuts in ((190, (200,)), (0, (64, 200, 257)), (199, (256,))):
        bounds = [begin, *cuts, 330]
        chunks = [paged.attend(mode, [(1, 0, 40), (0, a, b), (2, 269, 270)])[1] for a, b in zip(bounds, bounds[1:])]  # noqa: RUF007, B905
        for token, alone in zip((199, 255, 256, 329), decoded, strict=True):
            if token >= begin:
                assert_bits_equal(torch.cat(chunks)[token - begin], alone[0])
    together = paged.attend(mode, [(s, n - 1, n) for s, n in enumerate(paged.lengths)])
    assert_bits_equal(together[0], decoded[-1])


def test_prompts_use_other_attention_kernels_than_without_the_mode(mode: Kernels) -> None:
    if mode.device == "cuda":
        pytest.skip("launches are known on the emulated GPU only")
    emulated.emulator().set_chip(*HOPPER)
    paged = Paged([130], heads=4, kv_heads=1, dim=64)
    emulated.emulator().launches()
    paged.attend(mode, [(0, 0, 130)])
    in_mode = {name for name, _ in emulated.emulator().launches()}
    disable_kernels(mode, "none")
    paged.attend(mode, [(0, 0, 130)])
    assert in_mode.isdisjoint(name for name, _ in emulated.emulator().launches())


@pytest.mark.gpu
def test_log_softmax_does_not_depend_on_the_place_of_a_row(gpu: Kernels) -> None:
    """With 4,097 values a row, each row starts at a different alignment."""
    logits = tame(9, 4097, seed=1)
    batch_invariant._invariant_devices.add("cuda")
    try:
        together = batch_invariant.log_softmax(gpu.here(logits)).cpu()
        for row in range(len(logits)):
            assert_bits_equal(batch_invariant.log_softmax(gpu.here(logits[row : row + 1])).cpu()[0], together[row])
    finally:
        batch_invariant._invariant_devices.discard("cuda")
