"""The log-probabilities of OpenAI's two routes, aligned with the returned text.

`LogprobStream` assigns each token its offset in the returned text. It returns a token together with the token's text. A
token is withheld while its text may begin a stop string, and the tokens of a stop string are not returned.

A token is written as text, or as `bytes:\\xe2\\x98` if it is only a part of a character, as OpenAI does. The joined
`bytes` of all tokens are the UTF-8 bytes of the text. They are null for a token without text, such as end-of-text. In
`/v1/completions` the alternatives are keyed by text; of two alternatives with the same text, the less probable one has
the key `token_id:N`. Minus infinity is clamped (`routing.finite`), because JSON has no infinity.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from typing_extensions import TypedDict

from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.model.text.tokenizer_facts import TokenizerFacts
from fp8serve.server.api.routing import JsonObject, ResponseModel, finite, forbid_extra


class TextLogprobs(ResponseModel):
    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@forbid_extra
class PromptLogprob(TypedDict):
    logprob: float
    rank: int | None  # null if the token is not among the requested alternatives
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""The log-probabilities of each token of a prompt and of its alternatives by token id; None for the first token."""


@forbid_extra
class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


@forbid_extra
class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    content: list[ChatLogprob]
    refusal: None = None


@dataclass(frozen=True, slots=True)
class PositionedToken:
    """A token and its position in the returned text.

    Args:
        token: the token id, its log-probability and the alternatives.
        offset: the number of characters before the token.
        has_text: whether the token has text in the response.
        is_first: whether no text is before the token.
        has_logprob: False for the first token of a prompt.
    """

    token: TokenLogprob
    offset: int
    has_text: bool
    is_first: bool
    has_logprob: bool = True


WriteToken = Callable[[TokenizerFacts, int, PositionedToken], str]
"""Returns a token as it is written in a response."""


class LogprobStream:
    """Assigns the tokens of one choice their positions. `offset` is the length of the text before the first token."""

    def __init__(self, tokenizer: TokenizerFacts, params: SamplingParams, offset: int = 0) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._decoded_length = offset  # the characters of the tokens so far
        self._sent_length = offset  # the characters that were returned
        self._has_text_before = False
        self._withheld: deque[PositionedToken] = deque()

    def add(self, output: RequestOutput) -> list[PositionedToken]:
        """Adds an output and returns the tokens whose text has been returned by now."""
        for token, length in zip(output.logprobs or (), output.settled_chars, strict=True):
            has_text = self._has_text(token.token_id, output)
            self._withheld.append(PositionedToken(token, self._decoded_length, has_text, not self._has_text_before))
            self._decoded_length += length if has_text else 0
            self._has_text_before |= has_text
        self._sent_length += len(output.text_delta)
        is_complete = output.finish_reason is not None and not isinstance(output.stop_reason, str)
        returned = []
        while self._withheld and (is_complete or self._withheld[0].offset < self._sent_length):
            returned.append(self._withheld.popleft())
        return returned

    def _has_text(self, token_id: int, output: RequestOutput) -> bool:
        """Returns False for special tokens and for the token that ended the text, unless the request includes them."""
        if self._params.skip_special_tokens and token_id in self._tokenizer.special_ids:
            return False
        if self._params.include_stop_str_in_output:
            return True
        is_last = output.finish_reason == "stop" and output.token_ids[-1:] == (token_id,)
        return not is_last or (output.stop_reason != token_id and token_id not in self._tokenizer.eos_ids)


def position_prompt_tokens(
    first_id: int, logprobs: Sequence[TokenLogprob], lengths: Sequence[int], hidden_ids: Collection[int]
) -> list[PositionedToken]:
    """Returns the tokens of a prompt with their positions. The first token has no log-probability. `lengths` are the
    numbers of characters that the tokens add to the text."""
    tokens = (TokenLogprob(first_id, 0.0), *logprobs)
    offsets = accumulate(lengths, initial=0)
    return [
        PositionedToken(token, offset, token.token_id not in hidden_ids, offset == 0, has_logprob=number > 0)
        for number, (token, offset) in enumerate(zip(tokens, offsets, strict=False))
    ]


def prompt_logprobs_by_id(
    logprobs: Sequence[TokenLogprob], top: int, tokenizer: TokenizerFacts
) -> list[JsonObject | None]:
    """Returns vLLM's `prompt_logprobs`: for each position, the prompt's token and the `top` best ones by token id."""
    return [None, *(_by_id(token, top, tokenizer) for token in logprobs)]


def _by_id(token: TokenLogprob, top: int, tokenizer: TokenizerFacts) -> JsonObject:
    alternatives = token.top[:top]
    ranks: dict[int, int | None] = {token_id: rank for rank, (token_id, _) in enumerate(alternatives, 1)}
    values = dict(alternatives)
    return {
        str(token_id): {
            "logprob": finite(values.get(token_id, token.logprob)),
            "rank": ranks.get(token_id),
            "decoded_token": tokenizer.texts.text(token_id),
        }
        for token_id in dict.fromkeys((token.token_id, *ranks))
    }


def completion_logprobs(
    tokens: list[PositionedToken], tokenizer: TokenizerFacts, as_ids: bool | None = False
) -> JsonObject:
    """Returns the `logprobs` of a choice of /v1/completions. With `as_ids`, tokens are written as `token_id:N`."""
    write = _write_id if as_ids else _token_text
    return {
        "tokens": [write(tokenizer, t.token.token_id, t) for t in tokens],
        "token_logprobs": [finite(t.token.logprob) if t.has_logprob else None for t in tokens],
        "top_logprobs": [_by_text(t, tokenizer, write) if t.has_logprob else None for t in tokens],
        "text_offset": [t.offset for t in tokens],
    }


def _by_text(positioned: PositionedToken, tokenizer: TokenizerFacts, write: WriteToken) -> dict[str, float]:
    """Returns the most likely tokens in descending order of probability, and the sampled token. OpenAI documents this
    as "up to logprobs+1 elements"."""
    logprobs = dict(positioned.token.top)
    logprobs.setdefault(positioned.token.token_id, positioned.token.logprob)
    by_text: dict[str, float] = {}
    for token_id, logprob in logprobs.items():
        text = write(tokenizer, token_id, positioned)
        by_text[f"token_id:{token_id}" if text in by_text else text] = finite(logprob)
    return by_text


def chat_logprobs(tokens: list[PositionedToken], tokenizer: TokenizerFacts, as_ids: bool | None = False) -> JsonObject:
    """Returns the `logprobs` of a choice of /v1/chat/completions. With `as_ids`, tokens are written as `token_id:N`."""
    write = _write_id if as_ids else _token_text
    return {"content": [_chat_logprob(token, tokenizer, write) for token in tokens], "refusal": None}


def _chat_logprob(positioned: PositionedToken, tokenizer: TokenizerFacts, write: WriteToken) -> JsonObject:
    token = positioned.token
    entry = _top_logprob(token.token_id, token.logprob, positioned, tokenizer, write)
    utf8 = list(tokenizer.texts.utf8(token.token_id, positioned.is_first)) if positioned.has_text else None
    entry["bytes"] = utf8
    return entry | {
        "top_logprobs": [_top_logprob(i, logprob, positioned, tokenizer, write) for i, logprob in token.top]
    }


def _top_logprob(
    token_id: int, logprob: float, positioned: PositionedToken, tokenizer: TokenizerFacts, write: WriteToken
) -> JsonObject:
    has_text = token_id not in tokenizer.special_ids
    utf8 = list(tokenizer.texts.utf8(token_id, positioned.is_first)) if has_text else None
    return {"token": write(tokenizer, token_id, positioned), "logprob": finite(logprob), "bytes": utf8}


def _write_id(tokenizer: TokenizerFacts, token_id: int, positioned: PositionedToken) -> str:
    return f"token_id:{token_id}"


def _token_text(tokenizer: TokenizerFacts, token_id: int, positioned: PositionedToken) -> str:
    utf8 = tokenizer.texts.utf8(token_id, positioned.is_first)
    try:
        return utf8.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)
