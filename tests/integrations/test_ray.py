"""Ray Serve with real replicas, asked through Ray's proxy by the `openai` client, and fine-tunes as Ray jobs."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import psutil
import pytest
from starlette.responses import PlainTextResponse

from fp8serve.errors import MachineError, RequestError
from fp8serve.running import open_listener
from tests.patience import PATIENCE, until
from tests.tiny import CHATS, SENTENCES, write_tiny_model

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'fp8serve[ray]'")

CPUS, OBJECT_STORE = 8, 80 << 20
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # no token in the user's home
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "600",
    "RAY_worker_register_timeout_seconds": "600",
}
KILLED_REPLICAS = 2  # which cannot remove their directories
LONG = 8000  # tokens, so that a test can act while they are generated
ENGINE = "fp8serve.engine.worker"
SERVE = Path(sys.executable).with_name("serve")
pytestmark = pytest.mark.filterwarnings("default")  # Ray's own


class Cluster:
    """A Ray cluster on this machine, whose processes are children of this one."""

    def __init__(self, url: str, dashboard: str) -> None:
        self.url, self.dashboard = url, dashboard

    @contextlib.contextmanager
    def deployed(self, prefix: str = "/", **arguments: Any) -> Iterator[openai.OpenAI]:
        """Yields a client of an application that is ready."""
        from ray import serve

        self.deploy(prefix, **arguments)
        try:
            with self.client(prefix) as client:
                yield client
        finally:
            serve.delete("default")

    def deploy(self, prefix: str = "/", **arguments: Any) -> None:
        from ray import serve

        from fp8serve.integrations.ray import app

        serve.run(app(arguments), route_prefix=prefix)

    def client(self, prefix: str = "/") -> openai.OpenAI:
        url = f"{self.url}{prefix.rstrip('/')}/v1"
        return openai.OpenAI(base_url=url, api_key="none", timeout=PATIENCE, max_retries=0)

    def engines(self) -> dict[int, psutil.Process]:
        """Returns the processes of engines, by process id."""
        processes = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if ENGINE in process.cmdline():
                    processes[process.pid] = process
        return processes


def processes_of_ray(place: str) -> list[psutil.Process]:
    """Returns Ray's processes, whose arguments name the directory `place`, and all that they started."""
    started = [child for child in psutil.Process().children() if any(place in word for word in child.cmdline())]
    return [*started, *(process for child in started for process in child.children(recursive=True))]


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def free_port() -> int:
    with open_listener() as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    import ray
    from ray import serve

    place = tempfile.mkdtemp(prefix="ray-")  # tmp_path is too long for Ray's sockets
    dashboard, proxy = free_port(), free_port()
    handler = signal.getsignal(signal.SIGTERM)  # which Ray replaces
    started: list[psutil.Process] = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**ENVIRONMENT, "TMPDIR": place}.items():
                patch.setenv(name, value)
            ray.init(
                address="local",
                num_cpus=CPUS,
                object_store_memory=OBJECT_STORE,
                include_dashboard=True,
                dashboard_port=dashboard,
                log_to_driver=False,
                _temp_dir=place,
            )
            serve.start(http_options={"host": "127.0.0.1", "port": proxy})
            yield Cluster(f"http://127.0.0.1:{proxy}", f"http://127.0.0.1:{dashboard}")
            started = processes_of_ray(place)
            assert started
            serve.shutdown()
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)
        until(lambda: not any(map(is_alive, started)), "the end of Ray's processes")
        directories = list(Path(place).glob("fp8serve-ray-*"))
        shutil.rmtree(place)
    assert len(directories) <= KILLED_REPLICAS


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories: `long` and `other` have room for LONG tokens, `short` has not, `run` has an adapter of `long`."""
    from fp8serve.cli import main
    from fp8serve.train.scratch import write_random_model

    place = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 128}
    write_random_model(place / "long", SENTENCES, vocab_size=320, context=2 * LONG, **sizes)
    write_tiny_model(place / "short")
    (place / "chats.jsonl").write_text(CHATS)
    options = ["--recipe", "current", "--lora-rank", "4", "--max-steps", "1", "--seq-len", "64"]
    data = ["--data", str(place / "chats.jsonl"), "--out", str(place / "run")]
    assert main(["finetune", str(place / "long"), *data, *options]) == 0
    write_random_model(place / "other", SENTENCES, vocab_size=320, context=2 * LONG, seed=1, **sizes)
    return place


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "Name a model: model=DIR."),
        ({"model": "missing"}, "missing is not a directory"),
        ({"model": ".", "num_replica": "2"}, "Unknown argument 'num_replica'. Did you mean num_replicas?"),
        ({"model": ".", "port": "80"}, "Unknown argument 'port'."),
        ({"model": ".", "num_replicas": "two"}, "num_replicas must be a whole number, not 'two'."),
        (
            {"model": ".", "num_replicas": "3", "max_replicas": "2"},
            "max_replicas (2) must be at least num_replicas (3).",
        ),
        ({"model": ".", "max_num_seqs": "0"}, "max_num_seqs must be at least 1, not 0."),
        ({"model": ".", "train_on": "share"}, "train_on needs database"),
        ({"model": ".", "adapters": "tutor"}, "--adapter must be NAME=DIR"),
        ({"model": ".", "adapters": None}, "adapters must be a text or a list of texts, not null."),
        ({"model": ".", "served_model_name": 5}, "served_model_name must be a text or a list of texts, not 5."),
        ({"model": ".", "limits": {"queue": 9}}, "limits must be a text or a list of texts, not {'queue': 9}."),
        ({"model": 5}, "model must be a path, not 5."),
        ({"model": ".", "api_key_file": 5}, "api_key_file must be a path, not 5."),
    ],
)
def test_a_wrong_argument_is_a_sentence(arguments: dict[str, Any], sentence: str) -> None:
    import click

    from fp8serve.integrations.ray import app

    with pytest.raises(click.ClickException) as error:
        app(arguments)
    assert sentence in error.value.message
    assert "\n" not in error.value.message


def test_texts_and_values_are_the_same_arguments(tmp_path: Path) -> None:
    """`serve run` passes texts, a configuration file has numbers and lists."""
    from fp8serve.integrations.ray import ReplicaOptions, settings_of

    (tmp_path / "model").mkdir()
    model, other = f"{tmp_path / 'model'}", f"other={tmp_path / 'model'},recipe=bf16"
    texts = {"max_num_seqs": "8", "models": f"{other}", "invariant": "true", "limits": "queue=9 streams=8"}
    values = {"max_num_seqs": 8, "models": [other], "invariant": True, "limits": ["queue=9", "streams=8"]}
    settings = settings_of({"model": model, **texts}, ReplicaOptions(num_cpus=2))
    assert settings == settings_of({"model": model, **values}, ReplicaOptions(num_cpus=2))
    assert (settings.limits.queue, settings.threads, settings.device) == (9, 2, "cpu")
    with pytest.raises(RequestError, match="unknown limit"):
        settings_of({"model": model, "limits": "queues=9"}, ReplicaOptions())


async def test_a_replica_whose_engine_died_gets_no_more_requests() -> None:
    """Its other models may need a while to answer the requests in flight."""
    from fp8serve.integrations.ray import Replica

    models = {name: SimpleNamespace(state="ready") for name in ("first", "second")}
    draining = asyncio.Event()
    state = SimpleNamespace(
        models=SimpleNamespace(models=models, stats=dict), draining=draining,
        begin_drain=draining.set, finish_drain=lambda: False,
    )  # fmt: skip
    replica: Any = SimpleNamespace(_state=state, _gauges={})
    replica._watch = asyncio.create_task(Replica._end_with_engine(replica))
    await Replica.check_health(replica)
    models["second"].state = "restarting"
    await draining.wait()
    with pytest.raises(MachineError, match="engine process died"):
        await Replica.check_health(replica)
    replica._watch.cancel()


def test_gpus_of_a_replica(tmp_path: Path) -> None:
    from fp8serve.integrations.ray import ReplicaOptions, build

    def gpus(**arguments: Any) -> tuple[float, str]:
        deployment = build({"model": str(tmp_path), **arguments})._bound_deployment
        values, replicas, _ = deployment.init_args
        from fp8serve.integrations.ray import settings_of

        return deployment.ray_actor_options["num_gpus"], settings_of(values, replicas).device

    assert ReplicaOptions().num_gpus is None
    assert gpus() == (0, "cpu")
    assert gpus(num_gpus="1") == (1, "cuda")
    assert gpus(device="cuda", tensor_parallel="2") == (2, "cuda")


async def test_clients_on_other_machines_need_a_key_or_permission() -> None:
    from fp8serve.integrations.ray import ProxiedRequests

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse(scope["path"])(scope, receive, send)

    async def ask(address: str, is_open: bool, prefix: str = "") -> httpx.Response:
        transport = httpx.ASGITransport(ProxiedRequests(application, is_open), client=(address, 1), root_path=prefix)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(f"{prefix}/v1/models")

    assert (await ask("127.0.0.1", is_open=False)).text == "/v1/models"
    assert (await ask("192.0.2.7", is_open=True, prefix="/below")).text == "/v1/models"
    refused = await ask("192.0.2.7", is_open=False)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "forbidden"


@pytest.mark.slow
def test_models_and_adapters_behind_the_proxy(cluster: Cluster, models: Path) -> None:
    arguments = {
        "model": str(models / "long"),
        "models": f"other={models / 'short'},recipe=bf16",
        "adapters": f"tutor={models / 'run' / 'model'}",
        "recipe": "current",
        "num_replicas": "2",
    }
    with cluster.deployed(**arguments) as client:
        assert {model.id for model in client.models.list()} == {"long", "other", "tutor"}
        assert len(cluster.engines()) == 4
        ask = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        answers = {name: client.completions.create(model=name, **ask) for name in ("long", "other", "tutor")}
        assert all(answer.model == name for name, answer in answers.items())
        chunks = list(client.completions.create(model="long", stream=True, **ask))
        assert "".join(chunk.choices[0].text for chunk in chunks) == answers["long"].choices[0].text
        with pytest.raises(openai.NotFoundError, match="There is no model of that name here"):
            client.completions.create(model="none", **ask)
        native = httpx.post(f"{cluster.url}/generate", json={"inputs": "Once", "parameters": {"max_new_tokens": 2}})
        assert native.status_code == 200
        anthropic = {"model": "long", "max_tokens": 2, "messages": [{"role": "user", "content": "Why?"}]}
        assert httpx.post(f"{cluster.url}/v1/messages", json=anthropic, timeout=PATIENCE).json()["role"] == "assistant"
        refused = httpx.post(f"{cluster.url}/generate", json={"inputs": "Once"}, headers={"host": "example.com"})
        assert refused.status_code == 403


@pytest.mark.slow
def test_a_request_stops_when_its_client_leaves(cluster: Cluster, models: Path) -> None:
    with cluster.deployed(prefix="/below", model=str(models / "long"), recipe="current") as client:

        def active() -> int:
            return int(httpx.get(f"{cluster.url}/below/requests", timeout=PATIENCE).json()["total"])

        ask = {"model": "long", "prompt": "Once", "max_tokens": LONG, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(stream=True, **ask)
        next(iter(stream))
        assert active() == 1
        stream.close()
        until(lambda: active() == 0, "the end of the stream's request")
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.5).completions.create(**ask)
        until(lambda: active() == 0, "the end of the request")


@pytest.mark.slow
def test_a_replica_ends_with_its_engine(cluster: Cluster, models: Path) -> None:
    """Every request gets an answer or a typed error, whether it is in flight or comes later, and Ray starts a new
    replica."""
    arguments = {"model": str(models / "long"), "recipe": "current", "num_replicas": "2", "num_cpus": "1"}
    ask = {"model": "long", "max_tokens": 50, "extra_body": {"ignore_eos": True}}
    outcomes: list[str] = []
    stopped = threading.Event()

    def ask_repeatedly(number: int) -> None:
        is_stream = number % 2 == 1
        while not stopped.is_set():
            try:
                answer = client.completions.create(prompt=f"{number}", stream=is_stream, **ask)
                last = list(answer)[-1] if is_stream else answer
                outcomes.append("answer" if last.choices[0].finish_reason == "length" else f"cut off: {last}")
            except openai.APIError as error:
                outcomes.append(f"error: {error.code or error.body}")

    def kill_one() -> None:
        engine = next(iter(cluster.engines().values()))
        replica = engine.parent()
        assert replica is not None
        engine.kill()
        until(lambda: not is_alive(replica), "the end of the replica")
        until(lambda: len(cluster.engines()) == 2, "two engines")

    with cluster.deployed(**arguments) as client, ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(ask_repeatedly, number) for number in range(4)]
        try:
            for _ in range(2):
                answers = outcomes.count("answer")
                until(lambda before=answers: outcomes.count("answer") > before + 8, "answers")
                kill_one()
        finally:
            stopped.set()
        for task in tasks:
            task.result()
        long = pool.submit(client.completions.create, prompt="Once", **{**ask, "max_tokens": LONG})
        until(lambda: any(engine.cpu_percent(0.2) > 1 for engine in cluster.engines().values()), "a running request")
        for engine in cluster.engines().values():
            if (replica := engine.parent()) is not None:
                replica.kill()
        with pytest.raises(openai.InternalServerError):
            long.result()
        client.completions.create(prompt="Once", **ask)
    assert set(outcomes) <= {"answer", "error: engine_down", "error: draining"}


@pytest.mark.slow
def test_an_update_fails_no_request(cluster: Cluster, models: Path) -> None:
    """A stream that began before the update is completed by its replica, and requests go on."""
    arguments = {"recipe": "current", "num_replicas": "2", "served_model_name": "model", "drain_seconds": "600"}
    stopped = threading.Event()
    answers: list[str] = []

    def ask_repeatedly() -> None:
        while not stopped.is_set():
            answers.append(client.completions.create(model="model", prompt="Once", max_tokens=4).system_fingerprint)

    with cluster.deployed(model=str(models / "long"), **arguments) as client, ThreadPoolExecutor(2) as pool:
        long = {"model": "model", "prompt": "Once", "max_tokens": LONG // 4, "extra_body": {"ignore_eos": True}}
        stream = iter(client.completions.create(stream=True, **long))
        first = next(stream)
        old = cluster.engines()
        tasks = [pool.submit(ask_repeatedly) for _ in range(2)]
        try:
            cluster.deploy(model=str(models / "other"), **arguments)
            until(lambda: not old.keys() & cluster.engines().keys(), "the end of the old engines")
            count = len(answers)
            until(lambda: len(answers) > count, "an answer after the update")
        finally:
            stopped.set()
        for task in tasks:
            task.result()
        chunks = [first, *stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert answers[-1] != answers[0]


@pytest.mark.slow
def test_commands_serve_and_train(cluster: Cluster, models: Path, tmp_path: Path) -> None:
    """`ray job submit` trains an adapter, and `serve deploy` serves it."""
    from ray import serve

    def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        program = Path(sys.executable).with_name(command)
        return subprocess.run([program, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)

    out = tmp_path / "run"
    options = f"--recipe current --lora-rank 4 --max-steps 1 --seq-len 64 --data {models / 'chats.jsonl'} --out {out}"
    train = [sys.executable, "-m", "fp8serve", "finetune", str(models / "short"), *options.split()]
    job = run("ray", "job", "submit", "--address", cluster.dashboard, "--entrypoint-num-cpus", "1", "--", *train)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "succeeded" in job.stdout
    application = {
        "name": "default",
        "import_path": "fp8serve.integrations.ray:app",
        "args": {"model": str(models / "short"), "recipe": "current", "adapters": [f"tutor={out / 'model'}"]},
        "deployments": [{"name": "fp8serve", "num_replicas": 2}],
    }
    config = tmp_path / "app.yaml"
    config.write_text(json.dumps({"applications": [application]}))
    deploy = run("serve", "deploy", "--address", cluster.dashboard, str(config))
    assert deploy.returncode == 0, deploy.stdout + deploy.stderr
    try:
        until(lambda: serve.status().applications["default"].status in ("RUNNING", "DEPLOY_FAILED"), "the application")
        assert serve.status().applications["default"].status == "RUNNING", serve.status()
        assert len(cluster.engines()) == 2
        with cluster.client() as client:
            assert {model.id for model in client.models.list()} == {"short", "tutor"}
            assert client.completions.create(model="tutor", prompt="Why?", max_tokens=2).model == "tutor"
        application["args"] = {"model": str(models / "missing")}
        config.write_text(json.dumps({"applications": [application]}))
        assert run("serve", "deploy", "--address", cluster.dashboard, str(config)).returncode == 0
        until(lambda: serve.status().applications["default"].status == "DEPLOY_FAILED", "the refusal")
        assert "missing is not a directory; give a model directory" in serve.status().applications["default"].message
    finally:
        serve.delete("default")


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_fails_the_deployment(cluster: Cluster, models: Path, tmp_path: Path) -> None:
    from ray import serve

    shutil.copytree(models / "short", tmp_path / "damaged")
    os.truncate(tmp_path / "damaged" / "model.safetensors", 9000)
    with pytest.raises(RuntimeError), cluster.deployed(model=str(tmp_path / "damaged"), recipe="current"):
        pass
    status = serve.status().applications["default"]
    serve.delete("default")
    assert "model.safetensors is truncated or damaged" in status.deployments["fp8serve"].message


@pytest.mark.slow
def test_serve_run_prints_a_sentence(tmp_path: Path) -> None:
    command = [SERVE, "run", "fp8serve.integrations.ray:app", "model=missing"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert process.returncode == 1
    assert "Error: missing is not a directory; give a model directory" in process.stderr
    assert "Traceback" not in process.stderr
