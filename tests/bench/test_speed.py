"""`bench ops`, `engine`, `monitor`, `step` and `speculation` compute their figures correctly; speed is not tested."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8serve.bench import engine, figures, ops, training
from fp8serve.bench.ops import MAKERS, BenchCase, Peaks, others
from fp8serve.cli import main
from fp8serve.fp8.ops import OPS
from tests.engine.tiny import write_model


def ignore(what: str, completed: int, total: int) -> None:
    """A progress callback that does nothing."""


def known_peaks(seconds: float) -> Peaks:
    """Replaces the measurement of peaks, which takes seconds; `test_figures_of_one_op` runs it."""
    return Peaks(1e10, 1e11)


def test_candidates_alternate_and_the_fastest_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], []
    costs = {"a": iter((9.0, 3.0, 1.0, 2.0)), "b": iter((9.0, 5.0, 6.0, 4.0))}

    def call(name: str) -> None:
        order.append(name)
        now[0] += next(costs[name])

    monkeypatch.setattr(figures.time, "perf_counter", lambda: now[0])
    fastest = figures.fastest({"a": lambda: call("a"), "b": lambda: call("b")}, 0.0)
    assert fastest == {"a": 1.0, "b": 4.0}
    assert "".join(order) == "abababab"


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 2), (0.9, 4), (1.0, 4)])
def test_percentiles(share: float, value: int) -> None:
    assert figures.percentile([3, 1, 4, 2], share) == value


def test_every_op_is_measured() -> None:
    entries = [maker.__doc__ for maker in MAKERS]
    assert all(entries)
    source = Path(ops.__file__).with_name("ops.py").read_text()
    with_entry = {name for name in OPS if f"OPS.{name}" in source}
    assert with_entry | {entry.op for entry in others(with_entry)} == set(OPS)
    assert len(with_entry) >= 26


def test_an_op_without_an_entry_is_measured_at_its_largest_case(monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = others({*OPS} - {"transpose_fp8"})
    assert (entry.op, entry.num_bytes, entry.torch_bf16) == ("transpose_fp8", 2 * 128 * 256, None)
    monkeypatch.setattr(ops, "measure_peaks", known_peaks)
    monkeypatch.setattr(ops, "MAKERS", ())
    monkeypatch.setattr(ops, "others", lambda measured: [entry])
    (row,) = ops.measure(0.01, ignore)["ops"]
    assert row["gb_per_s"] > 0


def test_figures_of_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the inputs of every case, of zeros instead of random numbers, and measures one."""
    monkeypatch.setattr(ops, "_noise", lambda *shape: torch.zeros(shape, dtype=torch.bfloat16))
    result = ops.measure(0.01, ignore, only="delayed_update")
    (row,) = result["ops"]
    assert row["us"] > 0
    assert row["times_torch_bf16"] is None
    assert row["gb_per_s"] == pytest.approx(8 * 400 * 1024 / row["us"] / 1e3)
    assert row["share_of_peak"] > 0


def test_the_monitors_share_of_a_step() -> None:
    summary = training.monitor_summary({"without": [0.10, 0.20, 0.11], "with": [0.101, 0.202, 0.113]})
    assert summary["fastest_share_percent"] == pytest.approx(1.0)
    assert summary["median_share_percent"] == pytest.approx(100 * 0.002 / 0.11)
    assert (summary["fastest_with_ms"], summary["median_without_ms"]) == pytest.approx((101.0, 110.0))


def test_the_monitor_runs_in_every_other_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_counted: list[int] = []

    class Watched(training.Monitor):
        def step(self) -> list[Any]:
            readings = super().step()
            num_counted.append(len([r for r in readings if r.zeros is not None]))
            return readings

    monkeypatch.setattr(training, "Monitor", Watched)
    assert main(["bench", "monitor", "--hidden-size", "64", "--layers", "1", "--every", "2", "--rounds", "2"]) == 0
    assert num_counted == [7 * 3] * 4  # input, weight and gradient of seven linears; counted in the first of two steps
    assert "fastest" in capsys.readouterr().out


def test_steps_are_compared_with_bf16() -> None:
    summary = training.step_summary({"bf16": [0.2, 0.3, 0.4], "delayed": [0.1, 0.3, 0.5]})
    assert summary["bf16"]["fastest_x_bf16"] == summary["bf16"]["median_x_bf16"] == 1.0
    assert summary["delayed"]["fastest_x_bf16"] == pytest.approx(2.0)
    assert summary["delayed"]["median_x_bf16"] == pytest.approx(1.0)  # of 2, 1 and 0.8
    assert summary["delayed"]["median_ms"] == pytest.approx(300.0)


def test_a_step_of_every_kind_trains_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes: list[Any] = []
    losses: list[float] = []

    class Seen(training.Forward):
        def logits(self, batch: Any) -> Any:
            logits = super().logits(batch)
            recipes.append(self.recipe)
            losses.append(float(torch.nn.functional.cross_entropy(logits.detach(), batch.targets)))
            return logits

    monkeypatch.setattr(training, "Forward", Seen)
    arguments = ["--hidden-size", "64", "--layers", "1", "--vocab-size", "256", "--rows", "1", "--rounds", "2"]
    assert main(["bench", "step", "--recipe", "delayed", "--recipe", "block", *arguments]) == 0
    assert [type(r).__name__ for r in recipes] == ["NoneType", "DelayedScaling", "Float8BlockScaling"] * 3
    assert losses[-1] < losses[0]


def test_speculation_is_compared_with_plain_decoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path, max_position_embeddings=1024)
    args = ["--recipe", "bf16", "--new", "24", "--rounds", "2", "--speculative-tokens", "3", "--out", str(tmp_path)]
    assert main(["bench", "speculation", str(model), *args]) == 0
    assert "same output" in capsys.readouterr().out
    report = json.loads((tmp_path / "speculation.json").read_text())
    assert [row["text"] for row in report["texts"]] == ["summary", "edit", "code", "story"]
    for row in report["texts"]:
        assert row["same_answer"]
        assert row["steps"] + row["accepted"] == row["tokens"] - 1
        assert row["accepted"] <= row["drafted"]


def test_speculation_is_the_median_over_pairs_of_runs() -> None:
    def runs(tokens: list[int], *seconds: float) -> list[dict[str, Any]]:
        return [{"tokens": tokens, "seconds": s, "drafted": 8, "accepted": 4, "steps": 6} for s in seconds]

    pairs = [list(pair) for pair in zip(runs([1] * 11, 2.0, 8.0, 3.0), runs([1] * 11, 1.0, 2.0, 3.0), strict=True)]
    summary = engine.summary(pairs)
    assert summary["times_plain"] == pytest.approx(2.0)  # of 2, 4 and 1
    assert (summary["plain_tokens_per_second"], summary["speculative_tokens_per_second"]) == pytest.approx((5.0, 10.0))
    assert summary["same_answer"]
    pairs[0][1]["tokens"] = [2] * 11
    assert not engine.summary(pairs)["same_answer"]


def test_figures_are_compared_with_their_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def passes(seconds: float) -> float:
        now[0] += seconds
        return now[0]

    def maker() -> Iterator[BenchCase]:
        slow, fast = partial(passes, 4.0), partial(passes, 1.0)
        for name, ours, theirs, goal in (("a", fast, slow, 2.0), ("b", fast, slow, 9.0), ("c", fast, slow, None)):
            yield BenchCase(name, "1", ours, theirs, 1.0, goal=goal)

    monkeypatch.setattr(figures.time, "perf_counter", partial(passes, 0.01))
    monkeypatch.setattr(ops, "measure_peaks", known_peaks)
    monkeypatch.setattr(ops, "MAKERS", (maker,))
    monkeypatch.setattr(ops, "others", lambda measured: iter(()))
    reached = {row["op"]: row["reached"] for row in ops.measure(0.01, ignore)["ops"]}
    assert reached == {"a": True, "b": False, "c": None}
    assert [row["op"] for row in ops.measure(0.01, ignore, goals=True)["ops"]] == ["a", "b"]


def test_the_goals_of_the_speed_table_are_set() -> None:
    from fp8serve.bench.ops import LINEAR, casts

    assert [goal for goal in LINEAR.values() if goal] == [4.0, 3.0, 2.0, 2.0, 1.0, 1.0]
    assert [(entry.op, entry.goal) for entry in casts() if entry.goal] == [("quantize", 10.0)]


def test_figures_of_the_engine(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", max_position_embeddings=256)
    result = engine.measure_engine(model, ignore, batches=(1, 3), prompt=20, new=4, recipe="current")
    assert [row["batch"] for row in result["decode"]] == [1, 3]
    for row in result["decode"]:
        assert 0 < row["fastest_ms"] <= row["p50_ms"] <= row["p99_ms"]
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["p50_ms"])
    assert result["prefill"]["tokens_per_second"] == pytest.approx(20e3 / result["prefill"]["ms"])
    assert 0 < result["load_seconds"] < result["first_token_seconds"]
