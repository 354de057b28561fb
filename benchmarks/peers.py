"""Our engine beside other engines, in turn, on one machine: writes benchmarks/peers-<date>.json and a Markdown table.

    python benchmarks/peers.py MODEL peers.toml [--rounds 3] [--recipe stored] [--out benchmarks]

MODEL is what `fp8serve bench engine` measures. You provide the peers, their models and their environments. The file
says how each is started, once for every batch size, and how much faster we want to be:

    [[peer]]
    name = "llama.cpp Q8_0"
    command = ["/envs/llama/bin/python", "peer_llamacpp.py", "/models/1b", "q8_0", "{batch}"]
    batch = [1, 8]                               # "{batch}" becomes each of these
    goal = { prefill = 2.5, "1" = 1.15, "8" = 3.0 }  # times as fast: prefill at batch 1, decoding by batch size

A command prints its speeds as `... prefill 149.1 tok/s, decode 38.3 tok/s ...` or as a JSON object
`{"prefill": 149.1, "decode": 38.3}`; one of the two may be missing. The last line with speeds counts, and all other
output is ignored.

Other work on the machine and its changing clock can only make a run slower. So programs alternate, round by round and
batch by batch, and the best round of each counts; the worst is shown beside it, to tell how quiet the machine was. A
program that fails is named, the others are still measured, and the exit status is 1.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

OURS = "fp8serve"
LIMIT = 1800  # seconds for one command: some export the model on their first run
SPEEDS = re.compile(r"\b(prefill|decode) ([0-9.]+) tok(?:en)?s?/s")

Run = Callable[[Sequence[str]], str]


class PeerError(Exception):
    """A program that did not give its figures, or a file that does not say what to start."""


@dataclass(frozen=True)
class Program:
    """A program that decodes. goal: how many times as fast as this program ours should be, by "prefill" or the batch
    size."""

    name: str
    command: tuple[str, ...]
    batch: tuple[int, ...]
    goal: Mapping[str, float] = field(default_factory=dict)

    def at(self, batch: int) -> list[str]:
        return [part.replace("{batch}", str(batch)) for part in self.command]


def read_peers(text: str) -> list[Program]:
    """Returns the programs of a TOML file. PeerError when something is missing or unknown."""
    try:
        return [_program(entry) for entry in tomllib.loads(text).get("peer", [])]
    except tomllib.TOMLDecodeError as problem:
        raise PeerError(f"The file of peers is not TOML: {problem}.") from None


def _program(entry: Mapping[str, Any]) -> Program:
    name = entry.get("name", "a peer without a name")
    if unknown := entry.keys() - {"name", "command", "batch", "goal"}:
        raise PeerError(f"{name}: {sorted(unknown)} means nothing here; name, command, batch and goal do.")
    if not {"name", "command", "batch"} <= entry.keys():
        raise PeerError(f"{name}: needs a name, a command (a list of words) and batch (a list of numbers).")
    goal = entry.get("goal", {})
    if other := goal.keys() - {"prefill", *map(str, entry["batch"])}:
        raise PeerError(f"{name}: goals are for prefill and the batch sizes {entry['batch']}, not {sorted(other)}.")
    return Program(name, tuple(entry["command"]), tuple(entry["batch"]), goal)


def ours(model: str, recipe: str, batches: Sequence[int]) -> Program:
    """`fp8serve bench engine`, in its own process like every peer."""
    words = ["-m", "fp8serve.cli", "bench", "engine", model, "--recipe", recipe, "--batch", "{batch}", "--json"]
    return Program(OURS, (sys.executable, *words), tuple(batches))


# --- one run


def speeds(output: str) -> dict[str, float]:
    """Tokens per second for "prefill" and "decode", from the last line of the output that has them, or from a JSON
    object over several lines at its beginning. PeerError if there is neither."""
    for line in reversed(output.splitlines()):
        if results := _from_line(line):
            return results
    if results := _from_json(output.lstrip()):
        return results
    raise PeerError(f"printed no speed; its last words: {output.strip()[-300:]!r}")


def _from_line(line: str) -> dict[str, float]:
    return _from_json(line) if line.startswith("{") else {key: float(value) for key, value in SPEEDS.findall(line)}


def _from_json(text: str) -> dict[str, float]:
    """The speeds in the JSON object at the beginning of `text`; {} if there is no object, or none with speeds."""
    try:
        result, _ = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return {}
    return _from_object(result) if isinstance(result, dict) else {}


def _from_object(result: Mapping[str, Any]) -> dict[str, float]:
    """The speeds in the result of `fp8serve bench engine --json` for one batch size, or in the object of a peer."""
    if isinstance(result.get("prefill"), dict):
        (decode,) = result["decode"]
        return {"prefill": result["prefill"]["tokens_per_second"], "decode": decode["tokens_per_second"]}
    return {key: float(result[key]) for key in ("prefill", "decode") if isinstance(result.get(key), int | float)}


def start(command: Sequence[str]) -> str:
    """Runs the command and returns its output. PeerError when it fails or takes too long."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise PeerError(str(problem)) from None
    if result.returncode != 0:
        raise PeerError(f"ended with status {result.returncode}: {(result.stderr or result.stdout).strip()[-300:]!r}")
    return result.stdout


# --- all runs


@dataclass
class Measured:
    """rounds: the figures of every round, by program, then by "prefill" or the batch size. failed: the error of each
    program that failed."""

    rounds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, batch: int, results: Mapping[str, float]) -> None:
        rows = self.rounds.setdefault(name, {})
        if "decode" in results:
            rows.setdefault(str(batch), []).append(results["decode"])
        if "prefill" in results and batch == 1:
            rows.setdefault("prefill", []).append(results["prefill"])


def measure(programs: Sequence[Program], rounds: int, run: Run, report: Callable[[str], None]) -> Measured:
    """Runs all programs `rounds` times, batch by batch; a program that failed is not started again."""
    measured = Measured()
    for number in range(rounds):
        for batch, program in _turns(programs):
            if program.name in measured.failed:
                continue
            try:
                results = speeds(run(program.at(batch)))
            except (PeerError, ValueError, KeyError) as problem:
                measured.failed[program.name] = f"batch {batch}: {problem}"
                results = {}
            measured.add(program.name, batch, results)
            report(f"round {number + 1}, {program.name}, batch {batch}: {results or measured.failed[program.name]}")
    return measured


def _turns(programs: Sequence[Program]) -> Iterator[tuple[int, Program]]:
    for batch in sorted({batch for program in programs for batch in program.batch}):
        for program in programs:
            if batch in program.batch:
                yield batch, program


# --- the comparison


def compare(programs: Sequence[Program], measured: Measured) -> list[dict[str, Any]]:
    """One row for each peer and kind of work: both speeds, the ratio of the best rounds, the goal, and whether it was
    met."""
    mine, rows = measured.rounds.get(OURS, {}), []
    for program in programs:
        for work, theirs in measured.rounds.get(program.name, {}).items():
            if program.name == OURS or work not in mine:
                continue
            ratio, goal = max(mine[work]) / max(theirs), program.goal.get(work)
            row = {"peer": program.name, "work": work, "ours": max(mine[work]), "theirs": max(theirs)}
            worst = {"ours_worst": min(mine[work]), "theirs_worst": min(theirs)}
            rows.append(row | worst | {"ratio": ratio, "goal": goal, "met": None if goal is None else ratio >= goal})
    return sorted(rows, key=lambda row: (row["work"] != "prefill", row["work"].zfill(6)))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = ["| work | peer | ours, tokens/s | theirs | x | goal |", "|---|---|---|---|---|---|"]
    for row in rows:
        work = "prefill" if row["work"] == "prefill" else f"decode, batch {row['work']}"
        goal = "" if row["goal"] is None else f"{row['goal']:g} {'reached' if row['met'] else '**not reached**'}"
        lines.append(
            f"| {work} | {row['peer']} | {row['ours']:.1f} ({row['ours_worst']:.1f}) | "
            f"{row['theirs']:.1f} ({row['theirs_worst']:.1f}) | {row['ratio']:.2f} | {goal} |"
        )
    return "\n".join([*lines, "", "Best round, in brackets the worst."])


def write(out: Path, date: str, result: Mapping[str, Any]) -> Path:
    """Writes `peers-<date>.json` and `.md`; returns the path of the JSON file."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"peers-{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(table(result["rows"]) + "\n", encoding="utf-8")
    return path


def without_paths(words: Sequence[str]) -> list[str]:
    """Returns the command for publication: every absolute path is replaced by its last part."""
    return [Path(word).name if word.startswith("/") else word for word in words]


def main(arguments: Sequence[str] | None = None, run: Run = start) -> int:
    """Runs the comparison; returns 0 if no program failed, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory for fp8serve bench engine")
    parser.add_argument("peers", type=Path, help="TOML file that says how to start the peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recipe", default="stored", help="our model's recipe; 'stored': that of its directory")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args(arguments)
    from fp8serve.bench.figures import one_line, provenance

    peers = read_peers(options.peers.read_text(encoding="utf-8"))
    batches = sorted({batch for peer in peers for batch in peer.batch} | {1})
    programs = [ours(options.model, options.recipe, batches), *peers]
    began = datetime.now(UTC)
    measured = measure(programs, options.rounds, run, lambda line: print(line, file=sys.stderr, flush=True))
    origin = provenance("python benchmarks/peers.py") | {"began": began.isoformat(timespec="seconds")}
    commands = {program.name: without_paths(program.command) for program in programs}
    rows = compare(programs, measured)
    result = {"made": origin, "commands": commands, "rows": rows, "rounds": measured.rounds, "failed": measured.failed}
    path = write(options.out, began.date().isoformat(), result)
    print(one_line(origin), "", table(rows), "", f"written: {path}", sep="\n")
    for name, problem in measured.failed.items():
        print(f"{name} gave no figures: {problem}", file=sys.stderr)
    return int(bool(measured.failed))


if __name__ == "__main__":
    sys.exit(main())
