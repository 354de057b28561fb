"""Keeps the engine process of one model running, and reads its statistics.

A process that died is started again, with growing pauses between failed attempts. A process that hangs, because it
sends no heartbeat or stays in one step for too long, is killed and started again. One that got SIGTERM is started again
after its requests have finished. The server is not ready meanwhile, but keeps running. If newly activated weights die
several times, the previous weights are loaded again. If the engine cannot be started at all, the server is no longer
live, so that an orchestrator restarts it.
"""

import asyncio
import contextlib
import logging
import time

from fp8serve.errors import Fp8ServeError
from fp8serve.server.serving.served_model import ServedModel
from fp8serve.server.serving.served_weights import ServedWeights, WeightSource

log = logging.getLogger("fp8serve.server")

WATCH_SECONDS = 0.2
LAYER_STATS_SECONDS = 2.0
HISTORY_SECONDS = 5.0
BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STATS_TIMEOUT_SECONDS = 5.0
MAX_DEATHS = 3
"""Deaths of an engine process within its probation after which the previous weights are loaded again."""


class EngineSupervisor:
    """Watches the engine of `model`. All restarts are made here, one at a time. If other weights are activated during a
    restart, the restarted engine is closed again."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    async def watch(self) -> None:
        """Restarts dead or hung engines and reads statistics, until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_alive())
            tasks.create_task(self._poll_stats())
            tasks.create_task(self._poll_layers())

    async def _poll_stats(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            served = self.model.current
            if served is None or not served.engine.alive:
                continue
            with contextlib.suppress(Fp8ServeError, OSError, TimeoutError):
                async with asyncio.timeout(STATS_TIMEOUT_SECONDS):
                    self.model.last_stats = (served, stats := await served.engine.stats())
                served.prefilling_ids = frozenset(stats.get("prefilling", ()))
                served.has_reported = True

    async def _poll_layers(self) -> None:
        """Reads the statistics of FP8 layers: at once for new weights, then every few seconds."""
        seconds = LAYER_STATS_SECONDS if self.model.needs_layer_stats else HISTORY_SECONDS
        last_read: tuple[ServedWeights | None, float] = (None, 0.0)
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

    async def _read_layers(self, served: ServedWeights) -> None:
        with contextlib.suppress(Fp8ServeError, OSError, TimeoutError):
            async with asyncio.timeout(STATS_TIMEOUT_SECONDS):
                layers = await served.engine.scales()
            if self.model.needs_layer_stats:
                self.model.last_layer_stats = served, layers
            if served is self.model.current:
                self.model.history.add(served.weight_version, layers)

    async def _keep_alive(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now, served = time.monotonic(), self.model.current
            if served is not None:
                served.update_silence(now - last)
                await self._check(served)
            last = now

    async def _check(self, served: ServedWeights) -> None:
        """Kills the engine if it hangs, and restarts it if it is dead."""
        model = self.model
        if served.engine.alive and (reason := model.hang_reason(served)) is not None:
            log.error("the engine process of %s hangs and is killed", served.source.model_id)
            await served.engine.kill(reason)
        if served.engine.alive:
            model.failed_restarts = 0 if served.has_reported else model.failed_restarts
            if served.engine.is_draining:  # a signal reached only the engine process
                model.state = "restarting"
            return
        if model.is_shutting_down and not model.admission.capacity.in_flight:
            return  # a service manager's SIGTERM also reached the engine process, which no request needs any more
        model.state = "restarting"
        if model.failed_restarts:
            await asyncio.sleep(BACKOFF_SECONDS[min(model.failed_restarts, len(BACKOFF_SECONDS)) - 1])
        model.failed_restarts += 1
        if model.current is served:
            await self._restart(served)

    async def _restart(self, dead: ServedWeights) -> None:
        log.error("the engine process of %s died and is started again", dead.source.model_id)
        self.model.admission.metrics.restarts.inc()
        try:
            await dead.engine.close()
            new = await self.model.load_engine(_restart_source(self.model, dead))
        except Fp8ServeError as error:
            log.error("the engine process could not be started again: %s", error)
            return
        except Exception:
            log.exception("the engine process could not be started again")
            return
        if not self.model.replace_dead_engine(dead, new):
            await new.engine.close()
            return
        await _record_rollback(self.model, dead, new)


def _restart_source(model: ServedModel, dead: ServedWeights) -> WeightSource:
    """Returns what to load after the engine of `dead` died: the same source, or the previous one after MAX_DEATHS
    deaths within the probation."""
    probation = model.probation
    if probation is None or model.adapters or time.monotonic() > probation.ends_at:
        return dead.source
    probation.deaths += 1
    if probation.deaths < MAX_DEATHS:
        return dead.source
    names = dead.source.model_id, probation.deaths, probation.previous.model_id
    log.error("the engine process of %s died %d times since its activation; loading %s again", *names)
    return probation.previous


async def _record_rollback(model: ServedModel, dead: ServedWeights, new: ServedWeights) -> None:
    """Saves that `new` is served again, if `_restart_source` chose other weights than those of `dead`."""
    probation = model.probation
    if probation is None or new.source == dead.source:
        return
    model.probation = None
    model.admission.metrics.swaps("rolled_back").inc()
    log.info("now serving %s (%s) again", new.source.model_id, new.weight_version)
    try:
        await probation.save_activation(new.source.key)
    except Exception:
        log.exception("the rollback could not be saved: at its next start the server loads the failed weights")
