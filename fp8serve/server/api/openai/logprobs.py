"""Log-probabilities as OpenAI's two routes write them, aligned with the text of the answer.

`LogprobStream` gives each token its place in the returned text, in characters, and returns it together with its
text, streamed or not: a token is held back as long as its text may begin a stop string, and the tokens
of the stop string that ended the text are not a part of the answer.

A token is written as the text of its bytes, or as `bytes:\\xe2\\x98` when it is part of a character, as OpenAI does.
`bytes` of all tokens, joined, are the text's UTF-8 bytes; it is null for a token that has no text in the answer, such
as end-of-text. `/v1/completions` has a map keyed by text: if two alternatives have the same text, the less probable one
is called `token_id:N`. Values are clamped (`wire.finite`), because JSON has no infinity.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from typing_extensions import TypedDict

from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.model.text.tokenizer_facts import TokenizerFacts
from fp8serve.server.api.routing import Answer, JsonObject, closed, finite


class TextLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@closed
class PromptLogprob(TypedDict):
    logprob: float
    rank: int | None  # null if it is not among the requested alternatives
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, for each place of a prompt; null for the first. Present when the request asks for it."""


@closed
class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


@closed
class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[ChatLogprob]
    refusal: None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """A token and its place. `offset`: characters of the answer before it; `shown`: it has text in the answer;
    `first`: no text is before it; `known`: it has a log-probability, unlike the first token of a prompt.
    """

    item: TokenLogprob
    offset: int
    shown: bool
    first: bool
    known: bool = True


class LogprobStream:
    """The tokens of one answer, in order; see the module. `offset`: characters that are returned before it."""

    def __init__(self, tokenizer: TokenizerFacts, params: SamplingParams, offset: int = 0) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._settled = offset  # characters that the tokens seen so far make certain
        self._sent = offset  # characters that were returned
        self._begun = False
        self._waiting: deque[Placed] = deque()

    def take(self, output: RequestOutput) -> list[Placed]:
        """The tokens whose text is out with this output."""
        items = zip(output.logprobs or (), output.settled_chars, strict=True)
        self._waiting += [self._place(item, settled, output) for item, settled in items]
        self._sent += len(output.text_delta)
        whole = output.finish_reason is not None and not isinstance(output.stop_reason, str)
        due = []
        while self._waiting and (whole or self._waiting[0].offset < self._sent):
            due.append(self._waiting.popleft())
        return due

    def _place(self, item: TokenLogprob, settled: int, output: RequestOutput) -> Placed:
        placed = Placed(item, self._settled, self._has_text(item.token_id, output), not self._begun)
        if placed.shown:
            self._settled += settled
            self._begun = True
        return placed

    def _has_text(self, token_id: int, output: RequestOutput) -> bool:
        """Whether a token has text: special tokens and the one that ended the text have none, unless asked for."""
        if self._params.skip_special_tokens and token_id in self._tokenizer.special_ids:
            return False
        if self._params.include_stop_str_in_output:
            return True
        ends = output.finish_reason == "stop" and output.token_ids[-1:] == (token_id,)
        return not ends or (output.stop_reason != token_id and token_id not in self._tokenizer.eos_ids)


def placed_prompt(
    first: int, logprobs: Sequence[TokenLogprob], lengths: Sequence[int], hidden: Collection[int]
) -> list[Placed]:
    """A prompt's tokens, of which the first has no log-probability; `lengths`: how much text each makes certain."""
    items = (TokenLogprob(first, 0.0), *logprobs)
    offsets = accumulate(lengths, initial=0)
    return [
        Placed(item, offset, item.token_id not in hidden, offset == 0, known=number > 0)
        for number, (item, offset) in enumerate(zip(items, offsets, strict=False))
    ]


def prompt_table(logprobs: Sequence[TokenLogprob], top: int, tokenizer: TokenizerFacts) -> list[JsonObject | None]:
    """vLLM's `prompt_logprobs`: for each place, its token and the `top` best ones, by token id."""
    return [None, *(_by_id(item, top, tokenizer) for item in logprobs)]


def _by_id(item: TokenLogprob, top: int, tokenizer: TokenizerFacts) -> JsonObject:
    best = item.top[:top]
    ranks: dict[int, int | None] = {token_id: rank for rank, (token_id, _) in enumerate(best, 1)}
    values = dict(best)
    return {
        str(token_id): {
            "logprob": finite(values.get(token_id, item.logprob)),
            "rank": ranks.get(token_id),
            "decoded_token": tokenizer.texts.text(token_id),
        }
        for token_id in dict.fromkeys((item.token_id, *ranks))
    }


def text_logprobs(placed: list[Placed], tokenizer: TokenizerFacts) -> JsonObject:
    """The object of /v1/completions."""
    return {
        "tokens": [_name(tokenizer, p.item.token_id, p) for p in placed],
        "token_logprobs": [finite(p.item.logprob) if p.known else None for p in placed],
        "top_logprobs": [_by_text(p, tokenizer) if p.known else None for p in placed],
        "text_offset": [p.offset for p in placed],
    }


def _by_text(placed: Placed, tokenizer: TokenizerFacts) -> dict[str, float]:
    """The most likely tokens, in descending order of probability, and the token itself, as OpenAI describes it: "up to
    logprobs+1 elements"."""
    logprobs = dict(placed.item.top)
    logprobs.setdefault(placed.item.token_id, placed.item.logprob)
    by_text: dict[str, float] = {}
    for token_id, logprob in logprobs.items():
        name = _name(tokenizer, token_id, placed)
        by_text[f"token_id:{token_id}" if name in by_text else name] = finite(logprob)
    return by_text


def chat_logprobs(placed: list[Placed], tokenizer: TokenizerFacts) -> JsonObject:
    """The object of /v1/chat/completions."""
    return {"content": [_entry(p, tokenizer) for p in placed], "refusal": None}


def _entry(placed: Placed, tokenizer: TokenizerFacts) -> JsonObject:
    item = placed.item
    entry = _one(item.token_id, item.logprob, placed, tokenizer)
    entry["bytes"] = list(tokenizer.texts.utf8(item.token_id, placed.first)) if placed.shown else None
    return entry | {"top_logprobs": [_one(i, logprob, placed, tokenizer) for i, logprob in item.top]}


def _one(token_id: int, logprob: float, placed: Placed, tokenizer: TokenizerFacts) -> JsonObject:
    shown = token_id not in tokenizer.special_ids
    content = list(tokenizer.texts.utf8(token_id, placed.first)) if shown else None
    return {"token": _name(tokenizer, token_id, placed), "logprob": finite(logprob), "bytes": content}


def _name(tokenizer: TokenizerFacts, token_id: int, placed: Placed) -> str:
    content = tokenizer.texts.utf8(token_id, placed.first)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
