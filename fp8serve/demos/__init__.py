"""`fp8serve demo`: calibration, serving, fine-tuning and activation with a small model.

`smollm2` runs the demonstration on a chat model, `from_scratch` on a model that it first trains from random weights;
`commands/demo.py` selects one of them. This module has their common part: timed stages, HTTP steps and the working
directory, which is removed at the end, even after Ctrl-C, unless the user names a directory to keep. The demonstration
uses the interfaces of a user: the calibration of the command line, and a server in a child process.
"""

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from fp8serve.errors import MachineError
from fp8serve.options import AUTO
from fp8serve.running import RunningServer
from fp8serve.terminal import format_bytes, progress

AMAX_HISTORY_LEN = 16
NAME = "demo"  # the name of the served model
PROMPT = "The expression"
IN_FLIGHT_TOKENS = 256  # the length of the request that is in flight during the activation


class Demo:
    """A run of the demonstration.

    Args:
        why: why this demonstration was selected.
        keep: the working directory; None for a temporary one.
        print_line: prints the line of a stage.
        effort: below 1, training is shortened, for tests.
        device: the device of all stages; "auto" is resolved for each model.
    """

    model: ClassVar[str]  # the description of the model in the first line
    disk_bytes: ClassVar[int]  # an upper bound of the size of all written files

    def __init__(
        self,
        why: str,
        keep: Path | None = None,
        print_line: Callable[[str], None] | None = None,
        effort: float = 1.0,
        device: str = AUTO,
    ) -> None:
        self.why, self.keep, self.effort, self.device = why, keep, effort, device
        self.print_line = print_line or partial(print, flush=True)
        self.results: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Runs all stages and returns their results. Raises MachineError if the disk is too full or a stage fails."""
        start = time.monotonic()
        self.results["model"] = {"name": self.model, "why": self.why}
        with _sigterm_as_interrupt(), _working_directory(self.keep) as directory:
            _check_free_disk(directory, self.disk_bytes)
            self.print_line(f"{'model':10} {self.model} ({self.why})")
            self.run_stages(directory)
        seconds = self.results["seconds"] = time.monotonic() - start
        self.print_line(f"{'done':10} in {seconds:.0f} s" + (f"; see {self.keep}" if self.keep else ""))
        return self.results

    def run_stages(self, directory: Path) -> None:
        """Runs the stages, which write their files to `directory`."""
        raise NotImplementedError

    @contextmanager
    def stage(self, name: str) -> Iterator[Callable[..., None]]:
        """Measures the time of a stage. Yields a function that reports the line and the results of the stage."""
        start = time.monotonic()

        def report(line: str, **results: Any) -> None:
            seconds = time.monotonic() - start
            self.results[name] = results | {"seconds": seconds}
            self.print_line(f"{name:10} {line} ({seconds:.1f} s)")

        yield report

    def calibrate(self, model: Path, out: Path, data: Sequence[Path] | None, samples: int, bytes_bf16: int) -> None:
        """Calibrates `model`, writes it to `out`, and reports the loss of quality. If `data` is None, the calibration
        uses the passages of the package."""
        from fp8serve.calibration.pipeline import calibrate
        from fp8serve.fp8.recipe import DelayedScaling

        with self.stage("calibrate") as report, progress("Calibrating") as advance:
            result = calibrate(
                model,
                out=out,
                recipe=DelayedScaling(amax_history_len=AMAX_HISTORY_LEN),
                data=data,
                samples=samples,
                seq_len=128,
                device=self.device,
                progress=lambda stage, done, total: advance(done, total, stage),
            )
            bf16, fp8 = result.quality.reference_perplexity or float("nan"), result.quality.perplexity
            report(
                f"perplexity on held-out text: {bf16:.2f} in BF16, {fp8:.2f} in FP8 "
                f"({100 * (fp8 / bf16 - 1):+.2f} %), KL {result.quality.kl_divergence:.2g} nats; "
                f"weights {format_bytes(bytes_bf16)} and {format_bytes(result.bytes_after)}",
                tokens=result.data.tokens,
                perplexity_bf16=bf16,
                perplexity_fp8=fp8,
                kl_divergence=result.quality.kl_divergence,
                bytes_bf16=bytes_bf16,
                bytes_fp8=result.bytes_after,
            )

    # -- over HTTP -----------------------------------------------------------------------------------------------------

    @contextmanager
    def running_server(self, model: Path, data_dir: Path, stage: str = "serve") -> Iterator[RunningServer]:
        """Serves `model` until the end of the block. The server's files are in `data_dir`."""
        options = ["--train-on", "share", "--data-dir", str(data_dir), "--served-model-name", NAME]
        options += ["--device", self.device]
        server = RunningServer(model, options, log=data_dir.with_suffix(".log"))
        with self.stage(stage) as report, server:
            report(f"ready at {server.url}")
            yield server

    def finetune(self, server: RunningServer, facts: Mapping[str, str], **options: Any) -> str:
        """Trains the model to answer the questions of `facts` and returns the id of the job."""
        with self.stage("finetune") as report, progress("Fine-tuning") as advance:
            defaults = {"batch_size": 4, "warmup_steps": 5, "amax_history_len": AMAX_HISTORY_LEN}
            job = server.post("/finetune", {"data": _training_rows(facts)} | defaults | options)
            job = _wait_for_job(server, job, advance)
            losses = [m["train_loss"] for m in server.get(f"/finetune/{job['id']}/metrics")["metrics"]]
            report(
                f"{len(facts)} questions and answers, {options['epochs']} times; "
                f"loss {losses[0]:.2f} -> {losses[-1]:.3f}",
                first_loss=losses[0],
                last_loss=losses[-1],
            )
        return str(job["id"])

    def activate(self, server: RunningServer, job: str) -> None:
        """Activates the result of the job while a request is in flight, and checks that the request completes."""
        responses: list[dict[str, Any]] = []
        body = prompt(max_new_tokens=IN_FLIGHT_TOKENS)
        request = threading.Thread(target=lambda: responses.append(server.post("/generate", body)), daemon=True)
        with self.stage("activate") as report:
            request.start()
            served = server.post(f"/finetune/{job}/activate")["served"]
            request.join(300)
            if not responses or responses[0]["details"]["generated_tokens"] != IN_FLIGHT_TOKENS:
                raise MachineError("The request in flight did not complete during the activation.")
            report(f"{served['model']} is served with the scales of the training, without calibration", **served)


def prompt(**parameters: Any) -> dict[str, Any]:
    """Returns the body of a request that continues PROMPT up to the token limit."""
    return {"inputs": PROMPT, "parameters": {"ignore_eos": True, "details": True} | parameters}


def answer(server: RunningServer, question: str) -> str:
    """Returns the model's answer of at most 32 tokens, decoded greedily."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 32, "temperature": 0.0}
    response = server.post("/v1/chat/completions", body | {"model": NAME})
    return str(response["choices"][0]["message"]["content"]).strip()


def _training_rows(facts: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": fact}]}
        for question, fact in facts.items()
    ]


def _wait_for_job(server: RunningServer, job: dict[str, Any], advance: Callable[[int, int], None]) -> dict[str, Any]:
    """Waits until the job has ended and returns it. Raises MachineError if it did not succeed."""
    while job["status"] not in ("succeeded", "failed", "cancelled"):
        time.sleep(0.2)
        job = server.get(f"/finetune/{job['id']}")
        done = job["progress"] or {}
        advance(done.get("step", 0), done.get("total_steps") or 1)
    if job["status"] != "succeeded":
        raise MachineError(f"The fine-tune job {job['status']}: {job['error']}.")
    return job


@contextmanager
def _working_directory(keep: Path | None) -> Iterator[Path]:
    """Yields `keep`, which must be new or empty, or a temporary directory that is removed at the end."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="fp8serve-demo-") as name:
            yield Path(name)
        return
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise MachineError(f"{keep} is not empty; give --keep a directory that is new or empty.")
    yield keep


def _check_free_disk(directory: Path, needed: int) -> None:
    """Raises MachineError if fewer than `needed` bytes are free."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise MachineError(
            f"The demonstration writes up to {format_bytes(needed)} in {directory}, where {format_bytes(free)} are "
            "free; name a directory on another disk by --keep or TMPDIR."
        )


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Within the block, SIGTERM raises KeyboardInterrupt, so that the files are removed. Only the main thread can
    install a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
