"""examples/whole_idea.py implements FP8 training in plain Python; it has the bits of the library."""

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
    example_layer, library_layer = idea.Fp8Linear(48, 32), Linear(48, 32, bias=False)
    example_layer.mode = "fp8"
    library_layer.load_state_dict({"weight": example_layer.weight.detach().clone()}, strict=False)
    for step in range(5):
        x = torch.randn(16, 48, generator=torch.Generator().manual_seed(step)) * 3**step
        inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
        with autocast(recipe=DelayedScaling(amax_history_len=16)):
            expected = library_layer(inputs[1])
        actual = example_layer(inputs[0])
        assert torch.equal(actual, expected)
        actual.square().sum().backward()
        expected.square().sum().backward()
        idea.update(list(example_layer.states.values()))
        assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
        assert torch.equal(example_layer.weight.grad, library_layer.weight.grad)
        example_layer.zero_grad()
        library_layer.zero_grad()


def test_the_example_has_at_most_300_lines() -> None:
    assert len(PATH.read_text().splitlines()) <= 300
