"""The native generation routes: text-generation-inference's shapes, so its clients work, and a little more.

Everything that can be refused is refused before the 200, in the stream too. A stream sends one event for each token;
the text of a token is what it made certain, so characters are whole, stop strings never show, and the texts add up
to `generated_text`. The last event carries `generated_text` and `details`; there is no `[DONE]`. Answers also name
`model`, `weight_version`, `request_id`.
"""

import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from fp8serve.engine.request import RequestOutput, SamplingParams, TokenLogprob
from fp8serve.errors import Fp8ServeError
from fp8serve.model.tokenizer import Tokenizer
from fp8serve.server.api.bounded_route import BoundedRoute
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.api.wire import STREAM_RESPONSE, finite
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.streams import EventStream, event, until_disconnect
from fp8serve.server.parsing.request_parser import plain
from fp8serve.server.schemas.native import (
    DetokenizeBody,
    GenerateBody,
    GenerateParameters,
    TokenizeBody,
)
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.generation import Generation
from fp8serve.server.serving.models import Served

router = APIRouter(tags=["generation"], route_class=BoundedRoute)
DEFAULT_NEW_TOKENS = 16


@router.post("/generate", summary="Generate text", response_model=None, responses=STREAM_RESPONSE)
async def generate(body: GenerateBody, request: Request, state: StateDep) -> Response:
    """One answer, or server-sent events with `stream: true`."""
    job = await prepare(body, request, state)
    if body.stream:
        return stream(job, state)
    return JSONResponse(await until_disconnect(request, collect(job)), headers=timing_headers(job))


@router.post(
    "/generate_stream", summary="Generate text as server-sent events", response_model=None, responses=STREAM_RESPONSE
)
async def generate_stream(body: GenerateBody, request: Request, state: StateDep) -> Response:
    return stream(await prepare(body, request, state), state)


@router.post("/generate/stream", include_in_schema=False)
async def generate_slash_stream(body: GenerateBody, request: Request, state: StateDep) -> Response:
    return await generate_stream(body, request, state)


@router.post(
    "/",
    summary="The same for clients of Hugging Face's inference endpoints",
    response_model=None,
    responses=STREAM_RESPONSE,
)
async def root(body: GenerateBody, request: Request, state: StateDep) -> Response:
    """As /generate; the answer without `stream` is a list of one."""
    job = await prepare(body, request, state)
    if body.stream:
        return stream(job, state)
    return JSONResponse([await until_disconnect(request, collect(job))], headers=timing_headers(job))


# -- one request -------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """An admitted request and what has come of it."""

    body: GenerateBody
    request_id: str
    generation: Generation
    params: SamplingParams
    started: float = field(default_factory=time.perf_counter)
    text: str = ""
    tokens: list[dict[str, Any]] = field(default_factory=list)
    top_tokens: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def served(self) -> Served:
        return self.generation.served

    def full_text(self) -> str:
        prompt = self.body.inputs if self.body.parameters.return_full_text and self.body.inputs else ""
        return prompt + self.text

    def take(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Adds an output; returns its tokens. The text that became certain goes to the last of them."""
        tokenizer = self.served.tokenizer
        logprobs = output.logprobs or (None,) * len(output.token_ids)
        texts = [""] * (len(output.token_ids) - 1) + [output.text_delta]
        new = [_token(tokenizer, *item) for item in zip(output.token_ids, texts, logprobs, strict=False)]
        if not new and output.text_delta and self.tokens:  # a flush without a token of its own
            new = [self.tokens[-1] | {"text": output.text_delta}]
        self.text += output.text_delta
        self.tokens += new
        self.top_tokens += [_top(tokenizer, logprob) for logprob in logprobs if logprob is not None]
        return new

    def details(self, output: RequestOutput, whole: bool) -> dict[str, Any]:
        """`whole`: with every token, as in an answer that is not streamed."""
        facts = {
            "finish_reason": finish_reason(output),
            "generated_tokens": output.num_generated,
            "seed": self.params.seed if self.params.temperature > 0 else None,
            "input_length": output.num_prompt_tokens,
        }
        if not whole:
            return facts
        tops = {"top_tokens": self.top_tokens} if self.body.parameters.top_n_tokens else {}
        return facts | {"prefill": [], "tokens": self.tokens, "best_of_sequences": None} | tops

    def origin(self) -> dict[str, str]:
        served = self.served
        return {"model": served.source.model_id, "weight_version": served.weight_version, "request_id": self.request_id}


def _token(tokenizer: Tokenizer, token_id: int, text: str, logprob: TokenLogprob | None) -> dict[str, Any]:
    value = None if logprob is None else finite(logprob.logprob)
    return {"id": token_id, "text": text, "logprob": value, "special": token_id in tokenizer.special_ids}


def _top(tokenizer: Tokenizer, logprob: TokenLogprob) -> list[dict[str, Any]]:
    return [
        {"id": i, "text": tokenizer.token_text(i), "logprob": finite(p), "special": i in tokenizer.special_ids}
        for i, p in logprob.top
    ]


def finish_reason(output: RequestOutput) -> str:
    """In text-generation-inference's words."""
    if output.finish_reason == "length":
        return "length"
    return "eos_token" if output.stop_reason is None else "stop_sequence"


async def prepare(body: GenerateBody, request: Request, state: ServerState) -> Answer:
    """Tokenises, checks and admits. Raises Fault; after it the answer is a 200."""
    served = state.served(body.model)
    state.parser.sizes(served.engine.limits.max_model_len).check(body)
    params = sampling(body.parameters)
    prompt = body.inputs or "" if body.input_ids is None else body.input_ids
    with served.lease(), state.admission.reserve(1) as places:
        prompts = await until_disconnect(request, state.parser.prompts(served, [prompt], body.parameters.truncate))
        generation = state.generation(served, prompts, params, places, tenant=request.scope["tenant"])
    return Answer(body, request.scope["request_id"], generation, params)


def sampling(p: GenerateParameters) -> SamplingParams:
    """Greedy unless sampling is asked for, by `do_sample` or by a parameter that only sampling uses. Fault for a
    contradiction.
    """
    sampled = p.do_sample or any(value is not None for value in (p.temperature, p.top_p, p.top_k, p.min_p))
    temperature = (1.0 if p.temperature is None else p.temperature) if sampled else 0.0
    seed = p.seed if p.seed is not None else secrets.randbits(53)
    wanted = p.top_n_tokens or (0 if p.details else None)
    return make_params(
        max_new_tokens=p.max_new_tokens or DEFAULT_NEW_TOKENS,
        temperature=temperature,
        top_p=1.0 if p.top_p is None else p.top_p,
        top_k=p.top_k or 0,
        min_p=p.min_p or 0.0,
        presence_penalty=p.presence_penalty or 0.0,
        frequency_penalty=p.frequency_penalty or 0.0,
        repetition_penalty=p.repetition_penalty or 1.0,
        seed=seed if temperature > 0 else None,
        stop=tuple(p.stop),
        stop_token_ids=tuple(p.stop_token_ids),
        ignore_eos=p.ignore_eos,
        min_tokens=p.min_tokens,
        logprobs=wanted,
    )


def make_params(**values: Any) -> SamplingParams:
    """SamplingParams, its refusal as a Fault."""
    try:
        return SamplingParams(**values)
    except Fp8ServeError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error)) from None


# -- its answer --------------------------------------------------------------------------------------------------------


async def collect(job: Answer) -> dict[str, Any]:
    """The whole answer."""
    last = RequestOutput(job.request_id)
    async with contextlib.aclosing(job.generation.outputs()) as outputs:
        async for _, output in outputs:
            job.take(output)
            last = output
    body: dict[str, Any] = {"generated_text": job.full_text()}
    if job.body.parameters.details:
        body["details"] = job.details(last, whole=True)
    return body | job.origin()


def stream(job: Answer, state: ServerState) -> EventStream:
    try:
        state.admission.open_stream()
    except Fault:
        job.generation.discard()
        raise
    return EventStream(stream_events(job), state.settings.limits.keep_alive_seconds, state.admission.close_stream)


async def stream_events(job: Answer) -> AsyncGenerator[bytes, None]:
    """One event for each token; a failure becomes a last event with `error`."""
    index = 0
    try:
        async with contextlib.aclosing(job.generation.outputs()) as outputs:
            async for _, output in outputs:
                first = len(job.top_tokens)
                new = job.take(output)
                tops = job.top_tokens[first:]
                for i, token in enumerate(new):
                    index += 1
                    last = output.finish_reason is not None and i == len(new) - 1
                    yield event(
                        _stream_event(job, index, token, tops[i] if i < len(tops) else [], output if last else None)
                    )
                if output.finish_reason is not None and not new:
                    yield event(_stream_event(job, index + 1, _nothing(job), [], output))
    except Fault as fault:
        yield event(fault.native(job.request_id))


def _nothing(job: Answer) -> dict[str, Any]:
    """A token for a last event that adds none: the one before it again, without text, marked special so that clients
    skip it.
    """
    return (job.tokens[-1] if job.tokens else {"id": 0, "logprob": None}) | {"text": "", "special": True}


def _stream_event(
    job: Answer, index: int, token: dict[str, Any], top: list[dict[str, Any]], final: RequestOutput | None
) -> dict[str, Any]:
    end = (
        {"generated_text": None, "details": None}
        if final is None
        else {"generated_text": job.full_text(), "details": job.details(final, whole=False)}
    )
    tops = {"top_tokens": top} if job.body.parameters.top_n_tokens else {}
    return {"index": index, "token": token} | tops | end | (job.origin() if final is not None else {})


def timing_headers(job: Answer) -> dict[str, str]:
    """Headers that text-generation-inference's dashboards read; times in milliseconds."""
    milliseconds = str(round((time.perf_counter() - job.started) * 1e3))
    prompt = len(job.generation.requests[0].prompt_token_ids)
    return {"x-total-time": milliseconds, "x-prompt-tokens": str(prompt), "x-generated-tokens": str(len(job.tokens))}


# -- tokens ------------------------------------------------------------------------------------------------------------


@router.post("/tokenize", summary="Text or messages to token ids", response_model=None)
async def tokenize(body: TokenizeBody, request: Request, state: StateDep) -> Response:
    """The ids that generation would see for the same text."""
    served = state.models.resolve(body.model)
    text = plain(body.messages) if body.messages is not None else (body.prompt or "").encode()
    asked = {"special": body.add_special_tokens, "prompted": body.add_generation_prompt}
    head = {"op": "tokenize", "messages": body.messages is not None, "strings": body.return_token_strs, **asked}
    return await _rendered(state, request, served, head, text)


@router.post("/detokenize", summary="Token ids to text", response_model=None)
async def detokenize(body: DetokenizeBody, request: Request, state: StateDep) -> Response:
    served = state.models.resolve(body.model)
    state.parser.sizes(served.engine.limits.max_model_len).check(body)
    head = {"op": "detokenize", "skip": body.skip_special_tokens}
    return await _rendered(state, request, served, head, json.dumps(body.tokens).encode())


async def _rendered(
    state: ServerState, request: Request, served: Served, head: dict[str, Any], text: bytes
) -> Response:
    with served.lease():
        content = await until_disconnect(request, state.parser.render(served, head, text))
    return Response(content, media_type="application/json")
