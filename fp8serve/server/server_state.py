"""Everything one server holds, made once by `create_app` and handed to the handlers.

The order of life: `open` starts loading in the background (readiness false), `draining` refuses new work, `close`
ends the processes. Handlers get it by the `StateDep` dependency (api/routing.py); there is no global.
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
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import Fp8ServeError, MachineError
from fp8serve.server.access.keys import KeyFile
from fp8serve.server.access.limits import TenantLimiter
from fp8serve.server.data_directory import JOB_TABLE, DataDirectory
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.activation import Activation
from fp8serve.server.finetuning.job_runner import WORKER, JobRunner
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.finetuning.sources import Sources
from fp8serve.server.finetuning.submission import Retention, Submissions
from fp8serve.server.metrics import Metrics
from fp8serve.server.named_models import NamedModel
from fp8serve.server.parsing.request_parser import RequestParser
from fp8serve.server.serving.adapter_loader import AdapterLoader
from fp8serve.server.serving.adapters import AdapterSource
from fp8serve.server.serving.admission import Admission, Capacity, Reservation, Streams
from fp8serve.server.serving.generation import Generation, build_requests
from fp8serve.server.serving.loader import Loader
from fp8serve.server.serving.registry import Registry
from fp8serve.server.serving.rolled_scales import RolledScales
from fp8serve.server.serving.served import Launch, Served, Source, launch
from fp8serve.server.serving.served_model import BASE, ServedModel
from fp8serve.server.serving.supervisor import EngineSupervisor
from fp8serve.server.settings import Settings, is_loopback
from fp8serve.server.tracing import tracing_of
from fp8serve.server.usage import Usage

log = logging.getLogger("fp8serve.server")

OWN_SIGNAL_SECONDS = 1.0  # how much later than our engine we may handle a signal that both got


class ServerState:
    """One server's parts. `failed` is set when the default model could not be loaded, whose `problem` says why."""

    def __init__(
        self,
        settings: Settings,
        data: DataDirectory,
        start_engine: Launch | None = None,
        worker: Sequence[str] = WORKER,
    ) -> None:
        limits = settings.limits
        self.settings = settings
        self.keys = KeyFile(settings.api_keys, settings.api_key)
        self._data, self.data_dir = data, data.path
        self.metrics = Metrics()
        self.tracing = tracing_of(settings.otlp_endpoint)
        self.tenants = TenantLimiter(self.metrics)
        self._start_engine = start_engine or partial(launch, log_format=settings.log_format)
        home = Source(BASE, settings.model_name, settings.model, settings.engine, settings.answers)
        self.models = Registry(self._model(settings.model_name, home))
        self.models.aliases |= settings.named_aliases
        self.loader = Loader(self.models, self._model)
        self.loader.known |= {named.name: self._home(named) for named in settings.models}
        self.adapters = AdapterLoader(self.models, self._admission_of_adapter)
        for adapter in settings.adapters:
            source = AdapterSource(adapter.name, adapter.directory.name, adapter.directory, required=True)
            self.adapters.expect(self.models.default, source)
        self.supervisor = EngineSupervisor(self.models.default)
        self.streams = Streams(limits.streams, self.metrics)
        self.rolled = RolledScales(self.data_dir)
        self.parser = RequestParser(limits, settings.log_format)
        self.jobs = JobStore(self.data_dir / JOB_TABLE)
        self.runner = JobRunner(self.jobs, self.data_dir, wait_idle=self._wait_before_training, command=worker)
        self.sources = Sources(self.jobs, self.runner, self.models)
        self.retention = Retention(self.jobs, self.runner, self.models, settings.keep_jobs)
        self.runner.after_each = self.retention.sweep
        self.loaded = False  # whether the default model ever was
        self.started = False  # whether every model of the command line was loaded, or could not be
        self.started_at = int(time.time())
        self.address = "this application's address"
        self.active: weakref.WeakSet[Generation] = weakref.WeakSet()
        self.draining = asyncio.Event()
        self.submissions = Submissions(
            settings, self.data_dir, self.jobs, self.runner, self.models, self.parser, self.sources, self.draining
        )
        self.activation = Activation(
            self.jobs, self.runner, self.sources, self.models, self.loader, self.adapters, self.parser, self.draining
        )
        self._drain_deadline = math.inf
        self.failed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._connect_metrics()

    def _home(self, named: NamedModel) -> Source:
        return Source(BASE, named.name, named.directory, named.engine(self.settings.device), named.answers)

    def _model(self, name: str, home: Source) -> ServedModel:
        """A model that is not loaded yet."""
        limits = self.settings.limits
        capacity = Capacity(home.options.max_num_seqs + limits.queue, limits.queue_tokens)
        admission = Admission(capacity, self.metrics.of(name))
        model = ServedModel(name, home, self._start_engine, admission, self.settings.deadlines)
        model.asks_layers = self.settings.metrics_per_layer
        return model

    def _admission_of_adapter(self, name: str, base: Admission) -> Admission:
        """Counts the requests for an adapter, within the capacity of its model."""
        return Admission(base.capacity, self.metrics.of(name))

    def _connect_metrics(self) -> None:
        sources = self.metrics.sources
        sources.stats = self.models.stats
        sources.adapters = self.models.adapter_stats
        sources.layers = lambda: {name: model.layers for name, model in self.models.models.items()}
        sources.jobs = self.jobs.counts
        sources.ready = lambda: self.ready
        sources.build = build_facts
        sources.served = lambda: {name: served_facts(model.current) for name, model in self.models.models.items()}
        self.metrics.reading.set_function(lambda: self.parser.pool.bytes)

    # -- life ----------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        await asyncio.to_thread(self._sweep)
        self._tasks += [asyncio.create_task(self._load()), asyncio.create_task(self.supervisor.watch())]

    async def _load(self) -> None:
        default = self.models.default
        await self.activation.expect_adapters(default)
        try:
            served = await default.start(await self.activation.sources_of(default.name, default.home))
        except Fp8ServeError as error:
            if isinstance(error, MachineError):
                await self._await_own_signal()
            if not default.leaving:
                default.state, default.problem = "failed", error
                self.failed.set()
            return
        self.loaded = True
        if served.engine.limits.generates:
            log.info(answers_line(served))
        what = served.source.model_id, served.weight_version
        log.info("ready at %s: serving %s (%s) as %s", self.address, *what, default.name)
        if not self.settings.asks_for_keys and not is_loopback(self.settings.host):
            log.warning("no API key is set, as --allow-unauthenticated asks: whoever reaches this server may use it")
        self.runner.start()
        await self._load_further()
        self.started = True

    async def _await_own_signal(self) -> None:
        """A service manager's signal reaches the engine's process, too, which may end before we handle ours."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.draining.wait(), OWN_SIGNAL_SECONDS)

    async def _load_further(self) -> None:
        """One after the other. One that cannot be served says so where models are listed, and the others serve."""
        for named in self.settings.models:
            try:
                await self.activation.load(named.name, keep=True)
            except Fault as fault:
                if fault.code is Code.DRAINING:
                    return
                log.error("%s is not served: %s", named.name, fault.told)

    def _sweep(self) -> None:
        """Removes what a crash left half-made: job directories and uploads that no row names."""
        jobs, uploads = self.jobs.ids("jobs"), self.jobs.ids("files")
        for path in self.runner.root.iterdir():
            if path.name not in jobs:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.data_dir.glob("files/*"):
            if path.name.partition(".")[0] not in uploads:
                path.unlink()

    def begin_drain(self) -> None:
        """Takes nothing new; a running job begins to stop at a checkpoint."""
        self._drain_deadline = time.monotonic() + self.settings.drain_seconds
        self.draining.set()
        for model in self.models.models.values():
            model.leaving = True
        self.loader.give_up()
        self._tasks.append(asyncio.create_task(self.runner.close(self.settings.drain_seconds)))

    def hurry(self) -> None:
        """Ends the drain: what is not done by now is ended."""
        self._drain_deadline = time.monotonic()

    @property
    def drained(self) -> bool:
        """Whether the server can go: nothing is in flight, or the deadline has passed and the rest was ended."""
        if time.monotonic() >= self._drain_deadline:
            for generation in list(self.active):
                generation.fail(Fault(Code.DRAINING, "The server is shutting down and could not wait any longer."))
            return True
        return self.in_flight == 0 and self.runner.closed

    async def close(self) -> None:
        """Ends background work and processes. A running job stops at a checkpoint and resumes when a server starts
        again.
        """
        self.draining.set()
        await self.runner.close(min(self.settings.drain_seconds, self._drain_deadline - time.monotonic()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.adapters.close()
        await self.loader.close()
        await self.parser.close()
        if self.tracing is not None:
            await self.tracing.close()
        is_empty = not (self.jobs.ids("jobs") or self.jobs.ids("files"))
        self.jobs.close()
        if self.loaded or not is_empty:
            self._data.close()
        else:
            self._data.discard()

    # -- how it is -----------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests of all models that were admitted and have not ended."""
        return self.models.count(lambda model: model.admission.capacity.in_flight)

    @property
    def ready(self) -> bool:
        default = self.models.default
        takes_requests = self.started and not self.draining.is_set() and not self.paused
        return takes_requests and default.ready and not default.admission.capacity.nearly_full

    @property
    def status(self) -> str:
        """One word for the health routes."""
        if self.draining.is_set():
            return "draining"
        if self.paused:
            return "paused"
        default = self.models.default
        if default.ready and not self.started:
            return "loading"
        return "busy" if default.ready and default.admission.capacity.nearly_full else default.state

    # -- generating ----------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """A job runs on the device that serves, and the operator chose to pause serving meanwhile."""
        return self.settings.train_on == "pause" and self.settings.trains_on_serving_device and self.runner.busy

    def served(self, model: str | None, *tasks: Task) -> Served:
        """The weights for a new request; where it names no model, those of one for any of `tasks`, if there is one.

        Fault 503 when the server does not take any now, 404 for an unknown model.
        """
        if self.draining.is_set():
            raise Fault(Code.DRAINING, "The server is shutting down.", retry_after=5)
        if self.paused:
            raise Fault(Code.PAUSED, "Serving is paused while a fine-tune job uses the device.", retry_after=30)
        return self.models.resolve(model, tasks)

    def generation(
        self,
        served: Served,
        prompts: list[tuple[int, ...]],
        params: SamplingParams,
        reservation: Reservation,
        n: int = 1,
        tenant: str = "",
        usage: Usage | None = None,
    ) -> Generation:
        """Checks and admits; after this the answer is a 200. Fault otherwise."""
        requests = build_requests(served, prompts, params, n, tenant)
        generation = Generation(served, requests, n, reservation, usage or Usage(), self.settings.request_seconds)
        self.active.add(generation)
        return generation

    async def _wait_before_training(self) -> None:
        if self.paused:
            for model in list(self.models.models.values()):
                await model.admission.capacity.idle.wait()


@cache
def build_facts() -> dict[str, str]:
    """Versions, for `fp8serve_build_info`; torch is asked of its package, and not imported."""
    return {"version": fp8serve.__version__, "python": platform.python_version(), "torch": version("torch")}


def served_facts(served: Served | None) -> dict[str, str]:
    """What answers, for `fp8serve_model_info`; nothing while nothing does."""
    if served is None:
        return {}
    names = ("recipe", "device", "kv_cache_dtype", "block_size", "num_blocks")
    numbers = {name: str(served.engine.info.get(name, "")) for name in names}
    return {"weights": served.source.model_id, "weight_version": served.weight_version} | numbers


def answers_line(served: Served) -> str:
    """One line: how tool calls and reasoning are read from answers."""
    line = f"tool calls are read as {served.answers.tools}, reasoning as {served.answers.reasoning}"
    note = "; the chat template knows no tools, so the system message describes them"
    described = served.answers.tools != "none" and not served.tokenizer.takes_tools
    return line + (note if described else "")
