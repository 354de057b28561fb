"""FP32 master weights may be the model's own parameters (`master_weights="model"`), or the optimizer may hold them
beside a BF16 model (`"optimizer"`). Training has the same bits either way, with one exception: under an FP8 recipe,
layers of the BF16 model quantize the master rounded to BF16, and layers of the FP32 model quantize the master
itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.train.checkpoint import read_checkpoint
from fp8serve.train.forward import Forward
from fp8serve.train.trainer import Trainer

from .conftest import Configure

RECIPES = ("delayed", "current", "rowwise", "block")


def train(configure: Configure, out: Path, **values: Any) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Returns the loss of each step, the final masters and the final optimizer moments."""
    events: list[dict[str, Any]] = []
    result = Trainer(configure(out=str(out), **values)).run(events.append)
    snapshot = read_checkpoint(Path(str(result.checkpoint)))
    return [e["train_loss"] for e in events if e["type"] == "metrics"], snapshot.model, snapshot.optimizer


def train_with_masters_in_model_and_optimizer(configure: Configure, out: Path, **values: Any) -> Any:
    return [train(configure, out / mode, master_weights=mode, **values) for mode in ("model", "optimizer")]


def assert_same(first: Any, second: Any) -> None:
    assert first[0] == second[0]
    for a, b in zip(first[1:], second[1:], strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in b)


def test_bf16_training_has_equal_bits_in_both_modes(configure: Configure, tmp_path: Path) -> None:
    in_model, in_optimizer = train_with_masters_in_model_and_optimizer(configure, tmp_path, recipe="bf16", accumulate=2)
    assert_same(in_model, in_optimizer)
    assert all(master.dtype == torch.float32 for master in in_optimizer[1].values())


@pytest.fixture
def round_masters_before_quantizing(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP32 masters in the model are rounded to BF16 before an FP8 layer quantizes them, as in the other mode."""
    original_init = Forward.__init__

    def rounding_init(self: Forward, *arguments: Any, **options: Any) -> None:
        original_init(self, *arguments, **options)
        self.uncast = set()

    monkeypatch.setattr(Forward, "__init__", rounding_init)


@pytest.mark.usefixtures("round_masters_before_quantizing")
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_training_has_equal_bits_once_both_modes_round_masters_to_bf16(
    configure: Configure, tmp_path: Path, recipe: str
) -> None:
    assert_same(*train_with_masters_in_model_and_optimizer(configure, tmp_path, recipe=recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_rounding_masters_to_bf16_changes_fp8_losses_by_less_than_one_percent(
    configure: Configure, tmp_path: Path, recipe: str
) -> None:
    """BF16 moves a weight by at most 2^-9 of itself, E4M3 by 2^-4: few FP8 values change, and losses stay within
    1 %."""
    in_model, in_optimizer = train_with_masters_in_model_and_optimizer(configure, tmp_path, recipe=recipe)
    assert in_model[0] == pytest.approx(in_optimizer[0], rel=1e-2)
    assert in_model[0] != in_optimizer[0]
