"""Keeps this server's lease, and makes it serve what all servers that share a database serve.

Every POLL_SECONDS the server reads the API keys, renews its lease, joins the swaps that another server has begun
(fronts.py), and compares what it serves with the active weights and adapters of the database. The keys are read even if
the database refuses to write, so a key that was revoked is refused. The weights differ if the server was starting, or
its lease had ended, while the others swapped. It then loads the active weights, and is not ready until it serves them.
They also differ if the engine of another server died several times with the new weights, which rolls them back. All
servers then load the previous weights at the same time, and serve the new ones until the first attempt has ended.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from fp8serve.server.access.keys import ServerKeys
from fp8serve.server.faults import Fault
from fp8serve.server.finetuning.activation import Activator
from fp8serve.server.finetuning.fronts import POLL_SECONDS, Fronts
from fp8serve.server.finetuning.stored_keys import load_keys
from fp8serve.server.serving.served_model import ServedModel

log = logging.getLogger("fp8serve.server")
RETRY_SECONDS = 30.0


class Replication:
    """The background tasks of a server that shares its database. `is_behind` says whether the server may serve other
    weights than the active ones; `job_counts` are those of the last poll."""

    def __init__(self, fronts: Fronts, activator: Activator, keys: ServerKeys) -> None:
        self.is_behind = True
        self._was_level = False  # since the lease began, the server has served the active weights
        self.job_counts: dict[str, int] = {}
        self._fronts, self._activator, self._keys = fronts, activator, keys
        self._adapters: dict[str, set[str]] = {}
        self._retry_at = 0.0
        self._catch_up: asyncio.Task[None] | None = None
        self._changes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Polls the database until it is cancelled."""
        while True:
            for step in (self._read_keys, self._poll):
                try:
                    await step()
                except Fault:  # the database cannot be used, which is logged; the lease may end
                    pass
                except Exception:
                    log.exception("the database of jobs could not be followed; trying again")
            await asyncio.sleep(POLL_SECONDS)

    async def _read_keys(self) -> None:
        self._keys.set_database_keys(await asyncio.to_thread(load_keys, self._activator.jobs))

    async def _poll(self) -> None:
        models = {} if self._activator.draining.is_set() else self._activator.models.models
        serving = {name: model for name, model in models.items() if model.state == "ready"}
        if not await asyncio.to_thread(self._fronts.renew, serving):
            self._was_level = False
        self.job_counts = await asyncio.to_thread(self._activator.jobs.counts)
        if serving:
            for swap in await asyncio.to_thread(self._fronts.invitations):
                self._start(self._activator.accept(swap))
            if (self._catch_up is None or self._catch_up.done()) and time.monotonic() >= self._retry_at:
                self._catch_up = self._start(self._serve_active_weights(serving))

    def _start(self, change: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return task

    async def _serve_active_weights(self, models: Mapping[str, ServedModel]) -> None:
        """Makes each model serve the active weights. After a failure, this server tries again after RETRY_SECONDS, and
        is not ready then."""
        try:
            for name, model in models.items():  # weights cannot be replaced while their adapters are loaded
                previous = self._adapters.get(name, set())
                self._adapters[name] = await self._activator.unload_adapters(model, previous)
                key = await asyncio.to_thread(self._activator.missed_activation, model)
                if key is not None and not model.is_swapping():
                    if not (self._was_level and self._activator.was_rolled_back(model, key)):
                        self.is_behind = True
                    self._was_level = False
                    await self._activator.catch_up(model, key)
            self.is_behind, self._was_level = False, True
            for name, model in models.items():
                await self._activator.load_adapters(model, self._adapters[name])
        except Fault:  # it is logged
            self._retry_at = time.monotonic() + RETRY_SECONDS

    async def close(self) -> None:
        """Ends the lease, so that other servers take this server's jobs at once."""
        changes = list(self._changes)
        for task in changes:
            task.cancel()
        await asyncio.gather(*changes, return_exceptions=True)
        with contextlib.suppress(Fault):
            await asyncio.to_thread(self._fronts.leave)
