"""The studies reproduce known results, on inputs small enough for a test."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.studies import numerics, quantization, spikes
from benchmarks.studies.__main__ import main
from tests.tiny import write_tiny_model


@pytest.fixture(scope="module")
def casts() -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(r["tensor"], r["format"], r["granularity"]): r for r in quantization.synthetic()}


def test_int8_wins_on_gaussian_values_and_loses_to_outliers(casts: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    def db(tensor: str, fmt: str) -> float:
        return float(casts[tensor, fmt, "tensor"]["sqnr_db"])

    assert db("gaussian", "int8") > db("gaussian", "e4m3") + 5 > db("gaussian", "e5m2") + 10
    for outliers in ("1 % outliers", "5 % outliers"):
        assert db(outliers, "e4m3") > db(outliers, "int8") + 3
        assert casts[outliers, "int8", "tensor"]["ordinary_sqnr_db"] < 10
        assert abs(db(outliers, "e4m3") - db("gaussian", "e4m3")) < 0.5  # what floating point is for


def test_a_uniform_grid_has_the_error_it_must_have(casts: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    """Noise of a step d is d^2 / 12; here d = amax / 127 and the values have standard deviation 1."""
    x, _ = quantization.gaussian(0.0)
    step = float(x.abs().max()) / 127
    assert casts["gaussian", "int8", "tensor"]["sqnr_db"] == pytest.approx(-10 * math.log10(step**2 / 12), abs=0.1)


def test_int8_keeps_the_largest_value_and_zeros() -> None:
    x = torch.tensor([[0.0, 1.0, -127.0], [0.0, 0.0, 0.0]])
    for granularity in quantization.GRANULARITIES:
        assert torch.equal(quantization.int8(x, granularity), x)


@pytest.mark.parametrize(
    ("scenario", "history", "margin", "steps_to_recover"),
    [("once", 1, 0, 1), ("once", 16, 7, 17), ("lasting", 16, 0, 1), ("lasting", 16, 7, 0)],
)
def test_spikes(scenario: str, history: int, margin: int, steps_to_recover: int) -> None:
    case = spikes._case(scenario, history, margin, spikes.START + 40)
    assert case["recovered"]
    assert case["steps_to_recover"] == steps_to_recover
    assert (case["spike_saturated"] == 0) == (2**margin > spikes.FACTOR)
    assert case["before_db"] == pytest.approx(31.5, abs=0.3)


def test_a_spike_that_the_history_keeps_to_the_end_has_not_recovered() -> None:
    assert not spikes._case("once", 128, 7, spikes.START + 40)["recovered"]


def test_the_command_on_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "model")
    args = ["numerics", str(model), "--out", str(tmp_path / "out"), "--samples", "2", "--seq-len", "32"]
    assert main(args) == 0
    output = capsys.readouterr().out
    assert "inputs of 14 linears" in output
    assert "steps to recover" in output
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "numerics.json", "numerics-layers.svg", "numerics-spikes.svg", "numerics-margins.svg",
    }  # fmt: skip
    result = json.loads((tmp_path / "out" / "numerics.json").read_text())
    assert result["model"] == str(model)
    assert {"command", "commit", "cpu", "torch", "kernels"} <= set(result["made"])
    assert set(result["recipes"]) == {"delayed", "current", "rowwise", "block"}
    assert all(len(r["layers"]) == 14 and r["worst_db"] > 20 for r in result["recipes"].values())


def test_a_model_of_our_own_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "corpus", lambda docstrings_too: (["Some text to learn from. " * 40] * 3, []))
    steps: list[int] = []
    with numerics._model(None, 2, lambda what, step, total: steps.append(step)) as (model, described):
        assert (model / "config.json").is_file()
        assert "2 steps" in described
    assert steps == [1, 2]
    assert not model.exists()
