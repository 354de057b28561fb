"""CPU kernels, the reference, the emulated GPU and a GPU give the recorded vectors (record_vectors.py)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8serve.fp8.ops import reference
from tests.csrc.helpers import FORMATS, assert_fp8_equal
from tests.cuda.accumulation import assert_within_accumulation
from tests.cuda.conftest import DEVICES, Kernels, kernels_on
from tests.cuda.record_vectors import CASTS, HIGH, NAMES, PATH, load

pytestmark = pytest.mark.smoke
Run = Callable[..., Any]
VECTORS = load()


@pytest.fixture(params=["cpu", "reference", *DEVICES])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    on_cpu = {"reference": reference, "cpu": torch.ops.fp8serve}
    return Kernels(on_cpu[request.param], "cpu") if request.param in on_cpu else kernels_on(request.param)


@pytest.fixture
def run(kernels: Kernels) -> Run:
    return kernels.run


def assert_same(actual, expected_q, expected_scale):
    assert_fp8_equal(actual[0], expected_q)
    assert torch.equal(actual[1], expected_scale)


def test_the_file_is_small():
    assert PATH.stat().st_size < 2**20


@pytest.mark.parametrize("kind", HIGH)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("cast", CASTS)
def test_casts_have_the_recorded_bits(run, kind, dtype, cast):
    op, rest = CASTS[cast]
    key = f"{kind}.{NAMES[dtype]}.{cast}"
    assert_same(run(op, VECTORS[f"{kind}.x"], dtype, *rest), VECTORS[f"{key}.q"], VECTORS[f"{key}.scale_inv"])


@pytest.mark.parametrize("kind", HIGH)
@pytest.mark.parametrize("dtype", FORMATS)
def test_casts_with_a_given_scale_have_the_recorded_bits(run, kind, dtype):
    key = f"{kind}.{NAMES[dtype]}.given"
    actual = run("quantize", VECTORS[f"{kind}.x"], torch.tensor(0.37), dtype)
    assert_same(actual, VECTORS[f"{key}.q"], VECTORS[f"{key}.amax"])


@pytest.mark.parametrize("by", ["tensor", "row", "block"])
def test_products_are_close_to_exact_ones(kernels, by):
    operands = [VECTORS[f"mm.{by}.{part}"] for part in ("a", "b", "a_scale", "b_scale")]
    actual = kernels.run("scaled_mm", *operands, None, torch.float32)
    assert_within_accumulation(actual, *operands, device=kernels.device)
    assert_within_accumulation(VECTORS[f"mm.{by}.out"], *operands)
