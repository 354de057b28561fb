"""From a checked body to an answer, the same for every route that generates.

    body -> served model -> prompts as token ids, and parameters -> Generation -> outputs -> one answer, or a stream

A family of routes reads its body, calls `generate_texts` or `generate_chat` (chat_generation.py), and passes a
`Renderer`, which writes the answer, to `respond`. Everything that can be refused is refused before the 200, in a stream
too; a failure after it is the stream's last event.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from fp8serve import logs
from fp8serve.engine.output import RequestOutput
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError
from fp8serve.server.access.limits import TenantRequest
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.streams import EventStream, event, until_disconnect
from fp8serve.server.parsing.request_parser import Ids, Prompt, RequestParser
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.admission import Reservation
from fp8serve.server.serving.generation import Generation
from fp8serve.server.serving.served import Served

JsonObject = dict[str, Any]


class GenerationBody(Protocol):
    """The part of a body that every route reads in the same way."""

    @property
    def model(self) -> str | None: ...


# -- from a body to a generation ---------------------------------------------------------------------------------------


def model_for(body: GenerationBody, state: ServerState) -> Served:
    """The weights that answer `body`. Fault: they generate no text, or the body holds more than this server allows."""
    served = state.served(body.model, "generate")
    try:
        served.engine.limits.check_generates()
    except RequestError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error), param="model") from None
    state.parser.sizes(served.engine.limits.max_model_len).check(body)
    return served


@contextlib.contextmanager
def reserve(served: Served, state: ServerState, choices: int, prompts: int = 1) -> Iterator[Reservation]:
    """Holds the weights, and slots for `choices` answers to each prompt, before a prompt is read."""
    limit = state.settings.limits.n
    if choices > limit:
        message = f"{choices} answers to a prompt are more than this server's limit of {limit}."
        raise Fault(Code.INVALID_PARAMETER, message, param="n")
    with served.lease(), served.admission.reserve(choices * prompts) as reservation:
        yield reservation


async def generate_texts(
    served: Served,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    request: Request,
    state: ServerState,
    *,
    choices: int = 1,
    truncate: int | None = None,
    echo: bool = False,
) -> Generation:
    """`choices` answers to each text or list of token ids. `truncate`: how many tokens are kept of each prompt, the
    last ones. `echo`: whether prompts are a part of the answer.
    """
    with reserve(served, state, choices, len(prompts)) as reservation:
        ids = await until_disconnect(request, state.parser.prompts(served, prompts, truncate))
        return await admit(served, ids, params, choices, reservation, request, state, echo=echo)


async def admit(
    served: Served,
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
    """Checks what remains to be checked, and counts the tokens for the tenant. `tool_schemas`: by the tool's name, for
    an error about a schema of answers that was made from them.
    """
    _check_prompt_logprobs(prompts, params, choices, state.settings.limits.prompt_logprobs)
    await until_disconnect(request, _check_schema(params, tool_schemas or {}, state.parser))
    if params.logprobs is not None or params.prompt_logprobs is not None:
        await until_disconnect(request, state.parser.need_token_texts(served))
    echoes = state.parser.echoes(served, prompts, params.skip_special_tokens) if echo else None
    texts = [] if echoes is None else await until_disconnect(request, echoes)
    tenant_request: TenantRequest = request.scope["tenant_request"]
    tenant_request.reserve_tokens(sum(map(len, prompts)) + len(prompts) * choices * params.max_new_tokens)
    generation = state.generation(
        served, prompts, params, reservation, choices, request.scope["tenant"], tenant_request.usage
    )
    generation.echoes = texts
    return generation


def _check_prompt_logprobs(prompts: list[Ids], params: SamplingParams, choices: int, limit: int) -> None:
    """Fault when an answer would have more of them than the front can write without delaying other answers."""
    if params.prompt_logprobs is None:
        return
    tokens, values = sum(map(len, prompts)) * choices, params.prompt_logprobs + 1
    if tokens * values > limit:
        message = (
            f"The log-probabilities of {tokens} tokens of prompts, {values} for each token, are more than this "
            f"server's limit of {limit} in one request."
        )
        hint = "Ask for fewer alternatives or answers, or divide the prompts among requests."
        raise Fault(Code.INVALID_PARAMETER, message, hint=hint)


async def _check_schema(params: SamplingParams, tool_schemas: Mapping[str, str], parser: RequestParser) -> None:
    """Fault when no answer can satisfy the parameters; it names a tool if that tool's schema is the reason."""
    try:
        await parser.form(params.form)
    except RequestError:
        for name, schema in tool_schemas.items():
            try:
                await parser.form({"json_schema": schema})
            except RequestError as error:
                message = f"The arguments of {name} in tools cannot be held to their schema: {error}"
                raise Fault(Code.INVALID_PARAMETER, message, param="tools") from None
        raise


# -- from a generation to an answer ------------------------------------------------------------------------------------

New = TypeVar("New")
Whole = TypeVar("Whole")


class Renderer(ABC, Generic[New, Whole]):
    """Writes the outputs of one generation in the shapes of one family.

    `add` takes outputs and returns what is new in them; `events` shows that at once, and `whole` shows
    everything at the end.
    """

    END: ClassVar[bytes] = b""
    """The last bytes of a stream, also of one that failed."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    @abstractmethod
    def add(self, index: int, output: RequestOutput) -> New:
        """Takes in an output of the sequence `index`."""

    @abstractmethod
    def events(self, index: int, output: RequestOutput, new: New) -> Iterable[JsonObject]:
        """The events of a stream that show `new`, which `add` returned for the same output."""

    @abstractmethod
    def whole(self) -> Whole:
        """The answer that is not streamed."""

    @abstractmethod
    def failure(self, fault: Fault) -> JsonObject:
        """The event of a stream that cannot go on."""

    def opening(self) -> Iterable[JsonObject]:
        """Events before the first output. No client may take one of them for the first token."""
        return ()

    def closing(self) -> Iterable[JsonObject]:
        """Events after the last output."""
        return ()

    def encoded(self, item: JsonObject) -> bytes:
        """One event of a stream."""
        return event(item)


async def respond(
    renderer: Renderer[Any, Whole], request: Request, state: ServerState, stream: bool | None
) -> Response | Whole:
    """The answer of a generation, as a stream of events or as a whole. Raises Fault and ClientGoneError."""
    if stream:
        return _stream(renderer, state)
    return await until_disconnect(request, _collect(renderer))


async def _collect(renderer: Renderer[Any, Whole]) -> Whole:
    async with contextlib.aclosing(renderer.generation.outputs()) as outputs:
        async for index, output in outputs:
            renderer.add(index, output)
    return renderer.whole()


def _stream(renderer: Renderer[Any, Any], state: ServerState) -> EventStream:
    generation = renderer.generation
    try:
        state.streams.enter()
    except Fault:
        generation.discard()
        raise

    def close() -> None:
        generation.discard()  # a client may leave before the first output is read
        state.streams.leave()

    return EventStream(_encoded(renderer), state.settings.limits.keep_alive_seconds, close)


async def _encoded(renderer: Renderer[Any, Any]) -> AsyncGenerator[bytes, None]:
    try:
        async with contextlib.aclosing(_events(renderer)) as events:
            async for item in events:
                yield renderer.encoded(item)
    except Fault as fault:
        logs.bind(error=fault.code.value)
        yield renderer.encoded(renderer.failure(fault))
    if renderer.END:
        yield renderer.END


async def _events(renderer: Renderer[Any, Any]) -> AsyncGenerator[JsonObject, None]:
    for item in renderer.opening():
        yield item
    async with contextlib.aclosing(renderer.generation.outputs()) as outputs:
        async for index, output in outputs:
            for item in renderer.events(index, output, renderer.add(index, output)):
                yield item
    for item in renderer.closing():
        yield item
