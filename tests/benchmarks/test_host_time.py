"""The host's work per step is bounded by the number of function calls per sequence, which does not depend on the
machine."""

from pathlib import Path

import pytest

from benchmarks import host_time
from benchmarks.host_time import CONTEXT, TEXT, InstantDecoding
from fp8serve.engine.engine import Engine
from fp8serve.engine.graphs import Buffers
from fp8serve.train.scratch import write_random_model

MAX_CALLS = 12.0  # Python and C functions per greedy sequence and step
MAX_MIXED_CALLS = 12.0  # if the step also computes the prompt of a new request


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "model"
    return write_random_model(out, [TEXT], vocab_size=320, hidden_size=64, layers=1, context=CONTEXT)


def test_a_sequence_calls_few_functions_in_a_step(model_dir: Path) -> None:
    assert host_time.calls_per_sequence(model_dir) <= MAX_CALLS


def test_a_sequence_calls_few_functions_beside_a_prompt(model_dir: Path) -> None:
    assert host_time.calls_per_sequence(model_dir, mixed=True) <= MAX_MIXED_CALLS


def test_prompts_beside_sequences_that_decode_are_replayed(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, replayed = InstantDecoding(model_dir, 8, mixed=True, temperature=0.0), list[int]()
    fill = Buffers.fill_prompts
    monkeypatch.setattr(
        Buffers, "fill_prompts", lambda each, rows, size: (replayed.append(len(rows.tables)), fill(each, rows, size))
    )
    for _ in range(3):
        run.prepare_step()
        assert len(run.engine.step()) >= 7
    assert replayed == [8, 8, 8]


def test_more_work_for_a_sequence_is_detected(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_token = Engine._append_token

    def slower(engine: Engine, *arguments: object) -> object:
        for _ in range(10):
            len("work")
        return append_token(engine, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "_append_token", slower)
    assert host_time.calls_per_sequence(model_dir) > MAX_CALLS


def test_every_sequence_decodes_one_token_in_a_step(model_dir: Path) -> None:
    run = InstantDecoding(model_dir, 4, temperature=0.0)
    outputs = run.engine.step()
    assert [(output.token_ids, output.finish_reason) for output in outputs] == [((ord("a"),), None)] * 4
    assert run.engine.loaded.runner.graphs is not None


def test_figures_are_of_steps_and_of_sequences(model_dir: Path) -> None:
    figures = host_time.measure(model_dir, (1, 3), steps=2, rounds=1)
    assert set(figures) >= {"greedy engine", "greedy messages", "top_p engine", "top_p messages", "detokenize"}
    assert all(step > 0 for step in figures["greedy engine"]["step"])


def test_a_model_is_measured_with_and_without_flights(model_dir: Path) -> None:
    figures = host_time.measure_overlap(model_dir, "bf16", "cpu", (1, 2), steps=2, rounds=1)
    assert {name for name in figures if "batch" in name} == {
        f"{sampling} batch {batch}" for sampling in ("greedy", "top_p") for batch in (1, 2)
    }
    assert all(figures[name]["flights"] > 0 for name in figures if "batch" in name)
