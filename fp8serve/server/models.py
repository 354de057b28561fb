"""Which weights answer: one alias, the engine process behind it, and the swap to another.

`Models.current` is the only place that says what is served; replacing it is one assignment on the event loop, so
every request sees either the old weights or the new, whole. A request holds a lease on the weights it started with;
an engine that was replaced is closed when its last lease ends. A new engine must be ready and produce a token before
it is put in place; when it cannot, or not before a deadline, the old one keeps serving. An engine process that dies is
started again, with growing pauses, and readiness is false meanwhile; one that hangs, silent or in one step for too
long, is ended and started again in the same way, also while another is being loaded. The front stays alive through all
of it. If that does not help, liveness is false, and who watches this process must start it again.

Names come from a table here; nothing a client sends is ever joined to a path.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fp8serve.engine.client import EngineClient
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.request import Limits, Request, RequestOutput, SamplingParams
from fp8serve.errors import Fp8ServeError, MachineError
from fp8serve.model.config import read_config
from fp8serve.model.tokenizer import Tokenizer
from fp8serve.server.faults import Code, Fault
from fp8serve.server.metrics import Metrics
from fp8serve.server.pulse import Deadlines, Pulse

log = logging.getLogger("fp8serve.server")

BASE = "base"
WATCH_SECONDS = 0.2
BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STATS_SECONDS = 5.0
PLACEHOLDERS = frozenset({"dummy", "tgi"})
"""Names by which official clients say "the model you serve": huggingface_hub's InferenceClient, given an address, and
what text-generation-inference tells users of OpenAI's client to send."""
HOPELESS = 3
"""Restarts in a row that failed, after which somebody else should try."""


class Engine(Protocol):
    """What we use of `fp8serve.engine.client.EngineClient`."""

    limits: Limits
    info: dict[str, Any]

    @property
    def alive(self) -> bool: ...
    @property
    def heartbeat_age(self) -> float: ...
    @property
    def step_seconds(self) -> float: ...
    def check(self, request: Request) -> None: ...
    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]: ...
    async def abort(self, request_id: str) -> None: ...
    async def stats(self) -> dict[str, Any]: ...
    async def scales(self) -> list[dict[str, Any]]: ...
    async def drain(self, deadline: float) -> None: ...
    async def close(self) -> None: ...
    async def kill(self, why: str) -> None: ...


@dataclass(frozen=True)
class Source:
    """Weights that can be served: `key` is "base" or a job id, `model_id` the name for exactly these."""

    key: str
    model_id: str
    directory: Path
    options: EngineOptions


Launch = Callable[[Source], Awaitable[tuple[Engine, Tokenizer]]]


@dataclass(eq=False)
class Served:
    """Weights that answer requests. `weight_version` names their bytes."""

    source: Source
    engine: Engine
    tokenizer: Tokenizer
    weight_version: str
    pulse: Pulse = field(default_factory=Pulse)
    proven: bool = False  # it has answered since it serves
    leases: int = 0
    free: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.contextmanager
    def lease(self) -> Iterator["Served"]:
        """While it is held the engine behind these weights is not closed by a swap."""
        self.leases += 1
        self.free.clear()
        try:
            yield self
        finally:
            self.leases -= 1
            if self.leases == 0:
                self.free.set()


async def launch(source: Source) -> tuple[Engine, Tokenizer]:
    """Starts an engine process and reads the tokenizer. Raises Fp8ServeError when either cannot be."""
    await asyncio.to_thread(read_config, source.directory)  # the clearest word on a directory that is no model
    tokenizer = await asyncio.to_thread(Tokenizer.from_dir, source.directory)
    return await EngineClient.start(source.directory, source.options), tokenizer


class Models:
    """The alias `name` and what it points at."""

    def __init__(self, name: str, start_engine: Launch, metrics: Metrics, deadlines: Deadlines | None = None) -> None:
        self.name = name
        self.deadlines = deadlines or Deadlines()
        self.failed_restarts = 0
        self.current: Served | None = None
        self.state = "loading"
        self.problem: Fp8ServeError | None = None
        self._stats: tuple[Served | None, dict[str, Any]] = (None, {})
        self.busy_since: float | None = time.monotonic()
        self._launch = start_engine
        self._metrics = metrics
        self.activating: tuple[str, float] | None = (
            None  # what a swap is loading, and since when on the monotonic clock
        )
        self._swap = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()
        self._canaries = itertools.count()

    # -- what is served ------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Model names that requests may use now: the alias, then the id of the weights behind it."""
        return list(dict.fromkeys([self.name, *([self.current.source.model_id] if self.current else [])]))

    def resolve(self, model: str | None) -> Served:
        """The weights a request for `model` gets. Fault 404 for another name, 503 while there is no engine."""
        served = self.current
        if served is None or not served.engine.alive:
            code = Code.STARTING if self.state == "loading" else Code.ENGINE_DOWN
            raise Fault(
                code, "The model is loading." if code is Code.STARTING else "The engine is restarting.", retry_after=2
            )
        if model is not None and model not in self.names() and model not in PLACEHOLDERS:
            hint = f"This server answers to {', '.join(self.names())}; a fine-tuned model must be activated first."
            raise Fault(Code.MODEL_NOT_FOUND, "There is no model of that name here.", param="model", hint=hint)
        return served

    @property
    def ready(self) -> bool:
        served = self.current
        return self.state == "ready" and served is not None and served.engine.alive and self._hang(served) is None

    @property
    def stats(self) -> dict[str, Any]:
        """What the present engine said last about itself; empty when it is dead, or has said nothing yet."""
        of, stats = self._stats
        return stats if of is self.current and self.ready else {}

    @property
    def live(self) -> bool:
        """Whether the engine gives signs of life, or is being loaded; not when it could not be started again."""
        served = self.current
        if served is None or not served.engine.alive:
            return self.failed_restarts < HOPELESS
        return self._hang(served) is None

    def _hang(self, served: Served) -> str | None:
        """Why the engine counts as hung; None when it does not."""
        if served.pulse.silence >= self.deadlines.heartbeat:
            return f"The engine gave no sign of life for {self.deadlines.heartbeat:g} seconds and was ended."
        if served.engine.step_seconds >= self.deadlines.step:
            return f"The engine did not finish a step within {self.deadlines.step:g} seconds and was ended."
        return None

    # -- changing it ---------------------------------------------------------------------------------------------------

    async def start(self, source: Source) -> Served:
        """The first load. Raises what the engine says when it cannot."""
        async with self._swap:
            self.current = await self._ready_engine(source)
            self.state = "ready"
            return self.current

    async def activate(self, source: Source, record: Callable[[], Awaitable[None]]) -> Served:
        """Loads `source` beside what is served, has it `record`ed, then swaps, which cannot fail.

        On any failure, of `record` too, raises and changes nothing: what serves is always what a restart would serve.
        """
        if self._swap.locked():
            raise Fault(
                Code.ALIAS_BUSY, "Another change of the served weights is under way.", hint="Try again when it is done."
            )
        async with self._swap:
            self.activating = source.model_id, time.monotonic()
            try:
                new = await self._recorded(source, record)
            finally:
                self.activating = None
            old, self.current = self.current, new
            self.state = "ready"
            self._metrics.swaps.labels("ok").inc()
            log.info("now serving %s (%s)", new.source.model_id, new.weight_version)
            if old is not None:
                self._retire(old)
            return new

    async def _recorded(self, source: Source, record: Callable[[], Awaitable[None]]) -> Served:
        """`source`, ready to serve and written down as what is served."""
        try:
            new = await self._ready_engine(source)
        except Fp8ServeError as error:
            self._metrics.swaps.labels("failed").inc()
            raise Fault(
                Code.ACTIVATION_FAILED, f"The new weights cannot be served, and the old ones keep serving: {error}"
            ) from None
        try:
            await record()
        except BaseException:
            await new.engine.close()
            raise
        return new

    def swapping(self) -> bool:
        """Whether other weights are being loaded."""
        return self._swap.locked()

    async def _ready_engine(self, source: Source) -> Served:
        """Loaded and tried. Raises Fp8ServeError, also when it takes too long; nothing is then left running."""
        try:
            async with asyncio.timeout(self.deadlines.load):
                engine, tokenizer = await self._launch(source)
                try:
                    version = await asyncio.to_thread(weight_version, source.directory)
                    await self._canary(engine)
                except BaseException:
                    await engine.kill("The engine was given up before it served.")
                    raise
        except TimeoutError:
            raise MachineError(f"The weights were not ready within {self.deadlines.load:g} seconds.") from None
        except OSError as error:
            raise MachineError(f"The weights cannot be read: {error.strerror}.") from None
        return Served(source, engine, tokenizer, f"{source.key}-{version}")

    async def _canary(self, engine: Engine) -> None:
        """One greedy token: an engine that loads but cannot compute is not put in place."""
        request = Request(
            f"canary-{next(self._canaries)}", (0,), SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        )
        async for output in engine.generate(request):
            if output.finish_reason == "error":
                raise Fp8ServeError(output.error or "The engine cannot compute a token with these weights.")

    def _retire(self, old: Served) -> None:
        async def close_when_free() -> None:
            if old.leases:
                await old.free.wait()
            await old.engine.close()

        task = asyncio.create_task(close_when_free())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    # -- watching it ---------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Runs for ever: reads statistics for /metrics, and starts a dead engine again."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_alive())
            tasks.create_task(self._keep_informed())

    async def _keep_informed(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self.current is not None and self.current.engine.alive:
                self.current.proven |= await self._read_stats(self.current)

    async def _keep_alive(self) -> None:
        """Restarts are made here alone, one after the other; a swap meanwhile wins."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now, served = time.monotonic(), self.current
            if served is not None:
                served.pulse.turn(served.engine.heartbeat_age, now - last)
                await self._look_after(served)
            last = now

    async def _look_after(self, served: Served) -> None:
        if served.engine.alive and (hang := self._hang(served)) is not None:
            log.error("the engine process of %s hangs", served.source.model_id)
            await served.engine.kill(hang)
        if served.engine.alive:
            self.failed_restarts = 0 if served.proven else self.failed_restarts
            return
        self.state = "restarting"
        if self.failed_restarts:
            await asyncio.sleep(BACKOFF_SECONDS[min(self.failed_restarts, len(BACKOFF_SECONDS)) - 1])
        self.failed_restarts += 1
        if self.current is served:
            await self._restart(served)

    async def _read_stats(self, served: Served) -> bool:
        try:
            async with asyncio.timeout(STATS_SECONDS):
                self._stats = (served, await served.engine.stats())
        except (Fp8ServeError, OSError, TimeoutError):
            return False
        return True

    async def _restart(self, dead: Served) -> None:
        log.error("the engine process of %s died; starting it again", dead.source.model_id)
        self._metrics.engine_restarts.inc()
        try:
            await dead.engine.close()
            new = await self._ready_engine(dead.source)
        except Fp8ServeError as error:
            log.error("the engine could not be started again: %s", error)
            return
        except Exception:
            log.exception("the engine could not be started again")
            return
        if self.current is dead:
            self.current, self.state = new, "ready"
        else:  # other weights were put in its place meanwhile
            await new.engine.close()

    async def close(self) -> None:
        """Ends every engine process."""
        for task in list(self._retiring):
            task.cancel()
        self.state = "closed"
        if self.current is not None:
            await self.current.engine.close()


SAMPLE_BYTES = 1 << 16


def weight_version(directory: Path) -> str:
    """12 hex digits from the config and from size, head, middle and tail of every weight file: cheap, and tells results
    apart.
    """
    digest = hashlib.sha256()
    for path in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        if path.is_file():
            digest.update(f"{path.name}:{path.stat().st_size}".encode())
            _sample(path, digest)
    return digest.hexdigest()[:12]


def _sample(path: Path, digest: "hashlib._Hash") -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        for offset in sorted({0, max(0, size // 2), max(0, size - SAMPLE_BYTES)}):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
