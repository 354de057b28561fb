"""Step directories: whole or absent, verified, swept, thinned; no pickle in them."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8serve.errors import JobError, MachineError
from fp8serve.train import checkpoint
from fp8serve.train.checkpoint import TrainState
from tests.model.readers import tensors_taken


def a_state(step: int) -> TrainState:
    generator = torch.Generator().manual_seed(step)
    return TrainState(
        model={"w": torch.randn(4, 4, generator=generator)},
        optimizer={"w.exp_avg": torch.randn(4, 4, generator=generator), "w.step": torch.tensor(float(step))},
        scaling={"w.input.scale": torch.tensor(2.0)},
        random={"cpu": torch.get_rng_state()},
        meta={"step": step, "progress": {"step": step}},
    )


def carry(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def write(root: Path, step: int) -> Path:
    return checkpoint.write_checkpoint(root, a_state(step), carry)


def test_round_trip_is_bit_exact(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    assert path == tmp_path / "step-5"
    assert checkpoint.find_damage(path) is None
    back, original = checkpoint.read_checkpoint(path), a_state(5)
    for kind in ("model", "optimizer", "scaling", "random"):
        assert getattr(back, kind).keys() == getattr(original, kind).keys()
        assert all(torch.equal(t, getattr(original, kind)[n]) for n, t in getattr(back, kind).items())
    assert back.step == 5
    assert {p.suffix for p in path.iterdir()} == {".json", ".safetensors"}


def test_a_reader_of_every_safetensors_takes_the_weights_only(tmp_path: Path) -> None:
    assert tensors_taken(write(tmp_path, 5)) == ["w"]


def test_same_state_same_bytes(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a", 3), write(tmp_path / "b", 3)
    assert (one / "manifest.json").read_bytes() == (two / "manifest.json").read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "trainer.json", "config.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_found_and_the_one_before_is_used(tmp_path: Path, name: str, damage: str) -> None:
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    hurt(newer / name, damage)
    reported: list[tuple[Path, str]] = []
    assert checkpoint.newest_complete(tmp_path, lambda p, why: reported.append((p, why))) == older
    assert reported == [(newer, "its files differ from its manifest")]
    assert checkpoint.list_checkpoints(tmp_path) == [older]
    assert (tmp_path / "step-2.broken").is_dir()
    with pytest.raises(JobError, match="not a usable training checkpoint"):
        checkpoint.require_complete(tmp_path / "step-2.broken")


def hurt(path: Path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        content[-1] ^= 1
        path.write_bytes(content)


def test_a_file_the_manifest_does_not_list_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / "extra.json").write_text("{}")
    assert checkpoint.find_damage(path) is not None


def test_a_checkpoint_of_another_version_is_reported_and_not_deleted(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "version": 2}))
    assert "version 2" in str(checkpoint.find_damage(path))
    assert checkpoint.newest_complete(tmp_path, lambda p, why: None) is None
    assert (tmp_path / "step-1.broken" / "model.safetensors").exists()


def test_keep_last_keeps_the_newest_checkpoints_in_numeric_order(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        write(tmp_path, step)
    checkpoint.keep_last(tmp_path, 2)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step-10", "step-100"]
    assert len(list(tmp_path.iterdir())) == 2


def test_sweep_removes_unfinished_directories_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, 1)
    for name in (".step-2.tmp-1-a", ".model.tmp-2-b", ".notes.tmp-x", "model"):
        (tmp_path / name).mkdir()
    assert sorted(checkpoint.remove_unfinished(tmp_path)) == [".model.tmp-2-b", ".step-2.tmp-1-a"]
    assert {p.name for p in tmp_path.iterdir()} == {"step-1", ".notes.tmp-x", "model"}


class Dead(BaseException):
    """Stands for a kill: no code of the product may catch it and continue."""


CALLS = ("fsync", "rename")


def count_calls(root: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    return die_at(10**9, root, monkeypatch)


def die_at(point: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Write a checkpoint that dies in the `point`-th call of fsync or rename; returns how many calls there were."""
    calls = 0

    def guard(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == point:
                raise Dead
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, guard(getattr(os, name)))
        with contextlib.suppress(Dead):
            write(root, 2)
    return calls


def test_dying_at_any_fsync_or_rename_leaves_a_whole_checkpoint_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = count_calls(tmp_path / "count", monkeypatch)
    assert points >= 8  # six files, the directory, the rename, the parent
    for point in range(1, points + 1):
        root = tmp_path / str(point)
        older = write(root, 1)
        die_at(point, root, monkeypatch)
        checkpoint.remove_unfinished(root)
        assert all(checkpoint.find_damage(p) is None for p in checkpoint.list_checkpoints(root))
        assert checkpoint.newest_complete(root, lambda p, why: None) in (older, root / "step-2")
        if not (root / "step-2").exists():
            write(root, 2)
        assert checkpoint.find_damage(root / "step-2") is None


def test_a_disk_that_cannot_be_written_is_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(MachineError, match="No space left on device"):
            write(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []
