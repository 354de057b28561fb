"""Processes that calibrate together write the bytes of one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8serve.calibration.pipeline import calibrate
from fp8serve.cli import main
from fp8serve.errors import DataError, Fp8ServeError
from fp8serve.fp8.recipe import DelayedScaling, Recipe, from_name
from fp8serve.ranks import Ranks
from tests.fp8.distributed.ranks import on_ranks
from tests.model.encoders import BERT, make
from tests.patience import PATIENCE

from .test_stage_results import content

pytestmark = pytest.mark.distributed

SMALL = {"samples": 10, "seq_len": 32, "batch_size": 2}  # five batches, which the ranks cannot share equally
CASES: dict[str, tuple[Recipe | None, dict[str, object]]] = {
    "delayed": (DelayedScaling(amax_history_len=4), {}),
    "delayed smoothed": (DelayedScaling(), {"smoothing": 0.5}),
    "delayed gptq": (DelayedScaling(), {"rounding": "gptq"}),
    "rowwise gptq": (from_name("rowwise"), {"rounding": "gptq"}),
    "kv-cache": (from_name("rowwise"), {"kv_cache": True}),
    "most recent": (DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent"), {"kv_cache": True}),
    "gradients": (DelayedScaling(amax_history_len=3), {"gradients": True}),
}
OF_THREE = {"delayed", "rowwise gptq"}


def run(model: str, out: str, case: str, ranks: Ranks) -> int:
    recipe, options = CASES[case]
    report = calibrate(model, out=out, recipe=recipe, ranks=ranks, **SMALL | options)  # type: ignore[arg-type]
    return report.data.batches


def _calibrate_on_rank(rank: int, world: int, model: str, out: str, case: str) -> int:
    return run(model, out, case, Ranks(rank, world))


@pytest.mark.parametrize("case", CASES)
def test_several_processes_write_the_bytes_of_one(case: str, model_dir: Path, tmp_path: Path) -> None:
    world = 3 if case in OF_THREE else 2
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # like each rank
    try:
        run(str(model_dir), str(tmp_path / "one"), case, Ranks())
    finally:
        torch.set_num_threads(before)
    counts = on_ranks(world, _calibrate_on_rank, world, str(model_dir), str(tmp_path / "many"), case)
    assert counts == [5] * world
    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many", "one"]


def _fails(rank: int) -> list[str]:
    ranks = Ranks(rank, 3)
    try:
        with ranks.shared_errors():
            if rank == 1:
                raise DataError("The second share is damaged.")
    except Fp8ServeError as error:
        return [type(error).__name__, str(error)]
    return []


@pytest.mark.smoke
def test_an_error_on_one_rank_is_an_error_on_all() -> None:
    assert on_ranks(3, _fails) == [["DataError", "The second share is damaged."]] * 3


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fp8serve"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *start, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)


def test_the_command_under_torchrun(model_dir: Path, tmp_path: Path) -> None:
    options = ["--samples", "4", "--seq-len", "24", "--batch-size", "1", "--json"]
    process = torchrun("calibrate", str(model_dir), "--out", str(tmp_path / "out"), *options)
    assert process.returncode == 0, process.stderr
    assert len(re.findall(r'"perplexity"', process.stdout)) == 1, process.stdout  # only rank 0 prints
    again = torchrun("calibrate", str(model_dir), "--out", str(tmp_path / "out"), *options)
    assert again.returncode == 1
    assert again.stderr.count("is not empty; choose another output directory") == 1, again.stderr
    assert "internal error" not in again.stderr


def test_an_encoder_under_torchrun_is_written_once(tmp_path: Path) -> None:
    make(tmp_path / "encoder", BERT)
    options = ["--samples", "4", "--seq-len", "24", "--batch-size", "1", "--rounding", "gptq", "--json"]
    arguments = ["calibrate", str(tmp_path / "encoder"), *options, "--out"]
    done = torchrun(*arguments, str(tmp_path / "many"))
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r'"quality"', done.stdout)) == 1, done.stdout
    assert main([*arguments, str(tmp_path / "one")]) == 0
    assert content(tmp_path / "many") == content(tmp_path / "one")


def test_several_processes_cannot_read_standard_input(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Standard input \('-'\) cannot be read by several processes"):
        calibrate(model_dir, out=tmp_path / "out", data="-", ranks=Ranks(1, 2))
