"""The whole main job on an embedded default, offline: train in FP8, calibrate, serve, fine-tune over HTTP, ask again.

The text is `pydoc_data.topics`, the language reference that every Python installation carries (some 465,000
characters). A byte-pair tokenizer and a Llama of 4 layers are made from it and trained from random weights under
delayed scaling: every linear layer computes in E4M3 forward and E5M2 backward from the first step. All that follows
goes through the doors that a user has: the calibration of the command line, and a server in its own process.

Sizes are chosen for about two minutes on two CPU cores. So small a model is not clever: it continues text in the manner
of the reference, and after the fine-tune it answers the questions that it was taught. Nothing is left behind, after
ctrl-C neither, unless a directory to keep is given.
"""

import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8serve.errors import MachineError
from fp8serve.running import RunningServer
from fp8serve.terminal import progress, size

HISTORY = 16  # amaxes kept per tensor
NAME = "demo"
PROMPT = "The expression"
QUESTIONS = {
    "What does break do?": "It ends the nearest loop.",
    "What does continue do?": "It starts the next cycle of the nearest loop.",
    "What does pass do?": "Nothing at all.",
    "What does return do?": "It leaves the function with a value.",
    "What does raise do?": "It raises an exception.",
    "What does import do?": "It loads a module and binds its name.",
    "What does lambda make?": "A function without a name.",
    "What does del do?": "It unbinds a name.",
    "What does assert do?": "It checks a claim while debugging.",
    "What does global do?": "It makes a name refer to the module.",
    "What does yield make?": "A generator.",
    "What does with do?": "It enters and leaves a context.",
}


class Demo:
    """One run. `say` gets a line for each stage; `effort` below 1 shortens both trainings, for tests."""

    def __init__(self, keep: Path | None = None, say: Callable[[str], None] | None = None, effort: float = 1.0) -> None:
        self.keep, self.effort = keep, effort
        self.say = say or _say
        self.figures: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """All stages; returns their figures. Cleans up in every case."""
        began = time.monotonic()
        with _sigterm_like_ctrl_c(), _workplace(self.keep) as place:
            self._train(place)
            self._calibrate(place)
            self._serve(place)
        self.figures["seconds"] = time.monotonic() - began
        self.say(f"{'done':10} in {self.figures['seconds']:.0f} s" + (f"; see {self.keep}" if self.keep else ""))
        return self.figures

    @contextmanager
    def _stage(self, name: str) -> Iterator[Callable[..., None]]:
        """Times a stage. The function it gives takes the line to say about it and the figures behind it."""
        began = time.monotonic()

        def report(line: str, **figures: Any) -> None:
            seconds = time.monotonic() - began
            self.figures[name] = figures | {"seconds": seconds}
            self.say(f"{name:10} {line} ({seconds:.1f} s)")

        yield report

    # -- in this process: train and calibrate --------------------------------------------------------------------------

    def _train(self, place: Path) -> None:
        from fp8serve.train.trainer import Trainer

        with self._stage("train") as report, progress("Training") as advance:
            _write_texts(place)
            losses: list[float] = []

            def follow(event: dict[str, Any]) -> None:
                if event["type"] == "metrics":
                    losses.append(event["train_loss"])
                    advance(event["step"], event["total_steps"])

            done = Trainer(_training(place, self.effort)).run(follow)
            Path(str(done.checkpoint)).rename(place / "trained")  # FP32 weights; the FP8 result lies beside it
            speed = done.trained_tokens / done.seconds
            report(
                f"{done.step} steps in FP8 (E4M3 forward, E5M2 backward) from random weights, "
                f"{done.trained_tokens:,} tokens at {speed:,.0f} tokens/s; loss {losses[0]:.2f} -> {losses[-1]:.2f}",
                steps=done.step,
                tokens=done.trained_tokens,
                tokens_per_second=speed,
                first_loss=losses[0],
                last_loss=losses[-1],
            )

    def _calibrate(self, place: Path) -> None:
        from fp8serve.calibration.pipeline import calibrate
        from fp8serve.fp8.recipe import DelayedScaling

        with self._stage("calibrate") as report, progress("Calibrating") as advance:
            found = calibrate(
                place / "trained",
                out=place / "calibrated",
                recipe=DelayedScaling(amax_history_len=HISTORY),
                data=[place / "held-out.jsonl"],
                samples=32,
                seq_len=128,
                progress=lambda stage, done, total: advance(done, total, stage),
            )
            before, after = found.quality.reference_perplexity or float("nan"), found.quality.perplexity
            in_bf16 = (place / "untrained" / "model.safetensors").stat().st_size
            report(
                f"perplexity on text not trained on: {before:.2f} in BF16, {after:.2f} in FP8 "
                f"({100 * (after / before - 1):+.2f} %); weights {size(in_bf16)} and {size(found.bytes_after)}",
                tokens=found.data.tokens,
                perplexity_bf16=before,
                perplexity_fp8=after,
                bytes_bf16=in_bf16,
                bytes_fp8=found.bytes_after,
            )

    # -- over HTTP -----------------------------------------------------------------------------------------------------

    def _serve(self, place: Path) -> None:
        options = ["--train-on", "share", "--data-dir", str(place / "server"), "--served-model-name", NAME]
        server = RunningServer(place / "calibrated", options, log=place / "server.log")
        with self._stage("serve") as report, server:
            report(f"ready at {server.url}")
            self._generate(server)
            before = sum(_answer(server, question) == answer for question, answer in QUESTIONS.items())
            job = self._finetune(server)
            self._activate(server, job)
            self._ask_again(server, before)

    def _generate(self, server: RunningServer) -> None:
        with self._stage("generate") as report:
            began = time.monotonic()
            answer = server.post("/generate", _prompt(max_new_tokens=64, temperature=0.7, seed=0))
            speed = answer["details"]["generated_tokens"] / (time.monotonic() - began)
            text = answer["generated_text"]
            report(f"{speed:.0f} tokens/s: {PROMPT + text!r}", tokens_per_second=speed, text=text)

    def _finetune(self, server: RunningServer) -> str:
        """Teaches the answers; returns the job's id."""
        with self._stage("finetune") as report, progress("Fine-tuning") as advance:
            body = {"data": _rows(), "epochs": max(1, round(40 * self.effort)), "batch_size": 4, "learning_rate": 1e-3}
            job = server.post("/finetune", body | {"warmup_steps": 5, "amax_history_len": HISTORY})
            while job["status"] not in ("succeeded", "failed", "cancelled"):
                time.sleep(0.2)
                job = server.get(f"/finetune/{job['id']}")
                done = job["progress"] or {}
                advance(done.get("step", 0), done.get("total_steps") or 1)
            if job["status"] != "succeeded":
                raise MachineError(f"The fine-tune job {job['status']}: {job['error']}.")
            losses = [m["train_loss"] for m in server.get(f"/finetune/{job['id']}/metrics")["metrics"]]
            report(
                f"{len(QUESTIONS)} questions and answers, {body['epochs']} times; "
                f"loss {losses[0]:.2f} -> {losses[-1]:.3f}",
                first_loss=losses[0],
                last_loss=losses[-1],
            )
        return str(job["id"])

    def _activate(self, server: RunningServer, job: str) -> None:
        """Swaps the weights while a request is being answered, which must not notice."""
        answers: list[dict[str, Any]] = []
        body = _prompt(max_new_tokens=256)
        request = threading.Thread(target=lambda: answers.append(server.post("/generate", body)), daemon=True)
        with self._stage("activate") as report:
            request.start()
            served = server.post(f"/finetune/{job}/activate")["served"]
            request.join(300)
            if not answers or answers[0]["details"]["generated_tokens"] != 256:
                raise MachineError("A request in flight did not survive the swap.")
            report(f"{served['model']} is served with the scales that training kept; no calibration", **served)

    def _ask_again(self, server: RunningServer, before: int) -> None:
        with self._stage("ask again") as report:
            answers = {question: _answer(server, question) for question in QUESTIONS}
            after = sum(answers[question] == answer for question, answer in QUESTIONS.items())
            question = next(iter(QUESTIONS))
            report(
                f"{after} of {len(QUESTIONS)} answered word for word, {before} before: "
                f"{question!r} -> {answers[question]!r}",
                right_before=before,
                right_after=after,
                questions=len(QUESTIONS),
            )


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


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """Who stops the demonstration with SIGTERM gets the same cleaning up. Only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write_texts(place: Path) -> None:
    """The language reference as JSON lines, every eighth topic held out, and a random model with its tokenizer."""
    from pydoc_data.topics import topics

    from fp8serve.train.scratch import write_random_model, write_texts

    texts = [text for _, text in sorted(topics.items())]
    write_texts(place / "held-out.jsonl", texts[::8])
    write_texts(place / "train.jsonl", [text for i, text in enumerate(texts) if i % 8])
    write_random_model(place / "untrained", texts)


def _training(place: Path, effort: float) -> Any:
    from fp8serve.train.config import TrainConfig

    return TrainConfig(
        model=str(place / "untrained"),
        data=(str(place / "train.jsonl"),),
        out=str(place / "training"),
        amax_history_len=HISTORY,
        max_steps=max(2, round(480 * effort)),
        batch_size=4,
        seq_len=128,
        lr=2e-3,
        warmup_steps=20,
        weight_decay=0.1,
    )


def _prompt(**parameters: Any) -> dict[str, Any]:
    return {"inputs": PROMPT, "parameters": {"ignore_eos": True, "details": True} | parameters}


def _rows() -> list[dict[str, Any]]:
    """The questions and answers as chats."""
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in QUESTIONS.items()
    ]


def _answer(server: RunningServer, question: str) -> str:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 32, "temperature": 0.0}
    answer = server.post("/v1/chat/completions", body | {"model": NAME})
    return str(answer["choices"][0]["message"]["content"]).strip()
