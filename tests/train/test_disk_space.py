"""A run compares the free space of its disk with what it will write, before it begins."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fp8serve.calibration.pipeline import calibrate
from fp8serve.errors import MachineError
from fp8serve.model.checkpoint import open_checkpoint
from fp8serve.model.storage import files
from fp8serve.model.storage.shards import load_tensors
from fp8serve.train.checkpointing import required_disk_bytes
from fp8serve.train.config import TrainConfig
from fp8serve.train.trainer import Trainer, TrainResult

from .conftest import Configure

NOT_COUNTED = (".step", ".weight_scale", ".input_scale")
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def required(config: TrainConfig) -> int:
    return required_disk_bytes(open_checkpoint(config.model), config)


def bytes_on_disk(result: TrainResult) -> int:
    checkpoint, model = Path(str(result.checkpoint)), Path(str(result.model))
    paths = checkpoint / "model.safetensors", checkpoint / "optimizer.safetensors", model / "model.safetensors"
    tensors = {(path, name): tensor for path in paths for name, tensor in load_tensors(path).items()}
    return sum(tensor.nbytes for (_, name), tensor in tensors.items() if not name.endswith(NOT_COUNTED))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recipe": "bf16"},
        {"recipe": "rowwise", "master_weights": "optimizer"},
        pytest.param({"optimizer_states": "8bit"}, marks=needs_torchao),
    ],
)
def test_what_is_required_is_what_a_run_writes(configure: Configure, options: dict[str, Any]) -> None:
    config = configure(max_steps=1, **options)
    assert bytes_on_disk(Trainer(config).run()) == required(config)


def test_layers_in_high_precision_take_two_bytes(configure: Configure, model_dir: Path, tmp_path: Path) -> None:
    calibrate(model_dir, out=tmp_path / "fp8", samples=4, seq_len=16, skip=["*.down_proj"])
    config = configure(max_steps=1, model=str(tmp_path / "fp8"))
    assert bytes_on_disk(Trainer(config).run()) == required(config) > required(configure(max_steps=1))


def test_checkpoints_that_exist_at_once_are_counted(configure: Configure) -> None:
    one = required(configure(max_steps=6))
    sizes = [required(configure(max_steps=6, save_every=1, keep_last=count)) for count in (1, 2, 3)]
    checkpoint = sizes[1] - sizes[0]
    assert sizes == [checkpoint * count for count in (2, 3, 4)]
    assert checkpoint < one < 2 * checkpoint  # with the result
    assert required(configure(max_steps=6, save_every=3)) == one + checkpoint


def test_a_run_that_may_stop_early_needs_room_for_fewer_checkpoints(configure: Configure, tmp_path: Path) -> None:
    data = {"eval_data": configure().data, "eval_every": 1}
    four, two = (required(configure(max_steps=steps, save_every=1, keep_last=4)) for steps in (4, 2))
    options = {"save_every": 1, "keep_last": 4, **data}
    assert required(configure(max_steps=4, patience=1, **options)) == two < four
    assert required(configure(max_steps=4, patience=9, **options)) == four


def test_a_run_that_does_not_fit_is_refused_before_it_begins(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(max_steps=1)
    for missing in (1, 0):
        free = required(config) - missing
        monkeypatch.setattr(files.shutil, "disk_usage", lambda _, free=free: Usage(10, 10, free))
        if missing:
            with pytest.raises(MachineError, match="make room, or choose another disk"):
                Trainer(config).run()
            assert not list(Path(config.out).glob("checkpoints/*"))
    assert Trainer(config).run().status == "succeeded"
