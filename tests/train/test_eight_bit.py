"""8-bit optimizer states: their size, the loss of a run with them, and the bytes of a resumed run."""

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fp8serve.errors import JobError, MachineError
from fp8serve.model.config.decoder import read_config
from fp8serve.train.memory import memory_estimate
from fp8serve.train.optimizer import Optimizer
from fp8serve.train.trainer import Trainer
from fp8serve.train.validate import validate
from tests.train.conftest import Configure
from tests.train.test_resume import assert_same_when_killed

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


def test_without_torchao_an_error_names_the_extra(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8serve.train.events.find_spec", lambda name: None)
    config = configure(optimizer_states="8bit")
    for call in (lambda: Trainer(config).run(), lambda: validate(config)):
        with pytest.raises(MachineError, match=r"need torchao, .* pip install 'fp8serve\[torchao\]'"):
            call()
    assert not Path(config.out).exists()


@needs_torchao
@pytest.mark.parametrize("place", ["model", "optimizer"])
def test_moments_of_matrices_take_one_byte_and_the_estimate_counts_them(
    configure: Configure, place: str, model_dir: Path
) -> None:
    config: Any = configure(optimizer_states="8bit", master_weights=place)
    parameters = {"w": nn.Parameter(torch.ones(128, 64)), "norm": nn.Parameter(torch.ones(64))}
    optimizer = Optimizer(parameters, config)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.accumulate_in_fp32()
    optimizer.step(1e-3)
    state = optimizer.state()
    assert (state["w.exp_avg_codes"].dtype, state["w.exp_avg_codes"].shape) == (torch.uint8, (128, 64))
    assert state["w.exp_avg_sq_scale"].shape == (128 * 64 // 256,)
    assert state["norm.exp_avg"].dtype == torch.float32
    plans = [memory_estimate(read_config(model_dir), c, 0, 0.0)["weights"] for c in (config, configure())]
    assert plans[0] < plans[1]


@needs_torchao
def test_a_restored_optimizer_has_the_same_bits(configure: Configure) -> None:
    torch.manual_seed(0)
    config = configure(optimizer_states="8bit")
    first = {"w": nn.Parameter(torch.randn(128, 64)), "b": nn.Parameter(torch.randn(64))}
    one = Optimizer(first, config)

    def steps(optimizer: Optimizer, parameters: dict[str, nn.Parameter], seeds: range) -> None:
        for seed in seeds:
            torch.manual_seed(seed)
            for parameter in parameters.values():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step(1e-2)

    steps(one, first, range(3))
    second = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in first.items()}
    other = Optimizer(second, config)
    other.load({n: p.detach().clone() for n, p in one.masters.items()}, {k: v.clone() for k, v in one.state().items()})
    steps(one, first, range(3, 6))
    steps(other, second, range(3, 6))
    for name in first:
        assert torch.equal(first[name], second[name])
    assert all(torch.equal(value, other.state()[key]) for key, value in one.state().items())


@needs_torchao
def test_losses_are_within_two_percent_of_fp32_states(configure: Configure, tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {}
    for states in ("fp32", "8bit"):
        config = configure(optimizer_states=states, out=str(tmp_path / states), max_steps=12)
        values = losses.setdefault(states, [])
        Trainer(config).run(lambda event, values=values: values.append(event.get("train_loss")))
    last = {states: [loss for loss in values if loss is not None] for states, values in losses.items()}
    assert last["8bit"][-1] < 0.9 * last["8bit"][0]
    assert last["8bit"][-1] == pytest.approx(last["fp32"][-1], rel=0.02)
    assert last["8bit"] != last["fp32"]
    tensors = load_file(tmp_path / "8bit" / "checkpoints" / "step-12" / "optimizer.safetensors")
    assert any(name.endswith("q_proj.weight.exp_avg_codes") for name in tensors)


@needs_torchao
@pytest.mark.slow
def test_a_killed_and_resumed_run_writes_the_same_files(tmp_path: Path, configure: Configure) -> None:
    names = ("model/scales.safetensors", "checkpoints/step-8/optimizer.safetensors")
    assert_same_when_killed(tmp_path, configure, names, max_steps=8, keep_last=2, optimizer_states="8bit")


@needs_torchao
def test_resuming_with_another_kind_of_states_is_refused(configure: Configure) -> None:
    config = configure(optimizer_states="8bit", max_steps=2, save_every=1)
    Trainer(config).run()
    with pytest.raises(JobError, match="was written with optimizer_states='8bit'"):
        Trainer(dataclasses.replace(config, optimizer_states="fp32", max_steps=4)).run()
