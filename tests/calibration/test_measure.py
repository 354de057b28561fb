import math

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from fp8serve.calibration.measure import LayerTally, TokenTally
from fp8serve.errors import DataError, ModelError
from fp8serve.fp8.ops import quantize


def test_token_figures_equal_those_of_torch() -> None:
    torch.manual_seed(0)
    logits, reference, targets = torch.randn(40, 17), torch.randn(40, 17), torch.randint(17, (40,))
    tally = TokenTally()
    for rows in (slice(0, 13), slice(13, 40)):
        tally.add(targets[rows], logits[rows], reference[rows])
    quality = tally.quality(compared=True)
    assert quality.tokens == 40
    assert quality.perplexity == pytest.approx(math.exp(cross_entropy(logits, targets)), rel=1e-5)
    assert quality.reference_perplexity == pytest.approx(math.exp(cross_entropy(reference, targets)), rel=1e-5)
    kl = kl_div(log_softmax(logits, -1), log_softmax(reference, -1), log_target=True, reduction="batchmean")
    assert quality.kl_divergence == pytest.approx(float(kl), rel=1e-5)
    assert quality.top1_agreement == int((logits.argmax(-1) == reference.argmax(-1)).sum()) / 40


def test_a_model_has_no_divergence_from_itself() -> None:
    logits, targets = torch.randn(9, 5), torch.randint(5, (9,))
    tally = TokenTally()
    tally.add(targets, logits, logits)
    quality = tally.quality(compared=True)
    assert quality.perplexity == quality.reference_perplexity
    assert quality.kl_divergence == 0
    assert quality.top1_agreement == 1


def test_without_a_reference_there_are_no_reference_figures() -> None:
    tally = TokenTally()
    tally.add(torch.tensor([1]), torch.zeros(1, 4))
    quality = tally.quality(compared=False)
    assert quality.perplexity == pytest.approx(4)
    assert quality.reference_perplexity is quality.kl_divergence is quality.top1_agreement is None


def test_nothing_to_score_and_a_broken_model_are_refused() -> None:
    with pytest.raises(DataError, match="no token to score"):
        TokenTally().quality(compared=False)
    tally = TokenTally()
    tally.add(torch.tensor([0]), torch.full((1, 4), torch.nan))
    with pytest.raises(ModelError, match="is nan"):
        tally.quality(compared=False)


def test_sqnr_is_the_ratio_of_powers_in_decibel() -> None:
    tally = LayerTally()
    exact = torch.tensor([[3.0, 4.0]])
    tally.add_output(exact, exact + torch.tensor([[0.3, 0.4]]))
    assert tally.sqnr_db == pytest.approx(20, abs=1e-4)
    tally.add_output(torch.zeros(1, 2), torch.zeros(1, 2))  # tokens without signal or noise change nothing
    assert tally.sqnr_db == pytest.approx(20, abs=1e-4)


def test_an_exact_layer_has_no_sqnr() -> None:
    tally = LayerTally()
    tally.add_output(torch.ones(2, 2), torch.ones(2, 2))
    assert tally.sqnr_db is None


def test_saturated_and_underflowed_values_are_counted_separately() -> None:
    tally = LayerTally()
    x = torch.tensor([[1.0, -449.0, 448.0, 1e9, 440.0, 1e-4, 0.0, -0.0]])
    tally.add_input(x, *quantize(x, scale=1.0))
    report = tally.report("layer")
    assert (report.saturated, report.rounded_to_top, report.underflowed) == (2 / 8, 2 / 8, 1 / 8)
    own = torch.full((1, 8), 1e9)  # with a scale of its own amax, nothing saturates
    tally.add_input(own, *quantize(own, granularity="row"))
    report = tally.report("layer")
    assert (report.saturated, report.rounded_to_top, report.underflowed) == (2 / 16, 10 / 16, 1 / 16)


def test_a_tally_of_nothing_reports_no_loss() -> None:
    assert LayerTally().report("layer").underflowed == 0.0
