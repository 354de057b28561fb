"""The sampler: its distribution, penalties, bans and log-probabilities; a row of a batch equals that row sampled
alone."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from fp8serve.engine import sampler
from fp8serve.engine.flights import HostCopy
from fp8serve.engine.request import Request
from fp8serve.engine.sampler import sample, uniform
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.engine.sequence import Sequence


def sequence(prompt: list[int] | None = None, generated: tuple[int, ...] = (), **params: Any) -> Sequence:
    seq = Sequence.of(Request("r", tuple(prompt or [0]), SamplingParams(**{"seed": 0, **params})))
    seq.token_ids += generated
    return seq


def probabilities(logits: list[float], **params: Any) -> list[float]:
    """Returns the frequency of each token over draws with many seeds."""
    seqs = [sequence(**{**params, "seed": seed}) for seed in range(4000)]
    rows = torch.tensor(logits).expand(len(seqs), -1).clone()
    counts = Counter(item.token_id for item in sample(rows, seqs, ()))
    return [counts[token] / len(seqs) for token in range(len(logits))]


LOGITS = [math.log(p) for p in (0.4, 0.3, 0.15, 0.1, 0.05)]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"temperature": 0}, [1, 0, 0, 0, 0]),
        ({"temperature": 0.5}, [0.16 / 0.285, 0.09 / 0.285, 0.0225 / 0.285, 0.01 / 0.285, 0.0025 / 0.285]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.71}, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0, 0]),
        ({"min_p": 0.3}, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        (
            {"top_k": 2, "top_p": 0.5},
            [1, 0, 0, 0, 0],
        ),  # top_p applies to the tokens that top_k left: 0.4 of 0.7 is more than half
    ],
)
def test_draws_follow_the_distribution(params: dict[str, Any], expected: list[float]) -> None:
    actual = probabilities(LOGITS, **params)
    assert actual == pytest.approx(expected, abs=0.025)
    assert [p == 0 for p in actual] == [p == 0 for p in expected]


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-300, 1e-9, 1e-5])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_tiny_temperature_takes_the_most_probable_token(temperature: float, top_p: float) -> None:
    seqs = [sequence(temperature=temperature, top_p=top_p, seed=seed) for seed in range(50)]
    rows = torch.tensor([-40.0, 1.0, 60.0, 59.0]).expand(len(seqs), -1).clone()
    assert {item.token_id for item in sample(rows, seqs, ())} == {2}


def test_ties_at_the_border_of_top_k_go_to_smaller_ids() -> None:
    assert [p > 0 for p in probabilities([0.0, 1.0, 0.0, 0.0], top_k=3)] == [True, True, True, False]


def test_penalties() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, 1.0]])
    seq = sequence([0, 1], (2, 2), repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    sampler._apply_penalties(logits, sampler.SamplingPlan([seq], logits.device))
    assert logits.tolist() == [[1.0, -4.0, 1.0 - 0.5 - 0.5, 1.0]]


def test_end_of_text_is_banned_until_min_tokens() -> None:
    logits = [5.0, 4.0, 3.0]
    params = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (1,)}
    early, ready = sequence([2], (2,), **params), sequence([2], (2, 2), **params)
    results = sample(torch.tensor([logits, logits]), [early, ready], (0,))
    assert [item.token_id for item in results] == [2, 0]


def test_with_ignore_eos_end_of_text_is_an_ordinary_token() -> None:
    seq = sequence(temperature=0, min_tokens=2, ignore_eos=True)
    assert sample(torch.tensor([[5.0, 4.0]]), [seq], (0,))[0].token_id == 0


def test_a_bias_is_added_only_to_its_tokens() -> None:
    seqs = [sequence(temperature=0, logit_bias={"1": 2.5, 2: -100}, logprobs=1), sequence(temperature=0)]
    results = sample(torch.tensor([[3.0, 1.0, 5.0], [3.0, 1.0, 5.0]]), seqs, ())
    assert [item.token_id for item in results] == [1, 2]
    assert results[0].logprob is not None
    assert results[0].logprob.top[0][0] == 2  # logprobs are without the bias


def test_a_token_listed_twice_gets_its_bias_once() -> None:
    biased = sequence(temperature=0, logit_bias=[(1, 5.0), (1, 1.5)])
    assert [sample(torch.tensor([[3.0, x]]), [biased], ())[0].token_id for x in (1.0, 2.0)] == [0, 1]


def test_bad_words_and_an_early_end_are_banned_together() -> None:
    class Words:
        def tokens(self) -> Any:
            return np.array([0, 2])

    early, free = sequence(temperature=0, min_tokens=2), sequence(temperature=0)
    early.ban = free.ban = Words()  # type: ignore[assignment]
    results = sample(torch.tensor([[9.0, 1.0, 8.0], [9.0, 1.0, 8.0]]), [early, free], (1,))
    assert [item.token_id for item in results] == [1, 1]


def test_logprobs_are_those_of_the_model() -> None:
    seq = sequence([0], (0,), temperature=0, presence_penalty=2.0, logprobs=2)
    (result,) = sample(torch.tensor([LOGITS]), [seq], ())
    assert result.token_id == 1
    assert result.logprob is not None
    assert result.logprob.logprob == pytest.approx(math.log(0.3))
    assert [token for token, _ in result.logprob.top] == [0, 1]
    assert result.logprob.top[0][1] == pytest.approx(math.log(0.4))


def test_only_the_row_with_nan_logits_fails() -> None:
    logits = torch.tensor([LOGITS, [math.nan] * 5, [math.inf, 0.0, 0.0, 0.0, 0.0]])
    seqs = [sequence(temperature=0, logprobs=0) for _ in range(3)]
    assert [item.token_id for item in sample(logits, seqs, ())] == [0, None, None]


def test_the_uniform_numbers_are_uniform_and_belong_to_seed_and_position() -> None:
    numbers = [uniform(seed, position) for seed in range(40) for position in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.02)


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 3, 50]),
        "top_p": st.sampled_from([0.1, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "logprobs": st.sampled_from([None, 0, 5]),
        "min_tokens": st.sampled_from([0, 9]),
        "logit_bias": st.sampled_from([(), ((1, 3.0), (3, -100.0)), ((2, 0.1),)]),
        "seed": st.integers(0, 5),
    },
)


@settings(max_examples=60)
@given(st.lists(PARAMS, min_size=2, max_size=7), st.integers(0, 1000), st.sampled_from([5, 37, 301]))
def test_a_row_does_not_depend_on_other_rows(options: list[dict[str, Any]], seed: int, vocab: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    # rounded, so that there are ties
    logits = torch.randn(len(options), vocab, generator=rng).mul(2).bfloat16().float()
    seqs = [sequence([1, 2], (3, 4, 4)[: i % 4], **option) for i, option in enumerate(options)]
    together = sample(logits.clone(), seqs, (0,))
    alone = [sample(logits[i : i + 1].clone(), [seq], (0,))[0] for i, seq in enumerate(seqs)]
    assert together == alone


class SyncCounter(TorchFunctionMode):
    """Counts the calls that would synchronize with a device."""

    WAITING = frozenset({"tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero"})

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.WAITING or (name in ("__getitem__", "__setitem__") and self._has_list(args[1])):
            self.waits.append(name)
        return func(*args, **(kwargs or {}))

    def _has_list(self, index: Any) -> bool:
        """Returns whether `index` contains a Python list, which torch would copy to the device with a
        synchronization."""
        return any(isinstance(part, list) for part in (index if isinstance(index, tuple) else (index,)))


def test_launch_never_synchronizes_and_read_waits_for_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sampling option is in use. On a CPU, rows with NaN are found first; on a GPU, they are overwritten."""
    monkeypatch.setattr(sampler, "_waits_for_device", lambda x: True)
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"top_p": 0.8, "min_p": 0.01, "logprobs": 3},
        {"top_k": 5, "repetition_penalty": 1.2},
        {"min_tokens": 3, "stop_token_ids": (4,), "logprobs": 0},
        {"temperature": 0.7, "presence_penalty": 0.5, "logit_bias": {7: 1.5}},
    ]
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    logits[4, 3] = torch.nan
    seqs = [sequence([1, 2], (3,), **option) for option in options]
    copies = list[torch.Tensor]()

    class Copy(HostCopy):
        def read(self) -> torch.Tensor:
            copies.append(super().read())
            return copies[-1]

    monkeypatch.setattr(sampler, "HostCopy", Copy)
    with SyncCounter() as watch:
        launched = sampler.launch_sampling(logits.clone(), sampler.SamplingPlan(seqs, logits.device), (0,))
    assert (watch.waits, copies) == ([], [])
    tokens, logprobs = launched.read()
    assert len(copies) == 1
    monkeypatch.undo()
    expected = sample(logits.clone(), seqs, (0,))
    assert expected == [
        sampler.Sampled(None if token < 0 else token, logprobs.get(row)) for row, token in enumerate(tokens)
    ]
    assert expected[4].token_id is None
    assert sorted(logprobs) == [1, 3]
