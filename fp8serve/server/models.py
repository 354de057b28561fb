"""Which weights answer: one alias, the engine process behind it, and the swap to another.

`Models.current` is the only place that says what is served; replacing it is one assignment on the event loop, so
every request sees either the old weights or the new, whole. A request holds a lease on the weights it started with;
an engine that was replaced is closed when its last lease ends. A new engine must be ready and produce a token before
it is put in place; when it cannot, the old one keeps serving. An engine process that dies is started again, with
growing pauses, and readiness is false meanwhile. The front stays alive through all of it.

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
from fp8serve.errors import Fp8ServeError
from fp8serve.model.config import read_config
from fp8serve.model.tokenizer import Tokenizer
from fp8serve.server.faults import Code, Fault
from fp8serve.server.metrics import Metrics

log = logging.getLogger("fp8serve.server")

BASE = "base"
WATCH_SECONDS = 0.2
BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
CANARY_SECONDS = 120.0
STATS_SECONDS = 5.0
PLACEHOLDERS = frozenset({"dummy", "tgi"})
"""Names by which official clients say "the model you serve": huggingface_hub's InferenceClient, given an address, and
what text-generation-inference tells users of OpenAI's client to send."""


class Engine(Protocol):
    """What we use of `fp8serve.engine.client.EngineClient`."""

    limits: Limits
    info: dict[str, Any]

    @property
    def alive(self) -> bool: ...
    @property
    def heartbeat_age(self) -> float: ...
    def check(self, request: Request) -> None: ...
    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]: ...
    async def abort(self, request_id: str) -> None: ...
    async def stats(self) -> dict[str, Any]: ...
    async def scales(self) -> list[dict[str, Any]]: ...
    async def drain(self, deadline: float) -> None: ...
    async def close(self) -> None: ...


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

    def __init__(self, name: str, start_engine: Launch, metrics: Metrics) -> None:
        self.name = name
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
        return self.state == "ready" and self.current is not None and self.current.engine.alive

    @property
    def stats(self) -> dict[str, Any]:
        """What the present engine said last about itself; empty when it is dead, or has said nothing yet."""
        of, stats = self._stats
        return stats if of is self.current and self.ready else {}

    def live(self, limit: float) -> bool:
        """Whether the engine gave a sign of life within `limit` seconds, or is being loaded."""
        if self.current is None or not self.current.engine.alive:
            return True
        return self.current.engine.heartbeat_age < limit

    # -- changing it ---------------------------------------------------------------------------------------------------

    async def start(self, source: Source) -> Served:
        """The first load. Raises what the engine says when it cannot."""
        async with self._swap:
            self.current = await self._ready_engine(source)
            self.state = "ready"
            return self.current

    async def activate(self, source: Source) -> Served:
        """Loads `source` beside what is served, then swaps. On failure raises and changes nothing."""
        if self._swap.locked():
            raise Fault(
                Code.ALIAS_BUSY, "Another change of the served weights is under way.", hint="Try again when it is done."
            )
        async with self._swap:
            self.activating = source.model_id, time.monotonic()
            try:
                new = await self._ready_engine(source)
            except Fp8ServeError as error:
                self._metrics.swaps.labels("failed").inc()
                raise Fault(
                    Code.ACTIVATION_FAILED, f"The new weights cannot be served, and the old ones keep serving: {error}"
                ) from None
            finally:
                self.activating = None
            old, self.current = self.current, new
            self.state = "ready"
            self._metrics.swaps.labels("ok").inc()
            log.info("now serving %s (%s)", new.source.model_id, new.weight_version)
            if old is not None:
                self._retire(old)
            return new

    async def _ready_engine(self, source: Source) -> Served:
        engine, tokenizer = await self._launch(source)
        version = await asyncio.to_thread(weight_version, source.directory)
        try:
            async with asyncio.timeout(CANARY_SECONDS):
                await self._canary(engine)
        except BaseException:
            await engine.close()
            raise
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
        failures = 0
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            served = self.current
            if served is None or self._swap.locked():
                continue
            if served.engine.alive:
                failures = 0 if await self._read_stats(served) else failures
                continue
            self.state = "restarting"
            await asyncio.sleep(BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)] if failures else 0)
            failures += 1
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
            async with self._swap:
                if self.current is not dead:
                    return
                await dead.engine.close()
                self.current = await self._ready_engine(dead.source)
                self.state = "ready"
        except (Fp8ServeError, OSError, TimeoutError) as error:
            log.error("the engine could not be started again: %s", error)

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
