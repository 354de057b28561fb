"""The demonstration on a new model, offline: train it in FP8, calibrate, serve and fine-tune it over HTTP.

The text is `pydoc_data.topics`, the language reference in every Python installation (about 465,000 characters). A
byte-pair tokenizer is made from this text, and a Llama of 4 layers with random weights is trained on it with delayed
scaling. All linear layers compute in E4M3 in the forward pass and in E5M2 in the backward pass.

The run takes about two minutes on two CPU cores. The small model can only continue text in the style of the reference.
After the fine-tune it answers the questions of the training data.
"""

import time
from pathlib import Path
from typing import Any

from fp8serve.demos import AMAX_HISTORY_LEN, PROMPT, Demo, answer, prompt
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
    disk_bytes = 512 << 20

    def run_stages(self, directory: Path) -> None:
        self._train(directory)
        bytes_bf16 = (directory / "untrained" / "model.safetensors").stat().st_size
        self.calibrate(directory / "trained", directory / "calibrated", [directory / "held-out.jsonl"], 32, bytes_bf16)
        with self.running_server(directory / "calibrated", directory / "server") as server:
            self._generate(server)
            correct_before = _count_correct(server)
            epochs = max(1, round(40 * self.effort))
            job = self.finetune(server, QUESTIONS, epochs=epochs, learning_rate=1e-3)
            self.activate(server, job)
            self._ask_again(server, correct_before)

    def _train(self, directory: Path) -> None:
        from fp8serve.train.trainer import Trainer

        with self.stage("train") as report, progress("Training") as advance:
            _write_data_and_model(directory)
            losses: list[float] = []

            def on_event(event: dict[str, Any]) -> None:
                if event["type"] == "metrics":
                    losses.append(event["train_loss"])
                    advance(event["step"], event["total_steps"])

            result = Trainer(_train_config(directory, self.effort, self.device)).run(on_event)
            Path(str(result.checkpoint)).rename(directory / "trained")  # FP32 weights; the FP8 result is not used
            speed = result.trained_tokens / result.seconds
            report(
                f"{result.step} steps in FP8 (E4M3 forward, E5M2 backward) from random weights, "
                f"{result.trained_tokens:,} tokens at {speed:,.0f} tokens/s; loss {losses[0]:.2f} -> {losses[-1]:.2f}",
                steps=result.step,
                tokens=result.trained_tokens,
                tokens_per_second=speed,
                first_loss=losses[0],
                last_loss=losses[-1],
            )

    def _generate(self, server: RunningServer) -> None:
        with self.stage("generate") as report:
            start = time.monotonic()
            response = server.post("/generate", prompt(max_new_tokens=64, temperature=0.7, seed=0))
            speed = response["details"]["generated_tokens"] / (time.monotonic() - start)
            text = response["generated_text"]
            report(f"{speed:.0f} tokens/s: {PROMPT + text!r}", tokens_per_second=speed, text=text)

    def _ask_again(self, server: RunningServer, correct_before: int) -> None:
        with self.stage("ask again") as report:
            answers = {question: answer(server, question) for question in QUESTIONS}
            correct = sum(answers[question] == expected for question, expected in QUESTIONS.items())
            question = next(iter(QUESTIONS))
            report(
                f"{correct} of {len(QUESTIONS)} answered word for word, {correct_before} before: "
                f"{question!r} -> {answers[question]!r}",
                right_before=correct_before,
                right_after=correct,
                questions=len(QUESTIONS),
            )


def _count_correct(server: RunningServer) -> int:
    """Returns how many questions the model answers word for word."""
    return sum(answer(server, question) == expected for question, expected in QUESTIONS.items())


def _write_data_and_model(directory: Path) -> None:
    """Writes the language reference as JSON lines, with every eighth topic held out, and a model with random weights
    and its tokenizer."""
    from pydoc_data.topics import topics

    from fp8serve.train.scratch import write_random_model, write_texts

    texts = [text for _, text in sorted(topics.items())]
    write_texts(directory / "held-out.jsonl", texts[::8])
    write_texts(directory / "train.jsonl", [text for i, text in enumerate(texts) if i % 8])
    write_random_model(directory / "untrained", texts)


def _train_config(directory: Path, effort: float, device: str) -> Any:
    from fp8serve.model.device import resolve_device
    from fp8serve.train.config import TrainConfig

    return TrainConfig(
        model=str(directory / "untrained"),
        data=(str(directory / "train.jsonl"),),
        out=str(directory / "training"),
        amax_history_len=AMAX_HISTORY_LEN,
        max_steps=max(2, round(480 * effort)),
        batch_size=4,
        seq_len=128,
        lr=2e-3,
        warmup_steps=20,
        weight_decay=0.1,
        device=resolve_device(device, directory / "untrained"),
    )
