"""From prompts as token ids to a stream of engine outputs.

`build_requests` checks each request against the engine's limits; a `Generation` takes their admission slots and a
lease on the weights. Only then does a handler send a header. `Generation.outputs()` yields `(index, RequestOutput)` of
all its requests as they come; leaving it early (a disconnect, a cancelled task) aborts what still runs and frees its
blocks. An engine that fails, a drain deadline and an abort all arrive as one `Fault`.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import Fp8ServeError, RequestError, TokenizerError
from fp8serve.server.faults import Code, Fault
from fp8serve.server.metrics import ModelMetrics
from fp8serve.server.serving.admission import Outcome, Reservation, Slot
from fp8serve.server.serving.served import Served
from fp8serve.server.usage import Answer, Usage

Item = tuple[int, RequestOutput] | Fault
State = Literal["queued", "prefill", "decode"]


@dataclass(frozen=True)
class Echo:
    """A prompt as a client sees it: its text, and how many characters of it each of its tokens makes certain."""

    text: str
    lengths: list[int]


class Generation:
    """Admitted requests of one HTTP request. Use `outputs` once; it closes everything behind itself.

    prompt_end: the text of the last tokens of a conversation. echoes: of all prompts, if they are a part of the answer.
    """

    def __init__(
        self,
        served: Served,
        requests: Sequence[Request],
        n: int,
        reservation: Reservation,
        usage: Usage,
        seconds: float | None = None,
    ) -> None:
        self.served = served
        self.requests = requests
        self.n = n
        self.started = time.perf_counter()
        self.seconds = seconds
        self.usage = usage
        self.prompt_end = ""
        self.echoes: list[Echo] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self._answers = [Answer(request) for request in requests]
        self._lease = contextlib.ExitStack()
        self._slots = reservation.admit([len(r.prompt_token_ids) + r.params.max_new_tokens for r in requests])
        self._lease.enter_context(served.lease())
        usage.prompt += self.prompt_tokens
        usage.answers += self._answers
        usage.model = served.source.model_id
        self.metrics = served.admission.metrics
        self.metrics.request_n.observe(n)

    @property
    def id(self) -> str:
        """Unique on this server, whatever the client calls the request."""
        return self.requests[0].request_id.rpartition("-")[0]

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts, each counted once however many choices (`n`) it has."""
        return sum(len(request.prompt_token_ids) for request in self.requests[:: self.n])

    @property
    def cached_tokens(self) -> int:
        """How many of `prompt_tokens` every choice of a prompt found in the prefix cache."""
        groups = range(0, len(self._answers), self.n)
        return sum(min(answer.cached for answer in self._answers[at : at + self.n]) for at in groups)

    @property
    def under_way(self) -> bool:
        """Whether one of its requests has not ended."""
        return any(slot.open for slot in self._slots)

    @property
    def generated(self) -> int:
        """Tokens of all answers so far."""
        return sum(answer.generated for answer in self._answers)

    @property
    def state(self) -> State:
        """The state of the most advanced answer, as last reported by the engine."""
        if self.generated:
            return "decode"
        return "queued" if self.served.prefilling.isdisjoint(r.request_id for r in self.requests) else "prefill"

    def fail(self, fault: Fault) -> None:
        """Ends the generation from outside, at once even if its reader is slow; the reader gets `fault`."""
        for pump in self._pumps:
            pump.cancel()
        self._queue.put_nowait(fault)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of all requests until each has finished. Raises Fault."""
        self._pumps = [
            asyncio.create_task(self._pump(i, request, self._slots[i])) for i, request in enumerate(self.requests)
        ]
        running = len(self._pumps)
        alarm = None if self.seconds is None else asyncio.get_running_loop().call_later(self.seconds, self._late)
        try:
            while running:
                item = await self._queue.get()
                if isinstance(item, Fault):
                    raise item
                yield item
                running -= item[1].finish_reason is not None
        finally:
            if alarm is not None:
                alarm.cancel()
            await self._close()

    def _late(self) -> None:
        message = f"The answer was not done within {self.seconds:g} seconds, this server's limit."
        self.fail(Fault(Code.REQUEST_TIMEOUT, message, hint="Ask for fewer tokens."))

    async def _close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        if lengths := [answer.generated for answer in self._answers if answer.finish_reason is not None]:
            self.metrics.longest.observe(max(lengths))
        self.discard()

    def discard(self) -> None:
        """Gives slots and lease back, for a generation whose outputs were never read."""
        for slot in self._slots:
            slot.close("cancelled")
        self._lease.close()

    async def _pump(self, index: int, request: Request, slot: Slot) -> None:
        """Puts one request's outputs into the queue, a failure as a Fault; cancelling it aborts the request."""
        answer = self._answers[index]
        clock = _Clock(self.metrics, self.usage, self.started)
        outcome: Outcome = "cancelled"
        try:
            async with contextlib.aclosing(self.served.engine.generate(request)) as outputs:
                async for output in outputs:
                    clock.saw(output)
                    answer.saw(output)
                    if fault := _fault_of(output, self.served.engine.alive):
                        outcome = "failed"
                        return self._queue.put_nowait(fault)
                    if output.finish_reason is not None:
                        outcome = "ok"
                        clock.done(request, output)
                    self._queue.put_nowait((index, output))
        except RequestError as error:  # the form turned out to be too complex
            outcome = "failed"
            self._queue.put_nowait(Fault(Code.INVALID_PARAMETER, str(error)))
        except TokenizerError as error:
            outcome = "failed"
            self._queue.put_nowait(Fault(Code.TOKENIZER_ERROR, str(error)))
        except (Fp8ServeError, OSError, EOFError) as error:
            outcome = "failed"
            self._queue.put_nowait(
                Fault(Code.ENGINE_DOWN, f"The engine stopped while it was answering: {error}", retry_after=2)
            )
        except Exception:
            outcome = "failed"
            self._queue.put_nowait(Fault(Code.INTERNAL, "The server failed while it was answering."))
            raise
        finally:
            self.metrics.ended(answer.finish_reason or ("abort" if outcome == "cancelled" else "error")).inc()
            slot.close(outcome)


def _fault_of(output: RequestOutput, alive: bool) -> Fault | None:
    if output.finish_reason == "error":
        code = Code.GENERATION_FAILED if alive else Code.ENGINE_DOWN
        return Fault(code, output.error or "The engine failed while it was answering.")
    if output.finish_reason == "abort":
        return Fault(Code.DRAINING, "The request was aborted before it was done.")
    return None


class _Clock:
    """Latencies of one request, from admission on, and its tokens."""

    def __init__(self, metrics: ModelMetrics, usage: Usage, started: float) -> None:
        self._metrics = metrics
        self._usage = usage
        self._started = started
        self._first: float | None = None
        self._last = started

    def saw(self, output: RequestOutput) -> None:
        if not output.token_ids:
            return
        now = time.perf_counter()
        if self._first is None:
            self._first = now
            self._metrics.first_token.observe(now - self._started)
        else:
            self._metrics.inter_token.observe((now - self._last) / len(output.token_ids))
        self._last = now
        self._metrics.generated_tokens.inc(len(output.token_ids))
        self._usage.generated += len(output.token_ids)

    def done(self, request: Request, output: RequestOutput) -> None:
        now = time.perf_counter()
        prompt = len(request.prompt_token_ids)
        self._metrics.prompt_tokens.inc(prompt)
        self._metrics.request_prompt.observe(prompt)
        self._metrics.cached_tokens.inc(output.num_cached_tokens)
        self._metrics.request_computed.observe(prompt - output.num_cached_tokens)
        self._metrics.request_max.observe(request.params.max_new_tokens)
        self._metrics.request_generated.observe(output.num_generated)
        self._metrics.request_seconds.observe(now - self._started)
        if self._first is not None and output.num_generated > 1:
            self._metrics.per_token.observe((now - self._first) / (output.num_generated - 1))
        if (timing := output.timing) is not None:
            self._metrics.queue_seconds.observe(timing.queue or 0.0)
            self._metrics.prefill_seconds.observe(timing.prefill or 0.0)
            self._metrics.decode_seconds.observe(timing.decode or 0.0)
            self._metrics.inference_seconds.observe(timing.inference or 0.0)


def build_requests(
    served: Served, prompts: Sequence[tuple[int, ...]], params: SamplingParams, n: int, tenant: str = ""
) -> list[Request]:
    """`n` requests for each prompt, in order; each choice has its own seed. Raises Fault when one could never run.

    Their ids in the engine are made here. A client's own request id is only for its log and the server's: two requests
    may have the same one.
    """
    requests: list[Request] = []
    group = secrets.token_hex(12)
    for prompt in prompts:
        for choice in range(n):
            seeded = params if params.seed is None else replace(params, seed=(params.seed + choice) % 2**63)
            name = f"{group}-{len(requests)}"
            requests.append(Request(name, prompt, seeded, tenant, group=group, adapter=served.adapter))
    _check_all(served, requests)
    return requests


def _check_all(served: Served, requests: Sequence[Request]) -> None:
    limit = served.engine.limits.max_model_len
    for request in requests:
        prompt, new = len(request.prompt_token_ids), request.params.max_new_tokens
        if prompt == limit and new:
            raise Fault(
                Code.CONTEXT_LENGTH_EXCEEDED,
                f"The prompt has {prompt} tokens, as many as this model's context holds with the answer.",
                hint="Shorten the prompt.",
            )
        if prompt + new > limit:
            raise Fault(
                Code.CONTEXT_LENGTH_EXCEEDED,
                f"The prompt has {prompt} tokens and {new} more are asked for, but this model's context holds {limit}.",
                hint="Shorten the prompt or ask for fewer tokens.",
            )
        try:
            served.engine.check(request)
        except RequestError as error:
            raise Fault(Code.INVALID_PARAMETER, str(error)) from None
