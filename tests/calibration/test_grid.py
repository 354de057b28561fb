import math

import pytest
import torch

from fp8serve.calibration.measure import SLICE_ELEMENTS, GridTally
from fp8serve.calibration.result import CastReport
from fp8serve.fp8.casting import cast_weight
from fp8serve.fp8.ops import dequantize, quantize
from fp8serve.fp8.ops.four_bit import unpack_codes
from fp8serve.fp8.recipe import from_name


def tallied(x: torch.Tensor, **how: object) -> CastReport:
    tally = GridTally()
    tally.add(x, *quantize(x, **how))  # type: ignore[arg-type]
    report = tally.report()
    assert report is not None
    return report


def test_every_value_is_counted_in_its_exponent() -> None:
    x = torch.tensor([[0.0, 1e-9, 2**-9, -(2.0**-6), 1.0, 1.9, -3.0, 256.0, 448.0, 1000.0]])
    report = tallied(x, scale=1.0)
    expected = [0.0] * 16
    for exponent in (0, 1, 7, 7, 8, 15, 15, 15):  # 2^-9 is subnormal, 2^-6 the first normal value, 1 = 2^0
        expected[exponent] += 1 / 10
    assert report.zeros == 2 / 10
    assert report.binades == pytest.approx(expected)
    assert report.zeros + sum(report.binades) == pytest.approx(1)
    assert report.at_top == 2 / 10


@pytest.mark.parametrize(("largest", "headroom"), [(448.0, 0.0), (224.0, 1.0), (112.0, 2.0), (896.0, -1.0)])
def test_headroom_is_in_powers_of_two(largest: float, headroom: float) -> None:
    assert tallied(torch.tensor([[1.0, -largest]]), scale=1.0).headroom == headroom
    assert tallied(torch.tensor([[1.0, -largest]]) / 4, scale=4.0).headroom == headroom


@pytest.mark.parametrize("granularity", ["tensor", "row", "block1x128", "block128x128"])
def test_sqnr_is_that_of_the_dequantized_tensor(granularity: str) -> None:
    x = torch.randn(130, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 130)[:, None]
    back = dequantize(*quantize(x, granularity=granularity))
    expected = 10 * math.log10(float(x.double().square().sum() / (x - back).double().square().sum()))
    report = tallied(x, granularity=granularity)
    assert report.sqnr_db == pytest.approx(expected, abs=1e-3)
    assert report.headroom == pytest.approx(0, abs=1e-3)  # each part has the scale of its own amax


@pytest.mark.parametrize("name", ["nvfp4-w4a16", "mxfp4-w4a16"])
def test_a_weight_of_4_bits_is_counted_in_the_exponents_of_e2m1(name: str) -> None:
    recipe = from_name(name)
    assert recipe is not None
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 48)[:, None]
    quantized = cast_weight(weight, recipe.specs.linear["weight"])
    tally = GridTally()
    tally.add(weight, *quantized)
    report = tally.report()
    assert report is not None
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(unpack_codes(quantized.q) & 7).long()]
    shares = [float(((magnitudes >= low) & (magnitudes < high)).double().mean())
              for low, high in ((0.5, 1), (1, 2), (2, 4), (4, 8))]  # fmt: skip
    assert report.binades == pytest.approx(shares, rel=1e-3)
    assert report.zeros == pytest.approx(float((magnitudes == 0).double().mean()), rel=1e-3)
    assert report.at_top == pytest.approx(float((magnitudes == 6).double().mean()), rel=1e-3)
    noise = (weight - quantized.dequantize()).double().square().sum()
    assert report.sqnr_db == pytest.approx(10 * math.log10(float(weight.double().square().sum() / noise)), abs=1e-3)


def test_parts_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    whole, parts = GridTally(), GridTally()
    whole.add(x, *quantize(x, scale=50.0))
    assert SLICE_ELEMENTS > 8
    monkeypatch.setattr("fp8serve.calibration.measure.SLICE_ELEMENTS", 24)  # three rows at a time
    for rows in (x[:7], x[7:]):
        parts.add(rows, *quantize(rows, scale=50.0))
    one, other = whole.report(), parts.report()
    assert one is not None
    assert other is not None
    assert (one.binades, one.headroom, one.zeros) == (other.binades, other.headroom, other.zeros)
    assert one.sqnr_db == pytest.approx(other.sqnr_db)


def test_empty_and_all_zero_tensors() -> None:
    assert GridTally().report() is None
    assert tallied(torch.zeros(2, 2), scale=1.0) == CastReport(None, None, 1.0, (0.0,) * 16, 0.0)
