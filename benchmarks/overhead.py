"""The cost of the server on top of its engine: tokens per second at batch 8, and the time to the first token.

    python -m benchmarks.overhead MODEL [--rounds 5] [--batch 8] [--prompt 64] [--new 96] [--recipe NAME] [--threads 2]

The engine runs in this process; beside it are three servers of the same model: one with default options, one that sends
spans to a collector (a small process that takes them and answers 200), and one with `--metrics-per-layer`. They take
turns: in a round each gets `--batch` requests at once, and then `--first` requests one after the other, with new random
prompts, while the others are idle. A rate is the number of all tokens of the answers divided by the time from sending
the first request to the last token. The server streams; its client only reads the bytes. In each round, a server's rate
is divided by the engine's, and the engine's time to the first token is subtracted from the server's. Prints the medians
and all rounds as JSON.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fp8serve.bench.figures import provenance
from fp8serve.engine.engine import Engine
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.hub import find_model
from fp8serve.running import RunningServer

Prompt = tuple[int, ...]
Arms = dict[str, Callable[[Sequence[Prompt], int], tuple[float, float]]]
"""By name, a function of the prompts and the number of new tokens for each. It returns the seconds to the first token
and to the last token of all answers."""
COLLECTOR = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def by_engine(engine: Engine, prompts: Sequence[Prompt], new: int) -> tuple[float, float]:
    params = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    began, first = time.perf_counter(), 0.0
    for number, prompt in enumerate(prompts):
        engine.add_request(Request(str(number), prompt, params))
    while engine.has_work():
        if engine.step() and not first:
            first = time.perf_counter() - began
    return first, time.perf_counter() - began


async def by_server(url: str, prompts: Sequence[Prompt], new: int) -> tuple[float, float]:
    began = time.perf_counter()
    firsts = await asyncio.gather(*(_stream(url, prompt, new, began) for prompt in prompts))
    return min(firsts), time.perf_counter() - began


async def _stream(url: str, prompt: Prompt, new: int, began: float) -> float:
    """Reads a whole stream; returns the seconds from `began` to its first event."""
    address = urlsplit(url)
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        response, first = bytearray(), 0.0
        while piece := await reader.read(1 << 16):
            response += piece
            if not first and b"data: " in response:
                first = time.perf_counter() - began
    finally:
        writer.close()
    assert response.startswith(b"HTTP/1.1 200"), bytes(response[:300])
    assert b"data: [DONE]" in response, bytes(response[-300:])
    return first


@contextmanager
def collector() -> Iterator[str]:
    """The address of a collector that accepts everything."""
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


def measure(
    arms: Arms, rounds: int, batch: int, prompt: int, new: int, first: int
) -> dict[str, list[dict[str, float]]]:
    """For each arm, a record of each round; the order of the arms changes from round to round."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    rng = random.Random(0)

    def prompts(count: int) -> list[Prompt]:
        return [tuple(rng.randrange(1000) for _ in range(prompt)) for _ in range(count)]

    for number in range(rounds + 1):  # the first one warms up
        names = list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
        for name in names:
            _, seconds = arms[name](prompts(batch), new)
            waits = [arms[name](prompts(1), 2)[0] for _ in range(first)]
            if number:
                rate = batch * new / seconds
                results[name].append({"tokens_per_second": rate, "first_ms": 1e3 * statistics.median(waits)})
    return results


def compared(rounds: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """For each server, its rounds compared with the engine's."""
    engine, results = rounds["engine"], {}
    for name, mine in rounds.items():
        rates = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(mine, engine, strict=True)]
        later = [a["first_ms"] - b["first_ms"] for a, b in zip(mine, engine, strict=True)]
        results[name] = {
            "tokens_per_second": round(statistics.median(one["tokens_per_second"] for one in mine), 1),
            "first_ms": round(statistics.median(one["first_ms"] for one in mine), 2),
            "of_the_engine": round(statistics.median(rates), 4),
            "first_ms_later": round(statistics.median(later), 2),
            "rounds_of_the_engine": [round(rate, 4) for rate in rates],
            "rounds_first_ms_later": [round(ms, 2) for ms in later],
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in {"rounds": 5, "batch": 8, "prompt": 64, "new": 96, "first": 5, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", default="stored")
    args = parser.parse_args()
    model, length = find_model(args.model), 2 * (args.prompt + args.new)
    common = ["--recipe", args.recipe, "--threads", str(args.threads), "--max-num-seqs", str(args.batch)]
    common += ["--max-model-len", str(length)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fp8serve-overhead-")))
        spans = ["--otlp-endpoint", stack.enter_context(collector())]
        kinds: dict[str, list[str]] = {"server": [], "with_spans": spans, "with_layer_metrics": ["--metrics-per-layer"]}
        arms: Arms = {}
        for name, more in kinds.items():
            options = [*common, *more, "--data-dir", str(folder / name)]
            url = stack.enter_context(RunningServer(model, options, log=folder / f"{name}.log")).url
            arms[name] = lambda prompts, new, url=url: asyncio.run(by_server(url, prompts, new))  # type: ignore[misc]
        engine = Engine(model, threads=args.threads, recipe=args.recipe, max_num_seqs=args.batch, max_model_len=length)
        engine.generate(["warm"], max_new_tokens=2)
        engine.pack_weights()
        arms = {"engine": lambda prompts, new: by_engine(engine, prompts, new), **arms}
        results = measure(arms, args.rounds, args.batch, args.prompt, args.new, args.first)
    header = provenance("python -m benchmarks.overhead")
    print(
        json.dumps(
            {**header, "batch": args.batch, "prompt": args.prompt, "new": args.new, **compared(results)}, indent=1
        )
    )


if __name__ == "__main__":
    main()
