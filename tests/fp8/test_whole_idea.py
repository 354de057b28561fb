"""examples/whole_idea.py does by hand what the library does: the same numbers, bit for bit."""

import importlib.util
from pathlib import Path
from typing import Any

import torch

from fp8serve import DelayedScaling, Linear, autocast

PATH = Path(__file__).resolve().parents[2] / "examples/whole_idea.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("whole_idea", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_layer_of_the_example_gives_the_library_s_bits() -> None:
    idea = example()
    by_hand, ours = idea.Fp8Linear(48, 32), Linear(48, 32, bias=False)
    by_hand.mode = "fp8"
    ours.load_state_dict({"weight": by_hand.weight.detach().clone()}, strict=False)
    for step in range(5):
        x = torch.randn(16, 48, generator=torch.Generator().manual_seed(step)) * 3**step
        pair = [x.clone().requires_grad_(), x.clone().requires_grad_()]
        with autocast(recipe=DelayedScaling(amax_history_len=16)):
            theirs = ours(pair[1])
        mine = by_hand(pair[0])
        assert torch.equal(mine, theirs)
        mine.square().sum().backward()
        theirs.square().sum().backward()
        idea.update(list(by_hand.states.values()))
        assert torch.equal(pair[0].grad, pair[1].grad)  # type: ignore[arg-type]
        assert torch.equal(by_hand.weight.grad, ours.weight.grad)
        by_hand.zero_grad()
        ours.zero_grad()


def test_the_example_is_read_in_one_sitting() -> None:
    assert len(PATH.read_text().splitlines()) <= 300
