"""The native generation route, which Hugging Face's InferenceClient can call, and the tokenizer routes.

A stream has one event for each token. The text of a token never contains a part of a character or of a stop string, and
the joined texts are `generated_text`. The last event has `generated_text` and `details`; no `[DONE]` follows. Responses
also have `model`, `weight_version` and `request_id`.
"""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response
from typing_extensions import TypedDict

from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.model.text.tokenizer_facts import TokenizerFacts
from fp8serve.server.api.generation_pipeline import Renderer, generate_texts, resolve_model, respond
from fp8serve.server.api.routing import (
    STREAM,
    BoundedRoute,
    JsonObject,
    ResponseModel,
    StateDep,
    finite,
    forbid_extra,
    omit_if_none,
)
from fp8serve.server.faults import Fault
from fp8serve.server.http.streams import until_disconnect
from fp8serve.server.parsing.request_parser import messages_json
from fp8serve.server.schemas import generation_bodies as bodies
from fp8serve.server.schemas.bodies import explicit_options
from fp8serve.server.schemas.messages import plain_tools, prompt_ending
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.generation import Generation
from fp8serve.server.serving.served_weights import ServedWeights

router = APIRouter(tags=["generation"], route_class=BoundedRoute)


# -- responses ---------------------------------------------------------------------------------------------------------


@forbid_extra
class Token(TypedDict):
    id: int
    text: str
    logprob: float | None
    special: bool


class Details(ResponseModel):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None
    input_length: int
    prefill: list[Token]
    tokens: list[Token]
    top_tokens: list[list[Token]] = omit_if_none()


class GenerateResponse(ResponseModel):
    generated_text: str
    details: Details | None = omit_if_none()
    model: str
    weight_version: str
    request_id: str


class TokenizeResponse(ResponseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(ResponseModel):
    prompt: str


@dataclass(frozen=True)
class NewTokens:
    """The tokens of one output, and for each token the most likely tokens, if the request asks for them."""

    tokens: list[JsonObject]
    top_tokens: list[list[JsonObject]]


class NativeRenderer(Renderer[NewTokens, GenerateResponse]):
    """Writes the completion of one prompt."""

    def __init__(self, body: bodies.GenerateBody, generation: Generation, request_id: str) -> None:
        super().__init__(generation)
        self.inputs, self.options, self.request_id = body.inputs, body.parameters, request_id
        self.params = generation.requests[0].params
        self.text = ""
        self.tokens: list[JsonObject] = []
        self.top_tokens: list[list[JsonObject]] = []
        self.prefill: list[JsonObject] = []
        self._last_output = RequestOutput(request_id)
        self._events_sent = 0

    def add(self, index: int, output: RequestOutput) -> NewTokens:
        """Stores an output. All its text is assigned to its last token."""
        tokenizer = self.generation.served.tokenizer
        logprobs = output.logprobs or (None,) * len(output.token_ids)
        texts = [""] * (len(output.token_ids) - 1) + [output.text_delta]
        tokens = [_token(tokenizer, *item) for item in zip(output.token_ids, texts, logprobs, strict=False)]
        if not tokens and output.text_delta and self.tokens:  # at the end, withheld text may arrive without a token
            tokens = [self.tokens[-1] | {"text": output.text_delta}]
        top_tokens = [
            [_token(tokenizer, i, tokenizer.texts.text(i), TokenLogprob(i, p)) for i, p in logprob.top]
            for logprob in logprobs
            if logprob is not None
        ]
        self.text += output.text_delta
        self.tokens += tokens
        self.top_tokens += top_tokens
        self._last_output = output
        if output.prompt_logprobs is not None:  # the first token of the prompt has no log-probability
            first = self.generation.requests[0].prompt_token_ids[0]
            prompt = [(first, None), *((item.token_id, item) for item in output.prompt_logprobs)]
            self.prefill = [_token(tokenizer, i, tokenizer.texts.text(i), logprob) for i, logprob in prompt]
        return NewTokens(tokens, top_tokens)

    # -- the complete response -----------------------------------------------------------------------------------------

    def response(self) -> GenerateResponse:
        details = None
        if self.options.details:
            top_tokens = {"top_tokens": self.top_tokens} if self.options.top_n_tokens else {}
            details = self._details(self._last_output) | {"prefill": self.prefill, "tokens": self.tokens} | top_tokens
        fields = {"generated_text": self._full_text(), "details": details} | self._origin()
        return GenerateResponse.model_validate(fields)

    # -- the stream ----------------------------------------------------------------------------------------------------

    def events(self, index: int, output: RequestOutput, delta: NewTokens) -> Iterator[JsonObject]:
        """Yields an event for each token. The last event has the finish reason, even if the output adds no token."""
        is_finished, top_tokens = output.finish_reason is not None, delta.top_tokens
        for i, token in enumerate(delta.tokens):
            is_last = is_finished and i == len(delta.tokens) - 1
            yield self._event(token, top_tokens[i] if i < len(top_tokens) else [], output if is_last else None)
        if is_finished and not delta.tokens:  # the last token without its text; clients do not display special tokens
            last_token = self.tokens[-1] if self.tokens else {"id": 0, "logprob": None}
            yield self._event(last_token | {"text": "", "special": True}, [], output)

    def failure(self, fault: Fault) -> JsonObject:
        return fault.native(self.request_id)

    def _event(self, token: JsonObject, top_tokens: list[JsonObject], last_output: RequestOutput | None) -> JsonObject:
        self._events_sent += 1
        event: JsonObject = {"index": self._events_sent, "token": token}
        if self.options.top_n_tokens:
            event["top_tokens"] = top_tokens
        if last_output is None:
            return event | {"generated_text": None, "details": None}
        return event | {"generated_text": self._full_text(), "details": self._details(last_output)} | self._origin()

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

    def _origin(self) -> dict[str, str]:
        served = self.generation.served
        return {"model": served.source.model_id, "weight_version": served.weight_version, "request_id": self.request_id}


def _token(tokenizer: TokenizerFacts, token_id: int, text: str, logprob: TokenLogprob | None) -> JsonObject:
    value = None if logprob is None else finite(logprob.logprob)
    return {"id": token_id, "text": text, "logprob": value, "special": token_id in tokenizer.special_ids}


def finish_reason(output: RequestOutput) -> str:
    """Returns the finish reason by the name that text-generation-inference gave it."""
    if output.finish_reason == "length":
        return "length"
    return "eos_token" if output.stop_reason is None else "stop_sequence"


# -- routes ------------------------------------------------------------------------------------------------------------

RANDOM_SAMPLING_FIELDS = frozenset({"temperature", "top_p", "top_k", "min_p"})


def to_sampling_params(p: bodies.GenerateParameters) -> SamplingParams:
    """Converts the parameters. Decoding is greedy unless `do_sample` or a parameter that only affects sampling is set.
    Raises RequestError if parameters contradict each other.
    """
    values = explicit_options(p, SamplingParams, bodies.RENAMED_FIELDS)
    if not (p.do_sample or RANDOM_SAMPLING_FIELDS & values.keys()):
        values["temperature"] = 0.0
    is_random = values.get("temperature") != 0
    values["seed"] = values.get("seed", secrets.randbits(53)) if is_random else None
    values["prompt_logprobs"] = 0 if p.decoder_input_details else None
    values["logprobs"] = p.top_n_tokens or (0 if p.details else None)
    return SamplingParams(**values | p.constraint())


@router.post("/generate", summary="Generate text", response_model=GenerateResponse, responses=STREAM)
async def generate(body: bodies.GenerateBody, request: Request, state: StateDep) -> Response | GenerateResponse:
    """Returns one object, or server-sent events with `stream: true`."""
    served = await resolve_model(body, request, state)
    params = to_sampling_params(body.parameters)
    field, prompt = ("inputs", body.inputs or "") if body.input_ids is None else ("input_ids", body.input_ids)
    truncate = body.parameters.truncate
    generation = await generate_texts(served, [prompt], params, request, state, field=field, truncate=truncate)
    renderer = NativeRenderer(body, generation, request.scope["request_id"])
    return await respond(renderer, request, state, body.stream)


@router.post("/tokenize", summary="Tokenize text or messages", response_model=TokenizeResponse)
async def tokenize(body: bodies.TokenizeBody, request: Request, state: StateDep) -> Response:
    """Returns the token ids that generation uses for the same text or messages."""
    served = state.models.resolve(body.model)
    text = messages_json(body.messages) if body.messages is not None else (body.prompt or "").encode()
    options = {
        "special": body.add_special_tokens,
        "ending": prompt_ending(body.messages or [], body.add_generation_prompt, body.continue_final_message),
        "variables": (body.chat_template_kwargs or {}) | {"tools": plain_tools(body.tools)},
    }
    head = {"op": "tokenize", "messages": body.messages is not None, "strings": body.return_token_strs, **options}
    return await _run_tokenizer(state, request, served, head, text)


@router.post("/detokenize", summary="Decode token ids", response_model=DetokenizeResponse)
async def detokenize(body: bodies.DetokenizeBody, request: Request, state: StateDep) -> Response:
    served = state.models.resolve(body.model)
    state.parser.size_limits(served.engine.limits.max_model_len).check(body)
    head = {"op": "detokenize", "skip_special": body.skip_special_tokens}
    return await _run_tokenizer(state, request, served, head, json.dumps(body.tokens).encode())


async def _run_tokenizer(
    state: ServerState, request: Request, served: ServedWeights, head: dict[str, Any], text: bytes
) -> Response:
    with served.lease():
        _, content = await until_disconnect(request, state.parser.run_job(served, head, text))
    return Response(content, media_type="application/json")
