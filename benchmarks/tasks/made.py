"""The data of three tasks for lm-eval, made here: nothing is downloaded, and every call makes the same."""

import json
import random
from pathlib import Path
from typing import Any

from datasets import Dataset

HERE = Path(__file__).resolve().parent
PASSAGES = HERE.parent.parent / "calibrate/passages.jsonl"
CHOICES = 4
Question = dict[str, Any]  # "question", "choices", "answer": the index of the right one


def _split(questions: list[Question]) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(questions)}


def _question(draw: random.Random, question: str, right: str, wrong: list[str]) -> Question:
    choices = [right, *wrong]
    draw.shuffle(choices)
    return {"question": question, "choices": choices, "answer": choices.index(right)}


def arithmetic(count: int = 200, **_: Any) -> dict[str, Dataset]:
    """Sums, differences and products of small numbers; wrong answers are near the right one."""
    draw = random.Random(0)
    return _split([_sum(draw) for _ in range(count)])


def _sum(draw: random.Random) -> Question:
    a, b = draw.randint(2, 30), draw.randint(2, 12)
    words, right = draw.choice([("plus", a + b), ("minus", a - b), ("times", a * b)])
    wrong = draw.sample([right + d for d in (-10, -3, -2, -1, 1, 2, 3, 10)], CHOICES - 1)
    return _question(draw, f"{a} {words} {b} is", str(right), [str(w) for w in wrong])


def python(**_: Any) -> dict[str, Dataset]:
    """Facts of the Python language and its library."""
    draw = random.Random(0)
    facts = [json.loads(line) for line in (HERE / "python_facts.jsonl").read_text(encoding="utf-8").splitlines()]
    return _split([_question(draw, fact["question"], fact["right"], fact["wrong"]) for fact in facts])


def cloze(**_: Any) -> dict[str, Dataset]:
    """The sentence that comes next in a passage shipped for calibration; wrong ones come from other passages."""
    draw = random.Random(0)
    lines = map(json.loads, PASSAGES.read_text(encoding="utf-8").splitlines())
    texts = [line["text"].split(". ") for line in lines if "text" in line]
    pieces = [(". ".join(t[:3]) + ".", t[3].strip()) for t in texts if len(t) > 4]
    nexts = [after for _, after in pieces]
    return _split(
        [
            _question(draw, before, after, draw.sample([n for n in nexts if n != after], CHOICES - 1))
            for before, after in pieces
        ]
    )
