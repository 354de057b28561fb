"""The kernels of a mixture of experts refuse wrong arguments, and grouped_mlp has the bits of its parts."""

import pytest
import torch

from fp8serve.fp8.ops import cases, packing
from fp8serve.fp8.ops.mixture import Scores, grouped_mlp
from tests.csrc.helpers import assert_bits_equal

OPS = torch.ops.fp8serve


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 7}, "count: is 7, must be at most 6"),
        ({"groups": 4}, "groups: is 4, must divide E = 6"),
        ({"groups": 3, "kept": 1, "count": 3}, "count: is 3, must be at most 2"),
        ({"groups": 6, "kept": 2, "scores": Scores.SIGMOID}, "of groups of two experts or more"),
        ({"scores": 3}, "scores: is 3, must be 0 to 2"),
        ({"correction": torch.zeros(5)}, "correction: dim 0 is 5, must be E = 6"),
        ({"dtype": torch.int64}, "dtype: must be float, bfloat16 or half"),
    ],
)
def test_wrong_arguments_of_choose_experts_are_refused(change, message):
    arguments = {"logits": torch.zeros(2, 6), "correction": None, "count": 2, "scores": Scores.SOFTMAX, "groups": 1}
    arguments |= {"kept": 1, "normalizes": True, "scale": 1.0, "dtype": torch.float32} | change
    with pytest.raises(RuntimeError, match=message):
        OPS.choose_experts(*arguments.values())


@pytest.mark.smoke
@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("grouped_mlp"), ids=lambda case: case.name)
def test_a_mixture_in_one_call_has_the_bits_of_its_parts(level, case):
    one, other = case.make(), case.make()
    actual = OPS.grouped_mlp(*one)
    assert_bits_equal(actual, grouped_mlp(OPS, *other))
    assert torch.equal(one[3], other[3])  # rows of each expert
    packed = [packed_weights(w) if i in (4, 7) else w for i, w in enumerate(case.make())]
    assert_bits_equal(OPS.grouped_mlp(*packed), actual)


def packed_weights(weights):
    """Packs weights [E, N, K] to [E, N / 16, K / 8, 128]."""
    out = torch.empty_like(weights).view(len(weights), *packing.packed_shape(*weights.shape[1:]))
    for weight, into in zip(weights, out, strict=True):
        OPS.pack_weight(weight, into)
    return out


@pytest.mark.parametrize("width", [1, 64])
def test_the_width_of_a_scale_must_be_0_or_128(width):
    arguments = list(cases("grouped_mlp")[0].make())
    arguments[-2] = width
    with pytest.raises(RuntimeError, match=f"width: is {width}, must be 0 or 128"):
        OPS.grouped_mlp(*arguments)


def test_an_expert_that_does_not_exist_is_refused():
    arguments = list(cases("grouped_mlp")[0].make())
    arguments[1] = arguments[1] + 16
    with pytest.raises(RuntimeError, match=r"names expert \d+, must be below E = 16"):
        OPS.grouped_mlp(*arguments)
