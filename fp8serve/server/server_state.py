"""Everything one server holds, made once by `create_app` and handed to the handlers.

The order of life: `open` starts loading in the background (readiness false), `draining` refuses new work, `close`
ends the processes. Handlers get it by the `StateDep` dependency (api/dependencies.py); there is no global.
"""

import asyncio
import logging
import math
import platform
import shutil
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version

import fp8serve
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import Fp8ServeError
from fp8serve.server.access.key_file import KeyFile
from fp8serve.server.access.limits import Tenants
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.job_runner import WORKER, JobRunner
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.finetuning.submission import Submissions
from fp8serve.server.metrics import Metrics
from fp8serve.server.parsing.request_parser import RequestParser
from fp8serve.server.serving.admission import Admission, Places
from fp8serve.server.serving.generation import Generation, build_requests
from fp8serve.server.serving.models import BASE, ServedModels
from fp8serve.server.serving.rolled_scales import RolledScales
from fp8serve.server.serving.served import Launch, Served, Source, launch
from fp8serve.server.serving.supervisor import EngineSupervisor
from fp8serve.server.settings import Settings, is_loopback, lock_data_dir, prepare_data_dir
from fp8serve.server.tracing import tracing_of
from fp8serve.server.usage import Usage

log = logging.getLogger("fp8serve.server")


class ServerState:
    """One server's parts. `failed` is set when the model could not be loaded, with the reason in `models.problem`."""

    def __init__(self, settings: Settings, start_engine: Launch | None = None, worker: Sequence[str] = WORKER) -> None:
        limits = settings.limits
        self.settings = settings
        self.keys = KeyFile(settings.api_keys, settings.api_key)
        self.data_dir = prepare_data_dir(settings)
        self._lock = lock_data_dir(self.data_dir)
        self.metrics = Metrics(settings.model_name if settings.vllm_metrics else None)
        self.tracing = tracing_of(settings.otlp_endpoint)
        self.tenants = Tenants(self.metrics)
        self.models = ServedModels(
            settings.model_name,
            start_engine or partial(launch, log_format=settings.log_format),
            self.metrics,
            settings.deadlines,
            settings.answers,
        )
        self.rolled = RolledScales(self.data_dir)
        self.supervisor = EngineSupervisor(self.models, self.metrics, settings.metrics_per_layer)
        self.admission = Admission(
            settings.max_num_seqs + limits.queue, limits.queue_tokens, limits.streams, self.metrics
        )
        self.parser = RequestParser(limits, settings.log_format)
        self.jobs = JobStore(self.data_dir / "jobs.sqlite3")
        self.runner = JobRunner(self.jobs, self.data_dir, wait_idle=self._wait_before_training, command=worker)
        self.started_at = int(time.time())
        self.address = "this application's address"
        self.active: weakref.WeakSet[Generation] = weakref.WeakSet()
        self.draining = asyncio.Event()
        self.submissions = Submissions(
            settings, self.data_dir, self.jobs, self.runner, self.models, self.parser, self.source, self.draining
        )
        self._drain_deadline = math.inf
        self.failed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._connect_metrics()

    def _connect_metrics(self) -> None:
        self.metrics.preset()
        sources = self.metrics.sources
        sources.stats = lambda: self.models.stats
        sources.layers = lambda: self.models.layers
        sources.jobs = self.jobs.counts
        sources.ready = lambda: self.ready
        sources.build = build_facts
        sources.served = lambda: served_facts(self.models.current)
        self.metrics.in_flight.set_function(lambda: self.admission.in_flight)
        self.metrics.reading.set_function(lambda: self.parser.pool.bytes)

    # -- life ----------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        await asyncio.to_thread(self._sweep)
        self._tasks = [asyncio.create_task(self._load()), asyncio.create_task(self.supervisor.watch())]

    async def _load(self) -> None:
        try:
            served = await self._first_source()
        except Fp8ServeError as error:
            self.models.state, self.models.problem = "failed", error
            self.failed.set()
            return
        log.info("%s", kernels_line(served))
        log.info(answers_line(served))
        log.info(
            "serving %s (%s) as %s on %s", served.source.model_id, served.weight_version, self.models.name, self.address
        )
        if not self.settings.asks_for_keys and not is_loopback(self.settings.host):
            log.warning("no API key is set, as --allow-unauthenticated asks: whoever reaches this server may use it")
        self.runner.start()

    def _sweep(self) -> None:
        """Removes what a crash left half-made: job directories and uploads that no row names."""
        jobs, uploads = self.jobs.ids("jobs"), self.jobs.ids("files")
        for path in self.runner.root.iterdir():
            if path.name not in jobs:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.data_dir.glob("files/*"):
            if path.stem not in uploads:
                path.unlink()

    async def _first_source(self) -> Served:
        """What was activated last for this model, if that still loads; else the model itself."""
        key = await asyncio.to_thread(self.jobs.activated, str(self.settings.model.resolve()))
        if key is not None and key != BASE:
            try:
                return await self.models.start(await asyncio.to_thread(self.source, key))
            except (Fp8ServeError, Fault) as error:
                log.error(
                    "the weights of %s, activated earlier, cannot be served (%s); serving the base model", key, error
                )
        return await self.models.start(self.source(BASE))

    def begin_drain(self) -> None:
        """Takes nothing new; a running job begins to stop at a checkpoint."""
        self._drain_deadline = time.monotonic() + self.settings.drain_seconds
        self.draining.set()
        self._tasks.append(asyncio.create_task(self.runner.close(self.settings.drain_seconds)))

    @property
    def drained(self) -> bool:
        """Whether the server can go: nothing is in flight, or the deadline has passed and the rest was ended."""
        if time.monotonic() >= self._drain_deadline:
            for generation in list(self.active):
                generation.fail(Fault(Code.DRAINING, "The server is shutting down and could not wait any longer."))
            return True
        return self.admission.in_flight == 0 and self.runner.closed

    async def close(self) -> None:
        """Ends background work and processes. A running job stops at a checkpoint and resumes when a server starts
        again.
        """
        self.draining.set()
        await self.runner.close(self.settings.drain_seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.models.close()
        await self.parser.close()
        await self.tracing.close()
        self.jobs.close()
        self._lock.close()

    # -- how it is -----------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.models.ready and not self.draining.is_set() and not self.paused and not self.admission.nearly_full

    @property
    def status(self) -> str:
        """One word for the health routes."""
        if self.draining.is_set():
            return "draining"
        if self.paused:
            return "paused"
        return "busy" if self.models.ready and self.admission.nearly_full else self.models.state

    # -- what can be served --------------------------------------------------------------------------------------------

    def source(self, key: str) -> Source:
        """The weights behind "base" or a finished job. Fault 404 or 409 when there are none. Reads the job table."""
        options = self.settings.engine
        if key == BASE:
            return Source(BASE, self.models.name, self.settings.model, options)
        job = self.jobs.get(key)
        directory = self.runner.result_dir(job)
        if job.status != "succeeded" or not directory.is_dir():
            raise Fault(Code.JOB_STATE, f"Only a job that succeeded can be served; this one is {job.status}.")
        return Source(job.id, job.model_id(self.models.name), directory, replace(options, recipe="stored", scales=None))

    async def activate(self, key: str) -> Served:
        """Swaps the served weights and remembers the choice for the next start."""
        base = str(self.settings.model.resolve())

        async def record() -> None:
            await asyncio.to_thread(self.jobs.set_activated, base, key)

        return await self.models.activate(await asyncio.to_thread(self.source, key), record)

    async def save_scales(self, name: str | None) -> tuple[str, int]:
        """Writes what is served, with its scales as they are now, beside the model that this server was started with;
        the directory's name, and how many scales follow the traffic. Fault.
        """
        model = self.settings.model.resolve()
        out = model.parent / (name or f"{model.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
        count = await self.rolled.save(self.models.resolve(None), out)
        log.info("saved %d scales as they are now, with their weights, to %s", count, out)
        return out.name, count

    # -- generating ----------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """A job runs on the device that serves, and the operator chose to pause serving meanwhile."""
        return self.settings.train_on == "pause" and self.settings.trains_on_serving_device and self.runner.busy

    def served(self, model: str | None) -> Served:
        """The weights for a new request. Fault 503 when the server does not take any now, 404 for an unknown model."""
        if self.draining.is_set():
            raise Fault(Code.DRAINING, "The server is shutting down.", retry_after=5)
        if self.paused:
            raise Fault(Code.PAUSED, "Serving is paused while a fine-tune job uses the device.", retry_after=30)
        return self.models.resolve(model)

    def generation(
        self,
        served: Served,
        prompts: list[tuple[int, ...]],
        params: SamplingParams,
        places: Places,
        n: int = 1,
        tenant: str = "",
        usage: Usage | None = None,
    ) -> Generation:
        """Checks and admits; after this the answer is a 200. Fault otherwise."""
        requests = build_requests(served, prompts, params, n, tenant)
        generation = Generation(
            served, requests, n, places, self.metrics, usage or Usage(), self.settings.request_seconds
        )
        self.active.add(generation)
        return generation

    async def _wait_before_training(self) -> None:
        if self.paused:
            await self.admission.idle.wait()


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
    return {"model": served.source.model_id, "weight_version": served.weight_version} | numbers


def answers_line(served: Served) -> str:
    """One line: how tool calls and reasoning are read from answers."""
    line = f"tool calls are read as {served.answers.tools}, reasoning as {served.answers.reasoning}"
    told = "; the chat template knows no tools, so the system message describes them"
    described = served.answers.tools != "none" and not served.tokenizer.takes_tools
    return line + (told if described else "")


def kernels_line(served: Served) -> str:
    """One line: which kernel serves each op, as the engine says."""
    info = served.engine.info
    kernels = info.get("kernels") or {}
    named = (
        ", ".join(f"{op}: {name}" for op, name in sorted(kernels.items()))
        if isinstance(kernels, dict)
        else str(kernels)
    )
    return f"kernels on {info.get('device', 'this device')}: {named or 'not reported'}"
