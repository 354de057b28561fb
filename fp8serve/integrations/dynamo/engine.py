"""An engine for Dynamo's workers.

The worker holds what a server holds for one model (server/serving): the engine's process with its supervisor, admission
and metrics. Dynamo's frontend and router take the place of the routes. So a worker refuses, cancels, drains and
restarts as a server does:

* A request that can never run, or asks for what fp8serve does not have, is refused with the status of a server.
* If the engine's process dies or hangs, its requests end with EngineShutdown, for which the frontend tries another
  worker (`--migration-limit`), and the process is started again.
* When the client leaves, its sequences leave the engine at once.
* On SIGTERM Dynamo removes the worker from discovery, and `cleanup` lets the requests that run finish.

Dynamo's runtime calls all methods on the event loop of this process.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, PushSource
from dynamo.common.utils.token_ids import token_ids_to_list
from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument

from fp8serve.engine.client import EngineClient
from fp8serve.engine.output import TokenLogprob
from fp8serve.engine.task import check_generates
from fp8serve.errors import Fp8ServeError, RequestError
from fp8serve.integrations.dynamo.cache_reports import RANK, CacheReports
from fp8serve.integrations.dynamo.options import parse
from fp8serve.integrations.dynamo.requests import cache_salt, chunk, sampling_params
from fp8serve.model.text.tokenizer_facts import TokenizerFacts
from fp8serve.processes import end_process
from fp8serve.server.faults import Code, Fault
from fp8serve.server.metrics import Metrics
from fp8serve.server.server_state import build_facts, served_facts
from fp8serve.server.serving.admission import Admission, Capacity
from fp8serve.server.serving.generation import Generation, build_requests
from fp8serve.server.serving.served_model import BASE, ServedModel
from fp8serve.server.serving.served_weights import WeightSource, launch
from fp8serve.server.serving.supervisor import EngineSupervisor
from fp8serve.server.settings import Settings
from fp8serve.server.usage import Usage

HTTP_METRICS = ["fp8serve_http_", "fp8serve_tenant_", "fp8serve_streams_", "fp8serve_reading_", "fp8serve_jobs"]
"""The metrics of a server that a worker does not have, by the beginnings of their names."""


class DynamoEngine(LLMEngine):  # type: ignore[misc,unused-ignore]
    """Runs one model for a worker of Dynamo."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.problem: Fp8ServeError | None = None  # why the model could not be loaded
        self._metrics = Metrics()
        self._model: ServedModel | None = None
        self._reports: CacheReports | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def from_args(cls, argv: Sequence[str] | None = None) -> tuple["DynamoEngine", WorkerConfig]:
        settings, config = parse(argv)
        await asyncio.to_thread(check_generates, settings.model, settings.task)
        return cls(settings), config

    async def start(self, worker_id: int) -> EngineConfig:
        """Loads the model in a process of its own, and returns what the frontend and the router need to know."""
        settings, name = self.settings, self.settings.model_name
        source = WeightSource(BASE, name, settings.model, settings.engine)
        capacity = Capacity(settings.num_seqs, settings.limits.queue, settings.limits.queue_tokens)
        admission = Admission(capacity, self._metrics.for_model(name))
        self._model = model = ServedModel(name, source, _launch, admission, settings.deadlines)
        model.needs_layer_stats = settings.metrics_per_layer
        try:
            served = await model.start([source])
        except Fp8ServeError as error:
            self.problem = error
            raise
        self._connect_metrics(model)
        self._reports = CacheReports(model, ComponentSnapshot)
        self._tasks = [asyncio.create_task(EngineSupervisor(model).watch()), asyncio.create_task(self._reports.run())]
        limits, info = served.engine.limits, served.engine.info
        return EngineConfig(
            model=str(settings.model),
            served_model_name=name,
            model_aliases=list(settings.served_model_name[1:]),
            llm=LlmRegistration(
                context_length=limits.max_model_len,
                kv_cache_block_size=limits.block_size,
                total_kv_blocks=limits.num_blocks,
                max_num_seqs=info["max_num_seqs"],
                max_num_batched_tokens=info["max_batch_tokens"],
            ),
        )

    def end_if_loading(self) -> None:
        """Ends this process, and so its engine's, if the model is not loaded yet: there are no requests to finish."""
        if self._reports is None:
            end_process(0)

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the tokens of a request as they are generated."""
        try:
            generation = self._admit(request)
        except (Fault, RequestError) as error:
            raise _dynamo_error(error) from None
        stopped = asyncio.ensure_future(context.async_killed_or_stopped())
        stopped.add_done_callback(lambda _: generation.fail(Fault(Code.REQUEST_CANCELLED, "The client has left.")))
        prompt: tuple[TokenLogprob, ...] | None = None
        try:
            async with contextlib.aclosing(generation.outputs()) as arrivals:
                async for items in arrivals:
                    for _, output in items:
                        prompt = output.prompt_logprobs or prompt
                        yield chunk(output, prompt)
        except Fault as fault:
            if fault.code is not Code.REQUEST_CANCELLED:
                raise _dynamo_error(fault) from None
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
        finally:
            stopped.cancel()

    async def health_check_payload(self) -> dict[str, Any]:
        """Returns the request of one token with which Dynamo checks an idle worker."""
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=0)
        return payload

    async def register_prometheus(self, metrics: Any) -> None:
        register_engine_registry(metrics, self._metrics.registry, exclude_prefixes=HTTP_METRICS)

    async def kv_event_sources(self) -> list[PushSource]:
        return [PushSource(on_ready=partial(setattr, self._reports, "blocks"), dp_rank=RANK)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [RANK]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        assert self._reports is not None  # `start` has returned
        self._reports.load = publisher

    async def cleanup(self) -> None:
        """Lets the requests that run finish for `drain_seconds`, and ends the engine's process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._model is not None:
            await self._model.unload(self.settings.drain_seconds)

    def _admit(self, request: Any) -> Generation:
        """Returns a generation with its place in the engine's queue. Raises Fault or RequestError."""
        assert self._model is not None  # `start` has returned
        model, served = self._model, self._model.resolve()
        request["token_ids"] = token_ids_to_list(request["token_ids"])
        params = sampling_params(request, served.engine.limits.max_model_len)
        requests = build_requests(served, [tuple(request["token_ids"])], params, 1, cache_salt(request))
        with model.admission.reserve(1) as reservation:
            return Generation(served, requests, 1, reservation, Usage(), self.settings.request_seconds)

    def _connect_metrics(self, model: ServedModel) -> None:
        sources = self._metrics.sources
        sources.stats = lambda: {model.name: model.stats}
        sources.layers = lambda: {model.name: model.layers}
        sources.ready = lambda: model.ready
        sources.build = build_facts
        sources.served = lambda: {model.name: served_facts(model.current)}


async def _launch(source: WeightSource) -> tuple[EngineClient, TokenizerFacts]:
    """Starts an engine process that ignores SIGTERM. A service manager sends the signal to this process, too, which
    takes requests until the frontend has noticed, and then ends its engine."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # Dynamo's threads receive it meanwhile
    try:
        return await launch(source)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _dynamo_error(error: Fault | RequestError) -> Exception:
    """Returns the exception that the frontend turns into the status which a server of fp8serve would send. Of these
    exceptions, the client gets only the message of InvalidArgument."""
    status = error.code.kind.v1_status if isinstance(error, Fault) else 400
    message = error.full_message if isinstance(error, Fault) else str(error)
    result: Exception
    if status == 400:
        result = InvalidArgument(message)
    elif status in (404, 503):  # this worker ends, or its engine does
        result = EngineShutdown(message)
    else:
        result = HttpError(status, message)
    return result
