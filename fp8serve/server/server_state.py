"""The parts of one server, which `create_app` creates once and handlers get as the dependency `StateDep`.

`open` starts to load the models in the background, `begin_drain` refuses new requests, and `close` ends all processes.
There is no global state.
"""

import asyncio
import contextlib
import logging
import math
import platform
import shutil
import time
import weakref
from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import version

import fp8serve
from fp8serve.engine.request import Task
from fp8serve.errors import Fp8ServeError, MachineError
from fp8serve.processes import phases_text, process_seconds
from fp8serve.server.access.keys import ServerKeys
from fp8serve.server.access.limits import TenantLimiter
from fp8serve.server.data_directory import JOB_DATABASE, DataDirectory
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.activation import Activator
from fp8serve.server.finetuning.artifacts import Bucket
from fp8serve.server.finetuning.fronts import Fronts
from fp8serve.server.finetuning.job_runner import TRAINING_COMMAND, JobRunner
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.finetuning.replication import Replication
from fp8serve.server.finetuning.stored_keys import load_keys
from fp8serve.server.finetuning.submission import Retention, Submissions
from fp8serve.server.finetuning.weight_sources import WeightSources
from fp8serve.server.metrics import Metrics
from fp8serve.server.parsing.request_parser import RequestParser
from fp8serve.server.serving.admission import Admission, Capacity, StreamLimiter
from fp8serve.server.serving.generation import Generation
from fp8serve.server.serving.model_loader import AdapterLoader, ModelLoader, source_of
from fp8serve.server.serving.registry import Registry
from fp8serve.server.serving.served_model import BASE, ServedModel
from fp8serve.server.serving.served_scales import ScaleSaver
from fp8serve.server.serving.served_weights import AdapterSource, Launch, ServedWeights, WeightSource, launch
from fp8serve.server.serving.supervisor import EngineSupervisor
from fp8serve.server.settings import Settings, is_loopback
from fp8serve.server.tracing import create_tracing

log = logging.getLogger("fp8serve.server")

ORPHAN_SECONDS = 24 * 3600.0  # age of files that no server is still writing
OWN_SIGNAL_SECONDS = 1.0  # how long the server waits for a signal that may have ended its engine process


class ServerState:
    """The parts of one server. `failed` is set if the default model cannot be loaded; the model's `problem` is the
    error."""

    def __init__(
        self,
        settings: Settings,
        data: DataDirectory,
        start_engine: Launch | None = None,
        worker: Sequence[str] = TRAINING_COMMAND,
    ) -> None:
        limits = settings.limits
        self._import_seconds = round(process_seconds(), 3)
        self.settings = settings
        self.keys = ServerKeys(settings.api_keys, settings.api_key, settings.requires_keys)
        self._data, self.data_dir = data, data.path
        self.metrics = Metrics()
        self.tracing = create_tracing(settings.otlp_endpoint)
        self.tenants = TenantLimiter(self.metrics)
        self._start_engine = start_engine or partial(launch, log_format=settings.log_format)
        base_source = WeightSource(BASE, settings.model_name, settings.model, settings.engine, settings.output_format)
        self.models = Registry(self._create_model(settings.model_name, base_source))
        self.models.default.gpu_memory = settings.gpu_memory_beside_jobs
        self.models.aliases |= settings.named_aliases
        self.model_loader = ModelLoader(self.models, self._create_model)
        self.model_loader.known_sources |= {named.name: source_of(named, settings.device) for named in settings.models}
        self.adapter_loader = AdapterLoader(self.models, self.metrics)
        for adapter in settings.adapters:
            source = AdapterSource(adapter.name, adapter.directory.name, adapter.directory, required=True)
            self.adapter_loader.register(self.models.default, source)
        self.supervisor = EngineSupervisor(self.models.default)
        self.streams = StreamLimiter(limits.streams, self.metrics)
        self.scale_saver = ScaleSaver(self.data_dir)
        self.parser = RequestParser(limits, settings.log_format)
        self.jobs = JobStore(settings.database or self.data_dir / JOB_DATABASE)
        if self.jobs.is_shared:
            self.keys.set_database_keys(load_keys(self.jobs))
        bucket = None if settings.artifacts is None else Bucket(settings.artifacts)
        self.runner = JobRunner(self.jobs, self.data_dir, self._wait_before_training, worker, bucket)
        self.sources = WeightSources(self.jobs, self.runner, self.models)
        self.retention = Retention(self.jobs, self.runner, self.models, settings.keep_jobs)
        self.runner.on_job_end = self.retention.sweep
        self.loaded = False  # whether the default model was loaded
        self.started = False  # whether every model of the command line was loaded or has failed
        self.started_at = int(time.time())
        self.address = "this application's address"
        self.active: weakref.WeakSet[Generation] = weakref.WeakSet()
        self.draining = asyncio.Event()
        self.submissions = Submissions(
            settings, self.jobs, self.runner, self.models, self.parser, self.sources, self.draining
        )
        self.activator = Activator(
            self.jobs,
            self.runner,
            self.sources,
            self.models,
            self.model_loader,
            self.adapter_loader,
            self.parser,
            self.draining,
            Fronts(self.jobs),
        )
        self.replication = Replication(self.activator.fronts, self.activator, self.keys)
        self._drain_deadline = math.inf
        self.failed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._connect_metrics()

    def _create_model(self, name: str, base_source: WeightSource) -> ServedModel:
        limits = self.settings.limits
        capacity = Capacity(base_source.options.num_seqs, limits.queue, limits.queue_tokens)
        admission = Admission(capacity, self.metrics.for_model(name))
        model = ServedModel(name, base_source, self._start_engine, admission, self.settings.deadlines)
        model.needs_layer_stats = self.settings.metrics_per_layer
        return model

    def _connect_metrics(self) -> None:
        sources = self.metrics.sources
        sources.stats = self.models.stats
        sources.adapters = self.models.adapter_stats
        sources.max_adapters = self.models.max_adapters
        sources.layers = lambda: {name: model.layers for name, model in self.models.models.items()}
        sources.jobs = lambda: self.replication.job_counts if self.jobs.is_shared else self.jobs.counts()
        sources.ready = lambda: self.ready
        sources.build = build_facts
        sources.served = lambda: {name: served_facts(model.current) for name, model in self.models.models.items()}
        self.metrics.parsing.set_function(lambda: self.parser.pool.waiting_bytes)

    # -- start and end -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Starts to load the models in the background, and the jobs after them."""
        await asyncio.to_thread(self._remove_orphans)
        if self.jobs.is_shared:
            self._tasks.append(asyncio.create_task(self.replication.run()))
        self._tasks += [asyncio.create_task(self._load_models()), asyncio.create_task(self.supervisor.watch())]

    async def _load_models(self) -> None:
        default = self.models.default
        try:
            await self.activator.register_activated_adapters(default)
            served = await default.start(await self.activator.sources_of(default.name, default.base_source))
        except Exception as error:
            if isinstance(error, Fault):
                error = MachineError(f"The active weights cannot be served: {error.full_message}")
            if not isinstance(error, Fp8ServeError):  # a defect, with which the server would load forever
                log.exception("%s could not be loaded", default.name)
                error = MachineError(
                    f"Loading failed unexpectedly ({type(error).__name__}); the log has the traceback."
                )
            if isinstance(error, MachineError):  # a service manager's signal may have ended the engine process first
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.draining.wait(), OWN_SIGNAL_SECONDS)
            if not default.is_shutting_down:
                default.state, default.problem = "failed", error
                self.failed.set()
            return
        self.loaded = True
        if served.engine.limits.generates:
            log.info(output_format_message(served))
        names = served.source.model_id, served.weight_version, default.name
        log.info("ready at %s: serving %s (%s) as %s", self.address, *names)
        phases = {f"engine {name}": value for name, value in served.engine.info.get("start_seconds", {}).items()}
        total, text = process_seconds(), phases_text({"server imports": self._import_seconds} | phases)
        log.info("ready in %.1f s: %s", total, text)
        if not self.keys.is_required and not is_loopback(self.settings.host):
            log.warning("no API key is set (--allow-unauthenticated): everyone who can reach this server may use it")
        if self.keys.is_required and not self.keys.current_keys().digests:
            log.warning("every request is refused until there is an API key: fp8serve key new --database URL")
        self.runner.start()
        await self._load_named_models()
        self.started = True

    async def _load_named_models(self) -> None:
        """Loads the other models of the command line, one by one. A model that fails stays listed with its error."""
        for named in self.settings.models:
            try:
                await self.activator.load(named.name, keep_failed=True)
            except Fault as fault:
                if fault.code is Code.DRAINING:
                    return
                log.error("%s is not served: %s", named.name, fault.full_message)
            except Exception:  # a defect, with which the server would never be ready
                log.exception("%s is not served", named.name)

    def _remove_orphans(self) -> None:
        """Removes job directories and uploads that a crash has left behind and that are not in the database.

        In a directory that other servers may use, recent ones stay: they may be about to enter the database. In one
        that was used with another database, all stay, and the log names one: that database may list them.
        """
        has_one_database = self._data.has_one_database()
        newest = time.time() - ORPHAN_SECONDS if self.jobs.is_shared else math.inf
        folders, files = list(self.runner.root.iterdir()), list(self.data_dir.glob("files/*"))
        jobs, uploads = self.jobs.ids("jobs"), self.jobs.ids("files")
        orphans = [path for path in folders if path.name not in jobs]
        orphans += [path for path in files if path.name.partition(".")[0] not in uploads]
        if orphans and not has_one_database:
            log.warning(
                "%d files and directories of jobs and uploads, such as %s, are not in this database; they are kept, "
                "because the data directory was used with another database, too", len(orphans), min(orphans),
            )  # fmt: skip
            return
        with contextlib.suppress(FileNotFoundError):  # another server removes them, too
            for path in orphans:
                if path.stat().st_mtime < newest:
                    shutil.rmtree(path, ignore_errors=True) if path.parent == self.runner.root else path.unlink()

    def begin_drain(self) -> None:
        """Refuses new requests, and makes a running job stop at a checkpoint."""
        self._drain_deadline = time.monotonic() + self.settings.drain_seconds
        self.draining.set()
        for model in self.models.models.values():
            model.is_shutting_down = True
            model.released.set()  # waiting requests are refused
        self.model_loader.cancel_changes()
        self._tasks.append(asyncio.create_task(self.runner.close(self.settings.drain_seconds)))

    def end_drain(self) -> None:
        """Ends the drain now; requests that still run are aborted."""
        self._drain_deadline = time.monotonic()

    def finish_drain(self) -> bool:
        """Returns whether no request or job runs. After the deadline, aborts the running requests and returns True."""
        if time.monotonic() >= self._drain_deadline:
            for generation in list(self.active):
                generation.fail(
                    Fault(Code.DRAINING, "The server is shutting down, and the request did not finish in time.")
                )
            return True
        return self.in_flight == 0 and self.runner.is_closed

    async def close(self) -> None:
        """Ends all tasks and processes. A running job stops at a checkpoint and resumes when a server starts again."""
        self.draining.set()
        await self.runner.close(min(self.settings.drain_seconds, self._drain_deadline - time.monotonic()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.adapter_loader.close()
        await self.model_loader.close()
        await self.parser.close()
        if self.tracing is not None:
            await self.tracing.close()
        is_empty = not self.jobs.is_shared and not (self.jobs.ids("jobs") or self.jobs.ids("files"))
        if self.jobs.is_shared:
            await self.replication.close()
        self.jobs.close()
        if self.loaded or not is_empty:
            self._data.close()
        else:
            self._data.discard()

    # -- status --------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """The number of admitted requests of all models that have not ended."""
        return sum(model.admission.capacity.in_flight for model in self.models.models.values())

    @property
    def ready(self) -> bool:
        default = self.models.default
        accepts_requests = self.started and not self.draining.is_set() and not self.paused and not self.is_behind
        return accepts_requests and default.ready and not default.admission.capacity.nearly_full

    @property
    def status(self) -> str:
        """The server's status for the health routes, as one word."""
        if self.draining.is_set():
            return "draining"
        if self.paused:
            return "paused"
        default = self.models.default
        if default.ready and (not self.started or self.is_behind):
            return "loading"
        return "busy" if default.ready and default.admission.capacity.nearly_full else default.state

    @property
    def is_behind(self) -> bool:
        """Whether the servers that share a database may serve other weights than this one."""
        return self.jobs.is_shared and self.replication.is_behind

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Whether a job uses the serving device and the operator chose to pause serving meanwhile."""
        return self.settings.train_on == "pause" and self.settings.trains_on_serving_device and self.runner.is_busy

    def served(self, model: str | None, *tasks: Task) -> ServedWeights:
        """Returns the weights for a new request that names `model`.

        If `model` is None, a model for one of `tasks` is preferred to the default model. Raises Fault 503 while the
        server accepts no requests, and 404 for an unknown model.
        """
        if self.draining.is_set():
            raise Fault(Code.DRAINING, "The server is shutting down.", retry_after=5)
        if self.paused:
            raise Fault(Code.PAUSED, "Serving is paused while a fine-tune job uses the device.", retry_after=30)
        return self.models.resolve(model, tasks)

    async def _wait_before_training(self) -> None:
        if self.paused:
            for model in list(self.models.models.values()):
                await model.admission.capacity.idle.wait()


@cache
def build_facts() -> dict[str, str]:
    """Returns the labels of `fp8serve_build_info`. torch's version is read without importing torch."""
    return {"version": fp8serve.__version__, "python": platform.python_version(), "torch": version("torch")}


def served_facts(served: ServedWeights | None) -> dict[str, str]:
    """Returns the labels of `fp8serve_model_info`, or an empty dict while no engine runs."""
    if served is None:
        return {}
    names = ("recipe", "device", "kv_cache_dtype", "block_size", "num_blocks")
    options = {name: str(served.engine.info.get(name, "")) for name in names}
    return {"weights": served.source.model_id, "weight_version": served.weight_version} | options


def output_format_message(served: ServedWeights) -> str:
    """Returns a log line that says how tool calls and reasoning are parsed."""
    message = f"tool calls are read as {served.output_format.tools}, reasoning as {served.output_format.reasoning}"
    note = "; the chat template knows no tools, so the system message describes them"
    needs_note = served.output_format.tools != "none" and not served.tokenizer.takes_tools
    return message + (note if needs_note else "")
