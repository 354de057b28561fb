"""Loads adapters beside served models, and unloads them.

Changes are made one after the other. They do not disturb requests: a request keeps the adapter that it started with
until its response has ended.
"""

import asyncio
import itertools
import logging

from fp8serve.errors import Fp8ServeError
from fp8serve.server.faults import Code, Fault
from fp8serve.server.metrics import Metrics
from fp8serve.server.serving.adapters import AdapterSource, ServedAdapter
from fp8serve.server.serving.admission import Admission
from fp8serve.server.serving.registry import Registry
from fp8serve.server.serving.served_model import ServedModel
from fp8serve.server.serving.served_weights import ServedWeights
from fp8serve.server.serving.verification import Verification, Verified

log = logging.getLogger("fp8serve.server")


class AdapterLoader:
    """Loads adapters beside the models of `models`. The requests for an adapter are counted under its own name, within
    the capacity of its model."""

    def __init__(self, models: Registry, metrics: Metrics) -> None:
        self._models, self._metrics = models, metrics
        self._numbers = itertools.count()
        self._change_lock = asyncio.Lock()
        self._unload_tasks: set[asyncio.Task[None]] = set()

    def register(self, model: ServedModel, source: AdapterSource) -> None:
        """Adds the adapter to those that each new engine process of `model` loads."""
        model.adapters[source.name] = self._new_adapter(model, source)

    async def load(
        self, model: ServedModel, source: AdapterSource, verification: Verification
    ) -> tuple[ServedAdapter, Verified | None]:
        """Loads and verifies an adapter beside the weights of `model`. An adapter that is already loaded is returned.

        Raises Fault 409 if the name is in use, the adapter does not fit the model or its verification fails. Raises
        Fault 503 while the model has no engine.
        """
        async with self._change_lock:
            loaded = model.adapters.get(source.name)
            if loaded is not None and loaded.source == source:
                return loaded, None
            if self._models.is_taken(source.name):
                hint = "Unload it first, or choose another name."
                message = f"{source.name} is already the name of another model or adapter."
                raise Fault(Code.NAME_TAKEN, message, hint=hint)
            if model.is_swapping():
                hint = "Try again when it is done."
                raise Fault(Code.ALIAS_BUSY, "Other weights are being loaded for this model.", hint=hint)
            served, adapter = model.resolve(), self._new_adapter(model, source)
            with served.lease():
                try:
                    await verification.check_files(source.directory)
                    adapter.facts = await served.engine.load_adapter(adapter.engine_name, source.directory)
                except Fp8ServeError as error:
                    adapter.admission.metrics.forget()
                    raise Fault(Code.LOAD_FAILED, f"The adapter cannot be served: {error}") from None
                try:
                    verified = await verification.check_engine(adapter.served_with(served), served)
                except BaseException as error:
                    adapter.admission.metrics.forget()
                    await self._remove_from_engine(served, adapter)
                    if isinstance(error, Fp8ServeError):
                        message = f"The adapter failed its verification and is not served: {error}"
                        raise Fault(Code.ACTIVATION_FAILED, message) from None
                    raise
            if model.current is not served:
                adapter.admission.metrics.forget()
                message = "Other weights were activated while the adapter was being loaded."
                raise Fault(Code.ALIAS_BUSY, message, hint="Try again.")
            model.adapters[source.name] = adapter
            log.info("also serving the adapter %s (%s) beside %s", source.name, source.root, model.name)
            return adapter, verified

    async def unload(self, name: str) -> None:
        """Unloads an adapter. Requests in flight still finish with it. Raises Fault 404 for an unknown name."""
        async with self._change_lock:
            model, adapter = self._models.require_adapter(name)
            del model.adapters[name]
            adapter.admission.metrics.forget()
        task = asyncio.create_task(self._remove_when_unleased(model, adapter))
        self._unload_tasks.add(task)
        task.add_done_callback(self._unload_tasks.discard)
        log.info("unloaded the adapter %s", name)

    async def close(self) -> None:
        """Cancels unloads that wait for requests, without waiting for those requests."""
        tasks = list(self._unload_tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _new_adapter(self, model: ServedModel, source: AdapterSource) -> ServedAdapter:
        admission = Admission(model.admission.capacity, self._metrics.for_model(source.name))
        return ServedAdapter(source, f"{source.name} ({next(self._numbers)})", admission)

    async def _remove_when_unleased(self, model: ServedModel, adapter: ServedAdapter) -> None:
        served = model.current
        if adapter.leases:
            await adapter.unleased.wait()
        if served is None or served is not model.current or not served.engine.alive:
            return  # the engine that had loaded the adapter has ended
        await self._remove_from_engine(served, adapter)

    async def _remove_from_engine(self, served: ServedWeights, adapter: ServedAdapter) -> None:
        try:
            await served.engine.unload_adapter(adapter.engine_name)
        except Fp8ServeError as error:
            log.error("the adapter %s could not be unloaded from the engine process: %s", adapter.name, error)
