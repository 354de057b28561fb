"""Another tool's model beside ours: a directory that fp8serve can read, or a program that runs the model itself.

A program gets requests as lines of JSON and answers each with one. First it describes itself, without a request:

    <- {"bytes": 144811648, "name": "llama.cpp Q8_0, llama-cpp-python 0.3.2"}
    -> {"ids": [1, 5, 9], "logits": "/tmp/x.npy"}     it writes FP32 [tokens, vocabulary] there
    <- {}
    -> {"prompt": [1, 5, 9], "new": 64}               it decodes greedily after the prompt
    <- {"tokens_per_second": 31.5}

benchmarks/quality_peers/ holds such programs. One that ends, or says anything else, is a JobError with its last words.
"""

import json
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.studies.documents import Logits
from fp8serve.calibration.data import Batch
from fp8serve.errors import JobError


@contextmanager
def running(name: str, command: str) -> "Iterator[Program]":
    """The peer in a process of its own, which is killed at the end."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+", encoding="utf-8") as errors:
        try:
            process = subprocess.Popen(
                shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        except (OSError, ValueError) as error:
            raise JobError(f"The peer {name} cannot be started: {error}.") from None
        try:
            yield Program(name, process, Path(folder))
        finally:
            process.kill()
            process.communicate()


class Program:
    """A running peer. folder: it writes logits there, and `stderr` there has its error output."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", folder: Path) -> None:
        self.name, self._process, self._folder = name, process, folder
        message = self._answer()
        self.bytes, self.about = int(message.get("bytes", 0)), str(message.get("name", name))

    def __call__(self, sequence: Batch) -> Logits:
        file = self._folder / "logits.npy"
        self._ask({"ids": sequence.ids.tolist(), "logits": str(file)})
        results = self._read(file)
        if results.ndim != 2 or len(results) != sequence.tokens:
            raise JobError(f"The peer {self.name} gave logits {results.shape} for {sequence.tokens} tokens.")
        return lambda rows: torch.from_numpy(results[rows.numpy()]).float()

    def _read(self, file: Path) -> Any:
        try:
            return np.load(file)
        except (OSError, ValueError) as error:
            raise JobError(f"The peer {self.name} wrote no logits that can be read: {error}.") from None

    def tokens_per_second(self, prompt: Sequence[int], new: int) -> float:
        """Returns the speed of greedy decoding at batch 1."""
        return float(self._ask({"prompt": list(prompt), "new": new})["tokens_per_second"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended; its last output is read next
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """Returns the next line that is an object of JSON; libraries print what they like before it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                if isinstance(results := json.loads(line), dict):
                    return results
            except ValueError:
                continue
        self._process.wait()
        words = (self._folder / "stderr").read_text(encoding="utf-8").strip()[-500:] or "it said nothing"
        raise JobError(f"The peer {self.name} ended with status {self._process.returncode}: {words}")
