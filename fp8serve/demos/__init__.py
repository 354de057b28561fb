"""`fp8serve demo`: the main job from end to end, on a chat model, or on a model trained from random weights.

`smollm2` runs it on real weights, `from_scratch` on a model that it trains first; `commands/demo.py` chooses. Here is
the common part: stages that are timed and reported, a place that is cleaned up, and HTTP steps.

Everything uses a user's interfaces: the calibration of the command line, and a server in its own process. No file is
left, not even after ctrl-C, unless a directory to keep is given.
"""

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from fp8serve.errors import MachineError
from fp8serve.running import RunningServer
from fp8serve.terminal import progress, size

HISTORY = 16  # amaxes kept per tensor
NAME = "demo"  # of the served model
PROMPT = "The expression"
IN_FLIGHT_TOKENS = 256


class Demo:
    """One run. `why` says why it is this one; `say` gets a line for each stage.

    `effort` below 1 shortens the trainings, for tests.
    """

    model: ClassVar[str]  # as the first line calls it
    room: ClassVar[int]  # bytes that the run writes at most

    def __init__(
        self, why: str, keep: Path | None = None, say: Callable[[str], None] | None = None, effort: float = 1.0
    ) -> None:
        self.why, self.keep, self.effort = why, keep, effort
        self.say = say or _say
        self.figures: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """All stages; returns their figures. Cleans up in every case. MachineError: no room, or a stage failed."""
        began = time.monotonic()
        self.figures["model"] = {"name": self.model, "why": self.why}
        with _sigterm_like_ctrl_c(), _workplace(self.keep) as place:
            _check_room(place, self.room)
            self.say(f"{'model':10} {self.model} ({self.why})")
            self.work(place)
        self.figures["seconds"] = time.monotonic() - began
        self.say(f"{'done':10} in {self.figures['seconds']:.0f} s" + (f"; see {self.keep}" if self.keep else ""))
        return self.figures

    def work(self, place: Path) -> None:
        """The stages, one after the other, with their files in `place`."""
        raise NotImplementedError

    @contextmanager
    def stage(self, name: str) -> Iterator[Callable[..., None]]:
        """Times a stage. The function that it returns takes the stage's line and figures."""
        began = time.monotonic()

        def report(line: str, **figures: Any) -> None:
            seconds = time.monotonic() - began
            self.figures[name] = figures | {"seconds": seconds}
            self.say(f"{name:10} {line} ({seconds:.1f} s)")

        yield report

    def calibrate(self, model: Path, out: Path, data: Sequence[Path] | None, samples: int, bytes_bf16: int) -> None:
        """Writes `model` in FP8 to `out` and reports the cost. data: None for the shipped passages."""
        from fp8serve.calibration.pipeline import calibrate
        from fp8serve.fp8.recipe import DelayedScaling

        with self.stage("calibrate") as report, progress("Calibrating") as advance:
            result = calibrate(
                model,
                out=out,
                recipe=DelayedScaling(amax_history_len=HISTORY),
                data=data,
                samples=samples,
                seq_len=128,
                progress=lambda stage, done, total: advance(done, total, stage),
            )
            before, after = result.quality.reference_perplexity or float("nan"), result.quality.perplexity
            report(
                f"perplexity on held-out text: {before:.2f} in BF16, {after:.2f} in FP8 "
                f"({100 * (after / before - 1):+.2f} %), KL {result.quality.kl_divergence:.2g} nats; "
                f"weights {size(bytes_bf16)} and {size(result.bytes_after)}",
                tokens=result.data.tokens,
                perplexity_bf16=before,
                perplexity_fp8=after,
                kl_divergence=result.quality.kl_divergence,
                bytes_bf16=bytes_bf16,
                bytes_fp8=result.bytes_after,
            )

    # -- over HTTP -----------------------------------------------------------------------------------------------------

    @contextmanager
    def serving(self, model: Path, place: Path, stage: str = "serve") -> Iterator[RunningServer]:
        """A server of `model`, with its files in `place`; it ends with the block."""
        options = ["--train-on", "share", "--data-dir", str(place), "--served-model-name", NAME]
        server = RunningServer(model, options, log=place.with_suffix(".log"))
        with self.stage(stage) as report, server:
            report(f"ready at {server.url}")
            yield server

    def finetune(self, server: RunningServer, facts: Mapping[str, str], **numbers: Any) -> str:
        """Teaches the answers of `facts` by the training `numbers`; returns the job's id."""
        with self.stage("finetune") as report, progress("Fine-tuning") as advance:
            body = {"data": _rows(facts), "batch_size": 4, "warmup_steps": 5, "amax_history_len": HISTORY} | numbers
            job = _finished(server, server.post("/finetune", body), advance)
            losses = [m["train_loss"] for m in server.get(f"/finetune/{job['id']}/metrics")["metrics"]]
            report(
                f"{len(facts)} questions and answers, {numbers['epochs']} times; "
                f"loss {losses[0]:.2f} -> {losses[-1]:.3f}",
                first_loss=losses[0],
                last_loss=losses[-1],
            )
        return str(job["id"])

    def activate(self, server: RunningServer, job: str) -> None:
        """Swaps the weights while a request is being answered, which must not be affected."""
        answers: list[dict[str, Any]] = []
        body = prompt(max_new_tokens=IN_FLIGHT_TOKENS)
        request = threading.Thread(target=lambda: answers.append(server.post("/generate", body)), daemon=True)
        with self.stage("activate") as report:
            request.start()
            served = server.post(f"/finetune/{job}/activate")["served"]
            request.join(300)
            if not answers or answers[0]["details"]["generated_tokens"] != IN_FLIGHT_TOKENS:
                raise MachineError("A request in flight did not survive the swap.")
            report(f"{served['model']} is served with the scales that training kept; no calibration", **served)


def prompt(**parameters: Any) -> dict[str, Any]:
    """The body of a request to continue PROMPT to its full length."""
    return {"inputs": PROMPT, "parameters": {"ignore_eos": True, "details": True} | parameters}


def answer(server: RunningServer, question: str) -> str:
    """The model's greedy answer, in at most 32 tokens."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 32, "temperature": 0.0}
    answered = server.post("/v1/chat/completions", body | {"model": NAME})
    return str(answered["choices"][0]["message"]["content"]).strip()


def _rows(facts: Mapping[str, str]) -> list[dict[str, Any]]:
    """The questions and answers as chats."""
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": reported}]}
        for question, reported in facts.items()
    ]


def _finished(server: RunningServer, job: dict[str, Any], advance: Callable[[int, int], None]) -> dict[str, Any]:
    """The job when it has ended. MachineError: it did not succeed."""
    while job["status"] not in ("succeeded", "failed", "cancelled"):
        time.sleep(0.2)
        job = server.get(f"/finetune/{job['id']}")
        done = job["progress"] or {}
        advance(done.get("step", 0), done.get("total_steps") or 1)
    if job["status"] != "succeeded":
        raise MachineError(f"The fine-tune job {job['status']}: {job['error']}.")
    return job


def _say(line: str) -> None:
    """At once, also into a pipe."""
    print(line, flush=True)


@contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    """An empty directory: `keep`, which must be new or empty, or a temporary one that is removed."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="fp8serve-demo-") as name:
            yield Path(name)
        return
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise MachineError(f"{keep} is not empty; give --keep a directory that is new or empty.")
    yield keep


def _check_room(place: Path, room: int) -> None:
    """MachineError when the disk is too full for the run, before minutes are spent on it."""
    free = shutil.disk_usage(place).free
    if free < room:
        raise MachineError(
            f"The demonstration writes up to {size(room)} in {place}, where {size(free)} are free; name a directory on "
            "another disk by --keep or TMPDIR."
        )


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """SIGTERM cleans up in the same way. Only the main thread may install the handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
