"""Small trainings that differ only in the recipe, and the studies of parts and of jumps made from them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.studies import arms, jumps, parts
from benchmarks.studies.__main__ import main
from benchmarks.studies.arms import Arm, ArmsPlan, Training
from benchmarks.studies.jumps import JumpsPlan, Run
from benchmarks.studies.parts import PartsPlan
from fp8serve.bench.options import Shape
from fp8serve.errors import JobError

TEXTS = [f"The number {i} is followed by the number {i + 1}, and that by {i + 2}." for i in range(60)]
SHAPE = Shape(hidden_size=64, layers=1, heads=1, kv_heads=1, intermediate_size=128, vocab_size=300)
SMALL = {"batch_size": 2, "seq_len": 16, "seeds": 1, "shape": SHAPE}


@pytest.fixture(autouse=True)
def small_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "corpus", lambda docstrings_too: (TEXTS, []))


def quiet(name: str, step: int, total: int) -> None:
    pass


def trained(folder: Path, plan: ArmsPlan, arm: Arm) -> tuple[Training, list[float]]:
    training = Training(folder, plan, arm, 0)
    return training, [training.take(batch, training.rate(step)) for step, batch in enumerate(training.batches())]


def test_arms_differ_only_by_the_recipe(tmp_path: Path) -> None:
    plan = ArmsPlan(steps=6, lr=1e-2, **SMALL)
    folder = arms.write_model(tmp_path, plan, 0)
    bf16, losses = trained(folder, plan, Arm())
    assert trained(folder, plan, Arm())[1] == losses
    assert losses[-1] < losses[0]
    assert bf16.loss() == bf16.loss(in_bf16=True)
    fp8, others = trained(folder, plan, Arm("current"))
    assert others != losses
    assert others == pytest.approx(losses, rel=0.02)
    assert fp8.loss() != fp8.loss(in_bf16=True)
    assert trained(folder, plan, Arm(rate=1.5))[0].rate(3) == pytest.approx(1.5 * bf16.rate(3))


def test_parts_of_current_scaling_that_are_left_out_are_in_bf16(tmp_path: Path) -> None:
    plan = ArmsPlan(steps=1, **SMALL)
    folder = arms.write_model(tmp_path, plan, 0)

    def gradients(name: str) -> torch.Tensor:
        training = Training(folder, plan, parts.ARMS[name], 0)
        gradients: list[torch.Tensor] = []
        weight = training.setup.optimizer.masters["model.layers.0.mlp.down_proj.weight"]
        weight.register_hook(lambda g: gradients.append(g.clone()))
        training.take(next(training.batches()), 0.0)
        return gradients[0]

    exact, names = gradients("bf16"), ["current", *(name for name in parts.ARMS if name.endswith("only"))]
    changed = {name: not torch.equal(gradients(name), exact) for name in names}
    # the last layer's weight gradient reads no input gradient that FP8 made, but for that of lm_head, which is in BF16
    assert changed == {
        "current": True,
        "current, forward only": True,
        "current, input gradients only": False,
        "current, weight gradients only": True,
    }


def test_every_part_can_be_trained(tmp_path: Path) -> None:
    plan = ArmsPlan(steps=1, **SMALL)
    folder = arms.write_model(tmp_path, plan, 0)
    for name, arm in parts.ARMS.items():
        assert len(trained(folder, plan, arm)[1]) == 1, name


def test_a_study_does_not_repeat_finished_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ARMS", parts.BF16 | {"current": Arm("current")})
    plan = PartsPlan(steps=2, **SMALL)
    first = parts.study(tmp_path, plan, quiet)
    assert first["arms"]["current"]["own"]["error"] is None
    calls: list[str] = []
    both = parts.study(tmp_path, replace(plan, seeds=2), lambda name, step, total: calls.append(name))
    assert all(name.startswith("seed 1") for name in calls)
    assert both["losses"]["0"] == first["losses"]["0"] != both["losses"]["1"]
    last = both["losses"]["1"].pop("current")
    result = json.loads((tmp_path / "seed-0.json").read_text()) | {"losses": both["losses"]["1"]}
    (tmp_path / "seed-1.json").write_text(json.dumps(result))
    calls.clear()
    again = parts.study(tmp_path, replace(plan, seeds=2), lambda name, step, total: calls.append(name))
    assert calls == ["seed 1, current"]
    assert again["losses"]["1"]["current"] == last
    assert parts.study(tmp_path, replace(plan, steps=3), quiet)["losses"]["0"] != first["losses"]["0"]


def test_distances_are_from_the_mean_of_the_bf16_runs() -> None:
    losses = {
        seed: {name: {"own": 4.0} for name in parts.BF16} | {"current": {"own": own}}
        for seed, own in ((0, 4.04), (1, 4.12))
    }
    losses[0]["bf16"] = {"own": 4.3}
    losses[0]["bf16, rate +0.01 %"] = {"own": 3.7}
    result = parts.distances(losses, "current", "own")
    assert result["apart"] == pytest.approx([1.0, 3.0])
    assert (result["mean"], result["error"]) == pytest.approx((2.0, 1.0))


def test_a_jump_is_cut_off_without_a_margin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selection = {
        name: jumps.ARMS[name] for name in ("bf16", "current", "history 1024, margin 0", "history 1024, margin 2")
    }
    monkeypatch.setattr(jumps, "ARMS", selection)
    monkeypatch.setattr(jumps, "SOON", 2)
    plan = JumpsPlan(steps=8, jump=5, **{**SMALL, "seeds": 2})
    report = jumps.study(plan, quiet)
    rows = {(row["jump"], row["arm"]): row for row in report["rows"]}
    assert len(rows) == 8
    weights = {arm: rows["rate", arm]["cut_off"]["weight"] for arm in selection}
    assert weights["history 1024, margin 0"] > weights["history 1024, margin 2"]
    assert weights["bf16"] == weights["current"] == 0
    assert all(value == 0 for value in rows["rate", "bf16"]["apart"].values())
    curves = report["curves"]["rate"]
    assert [len(curve) for curve in curves.values()] == [8] * 4
    assert report["curves"]["batch"]["bf16"][:5] == curves["bf16"][:5]
    assert report["curves"]["batch"]["bf16"][5] != curves["bf16"][5]


def test_how_long_values_are_cut_off() -> None:
    run = Run([0.0] * 5, {"input": [0, 0.5, 0.5, 0, 0], "weight": [0] * 5, "grad_output": [0, 0, 0.1, 0, 0.3]})
    assert jumps._lasting(run, 1) == 2
    assert jumps._lasting(run, 3) == 0
    assert jumps._lasting(run, 4) == 1


def test_a_jump_needs_steps_after_it() -> None:
    with pytest.raises(JobError, match="leaves nothing to look at in 8 steps"):
        JumpsPlan(steps=8, jump=7)


@pytest.mark.parametrize(("name", "options"), [("parts", []), ("jumps", ["--jump", "1"])])
def test_the_commands(
    name: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = {"parts": parts, "jumps": jumps}[name]
    monkeypatch.setattr(module, "ARMS", dict(list(module.ARMS.items())[:4]))
    monkeypatch.setattr(jumps, "chart", lambda result: "<svg/>")
    small = ["--steps", "3", "--batch-size", "1", "--seq-len", "16", "--seeds", "1"]
    assert main([name, "--out", str(tmp_path), *small, *options]) == 0
    assert "current" in capsys.readouterr().out
    assert json.loads((tmp_path / f"{name}.json").read_text())["study"] == name
    assert main([name, "--help"]) == 0
    assert f"python -m benchmarks.studies {name}" in capsys.readouterr().out.partition("Examples:")[2]


def test_the_chart_shows_the_steps_around_the_jump() -> None:
    curves = {arm: [float(step) for step in range(60)] for arm in jumps.ARMS}
    result = {"plan": {"jump": 20}, "curves": dict.fromkeys(jumps.JUMPS, curves)}
    assert jumps.chart(result).count("<polyline") == 10
