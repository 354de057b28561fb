"""With `on_divergence="return"`, a run that diverges returns to its last good checkpoint, and continues with a larger
margin or with current scaling."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8serve.errors import JobError
from fp8serve.fp8.recipe import MAX_MARGIN
from fp8serve.train import checkpoint, checkpointing, job_process, train_step
from fp8serve.train.trainer import Trainer

from .conftest import Configure
from .spoiled import spoiled
from .test_job_process import events as log_of
from .test_job_process import make_job
from .test_resume import DIVERGES, assert_same_when_killed, every_file
from .test_trainer import after, hashes, spoil_gradients

RETURN = {"on_divergence": "return", "save_every": 2, "keep_last": 1, "max_steps": 12}


def with_code(events: list[dict[str, Any]], code: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("code") == code]


def steps(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(e.get("returns", 0), e["step"]) for e in events if e["type"] == "metrics"]


@pytest.fixture
def spoiled_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "accumulate_gradients", spoiled)


def test_a_diverging_run_tries_a_larger_margin_and_then_current_scaling(
    configure: Configure, spoiled_weights: None
) -> None:
    events: list[dict[str, Any]] = []
    result = Trainer(configure(**RETURN)).run(events.append)
    assert result.status == "succeeded"
    returns = [(e["from_step"], e["step"], e["returns"], e["tried"]) for e in with_code(events, "returned")]
    assert returns == [(6, 4, 1, "margin 2"), (10, 8, 2, "current scaling")]
    assert "rose from" in with_code(events, "returned")[0]["message"]
    assert steps(events) == [
        *((0, n) for n in range(1, 7)),
        *((1, n) for n in range(5, 11)),
        *((2, n) for n in range(9, 13)),
    ]
    record = json.loads((Path(result.model or "") / "training.json").read_text())
    assert (record["returns"], record["trained_with"]["recipe"]) == (2, "current")
    assert record["config"]["recipe"] == "delayed"  # the job's own recipe
    assert [path.name for path in checkpoint.list_checkpoints(Path(configure().out) / "checkpoints")] == ["step-12"]


@pytest.mark.slow
def test_returning_to_a_checkpoint_changes_only_margin_and_scales(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The scales change at once, by the factor of the new margin."""
    monkeypatch.setattr("tests.train.spoiled.WHEN", {0: 5})
    monkeypatch.setattr(train_step, "accumulate_gradients", spoiled)
    config = configure(**RETURN)
    Trainer(config).run(stop=after(4))
    scaling = checkpoint.read_checkpoint(Path(config.out) / "checkpoints" / "step-4").scaling
    now = checkpointing.config_after(config, 1)
    scaled = checkpointing.convert_scaling(scaling, config, now)
    assert (config.recipe_options, now.recipe_options) == ({}, {"margin": 2})
    for name, tensor in scaling.items():
        assert torch.equal(scaled[name], tensor / 4 if name.endswith(".scale") else tensor)
    events: list[dict[str, Any]] = []
    assert Trainer(config).run(events.append).status == "succeeded"
    assert [e["tried"] for e in with_code(events, "returned")] == ["margin 2"]


@pytest.mark.slow
def test_a_recovering_run_stopped_after_every_step_ends_with_the_same_bytes(
    configure: Configure, spoiled_weights: None, tmp_path: Path
) -> None:
    common = {**RETURN, "template_date": "2026-01-31"}
    whole = Trainer(configure(**common, out=str(tmp_path / "whole"))).run()
    config = configure(**common, out=str(tmp_path / "stopped"))
    for _ in range(40):
        if Trainer(config).run(stop=after(1)).status == "succeeded":
            break
    again = Trainer(config).run()
    assert every_file(Path(again.model or "")) == every_file(Path(whole.model or ""))
    assert hashes(Path(again.checkpoint or ""), ".safetensors") == hashes(Path(whole.checkpoint or ""), ".safetensors")


@pytest.mark.slow
def test_a_recovering_run_killed_at_random_ends_with_the_same_directory(
    configure: Configure, tmp_path: Path, spoiled_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOILED", "1")
    names = ("model/training.json", "checkpoints/step-12/manifest.json")
    options = {name: value for name, value in RETURN.items() if name != "save_every"}
    assert_same_when_killed(tmp_path, configure, names, **options)


@pytest.mark.slow
def test_a_resumed_job_logs_each_step_of_each_try_once(
    configure: Configure, tmp_path: Path, spoiled_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path / "job", configure, **RETURN)
    real, killed = checkpoint.write_checkpoint, []

    def dies_after_going_back(root: Path, state: Any, carry: Any) -> Path:
        if state.meta["progress"]["returns"] == 1 and not killed:
            killed.append(state.step)
            raise RuntimeError("killed")
        return real(root, state, carry)

    monkeypatch.setattr(checkpoint, "write_checkpoint", dies_after_going_back)
    assert job_process.main([str(job)]) == job_process.EXIT_FAILED
    assert killed == [6]
    assert job_process.main([str(job)]) == job_process.EXIT_DONE
    steps_logged = steps(log_of(job))
    assert steps_logged == sorted(set(steps_logged))
    assert {r for r, _ in steps_logged} == {0, 1, 2}
    assert [e["returns"] for e in with_code(log_of(job), "returned")] == [1, 2]


@pytest.mark.slow
def test_a_run_fails_after_two_returns_if_the_learning_rate_is_too_high(configure: Configure) -> None:
    events: list[dict[str, Any]] = []
    with pytest.raises(
        JobError, match=r"Training diverged: .*neither margin 2 nor current scaling helped; lower lr \(5"
    ):
        Trainer(configure(**DIVERGES, on_divergence="return", save_every=3)).run(events.append)
    assert [e["returns"] for e in with_code(events, "returned")] == [1, 2]
    assert not (Path(configure().out) / "model").exists()


@pytest.mark.slow
def test_repeated_nonfinite_gradients_make_the_run_return(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_gradients(monkeypatch, set(range(4, 15)))
    events: list[dict[str, Any]] = []
    result = Trainer(configure(**{**RETURN, "max_steps": 16, "save_every": 3})).run(events.append)
    (returned,) = with_code(events, "returned")
    assert (returned["from_step"], returned["step"], returned["returns"]) == (13, 12, 1)
    assert "10 steps in a row" in returned["message"]
    assert result.status == "succeeded"


@pytest.mark.slow
def test_a_failed_job_may_be_resumed_with_on_divergence_return(configure: Configure, spoiled_weights: None) -> None:
    """Under `"fail"`, checkpoints are not checked when they are written; the resumed run skips the bad ones."""
    with pytest.raises(JobError, match="Training diverged"):
        Trainer(configure(**{**RETURN, "on_divergence": "fail", "keep_last": 9})).run()
    events: list[dict[str, Any]] = []
    assert Trainer(configure(**RETURN)).run(events.append).status == "succeeded"
    assert [e["step"] for e in with_code(events, "returned")] == [10, 8, 6, 4, 8]
    assert [e["returns"] for e in with_code(events, "returned")] == [1, 1, 1, 1, 2]


@pytest.mark.slow
def test_on_divergence_does_not_change_a_healthy_run(configure: Configure, tmp_path: Path) -> None:
    results = [
        Trainer(configure(out=str(tmp_path / how), save_every=2, on_divergence=how, template_date="2026-01-31")).run()
        for how in ("fail", "return")
    ]
    weights = [every_file(Path(result.model or "")) for result in results]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"save_every": None}, "give save_every, too"),
        ({"recipe": "rowwise"}, "which the recipe 'rowwise' does not have"),
        ({"lora_rank": 4, "amax_history_len": None}, "which an adapter does not have"),
        ({"on_divergence": "stop"}, "on_divergence"),
    ],
)
def test_options_under_which_a_run_cannot_return_are_refused(
    configure: Configure, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(JobError, match=says):
        configure(**{**RETURN, **options})


def test_recovery_configs_lists_the_tries_in_order(configure: Configure) -> None:
    def tries(**options: Any) -> list[str]:
        return [checkpointing.describe_scaling(c) for c in checkpointing.recovery_configs(configure(**options))]

    assert tries() == ["margin 0", "margin 2", "current scaling"]
    assert tries(recipe_options={"margin": MAX_MARGIN - 1}) == ["margin 7", "margin 8", "current scaling"]
    assert tries(recipe_options={"margin": MAX_MARGIN}) == ["margin 8", "current scaling"]
    assert tries(recipe="block") == ["block scaling"]
    kept_options = {"fp8_dpa": True, "interval": 2, "power_2_scale": True, "amax_compute_algo": "most_recent"}
    current = checkpointing.config_after(configure(recipe_options=kept_options), 9)
    assert (current.recipe_options, current.amax_history_len) == ({"fp8_dpa": True}, None)
