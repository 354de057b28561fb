"""From a checked body to an answer, the same for every route that generates.

    body -> ParsedRequest -> prompts as token ids -> Generation -> outputs -> events -> one answer, or a stream of them

A family of routes adds two things: a function that reads what its body asks for (`Parse`), and a `Renderer` that writes
the answer. Everything that can be refused is refused before the 200, in a stream too; a failure after it is the
stream's last event.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response

from fp8serve import logs
from fp8serve.engine.output import RequestOutput
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError
from fp8serve.server.access.limits import Visit
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.streams import EventStream, event, until_disconnect
from fp8serve.server.parsing.request_parser import Ids, Prompt, RequestParser
from fp8serve.server.schemas.messages import Ending, Message
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.admission import Places
from fp8serve.server.serving.generation import Echo, Generation
from fp8serve.server.serving.served import Served

JsonObject = dict[str, Any]


class GenerationBody(Protocol):
    """The part of a body that the pipeline itself reads."""

    @property
    def model(self) -> str | None: ...


@dataclass(frozen=True)
class ParsedRequest:
    """What a body asks for. Either `prompts` (texts or token ids) or `conversation` is given.

    `sampling` makes the parameters from the number of tokens for which the longest prompt leaves room. `variables`: for
    the chat template. `ending`: what the model is to write. `truncate`: how many tokens are kept of each prompt, the
    last ones. `choices`: answers to each prompt. `tools`: the JSON schema of each tool's arguments, for an error about
    a form that was made from them. `fitted` adapts these parameters to the served weights and the end of the
    conversation, or refuses with a Fault. `echo`: whether prompts are a part of the answer.
    """

    sampling: Callable[[int], SamplingParams]
    prompts: Sequence[Prompt] = ()
    conversation: list[Message] | None = None
    variables: JsonObject = field(default_factory=dict)
    ending: Ending = "prompted"
    truncate: int | None = None
    choices: int = 1
    tools: dict[str, str] = field(default_factory=dict)
    fitted: Callable[[Served, str, SamplingParams], SamplingParams] = lambda _served, _end, params: params
    echo: bool = False

    @property
    def sequences(self) -> int:
        """How many sequences the engine is to generate."""
        return self.choices * (len(self.prompts) if self.conversation is None else 1)


New = TypeVar("New")
Body = TypeVar("Body", bound=GenerationBody)
Parse = Callable[[Body], ParsedRequest]


class Renderer(ABC, Generic[New]):
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
    def whole(self) -> Any:
        """The answer that is not streamed, as JSON."""

    @abstractmethod
    def failure(self, fault: Fault) -> JsonObject:
        """The event of a stream that cannot go on."""

    def opening(self) -> Iterable[JsonObject]:
        """Events before the first output. No client may take one of them for the first token."""
        return ()

    def closing(self) -> Iterable[JsonObject]:
        """Events after the last output."""
        return ()

    def headers(self) -> dict[str, str]:
        """Further headers of an answer that is not streamed."""
        return {}

    def encoded(self, item: JsonObject) -> bytes:
        """One event of a stream."""
        return event(item)


Render = Callable[[Body, Generation, str], Renderer[Any]]
"""A renderer for a body, its generation and the request's id."""


async def respond(
    body: Body, parse: Parse[Body], render: Render[Body], request: Request, state: ServerState, stream: bool
) -> Response:
    """The answer to `body`, as a stream of events or as a whole. Raises Fault and ClientGoneError."""
    generation = await _admit(body, parse, request, state)
    renderer = render(body, generation, request.scope["request_id"])
    if stream:
        return _stream(renderer, state)
    return JSONResponse(await until_disconnect(request, _collect(renderer)), headers=renderer.headers())


# -- from a body to a generation ---------------------------------------------------------------------------------------


async def _admit(body: Body, parse: Parse[Body], request: Request, state: ServerState) -> Generation:
    """Everything that can be refused happens here. The places are reserved before a prompt is read."""
    served = state.served(body.model, "generate")
    try:
        served.engine.limits.check_generates()
    except RequestError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error), param="model") from None
    context = served.engine.limits.max_model_len
    state.parser.sizes(context).check(body)
    asked = parse(body)
    with served.lease(), _reserve(asked, served, state) as places:
        prompts, end = await until_disconnect(request, _read(asked, served, state.parser))
        params = asked.fitted(served, end, asked.sampling(context - max(map(len, prompts))))
        _check_prompt_logprobs(prompts, params, asked.choices, state.settings.limits.prompt_logprobs)
        await until_disconnect(request, _check_form(asked, params, state.parser))
        echoes = await until_disconnect(request, _texts_of(asked, prompts, params, served, state.parser))
        visit: Visit = request.scope["visit"]
        visit.set_aside(sum(map(len, prompts)) + asked.sequences * params.max_new_tokens)
        who = request.scope["tenant"]
        generation = state.generation(served, prompts, params, places, asked.choices, who, visit.usage)
        generation.prompt_end, generation.echoes = end, echoes
        return generation


def _reserve(asked: ParsedRequest, served: Served, state: ServerState) -> Places:
    limit = state.settings.limits.n
    if asked.choices > limit:
        message = f"{asked.choices} answers to a prompt are more than this server's limit of {limit}."
        raise Fault(Code.INVALID_PARAMETER, message, param="n")
    return served.admission.reserve(asked.sequences)


async def _read(asked: ParsedRequest, served: Served, parser: RequestParser) -> tuple[list[Ids], str]:
    """The prompts, and the text at the end of a conversation."""
    if asked.conversation is not None:
        ids, end = await parser.conversation(served, asked.conversation, asked.variables, asked.ending)
        return [ids], end
    return await parser.prompts(served, asked.prompts, asked.truncate), ""


async def _texts_of(
    asked: ParsedRequest, prompts: list[Ids], params: SamplingParams, served: Served, parser: RequestParser
) -> list[Echo]:
    """The prompts' texts if the answer has them; and sees to the texts of tokens if it has log-probabilities."""
    if params.logprobs is not None or params.prompt_logprobs is not None:
        await parser.need_token_texts(served)
    return await parser.echoes(served, prompts, params.skip_special_tokens) if asked.echo else []


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


async def _check_form(asked: ParsedRequest, params: SamplingParams, parser: RequestParser) -> None:
    """Fault when answers cannot have the form that the parameters ask for; it names a tool if its schema is the
    reason."""
    try:
        await parser.form(params.form)
    except RequestError:
        for name, schema in asked.tools.items():
            await _check_tool(name, schema, parser)
        raise


async def _check_tool(name: str, schema: str, parser: RequestParser) -> None:
    try:
        await parser.form({"json_schema": schema})
    except RequestError as error:
        message = f"The arguments of {name} in tools cannot be held to their schema: {error}"
        raise Fault(Code.INVALID_PARAMETER, message, param="tools") from None


# -- from a generation to an answer ------------------------------------------------------------------------------------


async def _collect(renderer: Renderer[Any]) -> Any:
    async with contextlib.aclosing(renderer.generation.outputs()) as outputs:
        async for index, output in outputs:
            renderer.add(index, output)
    return renderer.whole()


def _stream(renderer: Renderer[Any], state: ServerState) -> EventStream:
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


async def _encoded(renderer: Renderer[Any]) -> AsyncGenerator[bytes, None]:
    try:
        async with contextlib.aclosing(_events(renderer)) as events:
            async for item in events:
                yield renderer.encoded(item)
    except Fault as fault:
        logs.bind(error=fault.code.value)
        yield renderer.encoded(renderer.failure(fault))
    if renderer.END:
        yield renderer.END


async def _events(renderer: Renderer[Any]) -> AsyncGenerator[JsonObject, None]:
    for item in renderer.opening():
        yield item
    async with contextlib.aclosing(renderer.generation.outputs()) as outputs:
        async for index, output in outputs:
            for item in renderer.events(index, output, renderer.add(index, output)):
                yield item
    for item in renderer.closing():
        yield item
