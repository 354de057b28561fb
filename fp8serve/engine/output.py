"""The engine's outputs, which can be converted to JSON and back. This module does not import torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from fp8serve.options import known_fields

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of a token's probability. `top` has the most likely tokens at its position, best first, as
    pairs (token id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def ranked(cls, token_id: int, logprob: float, ids: list[int], logprobs: list[float], top: int) -> "TokenLogprob":
        """Creates the record with the `top` best of the given alternatives. Equal values are ordered by token id."""
        best = sorted(zip(ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return cls(token_id, logprob, tuple(best[:top]))


_LOGPROB_FIELDS = {"logprobs", "prompt_logprobs"}  # of a RequestOutput


@dataclass(frozen=True, slots=True)
class Timing:
    """The durations of a request's phases in seconds, until the output that contains this record.

    A phase that has not started is None. Time that a request waits after it was preempted belongs to its current phase.
    """

    arrived: float  # Unix time at which the engine process received the request
    queue: float  # until the request was first admitted
    prefill: float | None = None  # until the first token
    decode: float | None = None

    @property
    def inference(self) -> float:
        return (self.prefill or 0.0) + (self.decode or 0.0)


@dataclass(slots=True)  # not frozen: a frozen one takes four times as long to create
class RequestOutput:
    """The tokens that one step generated for one request. Only the last output of a request has a `finish_reason`.

    While a character is incomplete, or the text may be the beginning of a stop string, `text_delta` lags behind
    `token_ids`. The last output has all remaining text. An end-of-text or stop token is part of `token_ids` but not of
    the text.
    """

    request_id: str
    text_delta: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None  # one for each of token_ids, if requested
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_generated: int = 0  # tokens generated so far, including this output's
    num_cached_tokens: int = 0  # prompt tokens that were in the prefix cache
    stop_reason: str | int | None = None  # the stop string or stop token id that ended the text; None for end-of-text
    error: str | None = None  # a message, if finish_reason is "error"
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # of all prompt tokens except the first; in one output only
    timing: Timing | None = field(default=None, compare=False)  # in the first and the last output
    # with logprobs: the number of characters that each of token_ids completed, even if text_delta holds them back
    settled_chars: tuple[int, ...] = ()

    @property
    def has_only_text(self) -> bool:
        """Whether this output is in the middle of a completion, and nothing but text and tokens were requested."""
        return self.finish_reason is None and self.logprobs is None and self.prompt_logprobs is None

    @property
    def is_cut_off(self) -> bool:
        """Whether a limit or a stop string ended the completion, and not the model."""
        return self.finish_reason == "length" or isinstance(self.stop_reason, str)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that differ from their defaults."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        for name in _LOGPROB_FIELDS & values.keys():
            values[name] = [
                {"token_id": item.token_id, "logprob": item.logprob, "top": item.top} for item in values[name]
            ]
        if self.timing is not None:
            values["timing"] = asdict(self.timing)
        return values

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RequestOutput":
        values = known_fields(cls, data)
        for name in ("token_ids", "settled_chars"):
            values[name] = tuple(values.get(name, ()))
        for name in _LOGPROB_FIELDS & values.keys():
            values[name] = tuple(_logprob_from_json(item) for item in values[name])
        if "timing" in values:
            values["timing"] = Timing(**known_fields(Timing, values["timing"]))
        return cls(**values)


def _logprob_from_json(data: Mapping[str, Any]) -> TokenLogprob:
    return TokenLogprob(data["token_id"], data["logprob"], tuple((token, value) for token, value in data["top"]))


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished completion, as `Engine.generate` returns it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # of all prompt tokens except the first
