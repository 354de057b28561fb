"""The prompts of `bench serve`: random token ids, conversations in ShareGPT's form, or a file of prompts.

A data set is shuffled by the seed; if it has too few rows, it is read again from its beginning. Lengths of ShareGPT's
answers are counted by a tokenizer, and rows that are very short or very long are left out, both as `vllm bench serve`
does.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from fp8serve.bench.options import DEFAULT_OUTPUT, Load
from fp8serve.errors import DataError, JobError, os_reason

SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048  # tokens, as vLLM has them


@dataclass(frozen=True)
class Prompt:
    """A text, or token ids, and how many tokens its answer may have."""

    text: str | list[int]
    output_len: int


def prompts(load: Load, tokenizer: Path | None) -> list[Prompt]:
    """`load.num_prompts` of them. DataError for an invalid file, JobError for a missing option."""
    if load.dataset == "random":
        if load.api == "chat":
            raise JobError("Random prompts are token ids, which chat does not take; give a --dataset with texts.")
        chance = random.Random(load.seed)
        ids = [[chance.randrange(3, load.vocab) for _ in range(load.input_len)] for _ in range(load.num_prompts)]
        return [Prompt(text, load.output_len or DEFAULT_OUTPUT) for text in ids]
    if load.dataset_path is None:
        raise JobError(f"The data set {load.dataset} is a file; give its --dataset-path.")
    path = Path(load.dataset_path)
    found = list(_sharegpt(path, load, tokenizer) if load.dataset == "sharegpt" else _lines(path, load))
    if not found:
        raise DataError(f"{path} holds no prompt that can be used.")
    random.Random(load.seed).shuffle(found)
    return list(islice(cycle(found), load.num_prompts))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path} cannot be read: {os_reason(problem)}.") from None


def _lines(path: Path, load: Load) -> Iterator[Prompt]:
    """Of JSON lines with `prompt`, and `output_tokens` where the answer has a length of its own."""
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            own = row.get("output_tokens")
            sound = isinstance(row["prompt"], str) and (own is None or (type(own) is int and own > 0))
        except (ValueError, KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            raise DataError(f'{path}, line {number}: expected an object such as {{"prompt": "Hello"}}.')
        yield Prompt(row["prompt"], load.output_len or own or DEFAULT_OUTPUT)


def _sharegpt(path: Path, load: Load, tokenizer: Path | None) -> Iterator[Prompt]:
    """The first question of each conversation, with as many tokens for the answer as it had."""
    try:
        rows = json.loads(_read(path))
        pairs = [[str(turn["value"]) for turn in row["conversations"][:2]] for row in rows]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is not ShareGPT's JSON: a list of objects with conversations of value.") from None
    pairs = [pair for pair in pairs if len(pair) == 2]
    if tokenizer is None:
        if load.output_len is None:
            raise JobError("The length of ShareGPT's answers needs a tokenizer: give --tokenizer or --output-len.")
        return (Prompt(question, load.output_len) for question, _ in pairs)
    from fp8serve.model.text.tokenizer import Tokenizer

    encode = Tokenizer.from_dir(tokenizer).encode
    counted = ((question, len(encode(question)), load.output_len or len(encode(answer))) for question, answer in pairs)
    return (Prompt(question, new) for question, old, new in counted if _is_usual(old, new))


def _is_usual(prompt: int, answer: int) -> bool:
    return min(prompt, answer) >= SHORTEST and prompt <= LONGEST_PROMPT and prompt + answer <= LONGEST


def body(prompt: Prompt, load: Load, model: str) -> dict[str, Any]:
    """The request for one prompt; greedy, and streamed with its counts of tokens."""
    fixed = load.dataset == "random" if load.ignore_eos is None else load.ignore_eos
    asked: dict[str, Any] = {"model": model, "max_tokens": prompt.output_len, "temperature": 0, "stream": True}
    asked |= {"stream_options": {"include_usage": True}} | ({"ignore_eos": True} if fixed else {})
    if load.api == "completions":
        return asked | {"prompt": prompt.text}
    return asked | {"messages": [{"role": "user", "content": prompt.text}]}
