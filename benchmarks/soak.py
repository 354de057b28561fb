"""Does a server's memory stay flat? Minutes of mixed requests, the resident memory of its processes, a JSON and a plot.

    python benchmarks/soak.py MODEL [--minutes 30] [--warm-up 3] [--allow 8] [--out benchmarks] [--recipe current]

Clients in a closed loop send what real ones send: streamed and whole answers, chats, prompts of a few tokens and of
most of the context, prompts that share their beginning, several choices at once, sampling with every filter and
penalty, log-probabilities and stop strings; they hang up before the first token and in the middle of a stream; and
they send what must be refused. An answer with another status than the one that is due fails the run, too.

What is judged is anonymous memory (`RssAnon`), of the HTTP process and of the engine's: that is what leaks. Pages of
mapped weights come and go with the system's needs; they are recorded as part of the whole (`VmRSS`). The cache of
keys and values is the system's zero pages until it is used, so the server is given a small one and the warm-up has to
fill it. After the warm-up the median of the last quarter may exceed that of the first by `--allow` MB in each process.

Needs /proc, thus Linux. Requests follow a seed; which of them meet in a batch depends on the machine.
"""

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SEQUENCES = 8  # at the same time in the engine
CLIENTS = 12  # more than that, so that some wait
TIMEOUT = 300  # seconds for an answer
SHARED = "This is the beginning that many prompts have in common, and it is longer than a block of the cache. " * 2
WORDS = ("scale", "amax", "history", "recipe", "block", "cache", "token", "prompt", "batch", "stream", "weight")

# --- what clients ask for


@dataclass(frozen=True)
class Ask:
    """One request: where, what, the status that is due, and after how many lines of a stream the client hangs up."""

    kind: str
    path: str
    body: Any = None  # a str is sent as it is, None is a GET
    status: int = 200
    hang_up: int | None = None


Maker = Callable[[random.Random, int], Ask]  # its own random numbers, the context in tokens


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def _complete(kind: str, prompt: Any, hang_up: int | None = None, **options: Any) -> Ask:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, **options}
    return Ask(kind, "/v1/completions", body, hang_up=hang_up)


def _short(rng: random.Random, context: int) -> Ask:
    return _complete("short", _words(rng, 4), max_tokens=rng.randint(1, 32))


def _long(rng: random.Random, context: int) -> Ask:
    ids = [rng.randrange(3, 250) for _ in range(rng.randint(context // 2, context - 40))]
    return _complete("long prompt", ids, ignore_eos=True)


def _streamed(rng: random.Random, context: int) -> Ask:
    return _complete("streamed", _words(rng, 8), stream=True, stream_options={"include_usage": True}, ignore_eos=True)


def _prefix(rng: random.Random, context: int) -> Ask:
    return _complete("shared prefix", SHARED + _words(rng, 3))


def _choices(rng: random.Random, context: int) -> Ask:
    return _complete("several choices", _words(rng, 5), n=rng.randint(2, 4), temperature=1.0, seed=rng.randrange(1000))


def _sampled(rng: random.Random, context: int) -> Ask:
    filters = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": rng.randrange(1000)}
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    return _complete("sampled", _words(rng, 6), logprobs=3, stop=["amax", "\n\n"], **filters, **penalties)


def _chat(rng: random.Random, context: int) -> Ask:
    body = {"messages": [{"role": "user", "content": _words(rng, 10)}], "max_tokens": 20, "stream": rng.random() < 0.5}
    return Ask("chat", "/v1/chat/completions", body)


def _native(rng: random.Random, context: int) -> Ask:
    return Ask("native", "/generate", {"inputs": _words(rng, 5), "parameters": {"max_new_tokens": 12, "details": True}})


def _cut(rng: random.Random, context: int) -> Ask:
    """Hangs up in the middle of a stream, or before its first line."""
    return _complete("cut", _words(rng, 5), hang_up=rng.choice((0, 1, 6)), stream=True, max_tokens=200, ignore_eos=True)


def _refused(rng: random.Random, context: int) -> Ask:
    too_long = {"prompt": [5] * (2 * context)}
    unknown = {"prompt": "x", "model": "there-is-no-such-model"}
    wrong: list[tuple[Any, int]] = [("{no json", 400), ({"prompt": "x", "temperature": -1}, 400)]
    body, status = rng.choice([*wrong, ({"prompt": "x", "surprise": 1}, 400), (too_long, 400), (unknown, 404)])
    return Ask("refused", "/v1/completions", body, status)


def _looked(rng: random.Random, context: int) -> Ask:
    return Ask("looked at", rng.choice(("/metrics", "/health", "/info", "/v1/models", "/scales")))


MAKERS: tuple[Maker, ...] = (
    _short, _long, _streamed, _prefix, _choices, _sampled, _chat, _native, _cut, _refused, _looked,
)  # fmt: skip


# --- one client


@dataclass
class Counts:
    """What was asked, and what was answered otherwise than is due."""

    sent: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def answered(self, ask: Ask, status: int, said: bytes) -> None:
        self.sent[ask.kind] += 1
        if status != ask.status:
            self.wrong.append(f"{ask.kind}: {status} instead of {ask.status}: {said[:200].decode(errors='replace')}")
        elif b'data: {"error"' in said:
            self.wrong.append(f"{ask.kind}: a stream ended with an error: {said[-200:].decode(errors='replace')}")


def send(url: str, ask: Ask) -> tuple[int, bytes]:
    """The status and what was read; the connection is closed behind it, wherever the answer is."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=TIMEOUT)
    try:
        text = ask.body if isinstance(ask.body, str) else json.dumps(ask.body)
        verb, payload = ("GET", None) if ask.body is None else ("POST", text.encode())
        connection.request(verb, ask.path, payload, {"Content-Type": "application/json"})
        if ask.hang_up == 0:
            return ask.status, b""
        answer = connection.getresponse()
        lines = ask.hang_up if ask.status == answer.status else None
        return answer.status, answer.read() if lines is None else b"".join(answer.readline() for _ in range(lines))
    finally:
        connection.close()


def client(url: str, seed: int, context: int, done: threading.Event, counts: Counts) -> None:
    """Asks until `done`: every kind in turn, in an order of the client's own; the turn that has begun is ended."""
    rng = random.Random(seed)
    while not done.is_set():
        for make in rng.sample(MAKERS, len(MAKERS)):
            ask = make(rng, context)
            try:
                counts.answered(ask, *send(url, ask))
            except (OSError, http.client.HTTPException) as problem:
                counts.wrong.append(f"{ask.kind}: {type(problem).__name__}: {problem}")


# --- memory


def resident(pid: int) -> dict[str, float]:
    """MB of a process: {"resident", "anonymous"}."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {name: int(fields[key].split()[0]) / 1024 for name, key in (("resident", "VmRSS"), ("anonymous", "RssAnon"))}


def children(pid: int) -> list[int]:
    """Processes that this one started and that are alive."""
    return [int(c) for tasks in Path(f"/proc/{pid}/task").glob("*/children") for c in tasks.read_text().split()]


Sample = dict[str, Any]


def watch(pids: dict[str, int], seconds: float, every: float) -> list[Sample]:
    """A sample of every process, every so many seconds."""
    began, samples = time.monotonic(), []
    while (now := time.monotonic() - began) < seconds:
        samples.append({"seconds": round(now, 2)} | {name: resident(pid) for name, pid in pids.items()})
        time.sleep(min(every, max(0.0, seconds - (time.monotonic() - began))))
    return samples


def growth(samples: Sequence[Sample], warm_up: float, process: str) -> float:
    """MB of anonymous memory that the last quarter after the warm-up has more than the first quarter."""
    values = [sample[process]["anonymous"] for sample in samples if sample["seconds"] >= warm_up]
    quarter = max(1, len(values) // 4)
    return statistics.median(values[-quarter:]) - statistics.median(values[:quarter])


# --- the run


@dataclass(frozen=True)
class SoakPlan:
    """How long, in seconds; what is allowed, in MB."""

    seconds: float
    warm_up: float
    every: float
    allow: float
    context: int  # tokens that the server allows


def soak(url: str, pids: dict[str, int], plan: SoakPlan) -> dict[str, Any]:
    """Figures of a run, and `failed`: sentences, none when all is well."""
    done, counts = threading.Event(), Counts()
    with ThreadPoolExecutor(CLIENTS) as pool:
        jobs = [pool.submit(client, url, seed, plan.context, done, counts) for seed in range(CLIENTS)]
        try:
            samples = watch(pids, plan.seconds, plan.every)
        finally:
            done.set()
        for job in jobs:
            job.result()
    grown = {name: growth(samples, plan.warm_up, name) for name in pids}
    failed = [
        f"The {name} grew by {mb:.1f} MB after the warm-up; {plan.allow:g} are allowed."
        for name, mb in grown.items()
        if mb > plan.allow
    ]
    failed += counts.wrong[:20]
    requests = {"sent": dict(sorted(counts.sent.items())), "all": counts.sent.total(), "wrong": len(counts.wrong)}
    return {"requests": requests, "grown_mb": grown, "failed": failed, "samples": samples}


def plot(samples: Sequence[Sample], title: str) -> str:
    """SVG: memory over minutes, of each process."""
    from fp8serve.bench.plot import Panel, svg

    def curve(process: str, what: str) -> list[tuple[float, float]]:
        return [(sample["seconds"] / 60, sample[process][what]) for sample in samples]

    panels = [
        Panel(f"{process}, MB", {what: curve(process, what) for what in ("resident", "anonymous")})
        for process in ("engine", "server")
    ]
    return svg(title, panels, "minutes")


def serve_and_soak(model: str, recipe: str, plan: SoakPlan) -> dict[str, Any]:
    """A server of its own for the run."""
    from fp8serve.hub import find_model
    from fp8serve.running import RunningServer

    with tempfile.TemporaryDirectory(prefix="fp8serve-soak-") as folder:
        options = ["--data-dir", f"{folder}/data", "--recipe", recipe, "--max-num-seqs", str(SEQUENCES)]
        options += ["--max-model-len", str(plan.context)]
        with RunningServer(find_model(model), options, log=Path(folder) / "log") as server:
            (engine,) = children(server.pid)
            return soak(server.url, {"server": server.pid, "engine": engine}, plan)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when memory stayed flat and every answer was the one that was due."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up", type=float, default=3.0, help="minutes that are not judged")
    parser.add_argument("--allow", type=float, default=8.0, help="MB that a process may grow by")
    parser.add_argument("--context", type=int, default=512, help="tokens of the longest request; at least 200")
    parser.add_argument("--recipe", default="stored")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args(arguments)
    from fp8serve.bench.provenance import one_line, provenance

    seconds = 60 * options.minutes
    plan = SoakPlan(seconds, 60 * options.warm_up, max(0.1, seconds / 720), options.allow, options.context)
    made = provenance(f"python benchmarks/soak.py --minutes {options.minutes:g} --warm-up {options.warm_up:g}")
    result = {"made": made, **serve_and_soak(options.model, options.recipe, plan)}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"soak-{datetime.now(UTC).date().isoformat()}.json"
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    path.with_suffix(".svg").write_text(plot(result["samples"], f"{result['requests']['all']} requests"), "utf-8")
    grown = ", ".join(f"{name} {mb:+.1f} MB" for name, mb in result["grown_mb"].items())
    print(one_line(made), json.dumps(result["requests"]), f"after the warm-up: {grown}; written: {path}", sep="\n")
    print(*result["failed"], sep="\n", file=sys.stderr)
    return int(bool(result["failed"]))


if __name__ == "__main__":
    sys.exit(main())
