"""The host's time for a decoding step, by sequence: python -m benchmarks.host_time

A GPU computes while Python prepares the next step, so a step cannot be shorter than the host's work for it. This
benchmark runs the engine with a device that takes no time: a model of 320 tokens whose graphs return the same logits at
every replay, and sampling that returns the same tokens. All else is the engine's own: scheduling, the inputs of the
graph, and the outputs of every sequence. `engine` is the processor time of `Engine.run_step`, and `messages` that of
the messages which the engine process sends for it. The cost of torch's ops does not grow with the number of sequences,
so the time of a sequence is the slope between two batch sizes. `detokenize` is measured alone, because it belongs to
the tokenizer. In a `mixed` step, the oldest request has just been aborted, and the step computes the prompt of a new
one beside the sequences that decode.

`--model DIR` measures a real model on `--device` instead: the time of a step on the clock, with a step launched before
the previous one lands (engine/flights.py) and without, on the same engine in turns.

Sampling is greedy or drawn (top_p). Figures are the fastest of `--rounds` rounds of `--steps` steps each, in
microseconds of the processor. `--profile` prints what the engine spends its time on instead. Prints JSON.
"""

import argparse
import cProfile
import json
import pstats
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fp8serve.engine import runner as runner_module
from fp8serve.engine import sampler
from fp8serve.engine.engine import Engine
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.engine.sequence import StepOutput
from fp8serve.engine.worker import Connection, Worker
from fp8serve.train.scratch import write_random_model

TEXT = "The host prepares the next step while the device computes this one, and reads the sampled tokens afterwards."
PROMPT, CONTEXT, BLOCK = 64, 1024, 16
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "top_p": {"temperature": 0.8, "top_p": 0.95}}
MIXED = {f"{name} mixed": {**options, "mixed": True} for name, options in SAMPLING.items()}


class InstantModel(nn.Module):
    """A model that computes nothing: all logits are zero, except for one token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = model.config
        self._logits = torch.zeros(0, self.config.vocab_size)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: object, last: Tensor | None) -> Tensor:
        return torch.zeros(len(token_ids) if last is None else len(last), 1)

    def modules_of_output_rows(self) -> list[nn.Module]:
        return []

    def logits(self, hidden: Tensor) -> Tensor:
        if len(hidden) > len(self._logits):
            self._logits = torch.zeros(len(hidden), self.config.vocab_size)
            self._logits[:, ord("a")] = 20.0
        return self._logits[: len(hidden)]


class SilentConnection(Connection):
    """A connection that drops its messages."""

    def __init__(self) -> None:
        self._socket = self  # type: ignore[assignment]
        self._send_lock = threading.Lock()
        self.inbox = SimpleQueue()

    def sendall(self, data: bytes) -> None:
        pass


class InstantDecoding:
    """An engine whose sequences all decode, with a device that takes no time. If its steps are `mixed`, a request is
    replaced before each of them."""

    def __init__(
        self, model_dir: Path, batch: int, tokenizes: bool = False, mixed: bool = False, **sampling: Any
    ) -> None:
        self.engine = Engine(
            model_dir, recipe="bf16", max_num_seqs=batch, num_blocks=batch * CONTEXT // BLOCK, block_size=BLOCK,
            max_batch_tokens=batch * PROMPT, max_prefill_tokens=batch * PROMPT,
        )  # fmt: skip
        if not tokenizes:
            self.engine.tokenizer = None
        self.engine.async_scheduling = True  # as on a GPU
        runner = self.engine.loaded.runner
        runner.model = InstantModel(runner.model)  # type: ignore[assignment]
        with patch.object(runner_module, "can_replay_prompts", lambda _: True):
            runner.use_graphs(_replay_nothing, batch, CONTEXT, 4 * PROMPT + batch if mixed else 0)
        self.worker, self._mixed = Worker(SilentConnection(), self.engine), mixed
        self._params = SamplingParams(max_new_tokens=CONTEXT - PROMPT, ignore_eos=True, seed=0, **sampling)
        self._numbers = count()
        for _ in range(batch):
            self._add_request()
        while any(seq.num_generated < 2 for seq in self.engine.scheduler.running) or self.engine.scheduler.waiting:
            self.engine.step()

    def _add_request(self) -> None:
        number = next(self._numbers)
        prompt = tuple((number + i) % 256 for i in range(PROMPT))
        request = Request(f"request-{number:016x}", prompt, self._params, "tenant")
        self.worker._generate({"request": request.to_json(), "stream": number, "arrived": time.monotonic()})

    def prepare_step(self) -> None:
        """Replaces the oldest request if steps are mixed."""
        if self._mixed:
            name = self.engine.scheduler.running[0].request_id
            self.worker._abort({"request_id": name, "stream": self.worker._streams[name]})
            self._add_request()

    def us(self, steps: int) -> tuple[float, float]:
        """Returns the microseconds of a step: those of the engine, and those of its messages."""
        engine_seconds = message_seconds = 0.0
        for _ in range(steps):
            self.prepare_step()
            start = time.process_time()
            outputs = self.engine.run_step()
            middle = time.process_time()
            self.worker._send_outputs(outputs)
            engine_seconds += middle - start
            message_seconds += time.process_time() - middle
        return engine_seconds / steps * 1e6, message_seconds / steps * 1e6


def _replay_nothing(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Returns a replay that leaves the logits of the capture in place. Sampling may overwrite its input, so every
    replay returns a view of the same values."""
    logits = run()
    return lambda: logits


def _sample_nothing(logits: Tensor, *_: Tensor) -> Tensor:
    """Stands for the ops that sample on the device."""
    return torch.full((len(logits),), ord("a"))


def _instant_sampling() -> Any:
    return patch.multiple(sampler, _sample=_sample_nothing, _greedy_tokens=_sample_nothing)


def measure(model_dir: Path, batches: tuple[int, ...], steps: int, rounds: int) -> dict[str, Any]:
    """Returns the microseconds of a step at each batch size, and those of one sequence more."""
    result: dict[str, Any] = {"unit": "us", "batches": list(batches)}
    for name, sampling in (SAMPLING | MIXED).items():
        runs = [InstantDecoding(model_dir, batch, **sampling) for batch in batches]
        with _instant_sampling():
            times = [[run.us(steps) for run in runs] for _ in range(rounds)]
        for part, index in (("engine", 0), ("messages", 1)):
            small, large = (min(pair[run][index] for pair in times) for run in range(2))
            slope = (large - small) / (batches[1] - batches[0])
            result[f"{name} {part}"] = {"step": [round(small), round(large)], "sequence": round(slope, 2)}
    result["detokenize"] = {"token": round(detokenize_us(model_dir), 2)}
    return result


def detokenize_us(model_dir: Path) -> float:
    """Returns the microseconds in which the tokenizer's stream decodes one token."""
    tokenizer = Engine(model_dir, recipe="bf16", num_blocks=1, max_model_len=2).tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT) * 40
    stream, start = tokenizer.stream(True), time.process_time()
    for token in ids:
        stream.push(token)
    return (time.process_time() - start) / len(ids) * 1e6


def measure_overlap(
    model_dir: Path, recipe: str, device: str, batches: tuple[int, ...], steps: int, rounds: int
) -> dict[str, Any]:
    """Returns the milliseconds of a decoding step on the clock, with and without flights, by batch size."""
    engine = Engine(
        model_dir, recipe=recipe, device=device, max_model_len=PROMPT + 2 * (rounds + 1) * steps + 8,
        max_num_seqs=max(batches), max_batch_tokens=8192, max_prefill_tokens=4096,
    )  # fmt: skip
    engine.pack_weights()
    result: dict[str, Any] = {"unit": "ms", "device": device, "model": model_dir.name}
    for name, sampling in SAMPLING.items():
        params = SamplingParams(
            max_new_tokens=engine.limits.max_model_len - PROMPT, ignore_eos=True, seed=0, **sampling
        )
        for batch in batches:
            for number in range(batch):
                prompt = tuple((7 * number + i) % 256 for i in range(PROMPT))
                engine.add_request(Request(f"request-{number:016x}", prompt, params))
            while any(seq.num_generated < 2 for seq in engine.scheduler.running) or len(engine.scheduler.waiting):
                engine.step()
            times: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(rounds):
                for flights in times:
                    engine.async_scheduling = flights
                    engine.step()
                    start = time.perf_counter()
                    for _ in range(steps):
                        engine.step()
                    times[flights].append((time.perf_counter() - start) / steps * 1e3)
            engine.abort_all()
            while engine.has_work():
                engine.step()
            result[f"{name} batch {batch}"] = {
                "flights": round(min(times[True]), 3), "without": round(min(times[False]), 3)
            }  # fmt: skip
    return result


def calls_per_sequence(
    model_dir: Path, batches: tuple[int, int] = (16, 48), steps: int = BLOCK, mixed: bool = False
) -> float:
    """Returns how many Python functions one more sequence calls in a step, on average over the tokens of a block."""
    calls = []
    for batch in batches:
        run = InstantDecoding(model_dir, batch, mixed=mixed, temperature=0.0)
        profiler = cProfile.Profile()
        for _ in range(steps):
            run.prepare_step()
            profiler.enable()
            run.engine.run_step()
            profiler.disable()
        calls.append(pstats.Stats(profiler).total_calls / steps)  # type: ignore[attr-defined]
    return float((calls[1] - calls[0]) / (batches[1] - batches[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=(32, 128), help="two sizes, or any with --model")
    parser.add_argument("--steps", type=int, default=BLOCK)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", choices=tuple(SAMPLING | MIXED), help="profile steps of this kind")
    parser.add_argument("--model", type=Path, help="measure this model's steps on the clock")
    parser.add_argument("--recipe", default="stored", help="of --model")
    parser.add_argument("--device", default="cuda", help="of --model")
    options = parser.parse_args()
    batches = tuple(options.batches)
    if options.model is not None:
        print(
            json.dumps(
                measure_overlap(options.model, options.recipe, options.device, batches, options.steps, options.rounds),
                indent=2,
            )
        )
        return
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        model_dir = write_random_model(
            Path(folder) / "model", [TEXT], vocab_size=320, hidden_size=64, layers=1, context=CONTEXT
        )
        if options.profile is None:
            print(json.dumps(measure(model_dir, batches, options.steps, options.rounds), indent=2))
            return
        run = InstantDecoding(model_dir, batches[-1], **(SAMPLING | MIXED)[options.profile])
        outputs, profiler = list[StepOutput](), cProfile.Profile()
        with _instant_sampling():
            for _ in range(options.steps):
                run.prepare_step()
                profiler.enable()
                outputs += run.engine.run_step()
                profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
        print(f"{len(outputs)} outputs in {options.steps} steps")


if __name__ == "__main__":
    main()
