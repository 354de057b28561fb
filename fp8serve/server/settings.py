"""What a server is told when it starts: one frozen object, checked once, in one sentence per mistake.

The command line fills it; `create_app` and `run` read it; nothing here reads the environment. Sizes are bytes,
times are seconds. `ServerLimits` bounds everything that a request can multiply and is shown by `GET /info`.
"""

import fcntl
import hashlib
import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from fp8serve.errors import MachineError, RequestError

TrainOn = Literal["refuse", "share", "pause"]


def data_home() -> Path:
    """The user's directory that holds one data directory per model."""
    return Path.home() / ".local" / "share" / "fp8serve"


def default_data_dir(model: Path) -> Path:
    """Where jobs, uploads and checkpoints live unless told otherwise: a place of its own for each model."""
    path = model.resolve()
    mark = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return data_home() / f"{path.name}-{mark}"


@dataclass(frozen=True)
class Deadlines:
    """Seconds: for a heartbeat to come, for a step to end, for weights to load and give a first token."""

    heartbeat: float = 30.0
    step: float = 600.0
    load: float = 1800.0


@dataclass(frozen=True)
class ServerLimits:
    """Bounds on what one request, or all of them together, may ask for.

    `held_bytes`: of all request bodies together. `reading_*`: processor seconds and memory to check, render and
    tokenize one request, and bytes of requests that wait for that; `template_seconds`: of these, to render.
    `validation_*`: the same for the rows of a fine-tune.
    """

    body_bytes: int = 8 << 20
    held_bytes: int = 256 << 20
    header_bytes: int = 64 << 10
    upload_bytes: int = 1 << 30
    body_seconds: float = 30.0
    header_seconds: float = 10.0
    send_seconds: float = 60.0
    queue: int = 256
    queue_tokens: int = 1 << 20
    n: int = 16
    prompts: int = 64
    chat_messages: int = 1024
    streams: int = 512
    keep_alive_seconds: float = 15.0
    jobs_queued: int = 32
    row_bytes: int = 1 << 20
    rows: int = 1_000_000
    reading_seconds: float = 30.0
    reading_memory: int = 1 << 30
    reading_bytes: int = 64 << 20
    template_seconds: float = 2.0
    validation_seconds: float = 600.0
    validation_memory: int = 8 << 30

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise RequestError(f"The limit {name} must be positive, not {value}.")


@dataclass(frozen=True)
class Settings:
    """One server: which model, how it runs, where it listens, who may use it.

    `recipe` is "stored" (the scales that lie in the directory), "bf16", or a recipe name. `train_on` decides what a
    fine-tune job may do to the device that serves: "refuse" it, "share" the device, or "pause" serving while the job
    runs; a `train_device` other than `device` needs no such choice. `allowed_hosts`: further names by which requests
    may ask for this server (hosts.py says when that is checked). An engine that gives no heartbeat for
    `heartbeat_seconds`, or is in one step for `step_seconds`, is started again; weights that are not ready within
    `load_seconds` are given up, and so is an answer after `request_seconds` (None: never). Raises RequestError or
    MachineError on an impossible value.
    """

    model: Path
    recipe: str = "stored"
    scales: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    allow_unauthenticated: bool = False
    allowed_hosts: tuple[str, ...] = ()
    served_model_name: str | None = None
    device: str = "cpu"
    kv_cache_dtype: Literal["bf16", "fp8"] = "bf16"
    max_num_seqs: int = 16
    max_model_len: int | None = None
    gpu_memory: float | None = None
    cuda_graphs: bool | None = None
    data_dir: Path | None = None
    train_on: TrainOn = "refuse"
    train_device: str | None = None
    drain_seconds: float = 30.0
    heartbeat_seconds: float = 30.0
    step_seconds: float = 600.0
    load_seconds: float = 1800.0
    request_seconds: float | None = None
    vllm_metrics: bool = False
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_names(self)
        _check_exposure(self)

    @property
    def model_name(self) -> str:
        """The name requests use: `served_model_name`, else the directory's own."""
        return self.served_model_name or self.model.resolve().name

    @property
    def training_device(self) -> str:
        """Where a fine-tune job runs."""
        return self.train_device or self.device

    @property
    def deadlines(self) -> Deadlines:
        return Deadlines(self.heartbeat_seconds, self.step_seconds, self.load_seconds)

    @property
    def trains_on_serving_device(self) -> bool:
        return self.training_device == self.device


def _check_numbers(settings: Settings) -> None:
    if not 0 <= settings.port <= 65535:
        raise RequestError(f"The port must lie in 0..65535, not {settings.port}.")
    if settings.max_num_seqs < 1:
        raise RequestError(f"max_num_seqs must be at least 1, not {settings.max_num_seqs}.")
    if settings.max_model_len is not None and settings.max_model_len < 2:
        raise RequestError(f"max_model_len must be at least 2, not {settings.max_model_len}.")
    if settings.drain_seconds < 0:
        raise RequestError(f"drain_seconds must not be negative, as {settings.drain_seconds} is.")
    for name in ("heartbeat_seconds", "step_seconds", "load_seconds", "request_seconds"):
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise RequestError(f"{name} must be positive, not {value}.")


def _check_names(settings: Settings) -> None:
    if settings.train_on not in ("refuse", "share", "pause"):
        raise RequestError(f"train_on must be refuse, share or pause, not {settings.train_on!r}.")
    if settings.kv_cache_dtype not in ("bf16", "fp8"):
        raise RequestError(f"kv_cache_dtype must be bf16 or fp8, not {settings.kv_cache_dtype!r}.")
    if settings.api_key is not None and not settings.api_key.strip():
        raise RequestError("The API key is empty; give a key or leave the option out.")


def _check_exposure(settings: Settings) -> None:
    """Whoever can reach the port can run jobs on this machine, so an open port needs a key or an explicit word."""
    if settings.api_key is None and not settings.allow_unauthenticated and not is_loopback(settings.host):
        raise MachineError(
            f"Listening on {settings.host} lets other machines in, and no API key is set: "
            "give --api-key-file (or --api-key), listen on 127.0.0.1, or say --allow-unauthenticated."
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def prepare_data_dir(settings: Settings) -> Path:
    """Make the data directory, private to this user. Raises MachineError when it cannot be written."""
    path = settings.data_dir or default_data_dir(settings.model)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(
            f"Cannot make the data directory {path} ({error.strerror}); choose another with --data-dir."
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise MachineError(f"The data directory {path} is not writable; choose another with --data-dir.")
    return path


def lock_data_dir(path: Path) -> IO[str]:
    """Held while a server lives: two servers would run each other's jobs. Raises MachineError when another holds it."""
    try:
        (path / "jobs").mkdir(mode=0o700, exist_ok=True)
        lock = (path / "server.lock").open("a+")
    except OSError as error:
        raise MachineError(f"The data directory {path} cannot be written: {error.strerror}.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise MachineError(
            f"Another server uses the data directory {path}; stop it, or give this one its own with --data-dir."
        ) from None
    return lock
