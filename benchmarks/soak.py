"""Tests whether a server keeps its promises under load and over time: many requests at once, then many minutes of them.

    python -m benchmarks.soak MODEL [--load 2000] [--minutes 30] [--warm-up 3] [--context 512] [-- OPTION...]

First, `--load` requests of four tenants at the same moment (soak_load.py): no tenant waits more than twice as long as a
fair server would have it, memory is flat, `/metrics` counts every request. Then, on the same server, `--minutes` of
clients in a closed loop that send what real ones send (soak_asks.py): streamed and whole answers, chats, prompts of a
few tokens and of most of the context, prompts that share their beginning, several choices at once, sampling with every
filter and penalty, log-probabilities and stop strings; they hang up before the first token and in the middle of a
stream; and they send what must be refused. An answer with a status other than the expected one fails the run, too.

Memory is that of the HTTP process and of the engine's (soak_memory.py). The cache of keys and values takes no memory
until it is used, so the server is given a small one, which the first requests fill. After the warm-up, the median of
the last quarter may exceed that of the first by `--allow` MB in each process.

After `--` come further options of `fp8serve serve`. Writes a JSON file and a picture. Requests are drawn from a seed;
which of them share a batch depends on the machine.
"""

import argparse
import http.client
import json
import os
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import soak_load
from benchmarks.soak_asks import MAKERS, Ask
from benchmarks.soak_memory import Sample, children, too_much, watch

SEQUENCES = 8  # at the same time in the engine
CLIENTS = 12  # more than that, so that some wait
TIMEOUT = 600  # seconds for an answer


@dataclass
class Counts:
    """The number of requests of each kind, and a sentence for each wrong answer."""

    sent: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, ask: Ask, status: int, answer: bytes) -> None:
        self.sent[ask.kind] += 1
        if status != ask.status:
            self.wrong.append(f"{ask.kind}: {status} instead of {ask.status}: {answer[:200].decode(errors='replace')}")
        elif b'data: {"error"' in answer:
            self.wrong.append(f"{ask.kind}: a stream ended with an error: {answer[-200:].decode(errors='replace')}")


def send(url: str, key: str, ask: Ask) -> tuple[int, bytes]:
    """Sends a request; returns the status and the bytes that were read. Closes the connection, even in the middle of
    the answer."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=TIMEOUT)
    try:
        text = ask.body if isinstance(ask.body, str) else json.dumps(ask.body)
        verb, payload = ("GET", None) if ask.body is None else ("POST", text.encode())
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request(verb, ask.path, payload, headers)
        if ask.hang_up == 0:
            return ask.status, b""
        answer = connection.getresponse()
        lines = ask.hang_up if ask.status == answer.status else None
        return answer.status, answer.read() if lines is None else b"".join(answer.readline() for _ in range(lines))
    finally:
        connection.close()


def client(url: str, key: str, seed: int, context: int, stop: threading.Event, counts: Counts) -> None:
    """Sends requests of all kinds in turn, in the client's own order, until `stop` is set. Finishes its last turn."""
    rng = random.Random(seed)
    while not stop.is_set():
        for make in rng.sample(MAKERS, len(MAKERS)):
            ask = make(rng, context)
            try:
                counts.add(ask, *send(url, key, ask))
            except (OSError, http.client.HTTPException) as problem:
                counts.wrong.append(f"{ask.kind}: {type(problem).__name__}: {problem}")


# --- the run


@dataclass(frozen=True)
class SoakPlan:
    """Durations in seconds, and the allowed growth in MB."""

    seconds: float
    warm_up: float
    every: float
    allow: float
    context: int  # tokens that the server allows


def soak(url: str, keys: Sequence[str], pids: dict[str, int], plan: SoakPlan) -> dict[str, Any]:
    """Runs the clients; returns the figures of the run, in which "failed" is a list of sentences, empty if all is well.
    `keys`: API keys, which the clients take in turn."""
    stop, counts = threading.Event(), Counts()
    clock = threading.Timer(plan.seconds, stop.set)
    with ThreadPoolExecutor(CLIENTS) as pool:
        turns = [keys[seed % len(keys)] for seed in range(CLIENTS)]
        jobs = [pool.submit(client, url, key, seed, plan.context, stop, counts) for seed, key in enumerate(turns)]
        clock.start()
        try:
            samples = watch(pids, plan.every, stop)
        finally:
            clock.cancel()
            stop.set()
        for job in jobs:
            job.result()
    grown, failed = too_much(samples, plan.warm_up, plan.allow)
    requests = {"sent": dict(sorted(counts.sent.items())), "all": counts.sent.total(), "wrong": len(counts.wrong)}
    return {"requests": requests, "grown_mb": grown, "failed": failed + counts.wrong[:20], "samples": samples}


def plot(result: Mapping[str, Any]) -> str:
    """SVG, over minutes: the answers to the crowd by tenant, and the memory in each part that was run."""
    from fp8serve.charts import Panel, svg_file

    panels = []
    for name, run in ((name, result[name]) for name in ("load", "soak") if name in result):
        if "ends" in run:
            panels.append(Panel("answered, %", soak_load.finished(run["ends"])))
        for process in ("engine", "server"):
            curves = {what: _curve(run["samples"], process, what) for what in ("resident", "anonymous")}
            panels.append(Panel(f"{name}: {process}, MB", curves))
    return svg_file("A crowd of four tenants, and a soak", panels, "minutes")


def _curve(samples: Sequence[Sample], process: str, what: str) -> list[tuple[float, float]]:
    return [(sample["seconds"] / 60, sample[process][what]) for sample in samples]


def write_keys(path: Path) -> dict[str, str]:
    """Writes a file with an API key for each tenant of the crowd; returns the keys by tenant."""
    from fp8serve.server.access.keys import format_key_line, new_key

    keys = {tenant: new_key() for tenant in soak_load.SHARES}
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.writelines(format_key_line(name, name, ("generate", "read"), key) + "\n" for name, key in keys.items())
    return keys


def serve_and_run(model: str, options: Sequence[str], count: int, plan: SoakPlan) -> dict[str, Any]:
    """Starts a server and runs both parts on it."""
    from fp8serve.hub import find_model
    from fp8serve.running import RunningServer

    with tempfile.TemporaryDirectory(prefix="fp8serve-soak-") as folder:
        keys = write_keys(Path(folder) / "keys.toml")
        arguments = ["--data-dir", f"{folder}/data", "--api-keys", f"{folder}/keys.toml", *options]
        arguments += ["--max-num-seqs", str(SEQUENCES), "--max-model-len", str(plan.context)]
        arguments += ["--num-blocks", str(SEQUENCES * plan.context // 16)]
        waiting = max(256, count)  # the queue takes all requests, each as long as the context
        bounds = {"queue": waiting, "streams": waiting, "queue_tokens": waiting * plan.context}
        arguments += [f"--limit={name}={value}" for name, value in bounds.items()]
        with RunningServer(find_model(model), arguments, log=Path(folder) / "log") as server:
            (engine,) = children(server.pid)
            pids, result = {"server": server.pid, "engine": engine}, dict[str, Any]()
            if count:
                crowd = soak_load.make_requests(count, plan.context)
                result["load"] = soak_load.load(server.url, keys, pids, crowd, plan.allow)
            if plan.seconds:
                result["soak"] = soak(server.url, list(keys.values()), pids, plan)
            return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both parts; returns 0 if all checks passed, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load", type=int, default=2000, help="requests at the same moment; 0: none")
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes of the soak; 0: no soak")
    parser.add_argument("--warm-up", type=float, default=3.0, help="minutes that are not judged")
    parser.add_argument("--allow", type=float, default=8.0, help="MB that a process may grow by")
    parser.add_argument("--context", type=int, default=512, help="tokens of the longest request; at least 200")
    parser.add_argument("--recipe", default="stored")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    options, server_options = parser.parse_args(words[:end]), words[end + 1 :]
    from fp8serve.bench.figures import one_line, provenance

    seconds = 60 * options.minutes
    plan = SoakPlan(seconds, 60 * options.warm_up, max(0.1, seconds / 720), options.allow, options.context)
    server_options = ["--recipe", options.recipe, *server_options]
    command = (
        f"python -m benchmarks.soak {Path(options.model).name} --load {options.load} --minutes {options.minutes:g}"
    )
    header = provenance(
        f"{command} --warm-up {options.warm_up:g} --context {options.context} -- {' '.join(server_options)}"
    )
    result = {"made": header, **serve_and_run(options.model, server_options, options.load, plan)}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"soak-{datetime.now(UTC).date().isoformat()}.json"
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    path.with_suffix(".svg").write_text(plot(result), "utf-8")
    print(
        one_line(header),
        *map(summary, (run for name, run in result.items() if name != "made")),
        f"written: {path}",
        sep="\n",
    )
    failed = [sentence for name, run in result.items() if name != "made" for sentence in run["failed"]]
    print(*failed, sep="\n", file=sys.stderr)
    return int(bool(failed))


def summary(run: Mapping[str, Any]) -> str:
    """Returns the figures of a run as JSON, without its samples."""
    return json.dumps(
        {name: value for name, value in run.items() if name not in ("samples", "ends", "failed")}, indent=1
    )


if __name__ == "__main__":
    sys.exit(main())
