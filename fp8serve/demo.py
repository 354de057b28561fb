"""The whole main job on an embedded default, offline: train in FP8, calibrate, serve, fine-tune over HTTP, serve again.

The text is `pydoc_data.topics`, the language reference that every Python installation carries (about 465,000 characters).
A byte-pair tokenizer and a Llama of 4 layers are made from it and trained from random weights under delayed scaling:
every linear layer computes in E4M3 forwards and E5M2 backwards from the first step. Everything after that goes through
the doors that a user has: the calibration of the command line, and a server in a process of its own, over HTTP.

Sizes are chosen for about two minutes on two CPU cores. The model is far too small to be clever: before the fine-tune it
continues text in the manner of the reference; after it, it answers the questions it was taught. Nothing is left behind,
also after ctrl-C, unless a directory to keep is given.
"""

import json
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
    """Whoever stops the demonstration with SIGTERM gets the same cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _weights(directory: Path) -> int:
    """Bytes of safetensors files that hold weights."""
    return sum(f.stat().st_size for f in directory.glob("*.safetensors") if f.name != "scales.safetensors")


def _loss(metrics: list[dict[str, Any]]) -> tuple[float, float]:
    """First and last training loss."""
    losses = [m["train_loss"] for m in metrics]
    return losses[0], losses[-1]


class Demo:
    """One run; `say` gets one line for each stage. `scale` shrinks the training for tests: 1 is the real thing."""

    def __init__(self, keep: Path | None = None, say: Callable[[str], None] = print, scale: float = 1.0) -> None:
        self.keep, self.say, self.scale = keep, say, scale
        self.results: dict[str, Any] = {}
        self.started = time.monotonic()

    def run(self) -> dict[str, Any]:
        """All stages; returns their figures. Cleans up in every case."""
        with _sigterm_like_ctrl_c(), _workplace(self.keep) as place:
            trained = self._train(place)
            calibrated = self._calibrate(place, trained)
            began = time.monotonic()
            options = ["--train-on", "share", "--data-dir", str(place / "server"), "--served-model-name", "demo"]
            with RunningServer(calibrated, options, log=place / "server.log") as server:
                self._report("serve", f"ready at {server.url}", seconds=time.monotonic() - began)
                self._use(server)
        total = time.monotonic() - self.started
        self.results["seconds"] = total
        self.say(f"done in {total:.0f} s" + (f"; everything is in {self.keep}" if self.keep else ""))
        return self.results

    def _report(self, stage: str, line: str, /, **figures: Any) -> None:
        self.results[stage] = figures
        self.say(f"{stage:10} {line} ({figures['seconds']:.1f} s)")

    def _texts(self, place: Path) -> tuple[Path, Path]:
        """The language reference as JSON lines: what is trained on, and every eighth topic, which is not."""
        from pydoc_data.topics import topics

        texts = [text for _, text in sorted(topics.items())]
        held_out = texts[::8]
        for name, chosen in {"train": [t for t in texts if t not in held_out], "held-out": held_out}.items():
            lines = (json.dumps({"text": text}) + "\n" for text in chosen)
            (place / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        return place / "train.jsonl", place / "held-out.jsonl"

    def _train(self, place: Path) -> Path:
        """Random weights, then FP8 training; returns the last checkpoint, which holds the FP32 weights."""
        from pydoc_data.topics import topics

        from fp8serve.train.config import TrainConfig
        from fp8serve.train.scratch import write_random_model
        from fp8serve.train.trainer import Trainer

        began = time.monotonic()
        train, _ = self._texts(place)
        model = write_random_model(place / "untrained", topics.values())
        config = TrainConfig(
            model=str(model),
            data=(str(train),),
            out=str(place / "trained"),
            recipe="delayed",
            amax_history_len=16,
            max_steps=max(2, round(240 * self.scale)),
            batch_size=8,
            seq_len=128,
            lr=2e-3,
            warmup_steps=10,
            weight_decay=0.1,
        )
        losses: list[dict[str, Any]] = []
        with progress("Training") as advance:

            def follow(event: dict[str, Any]) -> None:
                if event["type"] == "metrics":
                    losses.append(event)
                    advance(event["step"], event["total_steps"])

            result = Trainer(config).run(follow)
        if result.checkpoint is None:
            raise MachineError("The training left no checkpoint.")
        first, last = _loss(losses)
        speed = result.trained_tokens / result.seconds
        self._report(
            "train",
            f"{result.step} steps in FP8 (E4M3 forward, E5M2 backward), {result.trained_tokens:,} tokens at "
            f"{speed:,.0f} tokens/s; loss {first:.2f} -> {last:.2f}",
            seconds=time.monotonic() - began,
            steps=result.step,
            tokens=result.trained_tokens,
            tokens_per_second=speed,
            first_loss=first,
            last_loss=last,
        )
        return Path(result.checkpoint)

    def _calibrate(self, place: Path, trained: Path) -> Path:
        from fp8serve.calibration.pipeline import calibrate
        from fp8serve.fp8.recipe import DelayedScaling

        began = time.monotonic()
        with progress("Calibrating") as advance:
            report = calibrate(
                trained,
                out=place / "calibrated",
                recipe=DelayedScaling(amax_history_len=16),
                data=[place / "held-out.jsonl"],
                samples=32,
                seq_len=128,
                progress=lambda stage, done, total: advance(done, total, stage),
            )
        quality = report.quality
        in_bf16 = _weights(place / "untrained")
        before, after = quality.reference_perplexity or float("nan"), quality.perplexity
        self._report(
            "calibrate",
            f"{report.data.tokens:,} tokens; perplexity {before:.2f} in BF16, {after:.2f} in FP8 "
            f"({100 * (after / before - 1):+.2f} %); weights {size(in_bf16)} in BF16, {size(report.bytes_after)} in FP8",
            seconds=time.monotonic() - began,
            perplexity_bf16=before,
            perplexity_fp8=after,
            bytes_bf16=in_bf16,
            bytes_fp8=report.bytes_after,
        )
        return place / "calibrated"

    def _use(self, server: RunningServer) -> None:
        self._generate(server, "generate")
        before = self._right_answers(server)
        job = self._finetune(server)
        self._activate(server, job)
        after = self._right_answers(server)
        question, answer = next(iter(QUESTIONS.items()))
        self.results["answers"] = {"right_before": before, "right_after": after, "of": len(QUESTIONS)}
        self.say(f"{'answers':10} {before} of {len(QUESTIONS)} right before, {after} after")
        self.say(f"{'':10} {question!r} -> {self._answer(server, question)!r}")
        self._generate(server, "again")

    def _generate(self, server: RunningServer, stage: str) -> None:
        began = time.monotonic()
        parameters = {"max_new_tokens": 64, "ignore_eos": True, "details": True, "temperature": 0.7, "seed": 0}
        answer = server.post("/generate", {"inputs": PROMPT, "parameters": parameters})
        seconds = time.monotonic() - began
        tokens = answer["details"]["generated_tokens"]
        self._report(
            stage,
            f"{tokens} tokens at {tokens / seconds:.0f} tokens/s: {PROMPT + answer['generated_text']!r}",
            seconds=seconds,
            tokens=tokens,
            tokens_per_second=tokens / seconds,
            text=answer["generated_text"],
            weight_version=answer["weight_version"],
        )

    def _answer(self, server: RunningServer, question: str) -> str:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 32, "temperature": 0.0}
        answer = server.post("/v1/chat/completions", {"model": "demo", **body})
        return str(answer["choices"][0]["message"]["content"])

    def _right_answers(self, server: RunningServer) -> int:
        return sum(self._answer(server, question).strip() == answer for question, answer in QUESTIONS.items())

    def _finetune(self, server: RunningServer) -> str:
        """Teaches the answers through the endpoint; returns the job's id."""
        began = time.monotonic()
        rows = [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in QUESTIONS.items()
        ]
        body = {"data": rows, "epochs": max(1, round(30 * self.scale)), "batch_size": 4, "learning_rate": 1e-3}
        job = server.post("/finetune", {**body, "warmup_steps": 5, "amax_history_len": 16})
        with progress("Fine-tuning") as advance:
            while job["status"] not in ("succeeded", "failed", "cancelled"):
                time.sleep(0.2)
                job = server.get(f"/finetune/{job['id']}")
                done = job["progress"] or {}
                advance(done.get("step", 0), done.get("total_steps", 0) or 1)
        if job["status"] != "succeeded":
            raise MachineError(f"The fine-tune job {job['status']}: {job['error']}.")
        first, last = _loss(server.get(f"/finetune/{job['id']}/metrics")["metrics"])
        self._report(
            "finetune",
            f"{len(rows)} questions over HTTP, {body['epochs']} epochs; loss {first:.2f} -> {last:.3f}",
            seconds=time.monotonic() - began,
            first_loss=first,
            last_loss=last,
        )
        return str(job["id"])

    def _activate(self, server: RunningServer, job: str) -> None:
        """Swaps the weights while a request is being answered, which must not notice."""
        answers: list[Any] = []
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 200, "ignore_eos": True, "details": True}}
        request = threading.Thread(target=lambda: answers.append(server.post("/generate", body)), daemon=True)
        request.start()
        began = time.monotonic()
        served = server.post(f"/finetune/{job}/activate")["served"]
        seconds = time.monotonic() - began
        request.join(300)
        if not answers or answers[0]["details"]["generated_tokens"] != 200:
            raise MachineError("A request in flight did not survive the swap.")
        self._report(
            "activate",
            f"serving {served['model']} with the scales that training kept; a request in flight finished on the old weights",
            seconds=seconds,
            weight_version=served["weight_version"],
        )
