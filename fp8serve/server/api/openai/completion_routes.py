"""`/v1/completions`, `/v1/chat/completions`, `/v1/models`: OpenAI's wire, on the same admission and generation as the
native routes.

A stream's failures after the 200 arrive as `data: {"error": ...}` and then `data: [DONE]`, which OpenAI's own client
raises as an APIError. Choices of one request run at the same time and their chunks interleave by `index`.
`system_fingerprint` is the version of the weights that answered.
"""

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from fp8serve.engine.request import RequestOutput, SamplingParams
from fp8serve.errors import Fp8ServeError
from fp8serve.model.tokenizer import Tokenizer
from fp8serve.server.api.bounded_route import BoundedRoute
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.api.openai.logprobs import LogprobStream, Placed, chat_logprobs, text_logprobs
from fp8serve.server.api.wire import STREAM_RESPONSE
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.streams import DONE, EventStream, event, until_disconnect
from fp8serve.server.schemas.openai import ChatBody, CompletionBody, Sampled
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.admission import Places
from fp8serve.server.serving.generation import Generation
from fp8serve.server.serving.models import Served

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BoundedRoute)
COMPLETION_TOKENS = 16
JsonObject = dict[str, Any]


@router.post("/completions", summary="Continue a text", response_model=None, responses=STREAM_RESPONSE)
async def completions(body: CompletionBody, request: Request, state: StateDep) -> Response:
    """One choice for each of `n` and each prompt."""
    served = state.served(body.model)
    state.parser.sizes(served.engine.limits.max_model_len).check(body)
    given = body.prompts()
    params = _params(body, body.max_tokens or COMPLETION_TOKENS)
    with served.lease(), reserve(body, state, len(given)) as places:
        prompts = await until_disconnect(request, state.parser.prompts(served, given))
        answer = admit(body, state, served, prompts, params, places, TextShape(), request.scope["tenant"])
    return await reply(answer, request, state)


@router.post("/chat/completions", summary="Continue a conversation", response_model=None, responses=STREAM_RESPONSE)
async def chat(body: ChatBody, request: Request, state: StateDep) -> Response:
    """The conversation is rendered by the model's own template."""
    served = state.served(body.model)
    state.parser.sizes(served.engine.limits.max_model_len).check(body)
    with served.lease(), reserve(body, state, 1) as places:
        prompt = await until_disconnect(request, state.parser.conversation(served, body.messages))
        room = served.engine.limits.max_model_len - len(prompt)
        params = _params(body, body.token_limit or max(1, room))
        answer = admit(body, state, served, [prompt], params, places, ChatShape(), request.scope["tenant"])
    return await reply(answer, request, state)


@router.get("/models", summary="Names that requests may use now")
async def list_models(state: StateDep) -> JsonObject:
    return {"object": "list", "data": [_model(state, name) for name in state.models.names()]}


@router.get("/models/{model:path}", summary="One model")
async def get_model(model: str, state: StateDep) -> JsonObject:
    if model not in state.models.names():
        raise Fault(Code.MODEL_NOT_FOUND, "There is no model of that name here.", param="model")
    return _model(state, model)


def _model(state: ServerState, name: str) -> JsonObject:
    served = state.models.current
    length = served.engine.limits.max_model_len if served is not None else None
    return {
        "id": name,
        "object": "model",
        "created": state.started_at,
        "owned_by": "fp8serve",
        "root": state.models.name,
        "parent": None,
        "max_model_len": length,
    }


# -- admission ---------------------------------------------------------------------------------------------------------


def _params(body: CompletionBody | ChatBody, max_tokens: int) -> SamplingParams:
    try:
        return body.params(max_tokens)
    except Fp8ServeError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error)) from None


def reserve(body: Sampled, state: ServerState, prompts: int) -> Places:
    """Room for all choices, before any prompt is read, or a Fault."""
    if body.choices > state.settings.limits.n:
        raise Fault(
            Code.INVALID_PARAMETER,
            f"n is {body.choices}, more than this server's limit of {state.settings.limits.n}.",
            param="n",
        )
    return state.admission.reserve(prompts * body.choices)


def admit(
    body: Sampled,
    state: ServerState,
    served: Served,
    prompts: list[tuple[int, ...]],
    params: SamplingParams,
    places: Places,
    shape: "TextShape | ChatShape",
    tenant: str,
) -> "Answer":
    """All choices of all prompts, or a Fault."""
    generation = state.generation(served, prompts, params, places, body.choices, tenant)
    return Answer(body, generation, shape)


# -- the two shapes ----------------------------------------------------------------------------------------------------


class TextShape:
    """`text_completion` objects."""

    prefix, object, chunk = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, c: "Choice", tokenizer: Tokenizer) -> JsonObject:
        return {
            "index": index,
            "text": c.text,
            "logprobs": self.logprobs(c.logprobs, tokenizer),
            "finish_reason": c.finish,
            "stop_reason": c.stop_reason,
        }

    def opening(self, index: int) -> JsonObject | None:
        return None

    def delta(self, index: int, output: RequestOutput, new: list[Placed], tokenizer: Tokenizer) -> JsonObject:
        return {
            "index": index,
            "text": output.text_delta,
            "logprobs": self.logprobs(new or None, tokenizer),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def logprobs(self, placed: list[Placed] | None, tokenizer: Tokenizer) -> JsonObject | None:
        return None if placed is None else text_logprobs(placed, tokenizer)


class ChatShape:
    """`chat.completion` objects and their chunks."""

    prefix, object, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, c: "Choice", tokenizer: Tokenizer) -> JsonObject:
        message = {"role": "assistant", "content": c.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(c.logprobs, tokenizer),
            "finish_reason": c.finish,
        }

    def opening(self, index: int) -> JsonObject | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, output: RequestOutput, new: list[Placed], tokenizer: Tokenizer) -> JsonObject:
        return {
            "index": index,
            "delta": {"content": output.text_delta} if output.text_delta else {},
            "logprobs": self.logprobs(new or None, tokenizer),
            "finish_reason": output.finish_reason,
        }

    def logprobs(self, placed: list[Placed] | None, tokenizer: Tokenizer) -> JsonObject | None:
        return None if placed is None else chat_logprobs(placed, tokenizer)


# -- the answer --------------------------------------------------------------------------------------------------------


@dataclass
class Choice:
    """One choice as it grows. `logprobs`: None when they were not asked for."""

    stream: LogprobStream
    text: str = ""
    logprobs: list[Placed] | None = None
    finish: str | None = None
    stop_reason: str | int | None = None
    tokens: int = 0

    def take(self, output: RequestOutput) -> list[Placed]:
        """Adds an output; returns its log-probabilities."""
        self.text += output.text_delta
        self.tokens = output.num_generated
        self.finish, self.stop_reason = output.finish_reason, output.stop_reason
        new = self.stream.take(output)
        if output.logprobs is not None or new:
            self.logprobs = (self.logprobs or []) + new
        return new


@dataclass
class Answer:
    """An admitted request and its choices: prompt 0's n, then prompt 1's n, ..."""

    body: Sampled
    generation: Generation
    shape: TextShape | ChatShape
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [Choice(LogprobStream(self.tokenizer)) for _ in self.generation.requests]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.generation.served.tokenizer

    def frame(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        identity = {
            "id": f"{self.shape.prefix}-{self.generation.id}",
            "object": kind,
            "created": self.created,
        }
        return identity | {
            "model": self.body.model or self.generation.served.source.model_id,
            "choices": choices,
            "system_fingerprint": self.generation.served.weight_version,
        }

    def usage(self) -> dict[str, int]:
        prompt, new = self.generation.prompt_tokens, sum(choice.tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


async def reply(answer: Answer, request: Request, state: ServerState) -> Response:
    if not answer.body.stream:
        return JSONResponse(await until_disconnect(request, collect(answer)))
    try:
        state.admission.open_stream()
    except Fault:
        answer.generation.discard()
        raise
    return EventStream(stream_events(answer), state.settings.limits.keep_alive_seconds, state.admission.close_stream)


async def collect(answer: Answer) -> JsonObject:
    async with contextlib.aclosing(answer.generation.outputs()) as outputs:
        async for index, output in outputs:
            answer.choices[index].take(output)
    choices = [answer.shape.choice(i, choice, answer.tokenizer) for i, choice in enumerate(answer.choices)]
    return answer.frame(answer.shape.object, choices) | {"usage": answer.usage()}


async def stream_events(answer: Answer) -> AsyncGenerator[bytes, None]:
    """Chunks of all choices as they come, the usage if it was asked for, and `[DONE]`."""
    usage: JsonObject = {"usage": None} if answer.body.include_usage else {}

    def chunk(choices: list[JsonObject], more: JsonObject = usage) -> bytes:
        return event(answer.frame(answer.shape.chunk, choices) | more)

    try:
        for index in range(len(answer.choices)):
            if (opening := answer.shape.opening(index)) is not None:
                yield chunk([opening])
        async with contextlib.aclosing(_deltas(answer)) as deltas:
            async for delta in deltas:
                yield chunk([delta])
        if answer.body.include_usage:
            yield chunk([], {"usage": answer.usage()})
    except Fault as fault:
        yield event(fault.openai())
    yield DONE


async def _deltas(answer: Answer) -> AsyncGenerator[JsonObject, None]:
    async with contextlib.aclosing(answer.generation.outputs()) as outputs:
        async for index, output in outputs:
            new = answer.choices[index].take(output)
            if output.text_delta or new or output.finish_reason is not None:
                yield answer.shape.delta(index, output, new, answer.tokenizer)
