"""The engine's outputs: plain data, no torch, to JSON and back."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from fp8serve.options import known_fields

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token and of its `top` alternatives, best first: (token id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def ranked(cls, token_id: int, logprob: float, ids: list[int], logprobs: list[float], top: int) -> "TokenLogprob":
        """With the `top` best of some alternatives; equal values rank by token id."""
        best = sorted(zip(ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return cls(token_id, logprob, tuple(best[:top]))


_LOGPROBS = {"logprobs", "prompt_logprobs"}  # fields of an output


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a request waited, its prompt was computed, and tokens came, in seconds, by the engine's clock.

    `arrived`: Unix time at which the engine's process received it. A phase that is None did not begin; the last one
    that did lasts until the output that carries this. A request that was preempted waits within its phase.
    """

    arrived: float
    queue: float
    prefill: float | None = None
    decode: float | None = None

    @property
    def inference(self) -> float:
        return (self.prefill or 0.0) + (self.decode or 0.0)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to one request. The last one, and only that, has a `finish_reason`.

    `text_delta` lags behind `token_ids` while a character is incomplete or a stop string may be forming; all of it is
    out when the request finishes. `token_ids` includes an end-of-text or stop token, the text does not.
    """

    request_id: str
    text_delta: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None  # one for each of token_ids, when asked for
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_generated: int = 0  # so far, these included
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it; None for end-of-text
    error: str | None = None  # one sentence, when finish_reason is "error"
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # of the prompt's tokens but the first; comes once
    timing: Timing | None = field(default=None, compare=False)  # with the first token, and with the last output
    # with logprobs: how many characters each of token_ids has made certain, whether or not they may be shown yet
    settled_chars: tuple[int, ...] = ()

    @property
    def is_cut_off(self) -> bool:
        """Whether a limit or a stop string ended the answer, not the model."""
        return self.finish_reason == "length" or isinstance(self.stop_reason, str)

    def to_json(self) -> dict[str, Any]:
        """Only what differs from the defaults: one of these crosses to the server for every token."""
        fields_set = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        for name in _LOGPROBS & fields_set.keys():
            fields_set[name] = [
                {"token_id": item.token_id, "logprob": item.logprob, "top": item.top} for item in fields_set[name]
            ]
        if self.timing is not None:
            fields_set["timing"] = asdict(self.timing)
        return fields_set

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RequestOutput":
        values = known_fields(cls, data)
        for name in ("token_ids", "settled_chars"):
            values[name] = tuple(values.get(name, ()))
        for name in _LOGPROBS & values.keys():
            values[name] = tuple(_logprob_from_json(item) for item in values[name])
        if "timing" in values:
            values["timing"] = Timing(**known_fields(Timing, values["timing"]))
        return cls(**values)


def _logprob_from_json(data: Mapping[str, Any]) -> TokenLogprob:
    return TokenLogprob(data["token_id"], data["logprob"], tuple((token, value) for token, value in data["top"]))


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer, as `Engine.generate` returns it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # of the prompt's tokens but the first
