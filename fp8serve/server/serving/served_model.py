"""Which weights answer to a name: the engine process behind it, and the swap to another.

`ServedModel.current` is the only place that says what is served; replacing it is one assignment on the event loop, so
every request sees either the old weights or the new, whole. A request holds a lease on the weights it started with;
an engine that was replaced is closed when its last lease ends. A new engine must be ready, produce a token and pass its
verification (`verification.py`) before it is put in place; when it cannot, or not before a deadline, the old one keeps
serving. If it dies again and again soon after it was, what served before it is started in its place.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import Fp8ServeError, MachineError
from fp8serve.server.answers.choice import choose
from fp8serve.server.faults import Code, Fault
from fp8serve.server.serving.adapters import ServedAdapter
from fp8serve.server.serving.admission import Admission
from fp8serve.server.serving.scale_history import ScaleHistory
from fp8serve.server.serving.served import EngineHandle, Launch, Served, Source, weight_version
from fp8serve.server.serving.verification import UNVERIFIED, Verification, Verified
from fp8serve.server.settings import Deadlines

log = logging.getLogger("fp8serve.server")

BASE = "base"
State = Literal["loading", "ready", "restarting", "failed", "unloading", "closed"]
MAX_FAILED_RESTARTS = 3
"""Failed restarts in a row after which the server reports that it is not live."""
PROBATION_SECONDS = 600.0
MAX_DEATHS = 3
"""Deaths of new weights within their probation after which those before them are started again."""

Record = Callable[[str], Awaitable[None]]
"""Writes down the key of what is to be served after the next start."""


@dataclass
class Probation:
    """Of weights that were put in place lately. before: what served before them."""

    before: Source
    record: Record
    ends: float  # on the monotonic clock
    deaths: int = 0


class ServedModel:
    """The name and what it points at, at first and as "base": `home`. Its requests are counted by `admission`."""

    def __init__(
        self, name: str, home: Source, start_engine: Launch, admission: Admission, deadlines: Deadlines
    ) -> None:
        self.name = name
        self.home = home
        self.admission = admission
        self.deadlines = deadlines
        self.failed_restarts = 0
        self.current: Served | None = None
        self.state: State = "loading"
        self.problem: Fp8ServeError | None = None
        self.reported: tuple[Served | None, dict[str, Any]] = (None, {})  # what an engine said last about itself
        self.adapters: dict[str, ServedAdapter] = {}  # by name
        self.replacing = False  # its weights are being written over
        self.leaving = False  # the server ends when the last answer has been given, and its engines may with it
        self.asks_layers = False  # whether it is asked about its layers, too
        self.reported_layers: tuple[Served | None, list[dict[str, Any]]] = (None, [])
        self.history = ScaleHistory()
        self._launch = start_engine
        # what a swap is loading, and since when on the monotonic clock
        self.activating: tuple[str, float] | None = None
        self._swap = asyncio.Lock()
        self._retiring: dict[Served, asyncio.Task[None]] = {}
        self._canaries = itertools.count()
        self._probation: Probation | None = None

    # -- what is served ------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Names by which requests may ask for it now: its own, then the id of the weights behind it."""
        return list(dict.fromkeys([self.name, *([self.current.source.model_id] if self.current else [])]))

    def resolve(self) -> Served:
        """The weights that a request gets. Fault 503 while there is no engine, 404 when there will be none."""
        self._refuse_if_leaving()
        served = self.current
        if self.replacing:
            raise Fault(Code.STARTING, "Other weights are being put in place.", retry_after=1)
        if served is not None and served.engine.alive:
            return served
        if self.state == "loading":
            raise Fault(Code.STARTING, "The model is loading.", retry_after=2)
        if self.state == "failed":
            raise Fault(Code.ENGINE_DOWN, f"The model could not be loaded: {self.problem}", retry_after=60)
        raise Fault(Code.ENGINE_DOWN, "The engine is restarting.", retry_after=2)

    def _refuse_if_leaving(self) -> None:
        if self.state in ("unloading", "closed"):
            raise Fault(Code.MODEL_NOT_FOUND, "The model is being unloaded.", param="model")

    @property
    def ready(self) -> bool:
        served = self.current
        return (
            self.state == "ready"
            and not self.replacing
            and served is not None
            and served.engine.alive
            and self.hang(served) is None
        )

    @property
    def stats(self) -> dict[str, Any]:
        """What the present engine said last about itself; empty when it is dead, or has said nothing yet."""
        of, stats = self.reported
        return stats if of is self.current and self.ready else {}

    def adapter_stats(self) -> dict[str, dict[str, int]]:
        """By adapter, how many sequences run and wait, as the engine said last."""
        counts, none = self.stats.get("adapters", {}), {"running": 0, "waiting": 0}
        return {name: counts.get(adapter.engine_name, none) for name, adapter in self.adapters.items()}

    @property
    def layers(self) -> list[dict[str, Any]]:
        """What it said last about its FP8 layers, where it is asked; likewise."""
        of, layers = self.reported_layers
        return layers if of is self.current and self.ready else []

    @property
    def live(self) -> bool:
        """Whether the engine gives signs of life, or is being loaded; not when it could not be started again."""
        served = self.current
        if served is None or not served.engine.alive:
            return self.failed_restarts < MAX_FAILED_RESTARTS
        return self.hang(served) is None

    def hang(self, served: Served) -> str | None:
        """Why the engine counts as hung; None when it does not."""
        if served.heartbeat.silence >= self.deadlines.heartbeat:
            return f"The engine gave no sign of life for {self.deadlines.heartbeat:g} seconds and was ended."
        if served.engine.step_seconds >= self.deadlines.step:
            return f"The engine did not finish a step within {self.deadlines.step:g} seconds and was ended."
        return None

    # -- changing it ---------------------------------------------------------------------------------------------------

    async def start(self, sources: Sequence[Source], fit: Callable[[Source], Source] = lambda source: source) -> Served:
        """The first load, of the first of `sources` that can be served; `fit` gives each its share of the machine.

        Raises what the engine, or `fit`, says of the last of them.
        """
        async with self._swap:
            *better, last = sources
            for source in better:
                try:
                    return self._began(await self.ready_engine(await asyncio.to_thread(fit, source)))
                except Fp8ServeError as error:
                    if self.leaving:
                        raise
                    log.error("%s cannot be served (%s); serving %s", source.model_id, error, last.model_id)
            return self._began(await self.ready_engine(await asyncio.to_thread(fit, last)))

    def _began(self, served: Served) -> Served:
        self.current, self.state = served, "ready"
        return served

    async def activate(
        self, source: Source, record: Record, verification: Verification = UNVERIFIED
    ) -> tuple[Served, Verified | None]:
        """Loads `source` beside what is served, verifies it, has it `record`ed, then swaps, which cannot fail.

        On any failure, of `record` too, raises and changes nothing: what serves is always what a restart would serve.
        """
        self._refuse_if_leaving()
        if self.adapters:
            hint = f"Unload first: {', '.join(self.adapters)}."
            raise Fault(Code.ALIAS_BUSY, "The model has adapters, which are for the weights that it serves.", hint=hint)
        if self._swap.locked():
            raise Fault(
                Code.ALIAS_BUSY, "Another change of the served weights is under way.", hint="Try again when it is done."
            )
        async with self._swap:
            self.activating = source.model_id, time.monotonic()
            try:
                new, verified = await self._recorded(source, record, verification)
            finally:
                self.activating = None
            old, self.current = self.current, new
            self.state = "ready"
            if old is not None and source != old.source:
                began = Probation(old.source, record, time.monotonic() + PROBATION_SECONDS)
                self._probation = None if source == self.home else began  # the base is what one goes back to
            self.admission.metrics.swaps("ok").inc()
            log.info("now serving %s (%s)", new.source.model_id, new.weight_version)
            if old is not None:
                self._retire(old)
            return new, verified

    async def replace_weights(
        self, directory: Path, seconds: float, verification: Verification = UNVERIFIED
    ) -> tuple[Served, Verified | None]:
        """Writes the weights of `directory`, another version of the same model, over those that serve.

        Requests that run have so many seconds to end first, and new ones are sent away meanwhile, so that every answer
        is one version's. The new weights write a token and pass `verification` before a request gets them. An engine
        that is started again has the weights that it was started with. Fault 409: the weights do not fit or are not to
        serve, there are adapters, or requests run on; then what served serves on.
        """
        old = self.resolve()
        if self._swap.locked():
            hint = "Try again when it is done."
            raise Fault(Code.ALIAS_BUSY, "Another change of the served weights is under way.", hint=hint)
        async with self._swap:
            before = await verification.before(old)
            self.replacing = True
            try:
                await self._until_free(old, seconds)
                version = await self._overwrite(old, directory)
                new = replace(old, weight_version=version, written=directory, free=asyncio.Event(), leases=0)
                verified = await self._verified_or_back(old, new, verification, before)
            finally:
                self.replacing = False
            if self.current is not old:
                raise Fault(Code.ENGINE_DOWN, "The engine ended while its weights were replaced.", retry_after=2)
            self.current = new
            log.info("now serving %s with the weights %s", new.source.model_id, new.weight_version)
            return new, verified

    async def _verified_or_back(
        self, old: Served, new: Served, verification: Verification, before: float | None
    ) -> Verified | None:
        """What was measured of `new`, which was written over `old`. Fault 409: it is not to serve, and `old` does."""
        try:
            await self._canary(new.engine)
            return await verification.written(new, before)
        except Fp8ServeError as error:
            became = await self._put_weights_back(old)
            message = f"The new weights cannot be served, and {became}: {error}"
            raise Fault(Code.ACTIVATION_FAILED, message) from None

    async def _put_weights_back(self, old: Served) -> str:
        """What became of it: the weights are read again where they came from; where that cannot be, or they are others
        now, the engine is ended, which then starts again with its first ones."""
        directory = old.written or old.source.directory
        try:
            is_same = old.weight_version.endswith(await asyncio.to_thread(weight_version, directory))
            if is_same and old.source.options.scales is None:
                await old.engine.load_weights(directory)
                return "those before serve on"
        except (Fp8ServeError, OSError) as error:
            log.error("the weights before could not be put back: %s", error)
        await old.engine.kill("The weights that were written over its own cannot be served.")
        return "the engine starts again with its first ones"

    async def _until_free(self, served: Served, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while served.leases:
                    await served.free.wait()
        except TimeoutError:
            message = f"{served.leases} requests were still running after {seconds:g} seconds."
            raise Fault(Code.ALIAS_BUSY, message, hint="Try again, or give them more `seconds`.") from None

    async def _overwrite(self, served: Served, directory: Path) -> str:
        """The version of the weights that serve then."""
        try:
            version = await asyncio.to_thread(weight_version, directory)
            await served.engine.load_weights(directory)
        except (Fp8ServeError, OSError) as error:
            raise Fault(Code.LOAD_FAILED, f"The weights cannot be put in place: {error}") from None
        return version

    async def _recorded(
        self, source: Source, record: Record, verification: Verification
    ) -> tuple[Served, Verified | None]:
        """`source`, ready to serve, verified and written down as what is served."""
        try:
            await verification.files(source.directory)
            new = await self.ready_engine(source)
            async with _closed_on_failure(new):
                verified = await verification.engines(new, self.current)
        except Fp8ServeError as error:
            self.admission.metrics.swaps("failed").inc()
            raise Fault(
                Code.ACTIVATION_FAILED, f"The new weights cannot be served, and the old ones keep serving: {error}"
            ) from None
        async with _closed_on_failure(new):
            await record(source.key)
        return new, verified

    def to_restart(self, dead: Served) -> Source:
        """What to start after `dead` has died: itself, or what served before it, where it dies again and again."""
        probation = self._probation
        if probation is None or self.adapters or time.monotonic() > probation.ends:
            return dead.source
        probation.deaths += 1
        if probation.deaths < MAX_DEATHS:
            return dead.source
        names = dead.source.model_id, probation.deaths, probation.before.model_id
        log.error("the engine process of %s has died %d times since it serves; going back to %s", *names)
        return probation.before

    async def went_back(self, dead: Served, new: Served) -> None:
        """Writes down that `new` serves again, if it is not what was started in place of `dead` anyway."""
        probation = self._probation
        if probation is None or new.source == dead.source:
            return
        self._probation = None
        self.admission.metrics.swaps("rolled_back").inc()
        log.info("now serving %s (%s) again", new.source.model_id, new.weight_version)
        try:
            await probation.record(new.source.key)
        except Exception:
            log.exception("what serves now could not be written down; the next start tries the weights that died")

    def swapping(self) -> bool:
        """Whether other weights are being loaded."""
        return self._swap.locked()

    async def ready_engine(self, source: Source) -> Served:
        """Loaded and tried. Raises Fp8ServeError, also when it takes too long; nothing is then left running."""
        try:
            async with asyncio.timeout(self.deadlines.load):
                engine, tokenizer = await self._launch(source)
                try:
                    version = await asyncio.to_thread(weight_version, source.directory)
                    await self._canary(engine)
                    await self._load_adapters(engine)
                except BaseException:
                    await engine.kill("The engine was given up before it served.")
                    raise
        except TimeoutError:
            raise MachineError(f"The weights were not ready within {self.deadlines.load:g} seconds.") from None
        except OSError as error:
            raise MachineError(f"The weights cannot be read: {error.strerror}.") from None
        answers = choose(tokenizer.template, tokenizer.takes_tools, source.readers)
        return Served(source, engine, tokenizer, self.admission, f"{source.key}-{version}", answers)

    async def _load_adapters(self, engine: EngineHandle) -> None:
        """What is beside the model. One that cannot be loaded is dropped, or if it is required at the first start,
        raised."""
        for name, adapter in list(self.adapters.items()):
            try:
                adapter.facts = await engine.load_adapter(adapter.engine_name, adapter.source.directory)
            except Fp8ServeError as error:
                if adapter.source.required and self.current is None:
                    raise
                log.error("the adapter %s is not served any more: %s", name, error)
                self.adapters.pop(name, None)
                adapter.admission.metrics.forget()

    async def _canary(self, engine: EngineHandle) -> None:
        """One greedy token, one vector or one score: an engine that loads but cannot compute is not put in place."""
        if not engine.limits.generates:
            await (engine.embed([[0]]) if engine.limits.task == "embed" else engine.classify([[0]], [[0]]))
            return
        request = Request(
            f"canary-{next(self._canaries)}", (0,), SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        )
        async with contextlib.aclosing(engine.generate(request)) as outputs:
            async for output in outputs:
                if output.finish_reason == "error":
                    raise Fp8ServeError(output.error or "The engine cannot compute a token with these weights.")

    def _retire(self, old: Served) -> None:
        async def close_when_free() -> None:
            if old.leases:
                await old.free.wait()
            await old.engine.close()

        task = self._retiring[old] = asyncio.create_task(close_when_free())
        task.add_done_callback(lambda _: self._retiring.pop(old, None))

    def put_back(self, dead: Served, new: Served) -> bool:
        """Serves `new` in place of `dead`; False, and nothing, when other weights were put in its place meanwhile."""
        if self.current is not dead:
            return False
        self.current, self.state = new, "ready"
        return True

    def engines(self) -> list[EngineHandle]:
        """That run for this name, those included that were replaced and still answer."""
        return [served.engine for served in (*self._retiring, *([self.current] if self.current else []))]

    async def leave(self, seconds: float) -> None:
        """Takes nothing new and closes. Answers under way have so many seconds, and are ended after them."""
        self.state = "unloading"
        if self.current is not None:
            self._retire(self.current)
        if self._retiring:
            await asyncio.wait(self._retiring.values(), timeout=seconds)
        for served in list(self._retiring):
            await served.engine.kill(f"The model was unloaded, and its answers had {seconds:g} seconds to end.")
        if self._retiring:
            await asyncio.wait(self._retiring.values())
        self.current, self.state = None, "closed"

    async def close(self) -> None:
        """Ends every engine process."""
        for task in list(self._retiring.values()):
            task.cancel()
        self.state = "closed"
        if self.current is not None:
            await self.current.engine.close()


@contextlib.asynccontextmanager
async def _closed_on_failure(served: Served) -> AsyncGenerator[None, None]:
    """An exception in the block, or its end from outside, closes the engine."""
    try:
        yield
    except BaseException:
        await served.engine.close()
        raise
