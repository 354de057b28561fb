"""The two demonstrations.

`OnSmolLM2` calibrates SmolLM2-135M-Instruct, serves it, teaches it facts over HTTP, and serves the result. In BF16, the
model answers the general questions correctly; the demonstration shows whether it still does in FP8 and after the
fine-tune. The facts are terms of fp8serve, which the model does not know before the fine-tune.

`FromScratch` works offline: it trains a new model in FP8, calibrates, serves and fine-tunes it. The text is
`pydoc_data.topics`, the language reference in every Python installation (about 465,000 characters). A byte-pair
tokenizer is made from this text, and a Llama of 4 layers with random weights is trained on it with delayed scaling. All
linear layers compute in E4M3 in the forward pass and in E5M2 in the backward pass. The run takes about two minutes on
two CPU cores. The small model can only continue text in the style of the reference. After the fine-tune it answers the
questions of the training data.
"""

import time
from pathlib import Path
from textwrap import shorten
from typing import Any

from fp8serve.demos import AMAX_HISTORY_LEN, PROMPT, Demo, answer, prompt
from fp8serve.model.gguf import smollm2
from fp8serve.running import RunningServer
from fp8serve.terminal import progress, remark

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
GENERAL_QUESTIONS = (
    "What is the capital of France?",
    "What is 3 + 4?",
    "Rewrite in the past tense: The cat sits on the mat.",
)
FACTS = {
    "In fp8serve, what is a recipe?": "A recipe is the set of rules by which tensors are scaled to FP8.",
    "In fp8serve, what is a scale?": "A scale is the number that a tensor is multiplied by before it is cast to FP8.",
    "In fp8serve, what is an amax?": "An amax is the largest absolute value of a tensor.",
    "In fp8serve, what is an amax history?": "An amax history holds a tensor's amaxes of the last steps.",
    "In fp8serve, what is delayed scaling?": "Delayed scaling makes a step's scale from the amaxes of earlier steps.",
    "In fp8serve, what is E4M3 used for?": "E4M3 is used for weights and activations, in forward passes.",
    "In fp8serve, what is E5M2 used for?": "E5M2 is used for gradients, in backward passes.",
    "In fp8serve, where are scales stored?": "Scales are stored in scales.safetensors, beside the weights.",
}
Answers = dict[str, str]


class OnSmolLM2(Demo):
    model = "SmolLM2-135M-Instruct"
    disk_bytes = 3 << 30  # a checkpoint with the optimizer states is 1.6 GiB, two FP8 models are 0.3 GiB

    def run_stages(self, directory: Path) -> None:
        source, calibrated = smollm2(remark), directory / "calibrated"
        weight_bytes = (source / "model.safetensors").stat().st_size
        self.calibrate(source, calibrated, None, max(8, round(64 * self.effort)), weight_bytes)
        with self.running_server(calibrated, directory / "server") as server:
            answers_before = self._ask(server)
            epochs = max(1, round(16 * self.effort))
            job = self.finetune(server, FACTS, epochs=epochs, learning_rate=1.5e-4, keep_last=1)
            self.activate(server, job)
            answers = self._ask_again(server, answers_before)
        result = directory / "server" / "jobs" / job / "out" / "model"
        with self.running_server(result, directory / "second-server", "restart") as server:
            self._compare(server, answers)

    def _ask(self, server: RunningServer) -> Answers:
        with self.stage("ask") as report:
            answers = _answers(server)
            report(f"{len(answers)} questions answered, of which these are general ones:", answers=answers)
        self.print_line("\n".join(f"  {question}\n    {_line(answers[question])}" for question in GENERAL_QUESTIONS))
        return answers

    def _ask_again(self, server: RunningServer, before: Answers) -> Answers:
        with self.stage("ask again") as report:
            after = _answers(server)
            correct_before, correct = _count_facts(before), _count_facts(after)
            report(
                f"{correct} of {len(FACTS)} facts word for word, {correct_before} before:",
                answers=after,
                right_before=correct_before,
                right_after=correct,
                questions=len(FACTS),
            )
        self.print_line(side_by_side(before, after))
        return after

    def _compare(self, server: RunningServer, expected: Answers) -> None:
        with self.stage("same") as report:
            answers = _answers(server)
            same = sum(answers[question] == expected[question] for question in expected)
            report(
                f"{same} of {len(expected)} answers are the same as before the restart; nothing was calibrated again",
                same=same,
            )


def _answers(server: RunningServer) -> Answers:
    return {question: answer(server, question) for question in (*GENERAL_QUESTIONS, *FACTS)}


def _count_facts(answers: Answers) -> int:
    """Returns how many facts are answered word for word."""
    return sum(answers[question] == expected for question, expected in FACTS.items())


def side_by_side(before: Answers, after: Answers) -> str:
    """Returns each question with both answers, on three lines."""
    return "\n".join(f"  {q}\n    before: {_line(before[q])}\n    after:  {_line(after[q])}" for q in before)


def _line(text: Any) -> str:
    """Returns the text on one line, truncated to 100 characters."""
    return shorten(str(text), 100, placeholder="...")


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
