"""Answers of OpenAI's two completion routes.

Choices of one request run at the same time and their chunks interleave by `index`. A stream's failures after the 200
arrive as `data: {"error": ...}` and then `data: [DONE]`, which OpenAI's own client raises as an APIError.
`system_fingerprint` is the version of the weights that answered.
"""

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.server.api.answer_pipeline import JsonObject, Renderer
from fp8serve.server.api.chat.tool_requests import answer_reader, call_id
from fp8serve.server.api.openai.chat_answer import ChatAnswer
from fp8serve.server.api.openai.logprobs import (
    LogprobStream,
    Placed,
    chat_logprobs,
    placed_prompt,
    prompt_table,
    text_logprobs,
)
from fp8serve.server.faults import Fault
from fp8serve.server.http.streams import DONE
from fp8serve.server.schemas.openai_bodies import ChatBody, CompletionBody, SampledBody
from fp8serve.server.serving.generation import Generation


@dataclass
class Choice:
    """One choice as it grows. `logprobs`: None when they were not asked for."""

    stream: LogprobStream
    text: str = ""
    logprobs: list[Placed] | None = None
    finish: str | None = None
    stop_reason: str | int | None = None
    tokens: int = 0
    of_prompt: list[JsonObject | None] | None = None
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


class CompletionRenderer(Renderer[list[Placed]]):
    """The common part of both routes. The choices are prompt 0's n, then prompt 1's n, ..."""

    END = DONE
    PREFIX: ClassVar[str]
    OBJECT: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(self, body: SampledBody, generation: Generation, request_id: str) -> None:
        super().__init__(generation)
        self.asked = body
        self.created = int(time.time())
        self.tokenizer = generation.served.tokenizer
        self.params = generation.requests[0].params
        self.choices = [Choice(LogprobStream(self.tokenizer, self.params)) for _ in generation.requests]

    @abstractmethod
    def choice(self, index: int, choice: Choice) -> JsonObject:
        """A choice that is complete."""

    def kept(self) -> Iterable[Choice]:
        """The choices to return, in their order."""
        return self.choices

    def add(self, index: int, output: RequestOutput) -> list[Placed]:
        if output.prompt_logprobs is not None and self.asked.prompt_logprobs is not None:
            table = prompt_table(output.prompt_logprobs, self.asked.prompt_logprobs, self.tokenizer)
            self.choices[index].of_prompt = table
        return self.choices[index].take(output)

    def prompt_logprobs(self, choice: Choice) -> JsonObject:
        """The field of this name, if it was asked for."""
        return {} if choice.of_prompt is None else {"prompt_logprobs": choice.of_prompt}

    def whole(self) -> JsonObject:
        choices = [self.choice(i, choice) for i, choice in enumerate(self.kept())]
        return self._frame(self.OBJECT, choices) | {"usage": self._usage()}

    def closing(self) -> Iterator[JsonObject]:
        """The usage, if it was asked for."""
        if self.asked.include_usage:
            yield self._frame(self.CHUNK, []) | {"usage": self._usage()}

    def failure(self, fault: Fault) -> JsonObject:
        return fault.openai()

    def _chunk(self, choice: JsonObject) -> JsonObject:
        """`choice` as a chunk; its usage, if every chunk has one, is that of this choice so far."""
        index = choice["index"]
        tokens = len(self.generation.requests[index].prompt_token_ids), self.choices[index].tokens
        usage = _counts(*tokens) if self.asked.continuous_usage else None
        return self._frame(self.CHUNK, [choice]) | ({"usage": usage} if self.asked.include_usage else {})

    def _frame(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        served = self.generation.served
        return {
            "id": f"{self.PREFIX}-{self.generation.id}",
            "object": kind,
            "created": self.created,
            "model": self.asked.model or served.source.model_id,
            "choices": choices,
            "system_fingerprint": served.weight_version,
        }

    def _usage(self) -> JsonObject:
        prompt, new = self.generation.prompt_tokens, sum(choice.tokens for choice in self.choices)
        cached = {"cached_tokens": self.generation.cached_tokens}
        return _counts(prompt, new) | {"prompt_tokens_details": cached}


def _counts(prompt: int, new: int) -> JsonObject:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class TextRenderer(CompletionRenderer):
    """`text_completion` objects."""

    PREFIX, OBJECT, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionBody, generation: Generation, request_id: str) -> None:
        super().__init__(body, generation, request_id)
        self._hides_answer = body.max_tokens == 0
        self._shows_logprobs = body.logprobs is not None
        self._shows_prompt = bool(body.echo) and self._shows_logprobs
        self._top = body.logprobs or 0
        self._echoes = [echo for echo in generation.echoes for _ in range(generation.n)]
        self._unsaid = set(range(len(self._echoes)))  # prompts that are still to be streamed
        for echo, choice in zip(self._echoes, self.choices, strict=False):
            choice.text = echo.text
            choice.stream = LogprobStream(self.tokenizer, self.params, len(choice.text))

    def add(self, index: int, output: RequestOutput) -> list[Placed]:
        if output.prompt_logprobs is not None and self._shows_prompt:
            self.choices[index].logprobs = self._placed(index, output.prompt_logprobs)
        return super().add(index, self._shown(output))

    def events(self, index: int, output: RequestOutput, new: list[Placed]) -> Iterator[JsonObject]:
        if index in self._unsaid:
            self._unsaid.remove(index)
            yield self._chunk(self._echo(index, output))
        shown = self._shown(output)
        if shown.text_delta or new or shown.finish_reason is not None:
            yield self._chunk(self._delta(index, shown, new))

    def _shown(self, output: RequestOutput) -> RequestOutput:
        """The output, without the token of an answer if none was requested."""
        if not self._hides_answer:
            return output
        finish = "length" if output.finish_reason == "stop" else output.finish_reason
        told = output.prompt_logprobs
        return RequestOutput(output.request_id, finish_reason=finish, error=output.error, prompt_logprobs=told)

    def _echo(self, index: int, output: RequestOutput) -> JsonObject:
        """The prompt as a part of a stream."""
        placed = None
        if output.prompt_logprobs is not None:
            placed = self._placed(index, output.prompt_logprobs)
        text, rest = self._echoes[index].text, {"finish_reason": None, "stop_reason": None}
        return {"index": index, "text": text, "logprobs": self._logprobs(placed), **rest}

    def _placed(self, index: int, found: Sequence[TokenLogprob]) -> list[Placed]:
        asked = [TokenLogprob(item.token_id, item.logprob, item.top[: self._top]) for item in found]
        first = self.generation.requests[index].prompt_token_ids[0]
        hidden = self.tokenizer.special_ids if self.params.skip_special_tokens else frozenset()
        return placed_prompt(first, asked, self._echoes[index].lengths, hidden)

    def kept(self) -> Iterator[Choice]:
        """The most probable of each prompt's answers, by the mean over their tokens; equal ones in their order."""
        each, wanted = self.generation.n, self.asked.returned
        for start in range(0, len(self.choices), each):
            group = self.choices[start : start + each]
            yield from (sorted(group, key=lambda choice: -choice.mean) if each > wanted else group)[:wanted]

    def choice(self, index: int, choice: Choice) -> JsonObject:
        shown = choice.logprobs if self._shows_logprobs else None
        return {
            "index": index,
            "text": choice.text,
            "logprobs": self._logprobs(shown),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        } | self.prompt_logprobs(choice)

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


class ChatRenderer(CompletionRenderer):
    """`chat.completion` objects and their chunks."""

    PREFIX, OBJECT, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, generation: Generation, request_id: str) -> None:
        super().__init__(body, generation, request_id)
        new_id = partial(call_id, body, generation.served, "call")
        readers = [answer_reader(body, generation) for _ in generation.requests]
        self._answers = [ChatAnswer(reader, new_id) for reader in readers]
        self._opened: set[int] = set()  # choices whose role was streamed

    def add(self, index: int, output: RequestOutput) -> list[Placed]:
        self._answers[index].take(output)
        return super().add(index, output)

    def whole(self) -> JsonObject:
        return super().whole() | self.prompt_logprobs(self.choices[0])

    def choice(self, index: int, choice: Choice) -> JsonObject:
        answer = self._answers[index]
        return {
            "index": index,
            "message": answer.message(),
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": answer.finish(choice.finish),
        }

    def events(self, index: int, output: RequestOutput, new: list[Placed]) -> Iterator[JsonObject]:
        """The role before a choice's first output, since clients take that chunk for the first token; then a chunk for
        each delta: the first has the log-probabilities, the last says why the answer ended."""
        if index not in self._opened:
            self._opened.add(index)
            delta = {"role": "assistant", "content": ""}
            yield self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        deltas = self._answers[index].drain()
        if not deltas and (new or output.finish_reason is not None):
            deltas = [{}]
        for number, delta in enumerate(deltas, 1):
            yield self._chunk(
                {
                    "index": index,
                    "delta": delta,
                    "logprobs": self._logprobs(new or None) if number == 1 else None,
                    "finish_reason": self._finish(index, output) if number == len(deltas) else None,
                }
            )

    def _finish(self, index: int, output: RequestOutput) -> str | None:
        return self._answers[index].finish(output.finish_reason)

    def _logprobs(self, placed: list[Placed] | None) -> JsonObject | None:
        return None if placed is None else chat_logprobs(placed, self.tokenizer)
