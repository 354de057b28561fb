"""The route `/v1/completions`, and the renderer that it shares with `/v1/chat/completions`.

The choices of a request run concurrently, and their chunks interleave. If a stream fails after the status 200, it ends
with `data: {"error": ...}` and `data: [DONE]`, which OpenAI's client raises as an APIError. `system_fingerprint` is the
version of the weights.
"""

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.api.generation_pipeline import Renderer, ResponseT, generate_texts, resolve_model, respond
from fp8serve.server.api.openai.logprobs import (
    LogprobStream,
    PositionedToken,
    PromptLogprobs,
    TextLogprobs,
    completion_logprobs,
    position_prompt_tokens,
    prompt_logprobs_by_id,
)
from fp8serve.server.api.routing import (
    STREAM,
    BoundedRoute,
    CachedTokens,
    JsonObject,
    ResponseModel,
    StateDep,
    omit_if_none,
)
from fp8serve.server.faults import Fault
from fp8serve.server.http.streams import DONE, to_json
from fp8serve.server.schemas.openai_bodies import CompletionBody, SamplingBody
from fp8serve.server.serving.generation import Generation

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BoundedRoute)


class TextChoice(ResponseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = omit_if_none()
    prompt_token_ids: list[int] | None = omit_if_none()


class Usage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Completion(ResponseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: Usage


@dataclass
class ChoiceState:
    """The outputs of one choice so far. `logprobs` is None if the request does not ask for them."""

    logprob_stream: LogprobStream
    prompt_token_ids: Sequence[int]
    text: str = ""
    logprobs: list[PositionedToken] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    tokens: int = 0
    prompt_logprobs: list[JsonObject | None] | None = None
    cumulative_logprob: float = 0.0
    token_ids: list[int] = field(default_factory=list)

    @property
    def mean_logprob(self) -> float:
        return self.cumulative_logprob / max(self.tokens, 1)

    def add(self, output: RequestOutput) -> list[PositionedToken]:
        """Adds an output and returns its tokens with log-probabilities."""
        self.text += output.text_delta
        self.tokens = output.num_generated
        self.token_ids += output.token_ids
        self.cumulative_logprob += sum(token.logprob for token in output.logprobs or ())
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        tokens = self.logprob_stream.add(output)
        if output.logprobs is not None or tokens:
            self.logprobs = (self.logprobs or []) + tokens
        return tokens


class CompletionRenderer(Renderer[list[PositionedToken], ResponseT]):
    """The shared part of the renderers of both routes. The choices of prompt 0 come first, then those of prompt 1."""

    END = DONE
    PREFIX: ClassVar[str]
    OBJECT: ClassVar[str]
    CHUNK: ClassVar[str]
    TEXT_FIELD: ClassVar[str]
    """The field of a chunk that has the new text."""

    def __init__(self, body: SamplingBody, generation: Generation) -> None:
        super().__init__(generation)
        generation.returns_aborted = True
        self.body = body
        self.created = int(time.time())
        self.tokenizer = generation.served.tokenizer
        self.params = generation.requests[0].params
        self.choices = [
            ChoiceState(LogprobStream(self.tokenizer, self.params), request.prompt_token_ids)
            for request in generation.requests
        ]

    @abstractmethod
    def choice(self, index: int, choice: ChoiceState) -> JsonObject:
        """Returns the JSON of a complete choice."""

    def returned_choices(self) -> Iterable[ChoiceState]:
        return self.choices

    def add(self, index: int, output: RequestOutput) -> list[PositionedToken]:
        if output.prompt_logprobs is not None and self.body.prompt_logprobs is not None:
            prompt_logprobs = prompt_logprobs_by_id(output.prompt_logprobs, self.body.prompt_logprobs, self.tokenizer)
            self.choices[index].prompt_logprobs = prompt_logprobs
        return self.choices[index].add(output)

    @property
    def has_plain_chunks(self) -> bool:
        """Whether the chunks of outputs that contain only text differ in nothing but this text."""
        return len(self.choices) == 1 and self.params.logprobs is None and not self.body.continuous_usage

    @abstractmethod
    def text_choice(self, text: str) -> JsonObject:
        """Returns the choice of a chunk that has only text, if the stream `has_plain_chunks`."""

    def plain_chunk(self) -> tuple[bytes, bytes] | None:
        if not self.has_plain_chunks:
            return None
        field = f'"{self.TEXT_FIELD}":'
        before, after = to_json(self._chunk(self.text_choice(""))).split(f'{field}""')
        return f"data: {before}{field}".encode(), f"{after}\n\n".encode()

    def _response_fields(self) -> JsonObject:
        choices = [self.choice(i, choice) for i, choice in enumerate(self.returned_choices())]
        return self._object(self.OBJECT, choices) | {"usage": self._usage()}

    def closing(self) -> Iterator[JsonObject]:
        """Yields the chunk with the usage if the request asks for it."""
        if self.body.include_usage:
            yield self._object(self.CHUNK, []) | {"usage": self._usage()}

    def failure(self, fault: Fault) -> JsonObject:
        return fault.openai()

    def _chunk(self, choice: JsonObject) -> JsonObject:
        """Returns a chunk with `choice`. With continuous usage, the chunk also has the usage of this choice so far."""
        index = choice["index"]
        tokens = len(self.generation.requests[index].prompt_token_ids), self.choices[index].tokens
        usage = _token_counts(*tokens) if self.body.continuous_usage else None
        return self._object(self.CHUNK, [choice]) | ({"usage": usage} if self.body.include_usage else {})

    def _object(self, object_type: str, choices: list[JsonObject]) -> JsonObject:
        served = self.generation.served
        return {
            "id": f"{self.PREFIX}-{self.generation.id}",
            "object": object_type,
            "created": self.created,
            "model": self.body.model or served.source.model_id,
            "choices": choices,
            "system_fingerprint": served.weight_version,
        }

    def _usage(self) -> JsonObject:
        counts = _token_counts(self.generation.prompt_tokens, sum(choice.tokens for choice in self.choices))
        return counts | {"prompt_tokens_details": {"cached_tokens": self.generation.cached_tokens}}


def _token_counts(prompt: int, completion: int) -> JsonObject:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class TextRenderer(CompletionRenderer[Completion]):
    """Writes `text_completion` objects."""

    PREFIX, OBJECT, CHUNK, TEXT_FIELD = "cmpl", "text_completion", "text_completion", "text"

    def __init__(self, body: CompletionBody, generation: Generation) -> None:
        super().__init__(body, generation)
        self._hides_completion = body.max_tokens == 0
        self._has_logprobs = body.logprobs is not None
        self._has_echoed_logprobs = bool(body.echo) and self._has_logprobs
        self._num_alternatives = body.logprobs or 0
        self._echoes = [echo for echo in generation.echoes for _ in range(generation.n)]
        self._unsent_echoes = set(range(len(self._echoes)))  # indexes of choices whose prompt is not streamed yet
        for echo, choice in zip(self._echoes, self.choices, strict=False):
            choice.text = echo.text
            choice.logprob_stream = LogprobStream(self.tokenizer, self.params, len(choice.text))

    def response(self) -> Completion:
        return Completion.model_validate(self._response_fields())

    def add(self, index: int, output: RequestOutput) -> list[PositionedToken]:
        if output.prompt_logprobs is not None and self._has_echoed_logprobs:
            self.choices[index].logprobs = self._prompt_tokens(index, output.prompt_logprobs)
        return super().add(index, self._visible(output))

    def events(self, index: int, output: RequestOutput, delta: list[PositionedToken]) -> Iterator[JsonObject]:
        if index in self._unsent_echoes:
            self._unsent_echoes.remove(index)
            yield self._chunk(self._echo(index, output))
        visible = self._visible(output)
        if visible.text_delta or delta or visible.finish_reason is not None:
            reasons = {"finish_reason": visible.finish_reason, "stop_reason": visible.stop_reason}
            logprobs = self._logprobs(delta or None)
            yield self._chunk({"index": index, "text": visible.text_delta, "logprobs": logprobs} | reasons)

    @property
    def has_plain_chunks(self) -> bool:
        return super().has_plain_chunks and not self._unsent_echoes and not self._hides_completion

    def text_choice(self, text: str) -> JsonObject:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def _visible(self, output: RequestOutput) -> RequestOutput:
        """Returns the output, without its token if the request asks for no new tokens (`max_tokens: 0`)."""
        if not self._hides_completion:
            return output
        reason = "length" if output.finish_reason == "stop" else output.finish_reason
        logprobs = output.prompt_logprobs
        return RequestOutput(output.request_id, finish_reason=reason, error=output.error, prompt_logprobs=logprobs)

    def _echo(self, index: int, output: RequestOutput) -> JsonObject:
        tokens = None
        if output.prompt_logprobs is not None:
            tokens = self._prompt_tokens(index, output.prompt_logprobs)
        text, reasons = self._echoes[index].text, {"finish_reason": None, "stop_reason": None}
        return {"index": index, "text": text, "logprobs": self._logprobs(tokens), **reasons}

    def _prompt_tokens(self, index: int, logprobs: Sequence[TokenLogprob]) -> list[PositionedToken]:
        top = self._num_alternatives
        requested = [TokenLogprob(token.token_id, token.logprob, token.top[:top]) for token in logprobs]
        first_id = self.generation.requests[index].prompt_token_ids[0]
        hidden_ids = self.tokenizer.special_ids if self.params.skip_special_tokens else frozenset()
        return position_prompt_tokens(first_id, requested, self._echoes[index].lengths, hidden_ids)

    def returned_choices(self) -> Iterator[ChoiceState]:
        """Yields the `n` choices of each prompt. With `best_of`, they are those with the highest mean log-probability;
        equal choices keep their order."""
        candidates, n = self.generation.n, self.body.num_choices
        for start in range(0, len(self.choices), candidates):
            group = self.choices[start : start + candidates]
            yield from (sorted(group, key=lambda choice: -choice.mean_logprob) if candidates > n else group)[:n]

    def choice(self, index: int, choice: ChoiceState) -> JsonObject:
        logprobs = choice.logprobs if self._has_logprobs else None
        return {
            "index": index,
            "text": choice.text,
            "logprobs": self._logprobs(logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "prompt_logprobs": choice.prompt_logprobs,
            "token_ids": choice.token_ids if self.body.return_token_ids else None,
            "prompt_token_ids": choice.prompt_token_ids if self.body.return_token_ids else None,
        }

    def _logprobs(self, tokens: list[PositionedToken] | None) -> JsonObject | None:
        as_ids = self.body.return_tokens_as_token_ids
        return None if tokens is None else completion_logprobs(tokens, self.tokenizer, as_ids)


@router.post("/completions", summary="Continue a text", response_model=Completion, responses=STREAM)
async def completions(body: CompletionBody, request: Request, state: StateDep) -> Response | Completion:
    """Generates `n` completions of each prompt."""
    served = await resolve_model(body, request, state)
    params = body.params(SamplingParams().max_new_tokens if body.max_tokens is None else body.max_tokens)
    generation = await generate_texts(
        served,
        body.prompts(),
        params,
        request,
        state,
        field="prompt",
        choices=body.num_candidates,
        echo=bool(body.echo),
    )
    return await respond(TextRenderer(body, generation), request, state, body.stream)
