"""Each layer's estimated share of the KL divergence is compared with the divergence of a model with only that layer in
FP8."""

from pathlib import Path

import pytest
import torch

from fp8serve.calibration.compare import freeze_function, kl_shares
from fp8serve.calibration.data import calibration_batches
from fp8serve.calibration.measure import TokenTally, add_logits
from fp8serve.calibration.observe import final_states, make_observer, observe
from fp8serve.calibration.passes import forward, forward_hooks
from fp8serve.calibration.pipeline import load_for_calibration
from fp8serve.calibration.progress import Stages
from fp8serve.calibration.result import LayerReport, by_cost
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.model.text.tokenizer import Tokenizer

from .conftest import VOCAB

RECIPE = DelayedScaling(amax_history_len=8)


@pytest.fixture(scope="module")
def measured(model_dir: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Returns, by layer, the estimated shares and the KL divergence with only that layer in FP8, of a model in which
    one layer is much worse than the others."""
    decoder, linears = load_for_calibration(model_dir, "cpu")
    batches = calibration_batches(
        None, Tokenizer.from_dir(model_dir), VOCAB, samples=64, seq_len=64, batch_size=4, seed=0
    )
    states = final_states(
        observe(decoder, make_observer(decoder, linears, DelayedScaling(amax_history_len=8)), batches.calibration)
    )
    states["model.layers.0.self_attn.o_proj.input"].scale.mul_(2.0**-13)  # most of its inputs underflow
    freeze = freeze_function(DelayedScaling(), states)
    shares = kl_shares(decoder, linears, batches.held_out, lambda name, linear, x: freeze(name, linears[name])(x))

    def alone(name: str) -> float:
        tally = TokenTally()
        for batch in batches.held_out:
            exact = forward(decoder, batch)
            with forward_hooks({name: linears[name]}, lambda n, linear, args, out: freeze(n, linears[n])(args[0])):
                add_logits(tally, batch.targets, (decoder, forward(decoder, batch)), (decoder, exact))
        return tally.quality(compared=True).kl_divergence or 0.0

    with torch.no_grad():
        return shares, {name: alone(name) for name in linears}


def test_shares_and_divergences_rank_layers_alike(measured: tuple[dict[str, float], dict[str, float]]) -> None:
    shares, alone = measured
    by_share, by_divergence = (sorted(d, key=lambda n: -d[n]) for d in (shares, alone))
    assert by_share[0] == by_divergence[0] == "model.layers.0.self_attn.o_proj"
    assert len(set(by_share[:6]) & set(by_divergence[:6])) >= 4


def test_shares_are_in_nats(measured: tuple[dict[str, float], dict[str, float]]) -> None:
    shares, alone = measured
    ordinary = [n for n in shares if n != "model.layers.0.self_attn.o_proj"]
    assert 0.5 < sum(shares[n] for n in ordinary) / sum(alone[n] for n in ordinary) < 2


def test_layers_are_ranked_by_share_and_not_by_sqnr() -> None:
    rows = [
        LayerReport("loud", 10.0, 0.0, kl=1e-5),
        LayerReport("harmful", 40.0, 0.0, kl=1e-3),
        LayerReport("exact", None, 0.0),
    ]
    assert [row.name for row in by_cost(rows)] == ["harmful", "loud", "exact"]


def test_several_sequences_in_one_pass_give_the_same_shares(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, several sequences are computed in one pass."""
    decoder, linears = load_for_calibration(model_dir, "cpu")
    batches = calibration_batches(
        None, Tokenizer.from_dir(model_dir), VOCAB, samples=64, seq_len=64, batch_size=4, seed=0
    )
    freeze = freeze_function(
        DelayedScaling(), final_states(observe(decoder, make_observer(decoder, linears, RECIPE), batches.calibration))
    )
    frozen = {name: freeze(name, linear) for name, linear in linears.items()}
    passes: list[int] = []

    def shares(limit: int | None) -> dict[str, float]:
        monkeypatch.setattr("fp8serve.calibration.compare._tokens_per_pass", lambda linears: limit)
        stages = Stages(lambda stage, completed, total: passes.append(total))
        return kl_shares(decoder, linears, batches.held_out, lambda name, linear, x: frozen[name](x), stages=stages)

    alone = shares(None)
    assert shares(10**6) == pytest.approx(alone, rel=1e-3)
    assert (passes[0], passes[-1]) == (sum(len(batch.lengths) for batch in batches.held_out), 1)
    assert shares(130) == pytest.approx(alone, rel=1e-3)
    assert 1 < passes[-1] < passes[0]
