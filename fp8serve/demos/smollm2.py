"""The demonstration on SmolLM2-135M-Instruct: calibrate and serve it, teach it facts over HTTP, and serve the result.

In BF16, the model answers the general questions correctly; the demonstration shows whether it still does in FP8 and
after the fine-tune. The facts are terms of fp8serve, which the model does not know before the fine-tune.
"""

from pathlib import Path
from textwrap import shorten
from typing import Any

from fp8serve.demos import Demo, answer
from fp8serve.model.gguf import smollm2
from fp8serve.running import RunningServer
from fp8serve.terminal import remark

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
            correct_before, correct = _count_correct(before), _count_correct(after)
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


def _count_correct(answers: Answers) -> int:
    """Returns how many facts are answered word for word."""
    return sum(answers[question] == expected for question, expected in FACTS.items())


def side_by_side(before: Answers, after: Answers) -> str:
    """Returns each question with both answers, on three lines."""
    return "\n".join(f"  {q}\n    before: {_line(before[q])}\n    after:  {_line(after[q])}" for q in before)


def _line(text: Any) -> str:
    """Returns the text on one line, truncated to 100 characters."""
    return shorten(str(text), 100, placeholder="...")
