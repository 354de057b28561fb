"""A Ray Serve application: `serve run fp8serve.integrations.ray:app model=DIR num_replicas=2` (docs/ray.md).

A replica is an actor that hosts fp8serve's own ASGI application and owns its engine processes. So Ray's proxy serves
every route, with its streams and errors. Ray chooses the replica of a request, adds and removes replicas by the number
of ongoing requests, waits for requests before it stops a replica, and replaces a replica that fails. All models and
adapters of an application are in every replica.

**A dead engine ends its replica.** A server starts a dead engine process again and refuses requests meanwhile. Ray
would send most requests to such a replica, because it has the fewest ongoing ones. So a replica whose engine died or
hung answers the requests in flight with an error and ends. Ray's router sends later requests to other replicas, or
holds them until there is a new one.

**State.** Replicas with a `database` share jobs and active weights like other servers (docs/several-servers.md).
Without one, each has a temporary data directory and refuses fine-tune jobs, which can run as Ray jobs instead.

**Access.** A replica does not know on which address Ray's proxy listens. Without a key it therefore answers only to
clients on the proxy's own machine, unless `allow_unauthenticated` is set.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import click
from annotated_types import Ge, Gt
from pydantic import TypeAdapter, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from fp8serve.commands.serve import find_key, limits_of, models_of
from fp8serve.errors import Fp8ServeError, MachineError, RequestError, shown, suggestion
from fp8serve.options import AUTO, About, Option, check, options_of
from fp8serve.server.app import create_app
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.scope import refuse
from fp8serve.server.metrics import ENGINE_METRICS
from fp8serve.server.named_models import NamedAdapter
from fp8serve.server.server_state import ServerState
from fp8serve.server.settings import Settings, is_loopback

try:
    import ray
    from ray import serve
    from ray.serve.metrics import Gauge
except ImportError:
    raise MachineError("Ray Serve is not installed: pip install 'fp8serve[ray]'.") from None

DEPLOYMENT = "fp8serve"
POLL_SECONDS = 0.1
HEALTH_CHECK_SECONDS = 2.0
CLOSE_SECONDS = 10.0  # that a replica may take to end its processes after its last request
DECIDED_BY_RAY = {"host", "port", "api_key"}
OF_JOBS = ("data_dir", "train_on", "train_device")  # options that need a database, because any replica may be asked


@dataclass(frozen=True)
class ReplicaOptions:
    """The replicas of an application and the share of the machine that Ray reserves for each."""

    num_replicas: Annotated[int, Ge(1), About("Replicas; with max_replicas, the fewest.")] = 1
    max_replicas: Annotated[
        int | None, Ge(1), About("Most replicas; Ray adds and removes them by ongoing requests.", unset="num_replicas")
    ] = None
    target_ongoing_requests: Annotated[
        float | None, Gt(0), About("Ongoing requests of a replica above which Ray adds one.", unset="max_num_seqs")
    ] = None
    max_ongoing_requests: Annotated[
        int | None, Ge(1), About("Ongoing requests of a replica above which Ray holds new ones.", unset="limit queue")
    ] = None
    num_cpus: Annotated[float, Gt(0), About("CPUs of a replica, and threads of its engines on a CPU.")] = 1
    num_gpus: Annotated[
        float | None, Ge(0), About("GPUs of a replica.", unset="tensor_parallel on cuda, otherwise 0")
    ] = None

    def __post_init__(self) -> None:
        check(self, RequestError)
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise RequestError(
                f"max_replicas ({self.max_replicas}) must be at least num_replicas ({self.num_replicas})."
            )


@serve.ingress()
class Replica:
    """A Serve replica: the application of one server, which ends with its engine."""

    def __init__(self, values: Mapping[str, Any], replicas: ReplicaOptions, directory: str) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="fp8serve-ray-")
        with contextlib.suppress(OSError):  # relative paths of `serve run`, where this machine has them
            os.chdir(directory)
        _log_like_ray()
        settings = settings_of(values, replicas)
        if settings.database is None:
            settings = replace(settings, data_dir=Path(self._temporary.name))
        key_file = values.get("api_key_file")
        self._settings = replace(settings, api_key=find_key(None, key_file and Path(key_file)))
        self._watch: asyncio.Task[None] | None = None
        self._gauges = {
            metric.key: Gauge(f"fp8serve_{metric.name}", metric.help_text, ("model",)) for metric in ENGINE_METRICS
        }

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve calls this once, after the constructor."""
        app = create_app(self._settings)
        app.add_middleware(
            ProxiedRequests, is_open=self._settings.requires_keys or not is_loopback(self._settings.host)
        )
        self._state: ServerState = app.state.server
        return app

    def __del__(self) -> None:
        """Serve calls this after the application's shutdown, and then kills the process."""
        self._temporary.cleanup()

    async def check_health(self) -> None:
        """Serve calls this before the replica gets requests, and then regularly. The first call waits until the models
        are loaded. Raises Fp8ServeError if a model cannot be loaded or its engine died."""
        if self._watch is None:
            await self._wait_until_loaded()
            self._watch = asyncio.create_task(self._end_with_engine())
        if self._watch.done() or self._state.draining.is_set():
            raise MachineError("The engine process died, and this replica ends.")
        for name, stats in self._state.models.stats().items():
            for key in self._gauges.keys() & stats.keys():
                self._gauges[key].set(stats[key], {"model": name})

    async def _wait_until_loaded(self) -> None:
        state = self._state
        while not (state.started or state.failed.is_set()):
            await asyncio.sleep(POLL_SECONDS)
        for model in state.models.models.values():
            if model.problem is not None:
                raise model.problem.with_traceback(None)  # Ray shows the traceback

    async def _end_with_engine(self) -> None:
        """Waits until an engine is dead, and ends this replica when the requests in flight are answered."""
        state = self._state
        while all(model.state != "restarting" for model in state.models.models.values()):
            await asyncio.sleep(POLL_SECONDS)
        state.begin_drain()
        while not state.finish_drain():
            await asyncio.sleep(POLL_SECONDS)
        # Ray first completes the calls that run, so that the answers reach the proxy.
        ray.get_runtime_context().current_actor.__ray_terminate__.remote()


class ProxiedRequests:
    """The middleware for requests that come through Ray's proxy. It removes the application's route prefix from the
    path and, unless the application `is_open`, refuses clients on other machines than the proxy's."""

    def __init__(self, app: ASGIApp, is_open: bool) -> None:
        self.app = app
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        scope = {**scope, "path": scope["path"].removeprefix(scope.get("root_path", "")) or "/", "root_path": ""}
        if not (self._is_open or is_loopback((scope.get("client") or ("",))[0])):
            message = "Without an API key, this application answers only to clients on the machine of Ray's proxy."
            hint = "Set api_keys, api_key_file or allow_unauthenticated."
            return await refuse(Fault(Code.FORBIDDEN, message, hint=hint), scope, receive, send)
        return await self.app(scope, receive, send)


def _log_like_ray() -> None:
    """Makes the log of this process part of the replica's log, as Ray's dashboard shows it."""
    log = logging.getLogger("fp8serve")
    log.handlers, log.propagate = logging.getLogger("ray.serve").handlers, False
    log.setLevel(logging.INFO)


def app(args: dict[str, Any]) -> serve.Application:
    """Returns the application, for `serve run` and for Serve's configuration files.

    The arguments are the options of `fp8serve serve` by their names in Python, `api_key_file`, and `ReplicaOptions`.
    Raises click.ClickException for an invalid argument; Ray's commands print its message.
    """
    try:
        return build(args)
    except (Fp8ServeError, click.UsageError) as error:
        raise click.ClickException(str(error)) from None


def build(args: Mapping[str, Any]) -> serve.Application:
    """Returns the application of `app`. Raises Fp8ServeError for an invalid argument."""
    names = [*_options(ReplicaOptions), *(set(_options(Settings)) - DECIDED_BY_RAY), "model", "api_key_file", "limits"]
    if unknown := next((name for name in args if name not in names), None):
        raise RequestError(f"Unknown argument {shown(unknown)}.{suggestion(unknown, names)}")
    replicas = ReplicaOptions(**_convert(ReplicaOptions, args))
    values = {name: value for name, value in args.items() if name not in _options(ReplicaOptions)}
    settings = settings_of(values, replicas)
    options: dict[str, Any] = {"num_replicas": replicas.num_replicas}
    if replicas.max_replicas is not None:
        options = {
            "autoscaling_config": {
                "min_replicas": replicas.num_replicas,
                "max_replicas": replicas.max_replicas,
                "target_ongoing_requests": replicas.target_ongoing_requests or settings.engine.num_seqs,
            }
        }
    deployment = serve.deployment(
        name=DEPLOYMENT,
        max_ongoing_requests=replicas.max_ongoing_requests or settings.limits.queue,
        ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": num_gpus(settings, replicas)},
        graceful_shutdown_timeout_s=settings.drain_seconds + CLOSE_SECONDS,
        health_check_period_s=HEALTH_CHECK_SECONDS,
        **options,
    )
    return deployment(Replica).bind(values, replicas, os.getcwd())


def settings_of(values: Mapping[str, Any], replicas: ReplicaOptions) -> Settings:
    """Returns the settings of a replica, without an API key. Raises Fp8ServeError for an invalid value or a model that
    is not there."""
    if not ({"model", "models"} & set(values)):
        raise RequestError("Name a model: model=DIR.")
    for key in ("model", "api_key_file"):
        if not isinstance(path := values.get(key), str | os.PathLike | None):
            raise RequestError(f"{key} must be a path, not {shown(path)}.")
    if name := next((name for name in OF_JOBS if name in values and "database" not in values), None):
        raise RequestError(
            f"{name} needs database, because each request may reach another replica; run fine-tunes as Ray jobs, or "
            "share a database."
        )
    options = _convert(Settings, values)
    options |= models_of(values.get("model"), options)
    options["adapters"] = tuple(NamedAdapter.parse(text) for text in options.get("adapters", ()))
    options["limits"] = limits_of(_words("limits", values.get("limits", ())))
    if options.get("allow_unauthenticated"):
        options["host"] = "0.0.0.0"  # Ray's proxy listens; the address decides which clients this server trusts
    settings = Settings(**options)
    if settings.device == AUTO:
        settings = replace(settings, device="cuda" if num_gpus(settings, replicas) else "cpu")
    if settings.device == "cpu" and settings.threads is None:
        settings = replace(settings, threads=max(1, int(replicas.num_cpus)))
    return settings


def num_gpus(settings: Settings, replicas: ReplicaOptions) -> float:
    """Returns the GPUs that Ray reserves for a replica. Without one, Ray hides all GPUs from it."""
    if replicas.num_gpus is not None:
        return replicas.num_gpus
    return settings.tensor_parallel if settings.device.startswith("cuda") else 0


def _options(cls: type) -> dict[str, Option]:
    return {option.name: option for option in options_of(cls)}


def _convert(cls: type, args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `cls` among the arguments. `serve run` passes texts: numbers and switches are parsed, and
    a list is divided at spaces."""
    converted = {}
    for name, option in _options(cls).items():
        if name not in args:
            continue
        value, kind = args[name], option.about.narrowed or option.value_type
        if any(get_origin(part) is tuple for part in (kind, *get_args(kind))):
            value = _words(name, value)
        with contextlib.suppress(ValidationError):  # `check` of the dataclass explains what is wrong
            value = TypeAdapter(kind).validate_python(value)
        converted[name] = value
    return converted


def _words(name: str, value: Any) -> tuple[str, ...]:
    """Returns the texts of an argument that is a list. Raises RequestError for another value."""
    words = value.split() if isinstance(value, str) else value
    if not (isinstance(words, list | tuple) and all(isinstance(word, str) for word in words)):
        raise RequestError(f"{name} must be a text or a list of texts, not {shown(value)}.")
    return tuple(words)
