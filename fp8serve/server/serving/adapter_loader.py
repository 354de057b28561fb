"""Loads adapters beside models that serve, and unloads them.

Changes are made one after the other. Nothing here touches a request: one that was let in ends with the adapter that it
began with, and the engine keeps that for so long.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable

from fp8serve.errors import Fp8ServeError
from fp8serve.server.faults import Code, Fault
from fp8serve.server.serving.adapters import AdapterSource, ServedAdapter
from fp8serve.server.serving.admission import Admission
from fp8serve.server.serving.registry import Registry
from fp8serve.server.serving.served import Served
from fp8serve.server.serving.served_model import ServedModel
from fp8serve.server.serving.verification import Verification, Verified

log = logging.getLogger("fp8serve.server")


class AdapterLoader:
    """Puts adapters beside the models of `models`. `admit`: counts the requests of a name in a model's queue."""

    def __init__(self, models: Registry, admit: Callable[[str, Admission], Admission]) -> None:
        self._models, self._admit = models, admit
        self._numbers = itertools.count()
        self._changing = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()

    def expect(self, model: ServedModel, source: AdapterSource) -> None:
        """It is loaded whenever an engine of the model starts."""
        model.adapters[source.name] = self._new_adapter(model, source)

    async def load(
        self, model: ServedModel, source: AdapterSource, verification: Verification
    ) -> tuple[ServedAdapter, Verified | None]:
        """Beside what `model` serves, once it is verified; one that is loaded already is given as it is.

        Fault 409: the name stands for something else, or the adapter does not fit, or is not to serve; 503 while there
        is no engine.
        """
        async with self._changing:
            there = model.adapters.get(source.name)
            if there is not None and there.source == source:
                return there, None
            if self._models.is_taken(source.name):
                hint = "Unload it first, or choose another name."
                raise Fault(Code.NAME_TAKEN, f"{source.name} is already the name of something else.", hint=hint)
            if model.swapping():
                hint = "Try again when it is done."
                raise Fault(Code.ALIAS_BUSY, "Other weights are being loaded for this model.", hint=hint)
            served, adapter = model.resolve(), self._new_adapter(model, source)
            with served.lease():
                try:
                    await verification.files(source.directory)
                    adapter.facts = await served.engine.load_adapter(adapter.engine_name, source.directory)
                except Fp8ServeError as error:
                    adapter.admission.metrics.forget()
                    raise Fault(Code.LOAD_FAILED, f"The adapter cannot be served: {error}") from None
                try:
                    verified = await verification.engines(adapter.served_with(served), served)
                except BaseException as error:
                    adapter.admission.metrics.forget()
                    await self._take_out(served, adapter)
                    if isinstance(error, Fp8ServeError):
                        raise Fault(Code.ACTIVATION_FAILED, f"The adapter is not served: {error}") from None
                    raise
            if model.current is not served:
                adapter.admission.metrics.forget()
                message = "Other weights were put in place while the adapter was loaded."
                raise Fault(Code.ALIAS_BUSY, message, hint="Try again.")
            model.adapters[source.name] = adapter
            log.info("also serving the adapter %s (%s) beside %s", source.name, source.root, model.name)
            return adapter, verified

    async def unload(self, name: str) -> None:
        """Takes nothing new for it; answers under way end with it. Fault 404: there is no adapter of that name."""
        async with self._changing:
            model, adapter = self._models.find_adapter(name)
            del model.adapters[name]
            adapter.admission.metrics.forget()
        task = asyncio.create_task(self._leave(model, adapter))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        log.info("unloaded the adapter %s", name)

    async def close(self) -> None:
        """Waits for nothing."""
        leaving = list(self._leaving)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)

    def _new_adapter(self, model: ServedModel, source: AdapterSource) -> ServedAdapter:
        admission = self._admit(source.name, model.admission)
        return ServedAdapter(source, f"{source.name} ({next(self._numbers)})", admission)

    async def _leave(self, model: ServedModel, adapter: ServedAdapter) -> None:
        served = model.current
        if adapter.leases:
            await adapter.free.wait()
        if served is None or served is not model.current or not served.engine.alive:
            return  # the engine that had it is gone
        await self._take_out(served, adapter)

    async def _take_out(self, served: Served, adapter: ServedAdapter) -> None:
        try:
            await served.engine.unload_adapter(adapter.engine_name)
        except Fp8ServeError as error:
            log.error("the adapter %s stays in the engine: %s", adapter.name, error)
