"""The native generation routes: text-generation-inference's shapes, so its clients work, and a little more.

A stream sends one event for each token; the text of a token is the text that it made certain, so characters are whole,
stop strings never appear, and the texts add up to `generated_text`. The last event has `generated_text` and `details`;
there is no `[DONE]`. Answers also have `model`, `weight_version` and `request_id`. `/tokenize` and `/detokenize` have
the tokenizer of the model that is served.
"""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.model.text.tokenizer_facts import TokenizerFacts
from fp8serve.server.api.answer_pipeline import Renderer, generate_texts, model_for, respond
from fp8serve.server.api.routing import STREAM, Answer, BoundedRoute, JsonObject, StateDep, absent, closed, finite
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.streams import until_disconnect
from fp8serve.server.parsing.request_parser import plain
from fp8serve.server.schemas.bodies import given
from fp8serve.server.schemas.generation_bodies import (
    SPELT_OTHERWISE,
    DetokenizeBody,
    GenerateBody,
    GenerateParameters,
    TokenizeBody,
)
from fp8serve.server.schemas.messages import ending_of, plain_tools
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.generation import Generation
from fp8serve.server.serving.served import Served

router = APIRouter(tags=["generation"], route_class=BoundedRoute)


# -- answers -----------------------------------------------------------------------------------------------------------


@closed
class Token(TypedDict):
    id: int
    text: str
    logprob: float | None
    special: bool


class Details(Answer):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None
    input_length: int
    prefill: list[Token]
    tokens: list[Token]
    best_of_sequences: None = None
    top_tokens: list[list[Token]] = absent()


class Generated(Answer):
    generated_text: str
    details: Details | None = absent()
    model: str
    weight_version: str
    request_id: str


class Tokenized(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    prompt: str


@dataclass(frozen=True)
class NewTokens:
    """The contents of one output: tokens, and the likeliest tokens at the place of each (empty when not asked for)."""

    tokens: list[JsonObject]
    tops: list[list[JsonObject]]


class NativeRenderer(Renderer[NewTokens, Generated]):
    """One answer to one prompt."""

    def __init__(self, body: GenerateBody, generation: Generation, request_id: str) -> None:
        super().__init__(generation)
        self.inputs, self.options, self.request_id = body.inputs, body.parameters, request_id
        self.params = generation.requests[0].params
        self.text = ""
        self.tokens: list[JsonObject] = []
        self.top_tokens: list[list[JsonObject]] = []
        self.prefill: list[JsonObject] = []
        self._last = RequestOutput(request_id)
        self._shown = 0  # events so far

    def add(self, index: int, output: RequestOutput) -> NewTokens:
        """Takes an output. The text that became certain goes to the last of its tokens."""
        tokenizer = self.generation.served.tokenizer
        logprobs = output.logprobs or (None,) * len(output.token_ids)
        texts = [""] * (len(output.token_ids) - 1) + [output.text_delta]
        new = [_token(tokenizer, *item) for item in zip(output.token_ids, texts, logprobs, strict=False)]
        if not new and output.text_delta and self.tokens:  # a flush without a token of its own
            new = [self.tokens[-1] | {"text": output.text_delta}]
        tops = [_top(tokenizer, logprob) for logprob in logprobs if logprob is not None]
        self.text += output.text_delta
        self.tokens += new
        self.top_tokens += tops
        self._last = output
        if output.prompt_logprobs is not None:
            self.prefill = self._prefill(output.prompt_logprobs)
        return NewTokens(new, tops)

    # -- as a whole ----------------------------------------------------------------------------------------------------

    def whole(self) -> Generated:
        details = None
        if self.options.details:
            tops = {"top_tokens": self.top_tokens} if self.options.top_n_tokens else {}
            details = self._details(self._last) | {"prefill": self.prefill, "tokens": self.tokens} | tops
        return Generated.model_validate({"generated_text": self._full_text(), "details": details} | self._origin())

    # -- as a stream ---------------------------------------------------------------------------------------------------

    def events(self, index: int, output: RequestOutput, new: NewTokens) -> Iterator[JsonObject]:
        """One event for each token. The last one tells how the answer ended, even if it adds no token."""
        ended = output.finish_reason is not None
        for i, token in enumerate(new.tokens):
            last = ended and i == len(new.tokens) - 1
            yield self._event(token, new.tops[i] if i < len(new.tops) else [], output if last else None)
        if ended and not new.tokens:
            yield self._event(self._no_token(), [], output)

    def failure(self, fault: Fault) -> JsonObject:
        return fault.native(self.request_id)

    def _event(self, token: JsonObject, top: list[JsonObject], final: RequestOutput | None) -> JsonObject:
        self._shown += 1
        end: JsonObject = {"generated_text": None, "details": None}
        if final is not None:
            end = {"generated_text": self._full_text(), "details": self._details(final)}
        tops = {"top_tokens": top} if self.options.top_n_tokens else {}
        return {"index": self._shown, "token": token} | tops | end | (self._origin() if final is not None else {})

    def _no_token(self) -> JsonObject:
        """The last token again, without text, marked special so that clients skip it."""
        return (self.tokens[-1] if self.tokens else {"id": 0, "logprob": None}) | {"text": "", "special": True}

    # -- parts of both -------------------------------------------------------------------------------------------------

    def _full_text(self) -> str:
        prompt = self.inputs if self.options.return_full_text and self.inputs else ""
        return prompt + self.text

    def _details(self, output: RequestOutput) -> JsonObject:
        return {
            "finish_reason": finish_reason(output),
            "generated_tokens": output.num_generated,
            "seed": self.params.seed if self.params.temperature > 0 else None,
            "input_length": output.num_prompt_tokens,
        }

    def _prefill(self, logprobs: Sequence[TokenLogprob]) -> list[JsonObject]:
        """The prompt's tokens; the first has no log-probability."""
        tokenizer, first = self.generation.served.tokenizer, self.generation.requests[0].prompt_token_ids[0]
        tokens = [(first, None), *((item.token_id, item) for item in logprobs)]
        return [_token(tokenizer, token_id, tokenizer.texts.text(token_id), item) for token_id, item in tokens]

    def _origin(self) -> dict[str, str]:
        served = self.generation.served
        return {"model": served.source.model_id, "weight_version": served.weight_version, "request_id": self.request_id}


def _token(tokenizer: TokenizerFacts, token_id: int, text: str, logprob: TokenLogprob | None) -> JsonObject:
    value = None if logprob is None else finite(logprob.logprob)
    return {"id": token_id, "text": text, "logprob": value, "special": token_id in tokenizer.special_ids}


def _top(tokenizer: TokenizerFacts, logprob: TokenLogprob) -> list[JsonObject]:
    return [
        {"id": i, "text": tokenizer.texts.text(i), "logprob": finite(p), "special": i in tokenizer.special_ids}
        for i, p in logprob.top
    ]


def finish_reason(output: RequestOutput) -> str:
    """In text-generation-inference's words."""
    if output.finish_reason == "length":
        return "length"
    return "eos_token" if output.stop_reason is None else "stop_sequence"


# -- routes ------------------------------------------------------------------------------------------------------------

ONLY_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p"})


def sampling(p: GenerateParameters) -> SamplingParams:
    """Greedy unless sampling is asked for, by `do_sample` or by a parameter that only sampling uses. RequestError
    for a contradiction.
    """
    values = given(p, SamplingParams, SPELT_OTHERWISE)
    if not (p.do_sample or ONLY_SAMPLING & values.keys()):
        values["temperature"] = 0.0
    is_random = values.get("temperature") != 0
    values["seed"] = values.get("seed", secrets.randbits(53)) if is_random else None
    values["prompt_logprobs"] = 0 if p.decoder_input_details else None
    values["logprobs"] = p.top_n_tokens or (0 if p.details else None)
    return SamplingParams(**values | p.form())


@router.post("/generate", summary="Generate text", response_model=Generated, responses=STREAM)
async def generate(body: GenerateBody, request: Request, response: Response, state: StateDep) -> Response | Generated:
    """One answer, or server-sent events with `stream: true`."""
    return await _generate(body, request, response, state, body.stream)


@router.post(
    "/generate_stream", summary="Generate text as server-sent events", response_class=Response, responses=STREAM
)
async def generate_stream(body: GenerateBody, request: Request, response: Response, state: StateDep) -> Any:
    if body.parameters.decoder_input_details:
        param = "parameters.decoder_input_details"
        raise Fault(Code.INVALID_PARAMETER, "decoder_input_details cannot be streamed.", param=param)
    return await _generate(body, request, response, state, stream=True)


@router.post("/generate/stream", include_in_schema=False)
async def generate_slash_stream(body: GenerateBody, request: Request, response: Response, state: StateDep) -> Any:
    return await generate_stream(body, request, response, state)


@router.post(
    "/",
    summary="The same for clients of Hugging Face's inference endpoints",
    response_model=Annotated[list[Generated], Field(min_length=1, max_length=1)],
    responses=STREAM,
)
async def root(body: GenerateBody, request: Request, response: Response, state: StateDep) -> Response | list[Generated]:
    """As /generate; the answer without `stream` is a list of one."""
    answer = await _generate(body, request, response, state, body.stream)
    return answer if isinstance(answer, Response) else [answer]


async def _generate(
    body: GenerateBody, request: Request, response: Response, state: ServerState, stream: bool
) -> Response | Generated:
    """One answer to one prompt, with the headers that text-generation-inference's dashboards read."""
    served = model_for(body, state)
    params = sampling(body.parameters)
    prompt = body.inputs or "" if body.input_ids is None else body.input_ids
    generation = await generate_texts(served, [prompt], params, request, state, truncate=body.parameters.truncate)
    started = time.perf_counter()
    renderer = NativeRenderer(body, generation, request.scope["request_id"])
    answer = await respond(renderer, request, state, stream)
    response.headers["x-total-time"] = str(round((time.perf_counter() - started) * 1e3))  # in milliseconds
    response.headers["x-prompt-tokens"] = str(generation.prompt_tokens)
    response.headers["x-generated-tokens"] = str(len(renderer.tokens))
    return answer


@router.post("/tokenize", summary="Text or messages to token ids", response_model=Tokenized)
async def tokenize(body: TokenizeBody, request: Request, state: StateDep) -> Response:
    """The ids that generation would see for the same text."""
    served = state.models.resolve(body.model)
    text = plain(body.messages) if body.messages is not None else (body.prompt or "").encode()
    options = {
        "special": body.add_special_tokens,
        "ending": ending_of(body.messages or [], body.add_generation_prompt, body.continue_final_message),
        "variables": (body.chat_template_kwargs or {}) | {"tools": plain_tools(body.tools)},
    }
    head = {"op": "tokenize", "messages": body.messages is not None, "strings": body.return_token_strs, **options}
    return await _rendered(state, request, served, head, text)


@router.post("/detokenize", summary="Token ids to text", response_model=Detokenized)
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
