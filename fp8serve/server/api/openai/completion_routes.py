"""`/v1/completions`, and what its answers have in common with those of `/v1/chat/completions`: OpenAI's wire.

Choices of one request run at the same time and their chunks interleave by `index`. A stream's failures after the 200
arrive as `data: {"error": ...}` and then `data: [DONE]`, which OpenAI's own client raises as an APIError.
`system_fingerprint` is the version of the weights that answered.
"""

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.api.answer_pipeline import Renderer, Whole, generate_texts, model_for, respond
from fp8serve.server.api.openai.logprobs import (
    LogprobStream,
    Placed,
    PromptLogprobs,
    TextLogprobs,
    placed_prompt,
    prompt_table,
    text_logprobs,
)
from fp8serve.server.api.routing import STREAM, Answer, BoundedRoute, CachedTokens, JsonObject, StateDep
from fp8serve.server.faults import Fault
from fp8serve.server.http.streams import DONE
from fp8serve.server.schemas.openai_bodies import CompletionBody, SampledBody
from fp8serve.server.serving.generation import Generation

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BoundedRoute)


class TextChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: Usage


@dataclass
class Choice:
    """One choice as it grows. `logprobs`: None when they were not asked for."""

    stream: LogprobStream
    text: str = ""
    logprobs: list[Placed] | None = None
    finish: str | None = None
    stop_reason: str | int | None = None
    tokens: int = 0
    prompt_logprobs: list[JsonObject | None] | None = None
    total: float = 0.0  # of its tokens' log-probabilities, where these are known

    @property
    def mean(self) -> float:
        return self.total / max(self.tokens, 1)

    def take(self, output: RequestOutput) -> list[Placed]:
        """Adds an output; returns its log-probabilities."""
        self.text += output.text_delta
        self.tokens = output.num_generated
        self.total += sum(item.logprob for item in output.logprobs or ())
        self.finish, self.stop_reason = output.finish_reason, output.stop_reason
        new = self.stream.take(output)
        if output.logprobs is not None or new:
            self.logprobs = (self.logprobs or []) + new
        return new


class CompletionRenderer(Renderer[list[Placed], Whole]):
    """The common part of both routes. The choices are prompt 0's n, then prompt 1's n, ..."""

    END = DONE
    PREFIX: ClassVar[str]
    OBJECT: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(self, body: SampledBody, generation: Generation) -> None:
        super().__init__(generation)
        self.body = body
        self.created = int(time.time())
        self.tokenizer = generation.served.tokenizer
        self.params = generation.requests[0].params
        self.choices = [Choice(LogprobStream(self.tokenizer, self.params)) for _ in generation.requests]

    @abstractmethod
    def choice(self, index: int, choice: Choice) -> JsonObject:
        """A choice that is complete."""

    def returned(self) -> Iterable[Choice]:
        """The choices to return, in their order."""
        return self.choices

    def add(self, index: int, output: RequestOutput) -> list[Placed]:
        if output.prompt_logprobs is not None and self.body.prompt_logprobs is not None:
            table = prompt_table(output.prompt_logprobs, self.body.prompt_logprobs, self.tokenizer)
            self.choices[index].prompt_logprobs = table
        return self.choices[index].take(output)

    def _ended(self) -> JsonObject:
        """The answer that is not streamed, for its model."""
        choices = [self.choice(i, choice) for i, choice in enumerate(self.returned())]
        return self._frame(self.OBJECT, choices) | {"usage": self._usage()}

    def closing(self) -> Iterator[JsonObject]:
        """The usage, if it was asked for."""
        if self.body.include_usage:
            yield self._frame(self.CHUNK, []) | {"usage": self._usage()}

    def failure(self, fault: Fault) -> JsonObject:
        return fault.openai()

    def _chunk(self, choice: JsonObject) -> JsonObject:
        """`choice` as a chunk; its usage, if every chunk has one, is that of this choice so far."""
        index = choice["index"]
        tokens = len(self.generation.requests[index].prompt_token_ids), self.choices[index].tokens
        usage = _counts(*tokens) if self.body.continuous_usage else None
        return self._frame(self.CHUNK, [choice]) | ({"usage": usage} if self.body.include_usage else {})

    def _frame(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        served = self.generation.served
        return {
            "id": f"{self.PREFIX}-{self.generation.id}",
            "object": kind,
            "created": self.created,
            "model": self.body.model or served.source.model_id,
            "choices": choices,
            "system_fingerprint": served.weight_version,
        }

    def _usage(self) -> JsonObject:
        prompt, new = self.generation.prompt_tokens, sum(choice.tokens for choice in self.choices)
        cached = {"cached_tokens": self.generation.cached_tokens}
        return _counts(prompt, new) | {"prompt_tokens_details": cached}


def _counts(prompt: int, new: int) -> JsonObject:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class TextRenderer(CompletionRenderer[Completion]):
    """`text_completion` objects."""

    PREFIX, OBJECT, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionBody, generation: Generation) -> None:
        super().__init__(body, generation)
        self._hides_answer = body.max_tokens == 0
        self._shows_logprobs = body.logprobs is not None
        self._shows_prompt = bool(body.echo) and self._shows_logprobs
        self._top = body.logprobs or 0
        self._echoes = [echo for echo in generation.echoes for _ in range(generation.n)]
        self._unsent_prompts = set(range(len(self._echoes)))  # prompts that are still to be streamed
        for echo, choice in zip(self._echoes, self.choices, strict=False):
            choice.text = echo.text
            choice.stream = LogprobStream(self.tokenizer, self.params, len(choice.text))

    def whole(self) -> Completion:
        return Completion.model_validate(self._ended())

    def add(self, index: int, output: RequestOutput) -> list[Placed]:
        if output.prompt_logprobs is not None and self._shows_prompt:
            self.choices[index].logprobs = self._placed(index, output.prompt_logprobs)
        return super().add(index, self._visible(output))

    def events(self, index: int, output: RequestOutput, new: list[Placed]) -> Iterator[JsonObject]:
        if index in self._unsent_prompts:
            self._unsent_prompts.remove(index)
            yield self._chunk(self._echo(index, output))
        visible = self._visible(output)
        if visible.text_delta or new or visible.finish_reason is not None:
            yield self._chunk(self._delta(index, visible, new))

    def _visible(self, output: RequestOutput) -> RequestOutput:
        """The output, without the token of an answer if none was requested."""
        if not self._hides_answer:
            return output
        finish = "length" if output.finish_reason == "stop" else output.finish_reason
        logprobs = output.prompt_logprobs
        return RequestOutput(output.request_id, finish_reason=finish, error=output.error, prompt_logprobs=logprobs)

    def _echo(self, index: int, output: RequestOutput) -> JsonObject:
        """The prompt as a part of a stream."""
        placed = None
        if output.prompt_logprobs is not None:
            placed = self._placed(index, output.prompt_logprobs)
        text, rest = self._echoes[index].text, {"finish_reason": None, "stop_reason": None}
        return {"index": index, "text": text, "logprobs": self._logprobs(placed), **rest}

    def _placed(self, index: int, logprobs: Sequence[TokenLogprob]) -> list[Placed]:
        cut = [TokenLogprob(item.token_id, item.logprob, item.top[: self._top]) for item in logprobs]
        first = self.generation.requests[index].prompt_token_ids[0]
        hidden = self.tokenizer.special_ids if self.params.skip_special_tokens else frozenset()
        return placed_prompt(first, cut, self._echoes[index].lengths, hidden)

    def returned(self) -> Iterator[Choice]:
        """The most probable of each prompt's answers, by the mean over their tokens; equal ones in their order."""
        each, returned = self.generation.n, self.body.returned
        for start in range(0, len(self.choices), each):
            group = self.choices[start : start + each]
            yield from (sorted(group, key=lambda choice: -choice.mean) if each > returned else group)[:returned]

    def choice(self, index: int, choice: Choice) -> JsonObject:
        logprobs = choice.logprobs if self._shows_logprobs else None
        return {
            "index": index,
            "text": choice.text,
            "logprobs": self._logprobs(logprobs),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
            "prompt_logprobs": choice.prompt_logprobs,
        }

    def _delta(self, index: int, output: RequestOutput, new: list[Placed]) -> JsonObject:
        """What `output` adds to a choice."""
        return {
            "index": index,
            "text": output.text_delta,
            "logprobs": self._logprobs(new or None),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _logprobs(self, placed: list[Placed] | None) -> JsonObject | None:
        return None if placed is None else text_logprobs(placed, self.tokenizer)


@router.post("/completions", summary="Continue a text", response_model=Completion, responses=STREAM)
async def completions(body: CompletionBody, request: Request, state: StateDep) -> Response | Completion:
    """One choice for each of `n` and each prompt."""
    served = model_for(body, state)
    params = body.params(SamplingParams().max_new_tokens if body.max_tokens is None else body.max_tokens)
    generation = await generate_texts(
        served, body.prompts(), params, request, state, choices=body.generated, echo=bool(body.echo)
    )
    return await respond(TextRenderer(body, generation), request, state, body.stream)
