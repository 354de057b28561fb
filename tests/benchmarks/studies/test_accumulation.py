"""How sums are kept: a small example of each kind, and the errors that grow with the number of terms."""

import pytest
import torch

from benchmarks.studies import accumulation
from benchmarks.studies.accumulation import cut_off, errors, in_bf16, promoted


def parts(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


def test_bits_beyond_the_fourteenth_are_cut_off() -> None:
    assert cut_off(parts(8192.0, 0.75)).item() == 8192.0
    assert cut_off(parts(-8192.0, -1.75)).item() == -8193.0  # towards zero
    assert cut_off(parts(1.0, 2.0**-13)).item() == 1 + 2.0**-13


def test_promoted_sums_start_again_after_128_terms() -> None:
    assert promoted(parts(8192.0, 0, 0, 0, 0.75)).item() == 8192.75
    assert promoted(parts(8192.0, 0, 0, 0.75)).item() == 8192.0


def test_bf16_sums_have_eight_bits() -> None:
    assert in_bf16(parts(256.0, 1.0)).item() == 256.0
    assert in_bf16(parts(256.0, 2.0)).item() == 258.0


def test_only_short_sums_get_worse_with_more_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (errors(*torch.randn(2, 8, terms, generator=torch.Generator().manual_seed(1))) for terms in (256, 8192))
    for name in ("14 bits", "bf16"):
        assert many[name] > 4 * few[name]
    assert many["promoted"] < 2 * few["promoted"]
    for error_of_sum in (few, many):
        assert error_of_sum["ours"] < 1e-6
        assert 0.02 < error_of_sum["cast"] < 0.06


def test_every_number_of_terms_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulation, "TERMS", (64, 256))
    report = accumulation.study(lambda *progress: None)
    assert [(row["terms"], row["values"]) for row in report["rows"]] == [
        (terms, kind) for terms in (64, 256) for kind in ("both signs", "one sign")
    ]
    assert accumulation.chart(report).count("<polyline") == 10
