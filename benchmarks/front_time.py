"""The server process's time for an event and for a request: python -m benchmarks.front_time

The server is the real one, started by this program, and so is its connection to an engine process. That process has no
model: every `--step-ms` it sends one token to each running request, through the worker's own messages. This process is
the client; it reads raw sockets and parses nothing but `data:` lines. Figures are processor time of the server process
(all threads, without the parser processes), from /proc:

    event     `--streams` streams at once, each of `--tokens` tokens of text; time divided by the events that arrived
              (`event_user_us`: without the kernel's part, most of which is the socket's)
    token     the same time divided by the tokens; less than `event` if several tokens shared events
    request   `--requests` requests of one token each, `--clients` at a time

`engine_us_a_token` is the engine process's time in its messages alone. Prints JSON. `--profile` prints what the server
spends its time on instead of timing it.
"""

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from fp8serve.running import open_listener

HEAD = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello there"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello there"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello there"}]},
    "/v1/responses": {"input": "hello there"},
    "/generate": {"inputs": "hello there"},
}
# The limits of an engine without a model, and its answer to `info`.
LIMITS = {"max_model_len": 1 << 16, "num_blocks": 1 << 20, "block_size": 16, "vocab_size": 257}
INFO: dict[str, Any] = {"device": "cpu", "kernels": {}}


# -- the engine process ------------------------------------------------------------------------------------------------


def run_engine(arguments: list[str], step_seconds: float) -> int:
    """Runs a worker with an engine that has no model."""
    from fp8serve.engine import worker
    from fp8serve.engine.output import RequestOutput, Timing
    from fp8serve.engine.request import EngineLimits, Request
    from fp8serve.engine.sequence import Sequence, StepOutput
    from fp8serve.processes import Phases

    class PacedEngine:
        """Sends " word" to every running request in each step."""

        def __init__(self, model_dir: Path, **options: Any) -> None:
            self.limits = EngineLimits(**LIMITS)
            self.running: dict[str, tuple[Sequence, int]] = {}  # with the number of tokens
            self.phases, self.next_step = Phases(), 0.0

        def add_request(self, request: Request, arrived: float) -> None:
            self.running[request.request_id] = Sequence.of(request), 0

        def run_step(self) -> list[StepOutput]:
            time.sleep(max(0.0, self.next_step - time.monotonic()))
            self.next_step = max(self.next_step + step_seconds, time.monotonic())
            outputs = list[StepOutput]()
            for name, (seq, count) in list(self.running.items()):
                count, prompt = count + 1, seq.num_prompt
                is_last = count == seq.params.max_new_tokens
                self.running[name] = seq, count
                if count > 1 and not is_last:
                    outputs.append((seq, prompt + count, 7, " word"))
                    continue
                timing, reason = Timing(time.time(), 0.0, 0.0, 0.0), "length" if is_last else None
                outputs.append(RequestOutput(name, " word", (7,), None, reason, prompt, count, timing=timing))  # type: ignore[arg-type]
                if is_last:
                    del self.running[name]
            return outputs

        def abort(self, request_id: str) -> None:
            self.running.pop(request_id, None)

        def abort_all(self) -> list[RequestOutput]:
            return []

        def has_work(self) -> bool:
            return bool(self.running)

        def pack_weights(self, seconds: float) -> bool:
            return False

        def save_prefixes(self) -> None: ...

        def stats(self) -> dict[str, Any]:
            return {"running": len(self.running), "waiting": 0, "kv_usage": 0.0, "prefilling": []}

        def scales(self) -> list[dict[str, Any]]:
            return []

        def info(self) -> dict[str, Any]:
            return INFO

    worker._ENGINES["generate"] = PacedEngine  # type: ignore[assignment]
    return worker.main(arguments)


# -- the server process ------------------------------------------------------------------------------------------------


def run_server(options: dict[str, Any]) -> None:
    from fp8serve.engine import client
    from fp8serve.server.launch import adopt, run
    from fp8serve.server.settings import ServerLimits, Settings

    module, step = "benchmarks.front_time", str(options["step_seconds"])
    vars(client)["module_command"] = lambda _, *rest: (sys.executable, "-m", module, "--engine", step, *rest)
    limits = ServerLimits(queue=options["queue"], streams=options["queue"])
    settings = Settings(model=Path(options["model"]), data_dir=Path(options["data"]), train_on="share", limits=limits)
    with cProfile.Profile() if options["profile"] else tempfile.SpooledTemporaryFile() as profiler:
        run(settings, None, adopt(options["fd"]))
    if isinstance(profiler, cProfile.Profile):
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


# -- the client --------------------------------------------------------------------------------------------------------


class ProcessorTime(NamedTuple):
    """Seconds that a process has used: its own code's, and the kernel's for its sockets."""

    user: float
    system: float

    @classmethod
    def of(cls, pid: int) -> "ProcessorTime":
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        return cls(int(fields[11]) / ticks, int(fields[12]) / ticks)

    def since(self, start: "ProcessorTime") -> "ProcessorTime":
        return ProcessorTime(self.user - start.user, self.system - start.system)

    @property
    def total(self) -> float:
        return self.user + self.system


def child(pid: int, argument: str) -> int:
    """Returns the child of a process whose command line has an argument."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == pid and argument in (stat.parent / "cmdline").read_text().split("\0"):
                return int(stat.parent.name)
        except OSError:  # it has ended
            continue
    raise SystemExit("The engine process is not running.")


def request_bytes(route: str, tokens: int) -> bytes:
    """Returns a request for a stream of `tokens` tokens."""
    options: dict[str, Any] = {"max_tokens": tokens, "stream": True}
    if route == "/generate":
        options = {"parameters": {"max_new_tokens": tokens}, "stream": True}
    elif route == "/v1/responses":
        options = {"max_output_tokens": tokens, "stream": True}
    body = json.dumps(ROUTES[route] | options).encode()
    return HEAD % (route.encode(), len(body)) + body


async def stream(port: int, route: str, tokens: int, requests: int = 1) -> tuple[int, int]:
    """Sends requests one after another on one connection. Returns the numbers of events and of bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = request_bytes(route, tokens)
    events = size = 0
    for _ in range(requests):
        writer.write(request)
        rest = b""
        while not rest.endswith(b"\r\n0\r\n\r\n"):
            if not (data := await reader.read(1 << 16)):
                raise SystemExit(f"The server closed the connection: {rest[-500:]!r}")
            size += len(data)
            rest = rest[-9:] + data
            events += data.count(b"data: {")
    writer.close()
    return events, size


async def measure(work: Coroutine[Any, Any, Any], pids: list[int]) -> tuple[Any, list[ProcessorTime], float]:
    """Returns the result, the processor time of each process, and the duration in seconds."""
    start, began = [ProcessorTime.of(pid) for pid in pids], time.perf_counter()
    result = await work
    used = [ProcessorTime.of(pid).since(each) for pid, each in zip(pids, start, strict=True)]
    return result, used, time.perf_counter() - began


async def ready(port: int, route: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise SystemExit(f"The server has ended with exit status {server.returncode}:\n{log.read_text()[-1000:]}")
        try:
            if (await stream(port, route, 3))[0] > 2:
                return
        except (SystemExit, OSError):
            pass
        await asyncio.sleep(0.1)
    raise SystemExit("The server is not ready after a minute.")


async def timings(port: int, server: subprocess.Popen[bytes], log: Path, options: argparse.Namespace) -> dict[str, Any]:
    await ready(port, options.route, server, log)
    pid, engine = server.pid, child(server.pid, "--engine")
    await asyncio.gather(*(stream(port, options.route, 10) for _ in range(options.clients)))
    streams = asyncio.gather(*(stream(port, options.route, options.tokens) for _ in range(options.streams)))
    counts, (server_time, engine_time), seconds = await measure(_result(streams), [pid, engine])
    events, tokens = sum(events for events, _ in counts), options.streams * options.tokens
    per_client = options.requests // options.clients
    short = asyncio.gather(*(stream(port, options.route, 1, per_client) for _ in range(options.clients)))
    _, (request_time, _), request_wall = await measure(_result(short), [pid, engine])
    return {
        "route": options.route,
        "streams": options.streams,
        "events": events,
        "tokens": tokens,
        "event_us": round(server_time.total / events * 1e6, 1),
        "event_user_us": round(server_time.user / events * 1e6, 1),
        "token_us": round(server_time.total / tokens * 1e6, 1),
        "tokens_per_second": round(tokens / seconds),
        "engine_us_a_token": round(engine_time.total / tokens * 1e6, 1),
        "request_ms": round(request_time.total / (per_client * options.clients) * 1e3, 2),
        "requests_per_second": round(per_client * options.clients / request_wall, 1),
    }


async def _result(future: Any) -> Any:
    return await future


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--route", choices=ROUTES, default="/v1/completions")
    parser.add_argument("--profile", action="store_true")
    parsed = parser.parse_args()
    from tests.server.fakes import model_dir

    with tempfile.TemporaryDirectory() as directory:
        listener, log = open_listener(), Path(directory) / "log"
        options = {
            "model": str(model_dir(Path(directory) / "model")),
            "data": str(Path(directory) / "data"),
            "fd": listener.fileno(),
            "step_seconds": parsed.step_ms / 1e3,
            "queue": max(parsed.streams, parsed.clients) * 2,
            "profile": parsed.profile,
        }
        command = [sys.executable, "-m", "benchmarks.front_time", "--server", json.dumps(options)]
        port, output = listener.getsockname()[1], None if parsed.profile else subprocess.DEVNULL
        with log.open("w") as errors:
            server = subprocess.Popen(command, pass_fds=[listener.fileno()], stdout=output, stderr=errors)
        listener.close()  # only the server holds the socket: if it ends, clients are refused instead of queued
        try:
            print(json.dumps(asyncio.run(timings(port, server, log, parsed)), indent=1), flush=True)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--server"]:
        run_server(json.loads(sys.argv[2]))
    elif sys.argv[1:2] == ["--engine"]:
        sys.exit(run_engine(sys.argv[3:], float(sys.argv[2])))
    else:
        main()
