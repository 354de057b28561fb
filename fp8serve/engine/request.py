"""What travels between a caller and the engine: a request in, its outputs out; plain data, no torch, JSON both ways.

`SamplingParams` and `Request` are frozen and refuse nonsense when they are made, so nothing behind them checks again.
`EngineLimits` are the numbers of a running engine; `EngineLimits.check` is called before a request is queued (by the
client too, so a server can answer 4xx before it sends a header). `Sequence` is the engine's own record of a request in
flight.

Not here: `n` completions of one prompt are `n` requests, made by the caller; they share their prompt's blocks.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Annotated, Any, Literal, Protocol

from annotated_types import Ge, Gt, Le, Len

from fp8serve.errors import RequestError
from fp8serve.options import About, check, known_fields

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS = 20
GREEDY_TEMPERATURE = 1e-5
"""Below it a difference of 1e-4 between two logits makes one 20,000 times as likely as the other, and far below it the
quotient of a logit and the temperature is no number."""
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 128
MAX_FORM_LENGTH = 65536


INT32 = 2**31 - 1
TokenId = Annotated[int, Ge(0), Le(INT32)]
Tokens = Annotated[int, Ge(1), Le(INT32)]
StopString = Annotated[str, Len(1, MAX_STOP_LENGTH)]
Form = Annotated[str | None, Len(1, MAX_FORM_LENGTH)]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Penalties follow OpenAI (presence, frequency: over generated tokens) and Hugging Face (repetition: over prompt and
    generated tokens). Filters apply after the temperature, in the order top_k, top_p, min_p; top_k 0 means all tokens.
    `logprobs` is the number of alternatives wanted beside the chosen token (0: the chosen token alone; None: nothing);
    they are the model's own log-probabilities, before penalties and temperature. `prompt_logprobs` wants the same of
    the prompt's tokens but the first; such a prompt is computed whole, and no cached prefix is taken.
    """

    max_new_tokens: Annotated[Tokens, About("Longest answer, in tokens.")] = 16
    temperature: Annotated[float, Ge(0), Le(100), About("0 takes the likeliest token every time.")] = 1.0
    top_p: Annotated[float, Gt(0), Le(1), About("Sample from the likeliest tokens of this total probability.")] = 1.0
    top_k: Annotated[int, Ge(0), Le(INT32), About("Sample from this many likeliest tokens; 0: all.")] = 0
    min_p: Annotated[
        float, Ge(0), Le(1), About("Leave out tokens less likely than this share of the likeliest one's probability.")
    ] = 0.0
    presence_penalty: Annotated[
        float, Ge(-2), Le(2), About("Taken from the logit of a token that was generated already.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Ge(-2), Le(2), About("Taken from a token's logit for each time it was generated.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Gt(0), Le(100), About("Divides the logit of a token of the prompt or the answer; 1: no penalty.")
    ] = 1.0
    seed: Annotated[
        int | None,
        Ge(-(2**63)),
        Le(2**64 - 1),
        About("Seed of the sampling; the same seed gives the same text.", unset="a fresh one for every request"),
    ] = None
    stop: Annotated[
        tuple[StopString, ...],
        Len(0, MAX_STOP_STRINGS),
        About("End before this text.", unset="none"),
    ] = ()
    stop_token_ids: Annotated[
        tuple[TokenId, ...],
        Len(0, MAX_STOP_TOKEN_IDS),
        About("End after this token.", unset="none"),
    ] = ()
    ignore_eos: Annotated[bool, About("Go on after the end-of-text token.")] = False
    min_tokens: Annotated[
        int,
        Ge(0),
        Le(INT32),
        About("Until then neither end-of-text, stop tokens nor stop strings end the text."),
    ] = 0
    logprobs: Annotated[
        int | None,
        Ge(0),
        Le(MAX_LOGPROBS),
        About("Alternatives to report with each token's log-probability; 0: the token's alone.", "none", flag=""),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Ge(0),
        Le(MAX_LOGPROBS),
        About("Alternatives to report with the log-probability of each token of the prompt.", "none", flag=""),
    ] = None
    json_schema: Annotated[Form, About('The answer is JSON of this schema; "{}" is any JSON.', unset="free text")] = (
        None
    )
    regex: Annotated[Form, About("The answer matches all of this expression.", unset="free text")] = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check(self, RequestError)
        if self.min_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must be at most max_new_tokens ({self.max_new_tokens})."
            )
        self._check_form()

    def _check_form(self) -> None:
        """The grammar itself is compiled later, by `grammar.py`."""
        if self.json_schema is not None:
            _check_json_object(self.json_schema)
        if self.json_schema is not None and self.regex is not None:
            raise RequestError("An answer can follow a json_schema or a regex, not both.")
        if self.has_form and (self.min_tokens or self.ignore_eos):
            raise RequestError(
                "min_tokens and ignore_eos cannot be used with json_schema or regex, which say when to end."
            )

    @property
    def greedy(self) -> bool:
        """The most probable token is taken; nothing is drawn."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_form(self) -> bool:
        return self.json_schema is not None or self.regex is not None


def _check_json_object(text: str) -> None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("json_schema is not valid JSON.") from None
    if not isinstance(found, dict):
        raise RequestError('json_schema must be a JSON object, such as {"type": "object"}.')


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. `tenant` separates callers: no shared cached blocks, and a fair share each.

    Requests of one `group` are parts of one (several answers, several prompts) and have one part's share together; ""
    means that the request stands alone.
    """

    request_id: Annotated[str, Len(1)]
    prompt_token_ids: tuple[TokenId, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""
    group: str = ""

    def __post_init__(self) -> None:
        check(self, RequestError)
        if not self.prompt_token_ids:
            raise RequestError("The prompt is empty: give at least one token.")

    def to_json(self) -> dict[str, Any]:
        """The prompt is not copied: `asdict` would, token by token."""
        plain = {name: getattr(self, name) for name in ("request_id", "prompt_token_ids", "tenant", "group")}
        return plain | {"params": asdict(self.params)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Request":
        params = known_fields(SamplingParams, data.get("params", {}))
        return cls(**{**known_fields(cls, data), "params": SamplingParams(**params)})


Task = Literal["generate", "embed", "classify"]
_NO_TEXT: dict[Task, str] = {
    "embed": "This is an embedding model, which writes no text; ask /v1/embeddings for vectors.",
    "classify": "This is a classifier, which writes no text; ask /classify, /v1/rerank or /v1/score.",
}


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a running engine can hold; every number of a refusal comes from here."""

    max_model_len: int  # tokens of prompt and answer together
    num_blocks: int
    block_size: int  # tokens
    vocab_size: int
    has_tokenizer: bool = True
    task: Task = "generate"

    @property
    def generates(self) -> bool:
        """Whether the model writes text."""
        return self.task == "generate"

    def check(self, request: Request) -> None:
        """Raises RequestError when `request` could never run, however long it waited."""
        if not self.generates:
            raise RequestError(_NO_TEXT[self.task])
        prompt, new = len(request.prompt_token_ids), request.params.max_new_tokens
        if prompt + new > self.max_model_len:
            raise RequestError(
                f"The prompt has {prompt} tokens and max_new_tokens is {new}, together {prompt + new}, but the context "
                f"holds {self.max_model_len}: shorten the prompt or ask for fewer new tokens."
            )
        # the last token is returned but never read back, so it needs no slot
        if (blocks := -(-(prompt + new - 1) // self.block_size)) > self.num_blocks:
            raise RequestError(
                f"The request needs {blocks} cache blocks of {self.block_size} tokens and the engine has "
                f"{self.num_blocks}: shorten it or start the engine with more blocks."
            )
        if (largest := max((*request.prompt_token_ids, *request.params.stop_token_ids))) >= self.vocab_size:
            raise RequestError(f"Token id {largest} is outside the vocabulary of {self.vocab_size} tokens.")
        if (request.params.stop or request.params.has_form) and not self.has_tokenizer:
            raise RequestError("Stop strings and grammars need a tokenizer and the model directory has none.")


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

    def to_json(self) -> dict[str, Any]:
        """Only what differs from the defaults: one of these crosses to the server for every token."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        for name in _LOGPROBS & found.keys():
            found[name] = [asdict(item) for item in found[name]]
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RequestOutput":
        values = known_fields(cls, data)
        values["token_ids"] = tuple(values.get("token_ids", ()))
        for name in _LOGPROBS & values.keys():
            values[name] = tuple(_logprob_from_json(item) for item in values[name])
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


class Status(Enum):
    """Where a sequence is; PREEMPTED waits again after losing its blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Constraint(Protocol):
    """What `grammar.Matcher` is to the rest of the engine."""

    def allowed(self) -> bytes: ...

    def accept(self, token_id: int) -> bool: ...

    @property
    def complete(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's record of one request in flight. Compared by identity."""

    request: Request
    token_ids: list[int]  # prompt, then what was generated; the engine appends
    seed: int  # the engine, from the request or fresh
    status: Status = Status.WAITING  # the scheduler
    num_computed: int = 0  # tokens whose keys and values are in the cache; the scheduler
    num_cached: int = 0  # prompt tokens taken from the prefix cache when first admitted; the scheduler
    block_table: list[int] = field(default_factory=list)  # the cache manager
    block_hashes: list[bytes] = field(default_factory=list)  # the cache manager: chained, of full blocks
    finish_reason: FinishReason | None = None  # whoever ends it
    constraint: Constraint | None = None  # the engine, when the answer has a given form
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # the engine, of tokens 1, 2, ...

    @classmethod
    def of(cls, request: Request) -> "Sequence":
        seed = request.params.seed
        return cls(request, list(request.prompt_token_ids), secrets.randbits(64) if seed is None else seed % 2**64)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def group(self) -> tuple[str, str]:
        """Names the request that this is a part of, among those of all tenants."""
        return self.request.tenant, self.request.group or self.request.request_id

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt whose log-probabilities are still wanted."""
        if self.params.prompt_logprobs is None:
            return 0
        return self.num_prompt - 1 - len(self.prompt_logprobs)

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are still to be computed: 1 while decoding."""
        return len(self.token_ids) - self.num_computed
