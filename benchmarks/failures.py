"""Kills the processes of servers under load, and accounts for every request.

    python -m benchmarks.failures MODEL [--times 50] [--failure engine ...] [--database URL] [-- OPTION...]

Clients in a closed loop ask two servers greedily, whole and streamed. Their right answers are recorded before the first
failure. As behind a load balancer, a request goes to the other server if the first accepts no connection, or answers
503 although the failure came before the request. Each failure hits the servers in turn, and the next one begins when
the server that was hit answers rightly again:

    engine    its engine process is killed
    rank      one of its engine's other ranks is killed (needs `-- --tensor-parallel N`)
    stopped   its engine process is stopped and never continued, as if it hung
    parser    its parser processes are killed
    trainer   the training process of its running job is killed; the job must succeed
    suspended all its processes are stopped for 5 seconds
    server    the server process is killed, and started again
    update    the server is stopped with SIGTERM, which drains it, and started again

Every request must have its right answer or an end that the failure permits on the server that was hit: an error with a
code (HTTP 503, or an error event in a stream, before which all text is right), or a broken connection where the server
process itself was killed. A stream never ends with part of an answer without an error. After `--` come options of
`fp8serve serve`. With `--database`, the servers share it. Prints a table, writes JSON, and exits with 1 if a request
ended otherwise. Needs /proc, thus Linux.
"""

import argparse
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.soak_asks import WORDS
from benchmarks.soak_memory import children
from fp8serve.running import RunningServer

CLIENTS = 6
PAUSE_SECONDS = 0.2  # the mean pause of a client between two requests
JOB_STEPS = 40
PROMPTS = 12
TIMEOUT = 600.0  # seconds for an answer
SUSPENDED_SECONDS = 5.0
PERMITTED = {
    "engine": {"error"},
    "rank": {"error"},
    "stopped": {"error"},
    "parser": set[str](),
    "trainer": set[str](),
    "suspended": set[str](),
    "server": {"broken"},
    "update": {"error"},
}
MODULES = {
    "engine": "fp8serve.engine.worker",
    "rank": "fp8serve.engine.follower",
    "stopped": "fp8serve.engine.worker",
    "parser": "fp8serve.server.parsing.parser_process",
    "trainer": "fp8serve.train.job_process",
}


class Request(NamedTuple):
    prompt: str
    is_stream: bool


class Outcome(NamedTuple):
    """The end of a request: "right", "error" (a typed one), "broken" (the connection), "refused" or "wrong"."""

    end: str
    text: str
    detail: str = ""


def ask(url: str, request: Request) -> Outcome:
    """Sends a request and reads its whole answer."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=TIMEOUT)
    body = {"prompt": request.prompt, "max_tokens": 48, "temperature": 0, "stream": request.is_stream}
    try:
        connection.connect()
    except OSError as problem:
        return Outcome("refused", "", str(problem))
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            error = json.loads(answer.read()).get("error", {})
            end = "error" if answer.status == 503 and error.get("code") else "wrong"
            return Outcome(end, "", f"{answer.status} {error.get('message')}")
        return _read_stream(answer) if request.is_stream else _read_whole(answer)
    except (OSError, http.client.HTTPException) as problem:
        return Outcome("broken", "", f"{type(problem).__name__}: {problem}")
    finally:
        connection.close()


def _read_whole(answer: http.client.HTTPResponse) -> Outcome:
    return Outcome("right", json.loads(answer.read())["choices"][0]["text"])


def _read_stream(answer: http.client.HTTPResponse) -> Outcome:
    text, is_finished = "", False
    for line in answer:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return Outcome("right" if is_finished else "wrong", text, "[DONE] without a reason")
        if not data or data.startswith(":"):
            continue
        event = json.loads(data)
        if error := event.get("error"):
            return Outcome("error" if error.get("code") else "wrong", text, str(error.get("message")))
        for choice in event["choices"]:
            text += choice["text"]
            is_finished = is_finished or choice["finish_reason"] is not None
    return Outcome("broken", text, "the stream ended without [DONE]")


@dataclass
class Balancer:
    """The servers, and what became of the requests that were sent to them."""

    urls: list[str]
    answers: dict[Request, str] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hit: tuple[int, set[str]] | None = None  # the server that a failure hits now, and the ends that it permits

    def send(self, rng: random.Random) -> None:
        """Sends one request to a server, or to the other one if the first is down."""
        request = rng.choice(list(self.answers))
        first = rng.randrange(len(self.urls))
        for server in (first, (first + 1) % len(self.urls)):
            before, outcome = self.hit, ask(self.urls[server], request)
            was_down = before is not None and before[0] == server and outcome.end == "error" and not outcome.text
            if outcome.end != "refused" and not was_down:
                break
            self.ends["moved"] += 1
        permitted = {end for hit in (before, self.hit) if hit is not None and hit[0] == server for end in hit[1]}
        end = outcome.end
        if not self.answers[request].startswith(outcome.text) or (
            end == "right" and outcome.text != self.answers[request]
        ):
            end = "wrong"
        self.ends[end] += 1
        if end not in permitted | {"right"}:
            self.wrong.append(f"{request}: {end}: {outcome.detail or outcome.text!r}")


def run_client(balancer: Balancer, seed: int, stop: threading.Event) -> None:
    rng = random.Random(seed)
    while not stop.wait(rng.expovariate(1 / PAUSE_SECONDS)):
        balancer.send(rng)


def processes(pid: int, module: str) -> list[int]:
    """Returns the descendants of a process that run a module."""
    found = []
    for child in children(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        found += ([child] if module.encode() in command else []) + processes(child, module)
    return found


class Cluster:
    """Two servers, each of which can be replaced by a new one with the same options."""

    def __init__(self, model: str, options: Sequence[str], database: str | None, folder: Path) -> None:
        self._model, self._options, self._folder = Path(model), [*options], folder
        if database is not None:
            self._options += ["--database", database, "--served-model-name", "failures"]
        self.servers = [self._start(index) for index in range(2)]
        self.balancer = Balancer([server.url for server in self.servers])

    def _start(self, index: int) -> RunningServer:
        options = [*self._options, "--data-dir", str(self._folder / f"data-{index}")]
        return RunningServer(self._model, options, log=self._folder / f"log-{index}").__enter__()

    def restart(self, index: int) -> None:
        """Starts a server again, whose process has ended."""
        self.servers[index] = self._start(index)
        self.balancer.urls[index] = self.servers[index].url

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def record_answers(self) -> None:
        rng = random.Random(0)
        for is_stream in (False, True):
            for _ in range(PROMPTS):
                request = Request(" ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 60))), is_stream)
                outcomes = [ask(url, request) for url in self.balancer.urls]
                if {outcome.end for outcome in outcomes} != {"right"} or outcomes[0].text != outcomes[1].text:
                    raise SystemExit(f"The servers do not answer alike before the first failure: {outcomes}")
                self.balancer.answers[request] = outcomes[0].text


def fail(cluster: Cluster, index: int, failure: str) -> None:
    """Makes a server fail, and starts it again if its process ends."""
    server = cluster.servers[index]
    if failure == "suspended":
        os.killpg(server.pid, signal.SIGSTOP)
        time.sleep(SUSPENDED_SECONDS)
        os.killpg(server.pid, signal.SIGCONT)
    elif failure == "server":
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        cluster.restart(index)
    elif failure == "update":
        if (status := server.stop()) != 0:
            raise SystemExit(f"A server that was stopped with SIGTERM ended with status {status}.")
        cluster.restart(index)
    else:
        for pid in _wait_for(lambda: processes(server.pid, MODULES[failure])):
            os.kill(pid, signal.SIGSTOP if failure == "stopped" else signal.SIGKILL)


def start_job(server: RunningServer) -> str:
    """Starts a fine-tune job, and returns its id after its first step."""
    rows = [{"prompt": f"{word} is", "completion": f" {word}"} for word in WORDS]
    job = server.post("/finetune", {"data": rows, "max_steps": JOB_STEPS, "batch_size": 2, "seq_len": 32})["id"]
    _wait_for(lambda: (server.get(f"/finetune/{job}").get("progress") or {}).get("step"))
    return str(job)


def wait_for_success(server: RunningServer, job: str) -> None:
    status = _wait_for(lambda: (s := server.get(f"/finetune/{job}")["status"]) in ("succeeded", "failed") and s)
    if status == "failed":
        raise SystemExit(f"A job failed after its training process was killed: {server.get(f'/finetune/{job}')}")


def _wait_for(condition: Any) -> Any:
    """Returns the result of `condition` when it is true."""
    end = time.monotonic() + TIMEOUT
    while not (result := condition()):
        if time.monotonic() > end:
            raise SystemExit("A server did not return to work after a failure.")
        time.sleep(0.05)
    return result


def wait_until_right(cluster: Cluster, index: int, pids: set[int], failure: str) -> None:
    """Waits until the killed processes have successors, and the server answers rightly and is ready."""
    server, balancer = cluster.servers[index], cluster.balancer
    request = next(iter(balancer.answers))
    if failure in ("engine", "rank", "stopped"):
        _wait_for(lambda: set(processes(server.pid, MODULES[failure])) - pids)
    _wait_for(lambda: ask(server.url, request) == Outcome("right", balancer.answers[request]))


@contextmanager
def load(balancer: Balancer) -> Iterator[None]:
    """Runs the clients during the block, and waits for the ends of their requests."""
    stop = threading.Event()
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(run_client, balancer, seed, stop) for seed in range(CLIENTS)]
        try:
            yield
        finally:
            stop.set()
    for client in clients:
        client.result()


def repeat(cluster: Cluster, failure: str, times: int) -> dict[str, Any]:
    """Lets servers fail in turn; returns the ends of all requests meanwhile and the seconds to recover."""
    balancer, seconds = cluster.balancer, list[float]()
    balancer.ends, balancer.wrong = Counter(), []
    with load(balancer):
        for time_ in range(times):
            index = time_ % 2
            pids = set(processes(cluster.servers[index].pid, MODULES.get(failure, "")))
            job = start_job(cluster.servers[index]) if failure == "trainer" else None
            balancer.hit = (index, PERMITTED[failure])
            start = time.monotonic()
            fail(cluster, index, failure)
            wait_until_right(cluster, index, pids, failure)
            if job is not None:
                wait_for_success(cluster.servers[index], job)
            seconds.append(time.monotonic() - start)
            time.sleep(0.5)  # requests that the failure hit have ended by then, or are counted by their start
            balancer.hit = None
    ordered = sorted(seconds)
    recovery = {"median": ordered[len(ordered) // 2], "longest": ordered[-1]}
    return {"times": times, "ends": dict(balancer.ends), "recovery_seconds": recovery, "wrong": balancer.wrong}


def table(results: Mapping[str, Any]) -> str:
    lines = ["| failure | times | requests | right | errors | broken | moved | wrong | recovery, s: median, longest |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for failure, result in results.items():
        ends = Counter(result["ends"])
        counts = [result["times"], sum(ends.values()) - ends["moved"], ends["right"], ends["error"], ends["broken"]]
        counts += [ends["moved"], len(result["wrong"])]
        recovery = "{median:.1f}, {longest:.1f}".format(**result["recovery_seconds"])
        lines.append(f"| {failure} | {' | '.join(map(str, counts))} | {recovery} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--failure", action="append", choices=PERMITTED, help="repeat for several; all by default")
    parser.add_argument("--database", help="postgresql:// URL of an empty database")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options, server_options = parser.parse_args(words[:end]), words[end + 1 :]
    from fp8serve.bench.figures import one_line, provenance
    from fp8serve.hub import find_model

    failures = options.failure or [
        name for name in PERMITTED if name != "rank" or "--tensor-parallel" in server_options
    ]
    results = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fp8serve-failures-")))
        cluster = Cluster(str(find_model(options.model)), server_options, options.database, folder)
        stack.callback(cluster.stop)
        cluster.record_answers()
        for failure in failures:
            results[failure] = repeat(cluster, failure, options.times)
            print(failure, json.dumps(results[failure]), file=sys.stderr, flush=True)
    origin = provenance(f"python -m benchmarks.failures {Path(options.model).name} -- {' '.join(server_options)}")
    path = options.out / f"failures-{datetime.now(UTC).date().isoformat()}.json"
    path.write_text(json.dumps({"made": origin, "results": results}, indent=1) + "\n", encoding="utf-8")
    print(one_line(origin), table(results), f"written: {path}", sep="\n\n")
    return int(any(result["wrong"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
