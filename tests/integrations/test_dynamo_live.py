"""Workers behind Dynamo's own frontend and router answer OpenAI's client as the engine does, and survive failures."""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fp8serve.engine.engine import Engine
from fp8serve.running import open_listener
from fp8serve.train.scratch import write_random_model
from tests.patience import PATIENCE, until
from tests.tiny import SENTENCES

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "build" / "dynamo-packages"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (PACKAGES / "complete").exists(), reason="Dynamo is not installed (make dynamo)"),
]
ACCEPTED, IN_FLIGHT = "fp8serve_requests_accepted_total", "fp8serve_requests_in_flight"
WORKER = ("-P", "-m", "fp8serve.integrations.dynamo")
LONG: Any = {"max_tokens": 3000, "temperature": 0, "extra_body": {"ignore_eos": True}}
CHAT: Any = [{"role": "user", "content": "What is a scale?"}]


def free_port() -> int:
    with open_listener() as listener:
        port: int = listener.getsockname()[1]
        return port


class Program:
    """A process with its log."""

    def __init__(self, folder: Path, name: str, *arguments: object, **variables: str) -> None:
        self.log = folder / f"{name}.log"
        environment = {
            **os.environ,
            "HOME": str(folder),  # the frontend stores tokenizers there
            "PYTHONPATH": str(PACKAGES),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_SYSTEM_HOST": "127.0.0.1",
            "DYN_SYSTEM_PORT": "0",  # a free one
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.5",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            **variables,
        }
        command = [sys.executable, *map(str, arguments)]
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=folder
            )

    def system(self, path: str) -> httpx.Response:
        """Requests the health or the metrics of a worker. Raises httpx.TransportError if it does not listen yet."""
        port = re.search(r"server bound to: 127\.0\.0\.1:(\d+)", self.log.read_text())
        if port is None:
            raise httpx.ConnectError("no port yet")
        return httpx.get(f"http://127.0.0.1:{port[1]}{path}", timeout=PATIENCE)

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of the series of a worker that have these labels."""
        lines = [line for line in self.system("/metrics").text.splitlines() if re.match(rf"{name}[ {{]", line)]
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(each in line for each in wanted))

    def engine(self) -> int:
        """Returns the id of a worker's engine process."""
        children = Path(f"/proc/{self.popen.pid}/task").glob("*/children")
        pids = [int(pid) for path in children for pid in path.read_text().split()]
        (engine,) = [pid for pid in pids if b"fp8serve.engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return engine


class Cluster:
    """Workers, and two frontends that find them in one directory: one per way of routing."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.programs: list[Program] = []
        self.clients = {mode: self._start_frontend(mode) for mode in ("round-robin", "kv")}

    def _start_frontend(self, mode: str) -> openai.OpenAI:
        port = free_port()
        address = ("--http-host", "127.0.0.1", "--http-port", port)
        self._start(mode, "-m", "dynamo.frontend", *address, "--router-mode", mode, "--migration-limit", 2)
        url = f"http://127.0.0.1:{port}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)

    def _start(self, name: str, *arguments: object) -> Program:
        self.programs.append(Program(self.folder, name, *arguments))
        return self.programs[-1]

    @property
    def workers(self) -> list[Program]:
        return [program for program in self.programs[len(self.clients) :] if program.popen.poll() is None]

    def start_worker(self) -> Program:
        """Starts a worker, and returns when both frontends use it."""
        options = ("--served-model-name", "tiny", "--device", "cpu", "--threads", 1, "--recipe", "current")
        worker = self._start(f"worker-{len(self.programs)}", *WORKER, self.model, *options)

        def is_ready() -> bool:
            assert worker.popen.poll() is None, worker.log.read_text()
            with contextlib.suppress(httpx.TransportError):
                return worker.system("/health").is_success
            return False

        until(is_ready, "the worker")
        for mode in self.clients:
            before = worker.metric(ACCEPTED)
            until(lambda mode=mode, before=before: self.reaches(worker, mode, before), "a request of the frontend")
        return worker

    def reaches(self, worker: Program, mode: str, before: float) -> bool:
        """Sends a request, and returns whether a worker has got more than `before`."""
        with contextlib.suppress(openai.APIError):
            self.complete(f"{time.monotonic_ns()} is new", mode, max_tokens=1)
        return worker.metric(ACCEPTED) > before

    def answers(self) -> bool:
        """Whether a request is answered."""
        with contextlib.suppress(openai.APIError):
            return bool(self.complete(max_tokens=1).choices)
        return False

    def complete(self, prompt: Any = "Once upon", mode: str = "round-robin", **options: Any) -> Any:
        return self.clients[mode].completions.create(model="tiny", prompt=prompt, **options)

    def num_known_blocks(self) -> int:
        """Returns the number of blocks that workers have reported to the router that knows their prefix caches."""
        url = str(self.clients["kv"].base_url).removesuffix("/v1/")
        lines = httpx.get(f"{url}/metrics", timeout=PATIENCE).text.splitlines()
        known = [line for line in lines if re.match(r'.*kv_cache_events_applied\{.*"stored",status="ok"', line)]
        return sum(int(line.rpartition(" ")[2]) for line in known)

    def chat(self, **options: Any) -> Any:
        return self.clients["round-robin"].chat.completions.create(model="tiny", messages=CHAT, **options)

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        for program in self.programs:
            if program.popen.poll() is None:
                program.popen.kill()
                program.popen.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 128}
    out = tmp_path_factory.mktemp("model") / "llama"
    return write_random_model(out, SENTENCES, vocab_size=320, context=4096, **sizes)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two frontends with one worker. A test that ends a worker starts another one before."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), model)
    try:
        cluster.start_worker()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine(model, device="cpu", threads=1, recipe="current")


def test_tokens_and_log_probabilities_are_the_engine_s(cluster: Cluster, engine: Engine) -> None:
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("Once upon a time there was")
    options: dict[str, Any] = {"temperature": 0.75, "top_p": 0.5, "seed": 11}
    (expected,) = engine.generate([prompt], max_new_tokens=24, logprobs=2, **options)
    answer = cluster.complete(prompt, max_tokens=24, logprobs=2, **options)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert expected.logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx([token.logprob for token in expected.logprobs])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 24)
    assert cluster.complete(prompt, max_tokens=24, **{**options, "seed": 12}).choices[0].text != expected.text


def test_chats_stream(cluster: Cluster) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "seed": 3, "logprobs": True, "top_logprobs": 2}
    whole = cluster.chat(**options).choices[0]
    parts = list(cluster.chat(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == whole.message.content
    assert len(parts) > 10
    assert parts[-1].usage.completion_tokens == 20
    assert len(whole.logprobs.content) == 20
    assert {len(token.top_logprobs) for token in whole.logprobs.content} <= {2, 3}  # the sampled token may be another


def test_a_stop_string_ends_the_answer(cluster: Cluster) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": 8}
    text = cluster.complete(**options).choices[0].text
    stop = text[10:12]
    answer = cluster.complete(**options, stop=stop).choices[0]
    assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")


def test_a_grammar_constrains_the_answer(cluster: Cluster) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}
    answer = cluster.chat(max_tokens=200, response_format=form).choices[0].message.content
    assert json.loads(answer)["a"] in (1, 2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"n": 2}, "fp8serve does not support n, and the request sets it to 2; leave it out."),
        ({"best_of": 3}, "does not support best_of"),
        ({"extra_body": {"nvext": {"max_thinking_tokens": 5}}}, "does not support max_thinking_tokens"),
        ({"max_tokens": 9000}, "up to 9000 are requested, but the context holds 4096"),
    ],
)
def test_what_a_worker_cannot_do_is_refused_in_a_sentence(
    options: dict[str, Any], sentence: str, cluster: Cluster
) -> None:
    with pytest.raises(openai.BadRequestError, match=sentence):
        cluster.complete(**options)


def test_a_client_that_leaves_frees_the_engine(cluster: Cluster) -> None:
    (worker,) = cluster.workers
    before = worker.metric("fp8serve_requests_finished_total", outcome="cancelled")
    with cluster.complete(stream=True, **LONG) as stream:
        next(iter(stream))
        assert worker.metric(IN_FLIGHT) == 1
    until(lambda: worker.metric(IN_FLIGHT) == 0, "the end of the request")
    until(lambda: worker.metric("fp8serve_requests_running") == 0, "the end of the sequence")
    assert worker.metric("fp8serve_requests_finished_total", outcome="cancelled") == before + 1
    assert worker.metric("fp8serve_engine_up", model="tiny") == 1


def test_a_killed_engine_starts_again(cluster: Cluster) -> None:
    """Its requests get an error of the frontend, because no other worker can continue them."""
    (worker,) = cluster.workers
    with cluster.complete(stream=True, **LONG) as stream:
        parts = iter(stream)
        next(parts)
        os.kill(worker.engine(), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="unavailable"):
            list(parts)
    until(cluster.answers, "an answer of the next engine")
    assert worker.metric("fp8serve_engine_restarts_total") == 1


def test_two_workers_share_requests_and_one_is_killed(cluster: Cluster) -> None:
    """The other worker continues what the killed one has begun, with the same tokens."""
    workers = [*cluster.workers, cluster.start_worker()]
    for mode in cluster.clients:
        before = [worker.metric(ACCEPTED) for worker in workers]
        prompts = [f"{mode}, {number} plus {number}, once upon a time" for number in range(4)]
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(cluster.complete, prompt, mode, **LONG) for prompt in prompts]
            expected = [answer.result().choices[0].text for answer in answers]
            assert all(worker.metric(ACCEPTED) > count for worker, count in zip(workers, before, strict=True))
            answers = [pool.submit(cluster.complete, prompt, mode, **LONG) for prompt in prompts]
            if mode == "kv":
                until(lambda: workers[1].metric(IN_FLIGHT) > 0, "requests of the second worker")
                workers[1].popen.kill()
                workers[1].popen.wait()
            assert [answer.result().choices[0].text for answer in answers] == expected
    assert cluster.complete(prompts[0], **LONG).choices[0].text == expected[0]


def test_the_router_knows_the_prefix_caches(cluster: Cluster) -> None:
    """Prompts that another frontend has sent go to the workers that have them in their caches."""
    worker = cluster.start_worker()
    try:
        prompts = [f"{number} {time.monotonic_ns()} " + "once upon a time " * 30 for number in range(8)]
        known = cluster.num_known_blocks()
        usages = [cluster.complete(prompt, max_tokens=1).usage for prompt in prompts]
        assert {usage.prompt_tokens_details.cached_tokens for usage in usages} == {0}
        blocks = sum(usage.prompt_tokens // 16 for usage in usages)
        until(lambda: cluster.num_known_blocks() >= known + blocks, "the blocks in the router's index")
        for prompt in prompts:
            assert cluster.complete(prompt, "kv", max_tokens=1).usage.prompt_tokens_details.cached_tokens > 300
    finally:
        worker.popen.kill()
        worker.popen.wait()


def test_sigterm_lets_requests_finish(cluster: Cluster) -> None:
    """A service manager sends the signal to the engine's process, too."""
    workers = [*cluster.workers, cluster.start_worker()]
    with cluster.complete(stream=True, **LONG) as stream:
        parts = iter(stream)
        next(parts)
        (worker,) = [worker for worker in workers if worker.metric(IN_FLIGHT)]
        log = worker.log.read_text()  # of earlier tests, too
        for pid in (worker.engine(), worker.popen.pid):
            os.kill(pid, signal.SIGTERM)
        assert list(parts)[-1].choices[0].finish_reason == "length"
    assert worker.popen.wait(PATIENCE) == 0, worker.log.read_text()
    assert "is started again" not in worker.log.read_text().removeprefix(log)
    assert len(cluster.workers) == 1
    assert cluster.complete(max_tokens=1).choices


ARGUMENTS = {
    ("MODEL", "--no-such-option"): "Unrecognized arguments: --no-such-option (--help lists the options).",
    ("MODEL", "--max-num-seqs", "0"): "max_num_seqs must be at least 1, not 0.",
    ("MODEL", "--max-num-seqs", "x"): "Argument --max-num-seqs: invalid int value: 'x' (--help lists the options).",
    ("MODEL", "--connector", "nixl"): "--connector (['nixl']) has no effect on a worker of fp8serve; leave it out.",
    ("MODEL", "--endpoint", "a.b"): "Invalid endpoint format: 'a.b'. Expected 'dyn://",
    (): "The following arguments are required: MODEL (--help lists the options).",
}
PARSING = """
import json, sys
from fp8serve.errors import Fp8ServeError
from fp8serve.integrations.dynamo.options import parse
for arguments in json.loads(sys.argv[1]):
    try:
        print(parse(arguments))
    except Fp8ServeError as error:
        print(error)
"""


def test_bad_arguments_are_a_sentence(model: Path, tmp_path: Path) -> None:
    words = [[str(model) if word == "MODEL" else word for word in arguments] for arguments in ARGUMENTS]
    program = Program(tmp_path, "parsing", "-c", PARSING, json.dumps(words))
    assert program.popen.wait(PATIENCE) == 0
    for line, sentence in zip(program.log.read_text().splitlines(), ARGUMENTS.values(), strict=True):
        assert line.startswith(sentence)


SHUTDOWN = """
import os
import dynamo.common.backend
from fp8serve.integrations.dynamo.__main__ import main
class Worker:
    def __init__(self, engine, config):
        pass
    async def run(self):
        print(os.environ["DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT"])
dynamo.common.backend.Worker = Worker
main()
"""


def test_dynamo_ends_a_worker_only_after_its_drain(model: Path, tmp_path: Path) -> None:
    arguments = ("-c", SHUTDOWN, model, "--drain-seconds", 99.5)
    long = Program(tmp_path, "long", *arguments)
    chosen = Program(tmp_path, "chosen", *arguments, DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT="7")
    assert [program.popen.wait(PATIENCE) for program in (long, chosen)] == [0, 0]
    assert [program.log.read_text() for program in (long, chosen)] == ["115\n", "7\n"]


LOADING = """
import asyncio, sys
from fp8serve.integrations.dynamo import engine
from fp8serve.integrations.dynamo.__main__ import main
async def launch(source):
    await (await asyncio.create_subprocess_exec("grep", "SigBlk", "/proc/self/status")).wait()
    print("loading", flush=True)
    await asyncio.Event().wait()
engine.launch = launch
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_loads_ends_at_once(number: signal.Signals, model: Path, tmp_path: Path) -> None:
    """Its engine does not handle SIGTERM, because it takes requests until the frontend has noticed."""
    worker = Program(tmp_path, "loading", "-c", LOADING, model)
    until(lambda: "loading\n" in worker.log.read_text() or worker.popen.poll() is not None, "the load")
    worker.popen.send_signal(number)
    assert worker.popen.wait(PATIENCE) == 0, worker.log.read_text()
    (blocked,) = re.findall(r"SigBlk:\s+(\w+)", worker.log.read_text())
    assert int(blocked, 16) >> (signal.SIGTERM - 1) & 1


def test_a_worker_that_cannot_start_ends_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    missing = Program(tmp_path, "missing", *WORKER, "no-such-directory")
    empty = Program(tmp_path, "empty", *WORKER, "empty")
    without = Program(tmp_path, "without", *WORKER, "empty", PYTHONPATH="")
    assert [program.popen.wait(PATIENCE) for program in (missing, empty, without)] == [1, 1, 1]
    assert missing.log.read_text().startswith("fp8serve: no-such-directory is not a directory; give a model directory")
    (line,) = [line for line in empty.log.read_text().splitlines() if "INFO" not in line]
    assert line == "fp8serve: empty is not a model directory: it holds no config.json."
    assert without.log.read_text() == (
        "fp8serve: A worker of Dynamo needs ai-dynamo (dynamo is not installed): pip install 'fp8serve[dynamo]'.\n"
    )
