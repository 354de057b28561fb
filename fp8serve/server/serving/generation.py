"""Runs the engine requests of one HTTP request and yields their outputs.

`build_requests` checks each request against the engine's limits. A `Generation` then takes their admission slots and a
lease on the weights; only after that does a handler send a header. `Generation.outputs()` yields lists of `(index,
RequestOutput)` of all its requests. If the caller closes it early, for example because the client disconnected, the
requests that still run are aborted. If the engine fails or the request is aborted, `outputs` raises `Fault`.

The engine's client delivers each output by a callback, and `outputs` runs in the task of its caller, so an output costs
no task and no queue. A slow caller gets all outputs that have arrived as one list. A stream can also set
`write_directly`, which gets the text of all tokens that arrived for the request together. If it writes the text, the
tokens become no outputs, and the task of the request is not even resumed.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fp8serve.engine.client import Token
from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import Fp8ServeError, RequestError, TokenizerError
from fp8serve.server.faults import Code, Fault
from fp8serve.server.metrics import ModelMetrics
from fp8serve.server.serving.admission import Outcome, Reservation, Slot
from fp8serve.server.serving.served_weights import ServedWeights
from fp8serve.server.usage import SequenceUsage, Usage

log = logging.getLogger("fp8serve.server")
Item = tuple[int, RequestOutput]
State = Literal["queued", "prefill", "decode"]


@dataclass(frozen=True)
class Echo:
    """The text of a prompt, and for each of its tokens the number of characters that it adds to the text."""

    text: str
    lengths: list[int]


class Generation:
    """The admitted engine requests of one HTTP request. `outputs` may be used once and releases slots and lease.

    `prompt_end` is the text of the last tokens of a conversation. `echoes` has an entry for each prompt, if the
    response shall contain the prompts. `write_directly` may write the text of tokens and return True; if it returns
    False, it must have changed nothing, and `outputs` yields the tokens.
    """

    def __init__(
        self,
        served: ServedWeights,
        requests: Sequence[Request],
        n: int,
        reservation: Reservation,
        usage: Usage,
        time_limit: float | None = None,
    ) -> None:
        self.served = served
        self.requests = requests
        self.n = n
        self.started = time.perf_counter()
        self.time_limit = time_limit
        self.usage = usage
        self.prompt_end = ""
        self.echoes: list[Echo] = []
        self._arrived: list[Item] = []  # outputs that the caller of `outputs` has not received yet
        self._fault: Fault | None = None  # raised after these outputs
        self._waiter: asyncio.Future[None] | None = None  # what `outputs` awaits while nothing has arrived
        self.write_directly: Callable[[str], bool] | None = None
        self.returns_aborted = False  # whether the response may end with the finish reason "abort"
        self.was_paused = False  # whether the requests were aborted because generation was paused (trainer.py)
        self._lease = contextlib.ExitStack()
        slots = reservation.admit([len(r.prompt_token_ids) + r.params.max_new_tokens for r in requests])
        self._lease.enter_context(served.lease())
        self.metrics = served.admission.metrics
        self._sequences = [_Sequence(self, i, *each) for i, each in enumerate(zip(requests, slots, strict=True))]
        usage.prompt_tokens += self.prompt_tokens
        usage.sequences += [sequence.usage for sequence in self._sequences]
        usage.model = served.source.model_id
        self.metrics.request_n.observe(n)

    @property
    def id(self) -> str:
        """An id that is unique on this server. Clients may give several requests the same x-request-id."""
        return self.requests[0].request_id.rpartition("-")[0]

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts, each counted once however many choices (`n`) it has."""
        return sum(len(request.prompt_token_ids) for request in self.requests[:: self.n])

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens found in the prefix cache: for each prompt, the minimum over its choices."""
        groups = range(0, len(self._sequences), self.n)
        return sum(min(each.usage.cached_tokens for each in self._sequences[at : at + self.n]) for at in groups)

    @property
    def is_running(self) -> bool:
        """Whether one of the requests has not finished."""
        return any(sequence.slot.open for sequence in self._sequences)

    @property
    def generated_tokens(self) -> int:
        """The number of tokens generated so far, over all choices."""
        return sum(sequence.usage.generated_tokens for sequence in self._sequences)

    @property
    def state(self) -> State:
        """The state of the most advanced sequence in the engine's last report."""
        if self.generated_tokens:
            return "decode"
        return "queued" if self.served.prefilling_ids.isdisjoint(r.request_id for r in self.requests) else "prefill"

    def fail(self, fault: Fault) -> None:
        """Aborts the requests at once. The caller of `outputs` gets `fault`, even if it reads slowly."""
        for sequence in self._sequences:
            sequence.cancel()
        self.end_with(fault)

    async def outputs(self) -> AsyncGenerator[list[Item], None]:
        """Yields lists of the outputs that have arrived, each with the index of its request, until all requests have
        finished. Raises Fault."""
        loop = asyncio.get_running_loop()
        alarm = None if self.time_limit is None else loop.call_later(self.time_limit, self._fail_late)
        try:
            for sequence in self._sequences:
                sequence.start()
            running = len(self._sequences)
            while running:
                if not self._arrived and self._fault is None:
                    self._waiter = loop.create_future()
                    await self._waiter
                if not self._arrived and self._fault is not None:
                    raise self._fault
                items, self._arrived = self._arrived, []
                running -= sum(output.finish_reason is not None for _, output in items)
                yield items
        finally:
            if alarm is not None:
                alarm.cancel()
            usages = [sequence.usage for sequence in self._sequences]
            if lengths := [usage.generated_tokens for usage in usages if usage.finish_reason is not None]:
                self.metrics.longest_choice.observe(max(lengths))
            self.discard()

    def receive(self, index: int, output: RequestOutput) -> None:
        """Passes an output to the caller of `outputs`. Outputs after a fault are dropped."""
        if self._fault is not None:
            return
        self._arrived.append((index, output))
        self._wake()

    def write_tokens(self, tokens: list[Token]) -> bool:
        """Writes the text of tokens by `write_directly`. Returns False and changes nothing if they must pass through
        `outputs`: because earlier outputs are there, or the client is slow, or they are not written as text alone."""
        if self.write_directly is None or self._waiter is None or self._waiter.done():
            return False
        text = tokens[0][1] if len(tokens) == 1 else "".join([text for _, text in tokens])
        try:
            return self.write_directly(text)
        except Exception:
            log.exception("a stream could not be written")
            self.write_directly = None
            self.fail(Fault(Code.INTERNAL, "The server failed while it was generating."))
            return True

    def end_with(self, fault: Fault) -> None:
        """Ends `outputs` with a fault, after the outputs that have arrived. Only the first fault counts."""
        self._fault = self._fault or fault
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail_late(self) -> None:
        message = f"The response did not finish within {self.time_limit:g} seconds, this server's limit."
        self.fail(Fault(Code.REQUEST_TIMEOUT, message, hint="Ask for fewer tokens."))

    def discard(self) -> None:
        """Aborts the requests that still run, and releases slots and lease. `outputs` does this at its end; a caller
        that may never use `outputs` must do it, and may do it twice."""
        for sequence in self._sequences:
            sequence.cancel()
        self._lease.close()


class _Sequence:
    """One engine request of a generation. Its slot is open until it has ended."""

    def __init__(self, generation: Generation, index: int, request: Request, slot: Slot) -> None:
        self.slot = slot
        self.usage = SequenceUsage(request)
        self._generation, self._index, self._request = generation, index, request
        self._recorder = _LatencyRecorder(generation.metrics, generation.usage, generation.started)
        self._has_started = False

    def start(self) -> None:
        if not self.slot.open:  # another request of the generation has failed
            return
        self._has_started = True
        try:
            self._generation.served.engine.submit(self._request, self._deliver, self._write_tokens)
        except Exception as error:
            self._deliver(error)

    def cancel(self) -> None:
        """Aborts the request unless it has ended."""
        if self.slot.open:
            if self._has_started:
                self._generation.served.engine.cancel(self._request.request_id)
            self._end("cancelled")

    def _deliver(self, item: RequestOutput | Exception) -> None:
        fault = self._record(item) if isinstance(item, RequestOutput) else _fault_of_error(item)
        if fault is not None:
            self._end("failed")
            self._generation.end_with(fault)
        elif isinstance(item, RequestOutput):
            self._generation.receive(self._index, item)

    def _write_tokens(self, tokens: list[Token]) -> bool:
        """Writes tokens directly and counts them, or returns False. The first output is never written directly."""
        if not self.usage.generated_tokens or not self._generation.write_tokens(tokens):
            return False
        count = len(tokens)
        self.usage.generated_tokens += count
        self._recorder.record_tokens(count)
        return True

    def _record(self, output: RequestOutput) -> Fault | None:
        """Counts an output, and ends the sequence if it is the last one. Returns the fault if the engine has failed."""
        self._recorder.record_output(output)
        self.usage.update(output)
        if output.finish_reason is None:
            return None
        if fault := _fault_of(output, self._generation):
            return fault
        self._recorder.record_end(self._request, output)
        self._end("ok")
        return None

    def _end(self, outcome: Outcome) -> None:
        if self._has_started:
            reason = self.usage.finish_reason or ("abort" if outcome == "cancelled" else "error")
            self._generation.metrics.sequences_ended(reason).inc()
        self.slot.close(outcome)


def _fault_of_error(error: Exception) -> Fault:
    if isinstance(error, RequestError):  # the engine found the grammar too complex
        return Fault(Code.INVALID_PARAMETER, str(error))
    if isinstance(error, TokenizerError):
        return Fault(Code.TOKENIZER_ERROR, str(error))
    if isinstance(error, Fp8ServeError | OSError | EOFError):
        return Fault(Code.ENGINE_DOWN, f"The engine ended while it was generating: {error}", retry_after=2)
    log.error("unexpected %s in a generation", type(error).__name__, exc_info=error)
    return Fault(Code.INTERNAL, "The server failed while it was generating.")


def _fault_of(output: RequestOutput, generation: Generation) -> Fault | None:
    if output.finish_reason == "error":
        code = Code.GENERATION_FAILED if generation.served.engine.alive else Code.ENGINE_DOWN
        return Fault(code, output.error or "The engine failed while it was generating.")
    if output.finish_reason == "abort" and not (generation.was_paused and generation.returns_aborted):
        return Fault(Code.DRAINING, "The request was aborted before it finished.")
    return None


class _LatencyRecorder:
    """Records the latencies of one request, counted from its admission, and its tokens in the metrics."""

    def __init__(self, metrics: ModelMetrics, usage: Usage, started: float) -> None:
        self._metrics = metrics
        self._token_counts = metrics.token_counts
        self._usage = usage
        self._started = started
        self._first: float | None = None
        self._last = started

    def record_output(self, output: RequestOutput) -> None:
        if not output.token_ids:
            return
        if self._first is not None:
            self.record_tokens(len(output.token_ids))
            return
        self._first = self._last = time.perf_counter()
        self._metrics.first_token.observe(self._first - self._started)
        self._metrics.generated_tokens.inc(len(output.token_ids))
        self._usage.generated_tokens += len(output.token_ids)

    def record_tokens(self, count: int) -> None:
        """Records `count` tokens after the first one."""
        now = time.perf_counter()
        self._token_counts.add(count, (now - self._last) / count)
        self._last = now
        self._usage.generated_tokens += count

    def record_end(self, request: Request, output: RequestOutput) -> None:
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
    served: ServedWeights, prompts: Sequence[tuple[int, ...]], params: SamplingParams, n: int, tenant: str = ""
) -> list[Request]:
    """Returns `n` requests for each prompt, in order, each with its own seed. Raises Fault if one could never run.

    The engine gets new ids for them, because clients may give two requests the same x-request-id.
    """
    requests: list[Request] = []
    group = secrets.token_hex(12)
    for prompt in prompts:
        for choice in range(n):
            seeded = params if params.seed is None else replace(params, seed=(params.seed + choice) % 2**63)
            name = f"{group}-{len(requests)}"
            requests.append(Request(name, prompt, seeded, tenant, group=group, adapter=served.adapter))
    limit = served.engine.limits.max_model_len
    for request in requests:
        size, new = len(request.prompt_token_ids), request.params.max_new_tokens
        if size == limit and new:
            raise Fault(
                Code.CONTEXT_LENGTH_EXCEEDED,
                f"The prompt has {size} tokens and fills this model's context, which has no room for a completion.",
                hint="Shorten the prompt.",
            )
        if size + new > limit:
            message = f"The prompt has {size} tokens and up to {new} are requested, but the context holds {limit}."
            raise Fault(Code.CONTEXT_LENGTH_EXCEEDED, message, hint="Shorten the prompt or ask for fewer tokens.")
        try:
            served.engine.check(request)
        except RequestError as error:
            raise Fault(Code.INVALID_PARAMETER, str(error)) from None
    return requests
