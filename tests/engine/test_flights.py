"""Async scheduling: the engine launches a step before it has read the results of the previous one. A stand-in for a GPU
records launches ("launch") and reads ("land"); a result cannot be read before its step lands.

Bits on a CPU do not depend on other rows, so an engine with async scheduling must generate the same as one without.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.engine import sampler
from fp8serve.engine.engine import Engine
from fp8serve.engine.output import Completion, RequestOutput
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.engine.scheduler import StepWork
from fp8serve.errors import RequestError
from fp8serve.fp8.recipe import DelayedScaling

from .adapters import write_random_adapter
from .test_graphs import FakeGraphs
from .tiny import write_model, write_scales

PROMPTS = [[256, *b"Once upon"], [5, 6, 7], list(range(40)), [9]]
OPTIONS: dict[str, Any] = {"recipe": "bf16", "max_num_seqs": 6, "max_batch_tokens": 32, "max_prefill_tokens": 8}


class Device:
    """A GPU that computes nothing until the host waits for it. `events` lists launches and reads in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.launched = 0
        self.error: str | None = None  # raised when the next step is read

    def copy(self, source: Tensor) -> "Copy":
        return Copy(self, source)

    @property
    def in_flight(self) -> int:
        return sum(event.startswith("launch") for event in self.events) - sum(e.startswith("land") for e in self.events)


class Copy:
    """A copy to the host that is complete only when `read` waits for it."""

    def __init__(self, device: Device, source: Tensor) -> None:
        self._device, self._source, self._step = device, source.clone(), device.launched
        device.launched += 1
        device.events.append(f"launch {self._step}")

    def read(self) -> Tensor:
        self._device.events.append(f"land {self._step}")
        if (error := self._device.error) is not None:
            self._device.error = None
            raise RuntimeError(error)
        return self._source


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    monkeypatch.setattr(sampler, "HostCopy", fake.copy)
    return fake


def make_engine(model_dir: Path, *, flights: bool = True, graphs: bool = False, **options: Any) -> Engine:
    engine = Engine(model_dir, **{**OPTIONS, **options})
    engine.async_scheduling = flights
    if graphs:
        engine.pack_weights()
        engine.loaded.runner.use_graphs(FakeGraphs(), 6, engine.limits.max_model_len, engine.options.step_tokens)
    return engine


def drive(engine: Engine, *requests: Request, each: Callable[[int], None] = lambda step: None) -> list[RequestOutput]:
    """Runs the requests to their ends. `each` is called before every step. Returns all outputs in order."""
    for request in requests:
        engine.add_request(request)
    outputs, step = list[RequestOutput](), 0
    while engine.has_work():
        each(step)
        outputs += engine.step()
        step += 1
    assert engine.stats()["kv_blocks_used"] == 0
    return outputs


def requests(**params: Any) -> Iterator[Request]:
    for number, prompt in enumerate(PROMPTS):
        yield Request(f"r{number}", tuple(prompt), SamplingParams(**{"seed": number, "max_new_tokens": 20, **params}))


def results_of(outputs: list[RequestOutput]) -> dict[str, tuple[str, list[int], Any, Any]]:
    """Returns text, tokens, finish reason and stop reason of each request."""
    result: dict[str, tuple[str, list[int], Any, Any]] = {}
    for output in outputs:
        text, tokens, finish, _ = result.get(output.request_id, ("", [], None, None))
        assert finish is None, "an output after the last one"
        tokens = tokens + list(output.token_ids)
        assert output.num_generated == len(tokens)
        result[output.request_id] = text + output.text_delta, tokens, output.finish_reason, output.stop_reason
    return result


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "sampled": {"temperature": 2.0, "top_p": 0.9},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_k": 30},
    "bias": {"logit_bias": {7: 3.0}, "min_tokens": 4, "stop_token_ids": tuple(range(0, 250, 9))},
    "bad words": {"bad_words": ("a", "e"), "temperature": 3.0},
    "stop strings": {"stop": ("a", "b", "e", "t", "\x01"), "temperature": 3.0},
    "grammar": {"regex": "[a-z ]{3,9}"},
}
POOLS: dict[str, dict[str, Any]] = {"roomy": {}, "preempting": {"block_size": 4, "num_blocks": 24}}


@pytest.mark.pairwise
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("pool", list(POOLS))
@pytest.mark.parametrize("sampling", list(SAMPLING))
def test_completions_equal_those_without_async_scheduling(
    model_dir: Path, device: Device, sampling: str, pool: str, graphs: bool
) -> None:
    """Sequences end at different steps, by every stop condition, while the next step is in flight."""
    engine, plain = (
        make_engine(model_dir, graphs=graphs, **POOLS[pool]),
        make_engine(model_dir, flights=False, **POOLS[pool]),
    )
    params = {"max_new_tokens": 20, "seed": 4, **SAMPLING[sampling]}
    assert generate(engine, params) == generate(plain, params)
    if pool == "preempting" and SAMPLING[sampling].get("ignore_eos"):
        assert engine.stats()["preemptions_total"] > 0
    assert engine.stats()["generated_tokens_total"] == plain.stats()["generated_tokens_total"]


def generate(engine: Engine, params: dict[str, Any]) -> list[Completion]:
    return engine.generate([*PROMPTS, *PROMPTS[:2]], **params)


def test_a_step_is_launched_before_the_previous_one_lands(model_dir: Path, device: Device) -> None:
    drive(make_engine(model_dir), Request("r", (1, 2, 3), SamplingParams(max_new_tokens=4, ignore_eos=True)))
    assert device.events == ["launch 0", "launch 1", "land 0", "launch 2", "land 1", "launch 3", "land 2", "land 3"]
    device.events.clear()
    device.launched = 0
    drive(
        make_engine(model_dir, flights=False), Request("r", (1, 2), SamplingParams(max_new_tokens=2, ignore_eos=True))
    )
    assert device.events == ["launch 0", "land 0", "launch 1", "land 1"]


def test_at_most_one_step_is_ahead(model_dir: Path, device: Device) -> None:
    engine = make_engine(model_dir, block_size=4, num_blocks=24)
    ahead = set[int]()
    drive(engine, *requests(ignore_eos=True), each=lambda step: ahead.add(device.in_flight))
    assert ahead == {0, 1}


def test_rows_with_penalties_are_sampled_after_the_previous_step_is_read(
    model_dir: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their forward pass is launched before the previous step is read."""
    engine = make_engine(model_dir)
    run = engine.loaded.runner.run

    def forward(work: StepWork) -> Tensor:
        device.events.append("forward")
        return run(work)

    monkeypatch.setattr(engine.loaded.runner, "run", forward)
    drive(engine, Request("r", (1, 2, 3), SamplingParams(max_new_tokens=3, ignore_eos=True, presence_penalty=1.0)))
    middle = ["forward", "land 0", "launch 1", "forward", "land 1", "launch 2"]
    assert device.events == ["forward", "launch 0", *middle, "land 2"]


def test_a_request_may_end_at_any_step_without_affecting_others(model_dir: Path, device: Device) -> None:
    """Each token that the first request generates is in turn made the end-of-text token."""
    engine, plain = make_engine(model_dir), make_engine(model_dir, flights=False)
    unstopped = results_of(drive(plain, *requests(temperature=0.0, ignore_eos=True)))["r0"][1]
    for token in dict.fromkeys(unstopped):
        for each in (engine, plain):
            each.eos_ids = (token,)
        ended = results_of(drive(engine, *requests(temperature=0.0)))
        assert ended == results_of(drive(plain, *requests(temperature=0.0)))
        assert ended["r0"][1] == unstopped[: unstopped.index(token) + 1]


@pytest.mark.parametrize("step", range(8))
def test_an_abort_in_flight_drops_only_the_token_in_flight(model_dir: Path, device: Device, step: int) -> None:
    engine = make_engine(model_dir)
    aborted = list[RequestOutput]()

    def abort(now: int) -> None:
        if now == step and (output := engine.abort("r1")) is not None:
            aborted.append(output)

    outputs = results_of(drive(engine, *requests(ignore_eos=True), each=abort))
    expected = results_of(drive(make_engine(model_dir, flights=False), *requests(ignore_eos=True)))
    assert [output.finish_reason for output in aborted] == ["abort"]
    tokens = outputs.pop("r1", ("", [], None, None))[1]
    assert tokens == expected.pop("r1")[1][: len(tokens)]
    assert aborted[0].num_generated == len(tokens)
    assert outputs == expected


def test_after_abort_all_the_step_in_flight_gives_no_outputs(model_dir: Path, device: Device) -> None:
    engine = make_engine(model_dir)
    for request in requests(ignore_eos=True):
        engine.add_request(request)
    engine.step()
    engine.step()
    assert len(engine.abort_all()) == 4
    assert engine.has_work()
    assert engine.step() == []
    assert not engine.has_work()


def test_an_id_can_be_used_again_while_its_old_sequence_is_in_flight(model_dir: Path, device: Device) -> None:
    engine = make_engine(model_dir)
    request = Request("r", (1, 2, 3), SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True))
    engine.add_request(request)
    engine.step()
    engine.step()
    engine.abort("r")
    assert results_of(drive(engine, request)) == results_of(drive(make_engine(model_dir, flights=False), request))


def test_a_sequence_that_waits_for_a_shared_prefix_does_not_end_async_scheduling(
    model_dir: Path, device: Device
) -> None:
    """The second request of tenant b waits for the prefix that the first one computes, so nothing is preempted."""
    engine = make_engine(model_dir, num_blocks=64, max_batch_tokens=12, max_prefill_tokens=4, block_size=4)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    for number in range(3):
        engine.add_request(Request(f"a{number}", (number + 1, 2, 3), params, "a"))
    for _ in range(4):
        engine.step()
    for number in range(2):
        engine.add_request(Request(f"b{number}", tuple(range(40)), params, "b"))
    in_flight = list[int]()
    for _ in range(6):
        engine.step()
        in_flight.append(device.in_flight)
        assert not engine.scheduler.may_preempt()
        assert len(engine.scheduler.waiting) == 1
    assert in_flight == [1] * 6
    engine.abort_all()


def test_swapping_weights_reads_the_step_in_flight_first(model_dir: Path, device: Device) -> None:
    engine = make_engine(model_dir)
    engine.stage_weights(model_dir)
    engine.add_request(Request("r", (1, 2, 3), SamplingParams(max_new_tokens=20, ignore_eos=True)))
    engine.step()
    engine.abort("r")
    assert device.in_flight == 1
    engine.swap_weights()
    assert device.in_flight == 0


def test_no_sequence_in_flight_is_preempted(model_dir: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence is preempted neither to free blocks nor for fairness while its step is in flight."""
    engine = make_engine(model_dir, max_num_seqs=2, block_size=4, num_blocks=8)
    preempt, in_flight = engine.scheduler._preempt, list[int]()

    def preempting(seq: Any) -> None:
        in_flight.append(seq.num_launched - seq.num_computed)
        preempt(seq)

    monkeypatch.setattr(engine.scheduler, "_preempt", preempting)
    params = SamplingParams(max_new_tokens=20, seed=1, ignore_eos=True)
    tenants = [Request(f"{tenant}{i}", (i, 1), params, tenant) for tenant in "ab" for i in range(3)]
    for request in tenants[:3]:
        engine.add_request(request)
    for _ in range(6):
        engine.step()
    drive(engine, *tenants[3:])
    assert len(in_flight) > 2
    assert set(in_flight) == {0}


def test_an_error_in_flight_ends_only_the_requests_of_its_step(model_dir: Path, device: Device) -> None:
    engine = make_engine(model_dir)
    late = Request("late", (3, 4), SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True))

    def fail(step: int) -> None:
        if step == 4:
            device.error = "CUDA error: an illegal memory access was encountered\nand a trace"
            engine.add_request(late)  # it is in the next step, not in the one that fails

    outputs = drive(engine, *requests(ignore_eos=True), each=fail)
    errors = [(output.request_id, output.error) for output in outputs if output.error is not None]
    message = "The model failed on this batch: CUDA error: an illegal memory access was encountered"
    assert sorted(errors) == [(f"r{i}", message) for i in range(4)]
    assert results_of(outputs)["late"] == results_of(drive(make_engine(model_dir, flights=False), late))["late"]


def test_a_failed_launch_still_reads_the_previous_step(
    model_dir: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model_dir)
    run = engine.loaded.runner.run

    def fail(step: int) -> None:
        if step == 6:
            monkeypatch.setattr(engine.loaded.runner, "run", out_of_memory)

    def out_of_memory(work: StepWork) -> Tensor:
        raise RuntimeError("CUDA out of memory.")

    request = Request("r", (1, 2, 3), SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True))
    (_, tokens, reason, _) = results_of(drive(engine, request, each=fail))["r"]
    assert (len(tokens), reason) == (6, "error")
    engine.loaded.runner.run = run  # type: ignore[method-assign]
    assert tokens == results_of(drive(engine, request))["r"][1][:6]


def test_nonfinite_logits_end_only_their_request(
    model_dir: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model_dir)
    run = engine.loaded.runner.run

    def sometimes_broken(work: StepWork) -> Tensor:
        logits = run(work)
        broken = [item.seq.request_id == "r2" and item.start > 45 for item in work if item.needs_sample]
        return logits.masked_fill(torch.tensor(broken)[:, None], torch.nan)

    monkeypatch.setattr(engine.loaded.runner, "run", sometimes_broken)
    outputs = results_of(drive(engine, *requests(ignore_eos=True)))
    expected = results_of(drive(make_engine(model_dir, flights=False), *requests(ignore_eos=True)))
    (_, tokens, reason, _) = outputs.pop("r2")
    assert (tokens, reason) == (expected.pop("r2")[1][:7], "error")
    assert outputs == expected


def test_weights_are_loaded_only_after_the_step_in_flight_is_read(
    model_dir: Path, device: Device, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", seed=7)
    engine, fresh = make_engine(model_dir), make_engine(other, flights=False)
    for request in requests(ignore_eos=True):
        engine.add_request(request)
    engine.step()
    engine.step()
    with pytest.raises(RequestError, match="4 requests are running"):
        engine.load_weights(other)
    engine.step()
    engine.abort_all()
    assert device.in_flight == 1
    engine.load_weights(other)
    assert device.in_flight == 0
    assert generate(engine, SAMPLING["greedy"]) == generate(fresh, SAMPLING["greedy"])


def test_an_adapter_is_replaced_while_its_sequences_are_in_flight(
    model_dir: Path, device: Device, tmp_path: Path
) -> None:
    directory = write_random_adapter(tmp_path / "adapter", model_dir)
    engine, plain = make_engine(model_dir), make_engine(model_dir, flights=False)
    params = SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True)
    mixed = [Request("with", (1, 2, 3), params, adapter="a"), Request("without", (1, 2, 3), params)]
    for one in (engine, plain):
        one.load_adapter("a", directory)

    def unload(step: int) -> None:
        if step == 4:
            assert device.in_flight == 1
            engine.unload_adapter("a")
            engine.load_adapter("a", write_random_adapter(tmp_path / "another", model_dir, seed=1))

    assert results_of(drive(engine, *mixed, each=unload)) == results_of(drive(plain, *mixed))
    assert [adapter.digest for adapter in engine.adapters._by_number.values()] == [engine.adapters.find("a").digest]


def test_scale_monitor_windows_equal_those_without_async_scheduling(
    model_dir: Path, device: Device, tmp_path: Path
) -> None:
    scales = write_scales(model_dir, tmp_path / "scales")
    options: dict[str, Any] = {"recipe": DelayedScaling(), "scales": scales, "drift_window": 16}
    engine, plain = make_engine(model_dir, **options), make_engine(model_dir, flights=False, **options)
    for one in (engine, plain):
        drive(one, *requests(ignore_eos=True))
    assert engine.stats()["scale_windows_total"] == plain.stats()["scale_windows_total"] > 2
    assert engine.scales() == plain.scales()


@pytest.mark.parametrize("drafts", [0, 4])
def test_engines_on_a_cpu_or_with_drafts_schedule_synchronously(model_dir: Path, device: Device, drafts: int) -> None:
    engine = Engine(model_dir, **OPTIONS, speculative_tokens=drafts)
    assert not engine.async_scheduling
    in_flight = set[int]()
    drive(engine, *requests(ignore_eos=True), each=lambda step: in_flight.add(device.in_flight))
    assert in_flight == {0}
