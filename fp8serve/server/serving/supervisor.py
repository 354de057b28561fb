"""Keeps the engine process alive that answers for one model.

One that dies is started again, with growing pauses, and readiness is false meanwhile; one that hangs, silent or in one
step for too long, is ended and started again in the same way, also while another is being loaded. The front stays alive
through all of it. Weights that were activated lately and die again and again give way to those that served before. If
nothing helps, liveness is false, and who watches this process must start it again.
"""

import asyncio
import contextlib
import logging
import time

from fp8serve.errors import Fp8ServeError
from fp8serve.server.serving.served import Served
from fp8serve.server.serving.served_model import ServedModel

log = logging.getLogger("fp8serve.server")

WATCH_SECONDS = 0.2
LAYERS_SECONDS = 2.0
HISTORY_SECONDS = 5.0
BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STATS_SECONDS = 5.0


class EngineSupervisor:
    """Watches what `model` serves. Restarts are made here alone, one after the other; a swap meanwhile wins."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    async def watch(self) -> None:
        """Runs for ever: reads statistics for /metrics, and starts a dead engine again."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_alive())
            tasks.create_task(self._keep_informed())
            tasks.create_task(self._keep_informed_of_layers())

    async def _keep_informed(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            served = self.model.current
            if served is not None and served.engine.alive:
                served.proven |= await self._read_stats(served)

    async def _keep_informed_of_layers(self) -> None:
        """New weights at once; then as often as metrics by layer are read, or for the history alone, less often."""
        seconds = LAYERS_SECONDS if self.model.asks_layers else HISTORY_SECONDS
        last_read: tuple[Served | None, float] = (None, 0.0)
        while True:
            served, now = self.model.current, time.monotonic()
            if (
                served is not None
                and served.engine.alive
                and (served is not last_read[0] or now - last_read[1] >= seconds)
            ):
                last_read = served, now
                await self._read_layers(served)
            await asyncio.sleep(WATCH_SECONDS)

    async def _read_layers(self, served: Served) -> None:
        with contextlib.suppress(Fp8ServeError, OSError, TimeoutError):
            async with asyncio.timeout(STATS_SECONDS):
                layers = await served.engine.scales()
            if self.model.asks_layers:
                self.model.reported_layers = served, layers
            if served is self.model.current:
                self.model.history.take(served.weight_version, layers)

    async def _keep_alive(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now, served = time.monotonic(), self.model.current
            if served is not None:
                served.heartbeat.turn(served.engine.heartbeat_age, now - last)
                await self._look_after(served)
            last = now

    async def _look_after(self, served: Served) -> None:
        model = self.model
        if served.engine.alive and (hang := model.hang(served)) is not None:
            log.error("the engine process of %s hangs", served.source.model_id)
            await served.engine.kill(hang)
        if served.engine.alive:
            model.failed_restarts = 0 if served.proven else model.failed_restarts
            return
        if model.leaving and not model.admission.capacity.in_flight:
            return  # a service manager's SIGTERM reaches the engine's process, too, and nothing needs it any more
        model.state = "restarting"
        if model.failed_restarts:
            await asyncio.sleep(BACKOFF_SECONDS[min(model.failed_restarts, len(BACKOFF_SECONDS)) - 1])
        model.failed_restarts += 1
        if model.current is served:
            await self._restart(served)

    async def _read_stats(self, served: Served) -> bool:
        try:
            async with asyncio.timeout(STATS_SECONDS):
                self.model.reported = (served, stats := await served.engine.stats())
                served.prefilling = frozenset(stats.get("prefilling", ()))
        except (Fp8ServeError, OSError, TimeoutError):
            return False
        return True

    async def _restart(self, dead: Served) -> None:
        log.error("the engine process of %s died; starting it again", dead.source.model_id)
        self.model.admission.metrics.restarts.inc()
        try:
            await dead.engine.close()
            new = await self.model.ready_engine(self.model.to_restart(dead))
        except Fp8ServeError as error:
            log.error("the engine could not be started again: %s", error)
            return
        except Exception:
            log.exception("the engine could not be started again")
            return
        if not self.model.put_back(dead, new):
            await new.engine.close()
            return
        await self.model.went_back(dead, new)
