"""Data-parallel training: several processes write the same bytes as one process, also if their number changes when a
run is resumed."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8serve.errors import JobError
from fp8serve.ranks import Ranks
from fp8serve.server.finetuning.job_runner import TRAINING_COMMAND, training_command
from fp8serve.train import job_process
from fp8serve.train.config import TrainConfig
from fp8serve.train.job_process import EXIT_USAGE
from fp8serve.train.train_step import GradientExchange
from fp8serve.train.trainer import Trainer
from tests.fp8.distributed.ranks import on_ranks
from tests.patience import PATIENCE

from . import spoiled
from .conftest import TEXTS, Configure, write_lines
from .test_job_process import make_job
from .test_resume import every_file
from .test_trainer import after

pytestmark = pytest.mark.distributed

SHARED: dict[str, Any] = {"accumulate": 4, "batch_size": 2, "max_steps": 4, "template_date": "2026-01-31"}
CASES: dict[str, dict[str, Any]] = {
    "delayed": {},
    "bf16": {"recipe": "bf16"},
    "current": {"recipe": "current"},
    "nvfp4": {"recipe": "nvfp4"},
    "rowwise, masters in the optimizer": {"recipe": "rowwise", "master_weights": "optimizer"},
    "most recent, in FP8 attention": {"recipe_options": {"amax_compute_algo": "most_recent", "fp8_dpa": True}},
    "reduce_amax off": {"recipe_options": {"reduce_amax": False}},
    "adapter with dropout": {"lora_rank": 4, "lora_dropout": 0.5, "amax_history_len": None, "recipe": "rowwise"},
}
OF_FOUR = {
    "delayed",
    "reduce_amax off",
}  # also run on four processes; the other cases change nothing that ranks exchange


def _train(rank: int, world: int, config: str, stop_after: int | None) -> list[str]:
    types: list[str] = []
    stop = after(stop_after) if stop_after is not None and rank == world - 1 else lambda: False
    Trainer(TrainConfig.from_json(config), Ranks(rank, world)).run(lambda e: types.append(e["type"]), stop)
    return types


def train_on(world: int, config: TrainConfig, stop_after: int | None = None) -> list[list[str]]:
    """Runs `config` on `world` processes. Returns the types of the events of each."""
    return on_ranks(world, _train, world, config.to_json(), stop_after)


def hashes_of(out: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file that does not contain the path or machine of the run."""
    return {n: h for n, h in every_file(out).items() if not n.endswith(("manifest.json", "trainer.json", "run.lock"))}


def metrics_of(out: Path) -> Any:
    """Returns the progress that the last checkpoint records: metrics and position in the data."""
    newest = max((out / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
    return json.loads((newest / "trainer.json").read_text())["progress"]


@pytest.mark.smoke
def test_gradients_are_added_in_the_order_of_the_microbatches() -> None:
    """1e8 + 1 - 1e8 + 3 is 3 in FP32, and 4 in other orders. A gradient that no rank has is None, and -0.0 keeps its
    sign."""
    assert on_ranks(2, _exchange_gradients) == [[3.0, True, True]] * 2


def _exchange_gradients(rank: int) -> list[Any]:
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 2, 1)]
    exchange = GradientExchange(parameters, Ranks(rank, 2))
    for values in ([1e8, 1.0], [-1e8, 3.0], [-0.0, None]):
        if (value := values[rank]) is not None:
            parameters[0].grad = torch.full((3,), value)
            parameters[2].grad = torch.full((1,), -0.0)
        exchange.finish_round()
    exchange.finish_step()
    summed, never, zero = (parameter.grad for parameter in parameters)
    assert summed is not None
    assert zero is not None
    return [summed[2].item(), never is None, bool(zero.signbit())]


@pytest.mark.parametrize("case", CASES)
def test_several_processes_write_the_bytes_of_one(
    case: str, configure: Configure, tmp_path: Path, fp8_dir: Path, data: Path
) -> None:
    """The last step of an epoch has three microbatches, so that ranks get unequal shares."""
    options: dict[str, Any] = {**SHARED, "eval_data": [str(data)], "eval_every": 2, "save_every": 2, **CASES[case]}
    model = {"model": str(fp8_dir)} if case == "reduce_amax off" else {}
    one = tmp_path / "1"
    events = train_on(1, configure(**options, **model, out=str(one)))
    assert "model/training.json" in hashes_of(one)
    for count in (2, 4) if case in OF_FOUR else (2,):
        several = tmp_path / str(count)
        assert train_on(count, configure(**options, **model, out=str(several))) == [*events, *[[]] * (count - 1)]
        assert hashes_of(several) == hashes_of(one)
        assert metrics_of(several) == metrics_of(one)


def test_dpo_reference_scores_are_shared_among_processes(configure: Configure, tmp_path: Path) -> None:
    pairs = [{"prompt": t[:20], "chosen": t[20:40], "rejected": t[40:60]} for t in TEXTS[:9]]
    options = {**SHARED, "method": "dpo", "data": [str(write_lines(tmp_path / "pairs.jsonl", pairs))]}
    for n in (1, 2):
        train_on(n, configure(**options, out=str(tmp_path / str(n))))
    assert any(name.endswith("method.safetensors") for name in hashes_of(tmp_path / "1"))
    assert hashes_of(tmp_path / "1") == hashes_of(tmp_path / "2")


def test_a_run_may_be_resumed_on_another_number_of_processes(configure: Configure, tmp_path: Path) -> None:
    options = {**SHARED, "max_steps": 6}
    train_on(1, configure(**options, out=str(tmp_path / "through")))
    config = configure(**options, out=str(tmp_path / "changing"))
    for world, stop_after in ((2, 2), (4, 2), (1, None)):
        train_on(world, config, stop_after)
    last = [
        {n: h for n, h in hashes_of(tmp_path / run).items() if "step-6" in n or "model/" in n}
        for run in ("through", "changing")
    ]
    assert last[0] == last[1]


def test_more_processes_than_microbatches_are_refused(configure: Configure) -> None:
    config = configure(accumulate=2)
    with pytest.raises(
        JobError, match=r"Each process needs a microbatch, and a step has 2 \(accumulate\) for 3 processes"
    ):
        Trainer(config, Ranks(0, 3)).run()
    assert not Path(config.out).exists()


def under_torchrun(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [*launcher, *arguments]
    return subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=PATIENCE, env=environment
    )


@pytest.fixture
def finetune(tmp_path: Path, model_dir: Path, data: Path) -> list[str]:
    """The arguments of a command for two steps."""
    options = ["--data", str(data), "--out", str(tmp_path / "out"), "--batch-size", "2", "--seq-len", "64", "--json"]
    return ["finetune", str(model_dir), *options, "--max-steps", "2"]


def test_a_refusal_under_torchrun_is_printed_once(finetune: list[str]) -> None:
    refused = under_torchrun("fp8serve", *finetune, "--accumulate", "1")
    assert refused.returncode == 1
    assert refused.stderr.count("Each process needs a microbatch") == 1, refused.stderr


@pytest.mark.parametrize("more", [[], ["--fsdp"]], ids=["whole", "fsdp"])
def test_the_command_runs_under_torchrun_and_leaves_no_thread(finetune: list[str], more: list[str]) -> None:
    """A thread that frees a tensor during interpreter shutdown aborts the process."""
    result = under_torchrun("tests.train.threads_left", *finetune, "--accumulate", "2", *more)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["status"] == "succeeded"  # only rank 0 prints
    lines = [line for line in result.stderr.splitlines() if line.startswith("threads left:")]
    assert [line.count("', '") for line in lines] == [0, 0], result.stderr


def test_a_job_has_no_more_processes_than_a_step_has_microbatches(tmp_path: Path, configure: Configure) -> None:
    job = make_job(tmp_path / "job", configure, **SHARED)
    job_json = json.loads((job / "job.json").read_text())
    assert [job_process.usable_processes(job, available) for available in (1, 3, 9)] == [1, 3, 4]
    for change in ({"accumulate": 1}, {"lr": -1}):
        (job / "job.json").write_text(json.dumps({**job_json, **change}))
        assert job_process.usable_processes(job, 9) == 1
    assert training_command(1) == TRAINING_COMMAND
    assert training_command(3) == (*TRAINING_COMMAND, "--procs", "3")


def test_grpo_is_refused_on_several_processes(configure: Configure) -> None:
    config = dataclasses.replace(configure(accumulate=4), method="grpo", reward="reward.py")
    with pytest.raises(JobError, match="grpo runs in one process; start 1 process instead of 2"):
        Trainer(config, Ranks(0, 2)).run()


@pytest.mark.parametrize("arguments", [["--procs", "0"], ["--procs", "two"], ["--threads", "2"], ["--procs"]])
def test_invalid_procs_options_are_usage_errors(job_directory: Path, arguments: list[str]) -> None:
    assert job_process.main([*arguments, str(job_directory)]) == EXIT_USAGE


@pytest.fixture
def job_directory(tmp_path: Path, configure: Configure) -> Path:
    return make_job(tmp_path / "job", configure)


def _train_spoiled(rank: int, world: int, config: str) -> list[str]:
    spoiled.spoil()
    return _train(rank, world, config, None)


def test_two_processes_recover_from_divergence_like_one(configure: Configure, tmp_path: Path) -> None:
    types = []
    for world in (1, 2):
        going_back = {"on_divergence": "return", "save_every": 2, "max_steps": 10, "out": str(tmp_path / str(world))}
        config = configure(**{**SHARED, "accumulate": 2, **going_back})
        types.append(on_ranks(world, _train_spoiled, world, config.to_json()))
    assert types[1] == [types[0][0], []]
    one, two = (hashes_of(tmp_path / name) for name in ("1", "2"))
    assert one == two
    assert metrics_of(tmp_path / "2")["returns"] == 2
