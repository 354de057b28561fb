"""The process in which strangers' tokenizers are tried, for programs that wait for it.

`python -m fp8serve.model.text.text_process`; limited_process.py says how it is spoken to. It imports no torch.
"""

import sys
from pathlib import Path

from fp8serve.model.text.limited_process import Answer, Head, LimitedProcess, serve
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.model.text.tokenizer_facts import TokenizerFacts

MODULE = "fp8serve.model.text.text_process"
READING_SECONDS, READING_MEMORY = 30.0, 2 << 30
"""Processor time and memory to read a tokenizer: ten times what the largest published one takes."""


def describe(directory: Path, cpu: float = READING_SECONDS, memory: int = READING_MEMORY) -> TokenizerFacts:
    """The facts about a directory's tokenizer, read under limits. ModelError: it has none, or one that is of no use."""
    process = LimitedProcess(MODULE, cpu, memory)
    try:
        head = {"op": "describe", "directory": str(directory)}
        _, written = process.perform(f"Reading {directory / 'tokenizer.json'}", head)
        return TokenizerFacts.from_json(written)
    finally:
        process.close()


def _describe(head: Head, body: bytes) -> Answer:
    return {}, TokenizerFacts.of(Tokenizer.from_dir(Path(head["directory"]))).to_json()


def main() -> int:
    serve({"describe": _describe})
    return 0


if __name__ == "__main__":
    sys.exit(main())
