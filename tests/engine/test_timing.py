"""Timing of a request: seconds of queueing, prefill and decoding since its arrival, measured by the engine."""

import time
from pathlib import Path

import pytest

from fp8serve.engine.engine import Engine
from fp8serve.engine.output import RequestOutput, Timing
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from tests.engine.tiny import write_model

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("timing") / "tiny")


def run(engine: Engine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def test_only_the_first_and_the_last_output_have_timing(model: Path) -> None:
    engine = Engine(model, recipe="bf16", max_num_seqs=1)
    began = time.time()
    for name in ("a", "b"):
        engine.add_request(Request(name, tuple(range(1, 30)), PARAMS))
    outputs = run(engine)
    ended = time.time()
    for name in ("a", "b"):
        timed = [output.timing is not None for output in outputs if output.request_id == name]
        assert timed == [True, False, False, False, False, True]
    first, last = (next(o.timing for o in outputs if o.request_id == name and o.finish_reason) for name in ("a", "b"))
    assert first is not None
    assert last is not None
    for timing in (first, last):
        assert timing.prefill is not None
        assert timing.decode is not None
        assert min(timing.prefill, timing.decode) > 0
        assert began - 1 <= timing.arrived <= ended
        assert timing.queue + timing.inference <= ended - began + 1
    assert last.queue > first.inference  # with max_num_seqs=1 the second request waits for the end of the first


def test_a_phase_that_did_not_start_is_none(model: Path) -> None:
    engine = Engine(model, recipe="bf16", max_num_seqs=1)
    engine.add_request(Request("waits", tuple(range(1, 30)), PARAMS), arrived=time.monotonic() - 5)
    output = engine.abort("waits")
    assert output is not None
    assert output.timing is not None
    assert output.timing.queue >= 5
    assert (output.timing.prefill, output.timing.decode) == (None, None)


def test_timing_survives_json() -> None:
    output = RequestOutput("a", timing=Timing(1.5, 0.25, 0.5))
    again = RequestOutput.from_json(output.to_json())
    assert again.timing == output.timing == Timing(1.5, 0.25, 0.5, None)
    assert "timing" not in RequestOutput("a").to_json()


def test_stats_name_the_requests_in_prefill(model: Path) -> None:
    engine = Engine(model, recipe="bf16", max_num_seqs=1, max_batch_tokens=16)
    for name in ("a", "b"):
        engine.add_request(Request(name, tuple(range(1, 30)), PARAMS))
    ids = [engine.stats()["prefilling"]]
    for _ in range(2):
        engine.step()
        ids.append(engine.stats()["prefilling"])
    assert ids == [[], ["a"], []]  # 16 of 29 prompt tokens are computed in the first step, the others in the second
    run(engine)
    assert engine.stats()["prefilling"] == []
