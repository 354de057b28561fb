"""The experts that a router chooses, and their weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.fp8.ops import reference
from fp8serve.fp8.ops.mixture import Scores, routing_weights

Choose = Callable[..., tuple[Tensor, Tensor]]
pytestmark = pytest.mark.parametrize(
    "choose", [reference.choose_experts, torch.ops.fp8serve.choose_experts], ids=["reference", "op"]
)


def rule(
    count: int, scores: Scores = Scores.SOFTMAX, groups: int = 1, topk_group: int = 1, **rest: Any
) -> tuple[Any, ...]:
    return count, scores, groups, topk_group, rest.get("normalizes", False), rest.get("scale", 1.0), torch.float32


def test_only_the_best_groups_are_chosen_from(choose: Choose) -> None:
    logits = torch.tensor([[5.0, -9.0, 2.0, 1.9, 2.1, 1.7]])  # groups of two
    softmax, sigmoid = rule(2, groups=3), rule(2, Scores.SIGMOID, groups=3)
    assert choose(logits, None, *softmax)[0].tolist() == [[0, 1]]  # softmax ranks a group by its best expert
    assert choose(logits, None, *sigmoid)[0].tolist() == [[2, 3]]  # sigmoid ranks a group by its best two experts
    chosen, weights = choose(logits, torch.tensor([0.0, 0, 0, 0, 1, 1]), *sigmoid)
    assert chosen.tolist() == [[4, 5]]
    torch.testing.assert_close(weights, logits.sigmoid()[:, 4:])  # the correction changes the choice, not the weights


def test_the_first_of_equal_experts_are_chosen(choose: Choose) -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 3.0, 1.0], [2.0] * 6])
    assert choose(logits, None, *rule(4))[0].tolist() == [[1, 4, 0, 2], [0, 1, 2, 3]]
    assert choose(logits, None, *rule(3, groups=3, topk_group=2))[0].tolist() == [[1, 4, 0], [0, 1, 2]]


def test_nonfinite_logits_still_choose_valid_experts(choose: Choose) -> None:
    """A padding row may have any logits; its weights are not used, but its experts must be valid indices."""
    for value in (torch.nan, torch.inf, -torch.inf):
        chosen, weights = choose(torch.full((3, 8), value), None, *rule(8, groups=4, topk_group=4))
        assert chosen.tolist() == [list(range(8))] * 3
        assert weights.isnan().all()
    assert choose(torch.tensor([[1.0, 2.0, torch.nan, 3.0]]), None, *rule(2))[0].tolist() == [[2, 3]]


@pytest.mark.parametrize("scores", Scores)
@pytest.mark.parametrize("normalizes", [True, False])
def test_weights_are_those_of_the_formula_of_each_score(scores: Scores, normalizes: bool, choose: Choose) -> None:
    logits = torch.randn(20, 24, generator=torch.Generator().manual_seed(0))
    chosen, weights = choose(logits, None, *rule(5, scores, normalizes=normalizes, scale=2.5))
    best, places = logits.topk(5, -1)
    assert torch.equal(chosen, places)
    exact = {
        Scores.SOFTMAX: logits.double().softmax(-1).gather(-1, places),
        Scores.SIGMOID: best.double().sigmoid(),
        Scores.SOFTMAX_OF_CHOSEN: best.double().softmax(-1),
    }[scores]
    exact = exact / exact.sum(-1, keepdim=True) if normalizes else exact
    torch.testing.assert_close(weights.double(), 2.5 * exact, rtol=1e-6, atol=0)
    again = routing_weights(logits, chosen, scores, normalizes, 2.5, torch.float32)
    torch.testing.assert_close(weights, again, rtol=1e-6, atol=0)
