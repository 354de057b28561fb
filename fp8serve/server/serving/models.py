"""Which weights answer: one alias, the engine process behind it, and the swap to another.

`ServedModels.current` is the only place that says what is served; replacing it is one assignment on the event loop, so
every request sees either the old weights or the new, whole. A request holds a lease on the weights it started with;
an engine that was replaced is closed when its last lease ends. A new engine must be ready and produce a token before
it is put in place; when it cannot, or not before a deadline, the old one keeps serving.

Names come from a table here; nothing a client sends is ever joined to a path.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import Fp8ServeError, MachineError
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.server.answers.choice import AnswerFormat, choose
from fp8serve.server.faults import Code, Fault
from fp8serve.server.metrics import Metrics
from fp8serve.server.serving.served import EngineHandle, Launch, Served, Source, weight_version
from fp8serve.server.settings import Deadlines

log = logging.getLogger("fp8serve.server")

BASE = "base"
PLACEHOLDERS = frozenset({"dummy", "tgi"})
"""Names by which official clients say "the model you serve": huggingface_hub's InferenceClient, given an address, and
what text-generation-inference tells users of OpenAI's client to send."""
MAX_FAILED_RESTARTS = 3
"""Restarts in a row that failed, after which somebody else should try."""


class ServedModels:
    """The alias `name` and what it points at."""

    def __init__(
        self, name: str, start_engine: Launch, metrics: Metrics, deadlines: Deadlines, readers: AnswerFormat
    ) -> None:
        """`readers`: how answers are read, as far as the operator said."""
        self.name = name
        self.deadlines = deadlines
        self._readers = readers
        self.failed_restarts = 0
        self.current: Served | None = None
        self.state = "loading"
        self.problem: Fp8ServeError | None = None
        self.reported: tuple[Served | None, dict[str, Any]] = (None, {})  # what an engine said last about itself
        self.reported_layers: tuple[Served | None, list[dict[str, Any]]] = (None, [])
        self._launch = start_engine
        self._metrics = metrics
        # what a swap is loading, and since when on the monotonic clock
        self.activating: tuple[str, float] | None = None
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
        return self.state == "ready" and served is not None and served.engine.alive and self.hang(served) is None

    @property
    def stats(self) -> dict[str, Any]:
        """What the present engine said last about itself; empty when it is dead, or has said nothing yet."""
        of, stats = self.reported
        return stats if of is self.current and self.ready else {}

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

    async def start(self, source: Source) -> Served:
        """The first load. Raises what the engine says when it cannot."""
        async with self._swap:
            self.current = await self.ready_engine(source)
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
            new = await self.ready_engine(source)
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

    async def ready_engine(self, source: Source) -> Served:
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
        return Served(source, engine, tokenizer, f"{source.key}-{version}", self._answers(tokenizer))

    def _answers(self, tokenizer: Tokenizer) -> AnswerFormat:
        return choose(tokenizer.template_text, tokenizer.takes_tools, self._readers)

    async def _canary(self, engine: EngineHandle) -> None:
        """One greedy token, one vector or one score: an engine that loads but cannot compute is not put in place."""
        if not engine.limits.generates:
            await (engine.embed([[0]]) if engine.limits.task == "embed" else engine.classify([[0]], [[0]]))
            return
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

    def put_back(self, dead: Served, new: Served) -> bool:
        """Serves `new` in place of `dead`; False, and nothing, when other weights were put in its place meanwhile."""
        if self.current is not dead:
            return False
        self.current, self.state = new, "ready"
        return True

    async def close(self) -> None:
        """Ends every engine process."""
        for task in list(self._retiring):
            task.cancel()
        self.state = "closed"
        if self.current is not None:
            await self.current.engine.close()
