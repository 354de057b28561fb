"""Texts per second: our server and engine beside sentence-transformers in BF16 and FP32, on the same texts, in turn.

    python benchmarks/embeddings.py MODEL --peer PYTHON [--fp8 DIR] [--rounds 5] [--threads 2] [--out benchmarks]

MODEL: an embedding model's directory in BF16 or FP32, which the peer reads. --fp8: the directory that `fp8serve
calibrate` wrote for MODEL; without this option MODEL is calibrated first (recipe `delayed`). PYTHON: the interpreter of
an environment with sentence-transformers.

The texts are the passages shipped with fp8serve, cut to lengths in tokens: short (8 to 24), 128, 256, and mixed (8 to
256), at most the model's context. Every program loads its model once and then waits for its turn; all have the
same number of threads. The server is asked in two ways: all texts in one request, and `CLIENTS` clients with a text
each at a time. The best of the rounds counts, because other work on the machine makes a run slower and never faster;
the worst is shown beside it. The median cosine to the peer's FP32 vectors shows that all computed the same. Writes
`embeddings-<date>.json` and prints a table.
"""

import argparse
import base64
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

PROGRAM = Path(__file__).with_name("peer_programs") / "embed_texts.py"
CLIENTS = 16
WORK = {"short": (8, 24, 256), "128 tokens": (128, 128, 64), "256 tokens": (256, 256, 32), "mixed": (8, 256, 96)}
ENGINE, SERVER = "fp8serve engine", "fp8serve server, one request"
CLIENT = f"fp8serve server, {CLIENTS} clients"
BF16, FP32 = "sentence-transformers BF16", "sentence-transformers FP32"

Vectors = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Texts:
    """The texts of one kind of work, and the number of their tokens."""

    texts: list[str]
    tokens: int


@dataclass(frozen=True)
class Program:
    """time(texts) -> seconds; vectors(texts) -> their embeddings."""

    name: str
    time: Callable[[list[str]], float]
    vectors: Callable[[list[str]], Vectors]


def make_texts(encode: Callable[[str], list[int]], words: Sequence[str], longest: int) -> dict[str, Texts]:
    """Texts of each kind, no longer than `longest` tokens: runs of the words that begin at different places."""
    rng, results = random.Random(0), {}
    for kind, (least, most, count) in WORK.items():
        texts = [_text(encode, words, rng, min(longest, rng.randint(least, most))) for _ in range(count)]
        results[kind] = Texts(texts, sum(len(encode(text)) for text in texts))
    return results


def _text(encode: Callable[[str], list[int]], words: Sequence[str], rng: random.Random, tokens: int) -> str:
    """Returns the longest run of words from a random place that has at most `tokens` tokens."""
    start = rng.randrange(len(words))
    piece = [words[(start + i) % len(words)] for i in range(tokens)]
    while len(piece) > 1 and len(encode(" ".join(piece))) > tokens:
        piece.pop()
    return " ".join(piece)


# --- programs


class Child:
    """A process of peer_programs/embed_texts.py, with our engine or the peer, that answers one line of JSON by
    another."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version: str = self._line()["name"]

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self._process.args} ended with status {self._process.wait()}; its output is above.")
        return json.loads(line)

    def ask(self, texts: list[str], vectors: bool) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"texts": texts, "vectors": vectors}) + "\n")
        self._process.stdin.flush()
        return self._line()

    def program(self, name: str) -> Program:
        return Program(name, lambda t: float(self.ask(t, False)["seconds"]), lambda t: self.ask(t, True)["vectors"])


def post(url: str, texts: list[str]) -> Vectors:
    """Returns the vectors that `/v1/embeddings` returns for a request like that of OpenAI's client."""
    body = {"input": texts, "encoding_format": "base64", "truncate_prompt_tokens": -1}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/v1/embeddings", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        rows = [base64.b64decode(item["embedding"]) for item in json.load(answer)["data"]]
    return [struct.unpack(f"<{len(row) // 4}f", row) for row in rows]


def served(url: str) -> list[Program]:
    """Returns programs that send all texts in one request, and one text a request by several clients."""

    def one_by_one(texts: list[str]) -> Vectors:
        with ThreadPoolExecutor(CLIENTS) as clients:
            return [rows[0] for rows in clients.map(lambda text: post(url, [text]), texts)]

    ways = {SERVER: lambda texts: post(url, texts), CLIENT: one_by_one}
    return [Program(name, lambda t, way=way: _seconds(way, t), way) for name, way in ways.items()]  # type: ignore[misc]


def _seconds(call: Callable[[list[str]], Any], texts: list[str]) -> float:
    began = time.perf_counter()
    call(texts)
    return time.perf_counter() - began


# --- measuring


@dataclass
class Measured:
    """Seconds of every round, by kind of work and program; and the median cosine to FP32, by program."""

    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    cosine: dict[str, float] = field(default_factory=dict)


def measure(
    programs: Sequence[Program], work: Mapping[str, Texts], rounds: int, report: Callable[[str], None]
) -> Measured:
    """Measures all programs in turn, kind by kind, `rounds` times. Before that every program embeds some texts of each
    kind, which warms it up and yields the cosines."""
    results = Measured()
    some = [text for texts in work.values() for text in texts.texts[:8]]
    vectors = {program.name: program.vectors(some) for program in programs}
    if FP32 in vectors:
        results.cosine = {name: median(map(cosine, vectors[FP32], rows)) for name, rows in vectors.items()}
    for number in range(rounds):
        for kind, texts in work.items():
            for program in programs:
                seconds = program.time(texts.texts)
                results.seconds.setdefault(kind, {}).setdefault(program.name, []).append(seconds)
                report(f"round {number + 1}, {kind}, {program.name}: {len(texts.texts) / seconds:.1f} texts/s")
    return results


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    return dot / math.sqrt(sum(a * a for a in one) * sum(b * b for b in other))


def rows_of(measured: Measured, work: Mapping[str, Texts]) -> list[dict[str, Any]]:
    """Returns a row for each kind of work and program: the best and the worst round, and how many times as fast as the
    peers."""
    rows = []
    for kind, programs in measured.seconds.items():
        count, tokens = len(work[kind].texts), work[kind].tokens
        for name, seconds in programs.items():
            best = min(seconds)
            ratios = {peer: min(programs[peer]) / best for peer in (BF16, FP32) if peer in programs}
            rows.append({
                "work": kind, "program": name, "texts_per_second": count / best, "worst": count / max(seconds),
                "tokens_per_second": tokens / best, "times": ratios,
            })  # fmt: skip
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = ["| work | program | texts/s | tokens/s | x BF16 | x FP32 |", "|---|---|---|---|---|---|"]
    for row in rows:
        times = " | ".join(f"{row['times'][peer]:.2f}" if peer in row["times"] else "" for peer in (BF16, FP32))
        speed = f"{row['texts_per_second']:.1f} ({row['worst']:.1f}) | {row['tokens_per_second']:.0f}"
        lines.append(f"| {row['work']} | {row['program']} | {speed} | {times} |")
    return "\n".join([*lines, "", "Best round, in brackets the worst."])


# --- the run


def calibrated(model: Path, folder: Path) -> Path:
    from fp8serve.calibration.pipeline import calibrate_encoder

    calibrate_encoder(model, out=folder / "fp8")
    return folder / "fp8"


def run(model: Path, fp8: Path | None, peer: str | None, rounds: int) -> dict[str, Any]:
    """Returns the contents of the file, except its origin."""
    from fp8serve.calibration.data import PASSAGES
    from fp8serve.model.text.tokenizer import Tokenizer
    from fp8serve.running import RunningServer

    lines = PASSAGES.read_text(encoding="utf-8").splitlines()
    words = " ".join(json.loads(line).get("text", "") for line in lines).split()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fp8serve-embeddings-")))
        fp8 = calibrated(model, folder) if fp8 is None else fp8
        server = RunningServer(fp8, ["--data-dir", str(folder / "data")], log=folder / "log")
        stack.enter_context(server)
        work = make_texts(Tokenizer.from_dir(fp8).encode, words, server.get("/info")["engine"]["max_model_len"])
        engine = stack.enter_context(Child([sys.executable, str(PROGRAM), "engine", str(fp8)]))
        programs, versions = [engine.program(ENGINE), *served(server.url)], {}
        for name, dtype in ((BF16, "bfloat16"), (FP32, "float32")) if peer else ():
            child = stack.enter_context(Child([str(peer), str(PROGRAM), "sentence-transformers", str(model), dtype]))
            programs.append(child.program(name))
            versions[name] = child.version
        measured = measure(programs, work, rounds, lambda line: print(line, file=sys.stderr, flush=True))
    rows = rows_of(measured, work)
    return {"versions": versions, "rows": rows, "cosine": measured.cosine, "seconds": measured.seconds}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", help="interpreter with sentence-transformers; without, only ours is measured")
    parser.add_argument("--fp8", type=Path, help="calibrated directory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of every program that is started, and of torch here
    from fp8serve.bench.figures import one_line, provenance

    command = f"python benchmarks/embeddings.py MODEL --rounds {options.rounds} --threads {options.threads}"
    result = {"made": provenance(command), "model": options.model.name}
    result |= run(options.model, options.fp8, options.peer, options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"embeddings-{datetime.now(UTC).date().isoformat()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    cosines = ", ".join(f"{name} {cosine:.4f}" for name, cosine in result["cosine"].items())
    print(one_line(result["made"]), "", table(result["rows"]), "", f"cosine to FP32: {cosines}", sep="\n")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
