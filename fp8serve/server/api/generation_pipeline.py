"""The pipeline from a validated request body to a response, shared by all routes that generate text.

    body -> served model -> prompts as token ids, and parameters -> Generation -> outputs -> one object, or a stream

A route parses its body, calls `generate_texts` or `generate_chat` (chat_generation.py), and passes a `Renderer` to
`respond`, which writes the response. A request can only be refused before the status 200 is sent, even if it asks for a
stream. A later failure becomes the last event of the stream.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request
from starlette.responses import Response

from fp8serve import logs
from fp8serve.engine.output import RequestOutput
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError
from fp8serve.server.access.limits import TenantRequest
from fp8serve.server.api.routing import JsonObject
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.streams import EventStream, WriteChunk, event, string_to_json, until_disconnect
from fp8serve.server.parsing.request_parser import Ids, Prompt, RequestParser
from fp8serve.server.schemas.generation_bodies import GenerateBody
from fp8serve.server.schemas.openai_bodies import SamplingBody
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.admission import Reservation
from fp8serve.server.serving.generation import Echo, Generation, build_requests
from fp8serve.server.serving.served_weights import ServedWeights

# -- from a body to a generation ---------------------------------------------------------------------------------------


async def resolve_model(body: SamplingBody | GenerateBody, request: Request, state: ServerState) -> ServedWeights:
    """Returns the model for a request. If its weights are being swapped or generation is paused, waits for the end
    first. The caller must lease the model before its next `await`.

    Raises Fault if the model generates no text or the request exceeds a limit of this server, and ClientGoneError if
    the client disconnects.
    """
    while (model := state.models.suspended(body.model, ("generate",))) is not None:
        await until_disconnect(request, model.released.wait())
    served = state.served(body.model, "generate")
    try:
        served.engine.limits.check_generates()
    except RequestError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error), param="model") from None
    state.parser.size_limits(served.engine.limits.max_model_len).check(body)
    return served


@contextlib.contextmanager
def reserve(served: ServedWeights, state: ServerState, choices: int, prompts: int = 1) -> Iterator[Reservation]:
    """Leases the model and reserves slots for `choices` outputs of each prompt, before the prompts are tokenized."""
    limit = state.settings.limits.n
    if choices > limit:
        message = f"{choices} choices for a prompt are more than this server's limit of {limit}."
        raise Fault(Code.INVALID_PARAMETER, message, param="n")
    with served.lease(), served.admission.reserve(choices * prompts) as reservation:
        yield reservation


async def generate_texts(
    served: ServedWeights,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    request: Request,
    state: ServerState,
    *,
    field: str,
    choices: int = 1,
    truncate: int | None = None,
    echo: bool = False,
) -> Generation:
    """Starts the generation of `choices` outputs for each prompt. `field` is the field of the request that holds the
    prompts. If `truncate` is given, only the last `truncate` tokens of each prompt are used. `echo` says whether the
    response includes the prompts.
    """
    with reserve(served, state, choices, len(prompts)) as reservation:
        ids = await until_disconnect(request, state.parser.encode_prompts(served, prompts, field, truncate))
        return await admit(served, ids, params, choices, reservation, request, state, echo=echo)


async def admit(
    served: ServedWeights,
    prompts: list[Ids],
    params: SamplingParams,
    choices: int,
    reservation: Reservation,
    request: Request,
    state: ServerState,
    *,
    echo: bool = False,
    tool_schemas: Mapping[str, str] | None = None,
) -> Generation:
    """Checks the tokenized prompts and the grammar, counts the tokens for the tenant, and returns the generation.
    `tool_schemas` are the argument schemas by tool, so that an error can name the tool whose schema is invalid.
    """
    _check_prompt_logprobs(prompts, params, choices, state.settings.limits.prompt_logprobs)
    if params.has_grammar:
        await until_disconnect(request, _check_grammar(params, tool_schemas or {}, state.parser))
    if params.logprobs is not None or params.prompt_logprobs is not None:
        await until_disconnect(request, state.parser.load_token_texts(served))
    echoes: list[Echo] = []
    if echo:
        rendering = state.parser.render_echoes(served, prompts, params.skip_special_tokens)
        echoes = await until_disconnect(request, rendering)
    tenant_request: TenantRequest = request.scope["tenant_request"]
    tenant_request.reserve_tokens(sum(map(len, prompts)) + len(prompts) * choices * params.max_new_tokens)
    requests = build_requests(served, prompts, params, choices, request.scope["tenant"])
    generation = Generation(
        served, requests, choices, reservation, tenant_request.usage, state.settings.request_seconds
    )
    generation.echoes = echoes
    state.active.add(generation)
    return generation


def _check_prompt_logprobs(prompts: list[Ids], params: SamplingParams, choices: int, limit: int) -> None:
    """Raises Fault for more log-probabilities than the server can serialize without delaying other requests."""
    if params.prompt_logprobs is None:
        return
    tokens, values = sum(map(len, prompts)) * choices, params.prompt_logprobs + 1
    if tokens * values > limit:
        message = (
            f"The log-probabilities of {tokens} tokens of prompts, {values} for each token, are more than this "
            f"server's limit of {limit} in one request."
        )
        hint = "Request fewer alternatives or choices, or send the prompts in several requests."
        raise Fault(Code.INVALID_PARAMETER, message, hint=hint)


async def _check_grammar(params: SamplingParams, tool_schemas: Mapping[str, str], parser: RequestParser) -> None:
    """Raises Fault or RequestError if the grammar or schema of the parameters is invalid. The error names a tool if the
    tool's schema is invalid."""
    try:
        await parser.check_grammar(params.grammar_by_kind)
    except RequestError:
        for name, schema in tool_schemas.items():
            try:
                await parser.check_grammar({"json_schema": schema})
            except RequestError as error:
                message = f"The schema of the arguments of {name} in tools cannot be enforced: {error}"
                raise Fault(Code.INVALID_PARAMETER, message, param="tools") from None
        raise


# -- from a generation to a response -----------------------------------------------------------------------------------

DeltaT = TypeVar("DeltaT")
ResponseT = TypeVar("ResponseT")


class Renderer(ABC, Generic[DeltaT, ResponseT]):
    """Writes the outputs of one generation as the response of one protocol.

    `add` stores an output and returns its delta. A stream writes `events` for each delta. If the response is not
    streamed, `response` returns it after the last output.
    """

    END: ClassVar[bytes] = b""
    """The last bytes of a stream, even of a failed one."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self._plain_chunk: tuple[bytes, bytes] | None = None

    @abstractmethod
    def add(self, index: int, output: RequestOutput) -> DeltaT:
        """Stores an output of the choice `index` and returns its delta."""

    @abstractmethod
    def events(self, index: int, output: RequestOutput, delta: DeltaT) -> Iterable[JsonObject]:
        """Returns the events of a stream for an output and the delta that `add` returned for it."""

    @abstractmethod
    def response(self) -> ResponseT:
        """Returns the response that is not streamed."""

    @abstractmethod
    def failure(self, fault: Fault) -> JsonObject:
        """Returns the event that ends a failed stream."""

    def opening(self) -> Iterable[JsonObject]:
        """Returns the events before the first output. Clients must not mistake one of them for the first token."""
        return ()

    def closing(self) -> Iterable[JsonObject]:
        """Returns the events after the last output."""
        return ()

    def encode(self, item: JsonObject) -> bytes:
        """Returns an event as the bytes of the stream."""
        return event(item)

    def plain_chunk(self) -> tuple[bytes, bytes] | None:
        """Returns the bytes before and after the text, as a JSON string, of every event from now on whose output has
        only text. Returns None if such events differ in more, or are not built from text alone."""
        return None

    def encode_text(self, text: str) -> bytes | None:
        """Returns the event of outputs that have only `text`, or None if `encode_outputs` must write them."""
        if self._plain_chunk is None:
            self._plain_chunk = self.plain_chunk()
        if self._plain_chunk is None:
            return None
        before, after = self._plain_chunk
        return before + string_to_json(text).encode() + after if text else b""

    def encode_outputs(self, outputs: Sequence[tuple[int, RequestOutput]]) -> bytes:
        """Stores outputs with their indexes and returns their events as the bytes of the stream. Outputs that have only
        text become one event."""
        if all(output.has_only_text for _, output in outputs):
            events = self.encode_text("".join(output.text_delta for _, output in outputs))
            if events is not None:
                return events
        return b"".join(
            self.encode(item)
            for index, output in outputs
            for item in self.events(index, output, self.add(index, output))
        )


async def respond(
    renderer: Renderer[Any, ResponseT], request: Request, state: ServerState, stream: bool | None
) -> Response | ResponseT:
    """Returns a stream of events or the complete response. Raises Fault if the generation fails, and ClientGoneError if
    the client disconnects."""
    if stream:
        return _stream(renderer, state)
    return await until_disconnect(request, _collect(renderer))


async def _collect(renderer: Renderer[Any, ResponseT]) -> ResponseT:
    async with contextlib.aclosing(renderer.generation.outputs()) as batches:
        async for outputs in batches:
            for index, output in outputs:
                renderer.add(index, output)
    return renderer.response()


def _stream(renderer: Renderer[Any, Any], state: ServerState) -> EventStream:
    generation = renderer.generation
    try:
        state.streams.acquire()
    except Fault:
        generation.discard()
        raise

    def close() -> None:
        generation.discard()  # the client may disconnect before the first output is read
        state.streams.release()

    def write_plain(write: WriteChunk) -> None:
        def write_directly(text: str) -> bool:
            events = renderer.encode_text(text)
            return events is not None and (not events or write(events))

        generation.write_directly = write_directly

    keep_alive = state.settings.limits.keep_alive_seconds
    return EventStream(_encoded_events(renderer), keep_alive, close, on_start=write_plain)


async def _encoded_events(renderer: Renderer[Any, Any]) -> AsyncGenerator[bytes, None]:
    """Yields the bytes of a stream. Events of outputs that arrived together are one chunk, and those of the last
    outputs are one chunk with the end of the stream."""
    last = b""
    try:
        if opening := b"".join(map(renderer.encode, renderer.opening())):
            yield opening
        async with contextlib.aclosing(renderer.generation.outputs()) as batches:
            async for outputs in batches:
                events = renderer.encode_outputs(outputs)
                if events and renderer.generation.is_running:
                    yield events
                else:
                    last += events
        closing = b"".join(map(renderer.encode, renderer.closing()))
    except Fault as fault:
        logs.bind(error=fault.code.value)
        closing = renderer.encode(renderer.failure(fault))
    if end := last + closing + renderer.END:
        yield end
