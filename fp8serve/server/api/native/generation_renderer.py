"""Answers of `/generate`, in text-generation-inference's shapes.

A stream sends one event for each token; the text of a token is the text that it made certain, so characters are whole,
stop strings never appear, and the texts add up to `generated_text`. The last event has `generated_text` and `details`;
there is no `[DONE]`. Answers also have `model`, `weight_version` and `request_id`.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.model.text.tokenizer_facts import TokenizerFacts
from fp8serve.server.api.answer_pipeline import JsonObject, Renderer
from fp8serve.server.api.wire import finite
from fp8serve.server.faults import Fault
from fp8serve.server.schemas.generation_bodies import GenerateBody
from fp8serve.server.serving.generation import Generation


@dataclass(frozen=True)
class NewTokens:
    """The contents of one output: tokens, and the likeliest tokens at the place of each (empty when not asked for)."""

    tokens: list[JsonObject]
    tops: list[list[JsonObject]]


class NativeRenderer(Renderer[NewTokens]):
    """One answer to one prompt."""

    def __init__(self, body: GenerateBody, generation: Generation, request_id: str) -> None:
        super().__init__(generation)
        self.asked, self.request_id = body, request_id
        self.params = generation.requests[0].params
        self.started = time.perf_counter()
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

    def whole(self) -> Any:
        answer: JsonObject = {"generated_text": self._full_text()}
        if self.asked.parameters.details:
            tops = {"top_tokens": self.top_tokens} if self.asked.parameters.top_n_tokens else {}
            more = {"prefill": self.prefill, "tokens": self.tokens, "best_of_sequences": None} | tops
            answer["details"] = self._details(self._last) | more
        return answer | self._origin()

    def headers(self) -> dict[str, str]:
        """The headers that text-generation-inference's dashboards read; times in milliseconds."""
        milliseconds = str(round((time.perf_counter() - self.started) * 1e3))
        prompt = len(self.generation.requests[0].prompt_token_ids)
        return {
            "x-total-time": milliseconds,
            "x-prompt-tokens": str(prompt),
            "x-generated-tokens": str(len(self.tokens)),
        }

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
        tops = {"top_tokens": top} if self.asked.parameters.top_n_tokens else {}
        return {"index": self._shown, "token": token} | tops | end | (self._origin() if final is not None else {})

    def _no_token(self) -> JsonObject:
        """The last token again, without text, marked special so that clients skip it."""
        return (self.tokens[-1] if self.tokens else {"id": 0, "logprob": None}) | {"text": "", "special": True}

    # -- parts of both -------------------------------------------------------------------------------------------------

    def _full_text(self) -> str:
        prompt = self.asked.inputs if self.asked.parameters.return_full_text and self.asked.inputs else ""
        return prompt + self.text

    def _details(self, output: RequestOutput) -> JsonObject:
        return {
            "finish_reason": finish_reason(output),
            "generated_tokens": output.num_generated,
            "seed": self.params.seed if self.params.temperature > 0 else None,
            "input_length": output.num_prompt_tokens,
        }

    def _prefill(self, found: Sequence[TokenLogprob]) -> list[JsonObject]:
        """The prompt's tokens; the first has no log-probability."""
        tokenizer, first = self.generation.served.tokenizer, self.generation.requests[0].prompt_token_ids[0]
        tokens = [(first, None), *((item.token_id, item) for item in found)]
        return [_token(tokenizer, token_id, tokenizer.texts.text(token_id), item) for token_id, item in tokens]

    def _origin(self) -> dict[str, str]:
        served = self.generation.served
        return {"model": served.source.model_id, "weight_version": served.weight_version, "request_id": self.request_id}


class ListRenderer(NativeRenderer):
    """The same for clients of Hugging Face's inference endpoints: an answer that is not streamed is a list of one."""

    def whole(self) -> Any:
        return [super().whole()]


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
