"""Both places for FP32 master weights give the same training, with one exception: if the model holds BF16, an FP8 layer
quantizes the weight rounded to BF16 and not the master itself. Without this rounding the bits are equal."""

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


def run(configure: Configure, out: Path, **values: Any) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, final masters and final moments."""
    events: list[dict[str, Any]] = []
    result = Trainer(configure(out=str(out), **values)).run(events.append)
    saved = read_checkpoint(Path(str(result.checkpoint)))
    return [e["train_loss"] for e in events if e["type"] == "metrics"], saved.model, saved.optimizer


def both(configure: Configure, out: Path, **values: Any) -> Any:
    return [run(configure, out / place, master_weights=place, **values) for place in ("model", "optimizer")]


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    for here, there in zip(one[1:], other[1:], strict=True):
        assert here.keys() == there.keys()
        assert all(torch.equal(here[name], there[name]) for name in there)


def test_in_bf16_the_trajectories_are_equal_bit_for_bit(configure: Configure, tmp_path: Path) -> None:
    in_model, in_optimizer = both(configure, tmp_path, recipe="bf16", accumulate=2)
    assert_same(in_model, in_optimizer)
    assert all(master.dtype == torch.float32 for master in in_optimizer[1].values())


@pytest.fixture
def rounded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 layers quantize the BF16 rounding of in-model masters, too."""
    begin = Forward.__init__

    def rounding(self: Forward, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        self.uncast = set()

    monkeypatch.setattr(Forward, "__init__", rounding)


@pytest.mark.usefixtures("rounded_first")
@pytest.mark.parametrize("recipe", RECIPES)
def test_in_fp8_bf16_rounding_is_the_only_difference(configure: Configure, tmp_path: Path, recipe: str) -> None:
    assert_same(*both(configure, tmp_path, recipe=recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_and_a_small_one(configure: Configure, tmp_path: Path, recipe: str) -> None:
    """BF16 moves a weight by at most 2^-9 of itself, E4M3 by 2^-4: few FP8 values change, and losses stay within
    1 %."""
    in_model, in_optimizer = both(configure, tmp_path, recipe=recipe)
    assert in_model[0] == pytest.approx(in_optimizer[0], rel=1e-2)
    assert in_model[0] != in_optimizer[0]
