"""The main job on a new model, offline: train in FP8, calibrate, serve, fine-tune over HTTP, ask again.

The text is `pydoc_data.topics`, the language reference that every Python installation carries (some 465,000
characters). A byte-pair tokenizer and a Llama of 4 layers are made from it and trained from random weights under
delayed scaling: every linear layer computes in E4M3 forward and E5M2 backward from the first step.

Sizes are chosen for about two minutes on two CPU cores. Such a small model can only continue text in the style of the
reference; after the fine-tune it answers the questions that it was taught.
"""

import time
from pathlib import Path
from typing import Any

from fp8serve.demos import HISTORY, PROMPT, Demo, answer, prompt
from fp8serve.running import RunningServer
from fp8serve.terminal import progress

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


class FromScratch(Demo):
    model = "a Llama of 4 layers, trained here from random weights"
    room = 512 << 20

    def work(self, place: Path) -> None:
        self._train(place)
        in_bf16 = (place / "untrained" / "model.safetensors").stat().st_size
        self.calibrate(place / "trained", place / "calibrated", [place / "held-out.jsonl"], 32, in_bf16)
        with self.serving(place / "calibrated", place / "server") as server:
            self._generate(server)
            before = _right(server)
            epochs = max(1, round(40 * self.effort))
            job = self.finetune(server, QUESTIONS, epochs=epochs, learning_rate=1e-3)
            self.activate(server, job)
            self._ask_again(server, before)

    def _train(self, place: Path) -> None:
        from fp8serve.train.trainer import Trainer

        with self.stage("train") as report, progress("Training") as advance:
            _write_texts(place)
            losses: list[float] = []

            def follow(event: dict[str, Any]) -> None:
                if event["type"] == "metrics":
                    losses.append(event["train_loss"])
                    advance(event["step"], event["total_steps"])

            done = Trainer(_training(place, self.effort)).run(follow)
            Path(str(done.checkpoint)).rename(place / "trained")  # FP32 weights; the FP8 result is written beside it
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

    def _generate(self, server: RunningServer) -> None:
        with self.stage("generate") as report:
            began = time.monotonic()
            answered = server.post("/generate", prompt(max_new_tokens=64, temperature=0.7, seed=0))
            speed = answered["details"]["generated_tokens"] / (time.monotonic() - began)
            text = answered["generated_text"]
            report(f"{speed:.0f} tokens/s: {PROMPT + text!r}", tokens_per_second=speed, text=text)

    def _ask_again(self, server: RunningServer, before: int) -> None:
        with self.stage("ask again") as report:
            answers = {question: answer(server, question) for question in QUESTIONS}
            after = sum(answers[question] == reported for question, reported in QUESTIONS.items())
            question = next(iter(QUESTIONS))
            report(
                f"{after} of {len(QUESTIONS)} answered word for word, {before} before: "
                f"{question!r} -> {answers[question]!r}",
                right_before=before,
                right_after=after,
                questions=len(QUESTIONS),
            )


def _right(server: RunningServer) -> int:
    """How many questions are answered word for word."""
    return sum(answer(server, question) == reported for question, reported in QUESTIONS.items())


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
