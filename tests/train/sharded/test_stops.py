"""Sharded runs that diverge, stop, are killed, or find a full disk end with the bytes of one process."""

import errno
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import MachineError
from fp8serve.model.storage import shards
from fp8serve.ranks import Ranks
from fp8serve.train.config import TrainConfig
from fp8serve.train.trainer import Trainer
from tests.fp8.distributed.ranks import on_ranks
from tests.train.conftest import Configure
from tests.train.test_job_process import events, finish, make_job
from tests.train.test_killed_groups import assert_same, assert_stops_by_a_signal, metrics_in, run_shared
from tests.train.test_processes import SHARED, _train_spoiled, hashes_of, metrics_of, train_on

pytestmark = pytest.mark.distributed


def test_a_diverging_run_returns_to_a_checkpoint(configure: Configure, tmp_path: Path) -> None:
    types = []
    for world in (1, 2):
        back = {"on_divergence": "return", "save_every": 2, "max_steps": 10, "out": str(tmp_path / str(world))}
        config = configure(**{**SHARED, "accumulate": 2, **back}, fsdp=world > 1)
        types.append(on_ranks(world, _train_spoiled, world, config.to_json()))
    assert types[1][1] == []
    assert hashes_of(tmp_path / "1") == hashes_of(tmp_path / "2")
    assert metrics_of(tmp_path / "2")["returns"] == 2


def test_a_run_may_be_resumed_sharded_or_not_on_any_number_of_processes(configure: Configure, tmp_path: Path) -> None:
    options: dict[str, Any] = {**SHARED, "max_steps": 8}
    train_on(1, configure(**options, out=str(tmp_path / "through")))
    plan = ((2, True, 2), (4, False, 2), (1, True, 2), (2, True, None))
    for world, fsdp, stop_after in plan:
        train_on(world, configure(**options, fsdp=fsdp, out=str(tmp_path / "changing")), stop_after)
    last = [
        {n: h for n, h in hashes_of(tmp_path / run).items() if "step-8" in n or n == "model/model.safetensors"}
        for run in ("through", "changing")
    ]
    assert len(last[0]) > 5
    assert last[0] == last[1]


@pytest.mark.smoke
def test_a_full_disk_is_an_error_on_all_ranks(configure: Configure, tmp_path: Path) -> None:
    config = configure(accumulate=2, fsdp=True, max_steps=2)
    errors = on_ranks(2, _full, config.to_json())
    assert errors[0] == errors[1]
    assert "step-2 could not be written: No space left on device" in errors[0]
    assert list((Path(config.out) / "checkpoints").iterdir()) == []


def _full(rank: int, config: str) -> str:
    def refuse(*call: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    shards._write_parts = refuse
    with pytest.raises(MachineError) as refusal:
        Trainer(TrainConfig.from_json(config), Ranks(rank, 2)).run()
    return str(refusal.value)


def test_a_signal_stops_a_sharded_group_at_a_checkpoint(tmp_path: Path, configure: Configure) -> None:
    job = make_job(tmp_path / "job", configure, **{**SHARED, "max_steps": 100_000}, save_every=None, fsdp=True)
    assert_stops_by_a_signal(job)
    divided = next(e["message"] for e in events(job) if e.get("code") == "sharded")
    assert divided.endswith("are sharded over 2 processes (FSDP2); layers are gathered in FP8")


@pytest.mark.slow
def test_sharded_processes_killed_at_random_write_the_directory_of_one(tmp_path: Path, configure: Configure) -> None:
    """Kills a rank, after which the group restarts it, and the parent process of the ranks."""
    whole, job = run_shared(tmp_path, configure, max_steps=12, save_every=2, keep_last=2, fsdp=True)
    assert finish(job, "group", "7") == 2
    assert_same(whole, job)
    losses = [[(e["step"], e["train_loss"]) for e in metrics_in(directory)] for directory in (whole, job)]
    assert losses[0] == losses[1]
