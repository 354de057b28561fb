"""The tensors of a step: position and cache slot of every token, and the queries of the rows that are sampled."""

from typing import Any

import torch

from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.engine.scheduler import Work
from fp8serve.engine.sequence import Sequence
from fp8serve.engine.step import Queries, StepTensors, flatten

CPU = torch.device("cpu")


def sequence(token_ids: list[int], block_table: list[int]) -> Sequence:
    seq = Sequence.of(Request("name", tuple(token_ids), SamplingParams()))
    seq.block_table = block_table
    return seq


def lists(tensors: StepTensors | Queries, *names: str) -> list[Any]:
    return [getattr(tensors, name).tolist() for name in names]


QUERIES = ("query_starts", "context_lens", "block_tables")
CHUNKED = sequence([10, 11, 12, 13, 14, 15, 16], [5, 2])  # blocks of 4
PROMPT = sequence([20, 21, 22], [7])
DECODING = sequence([30, 31, 32, 33, 34, 35, 36, 37, 38], [1, 9, 4])


def test_decoding_chunks_and_prompts_are_concatenated() -> None:
    step = flatten([Work(DECODING, 8, 1), Work(CHUNKED, 2, 3), Work(PROMPT, 0, 3)], 4, CPU)
    assert lists(step, "token_ids", "positions", "slots") == [
        [38, 12, 13, 14, 20, 21, 22],
        [8, 2, 3, 4, 0, 1, 2],
        [16, 22, 23, 8, 28, 29, 30],
    ]
    assert lists(step.queries, *QUERIES) == [[0, 1, 4, 7], [9, 5, 3], [[1, 9, 4], [5, 2, 0], [7, 0, 0]]]


def test_each_sampled_sequence_has_one_query_in_the_last_layer() -> None:
    step = flatten([Work(DECODING, 8, 1), Work(CHUNKED, 2, 3), Work(PROMPT, 0, 3)], 4, CPU)
    assert step.last is not None
    assert step.last.tolist() == [0, 6]
    assert lists(step.last_queries, *QUERIES) == [[0, 1, 2], [9, 3], [[1, 9, 4], [7, 0, 0]]]


def test_a_chunk_that_ends_its_prompt_is_sampled() -> None:
    step = flatten([Work(CHUNKED, 2, 5)], 4, CPU)
    assert step.last is not None
    assert step.last.tolist() == [4]
    assert lists(step.last_queries, *QUERIES) == [[0, 1], [7], [[5, 2]]]


def test_a_step_without_sampled_rows() -> None:
    step = flatten([Work(CHUNKED, 0, 4)], 4, CPU)
    assert step.last is not None
    assert step.last.tolist() == []
    assert lists(step.last_queries, *QUERIES) == [[0], [], []]


def test_if_every_token_is_sampled_no_rows_are_selected() -> None:
    step = flatten([Work(DECODING, 8, 1), Work(PROMPT, 2, 1)], 4, CPU)
    assert step.last is None
    assert step.last_queries is step.queries


def test_a_single_prompt_token_that_is_not_sampled() -> None:
    step = flatten([Work(DECODING, 8, 1), Work(PROMPT, 1, 1)], 4, CPU)
    assert step.last is not None
    assert step.last.tolist() == [0]
