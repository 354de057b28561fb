"""A request to the engine, which can be converted to JSON and back. This module does not import torch.

`SamplingParams` and `Request` are frozen and validated when they are created. `EngineLimits` holds the limits of a
running engine. `EngineLimits.check` is called before a request is queued, and also by `EngineClient`, so that the
server can respond with a 4xx status before it starts a stream.

For `n` completions of one prompt, the caller creates `n` requests, which share the blocks of their prompt.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Annotated, Any, Literal

from annotated_types import Len

from fp8serve.engine.sampling_params import SamplingParams, TokenId
from fp8serve.errors import RequestError
from fp8serve.options import check, known_fields


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and its sampling parameters.

    Tenants share no cached blocks, and each gets a fair share of the engine. All requests of one `group` (several
    completions or prompts of one HTTP request) together get the share of one request. If `group` is empty, the request
    is a group of its own. `adapter` is the name of a loaded adapter.
    """

    request_id: Annotated[str, Len(1)]
    prompt_token_ids: tuple[TokenId, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""
    group: str = ""
    adapter: str | None = None

    def __post_init__(self) -> None:
        check(self, RequestError)
        if not self.prompt_token_ids:
            raise RequestError("The prompt is empty: give at least one token.")

    @property
    def token_ids(self) -> Iterator[int]:
        """All token ids that occur in the request."""
        biased = (token_id for token_id, _ in self.params.logit_bias)
        return chain(self.prompt_token_ids, self.params.stop_token_ids, biased)

    def to_json(self) -> dict[str, Any]:
        """Returns the request as a JSON object, without copying the prompt and without parameters that have their
        defaults."""
        values = {name: getattr(self.params, name) for name in _DEFAULTS}
        params = {name: value for name, value in values.items() if value != _DEFAULTS[name]}
        return {name: getattr(self, name) for name in _PLAIN_FIELDS} | {"params": params}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Request":
        params = known_fields(SamplingParams, data.get("params", {}))
        return cls(**{**known_fields(cls, data), "params": SamplingParams(**params)})


_DEFAULTS = {item.name: item.default for item in fields(SamplingParams)}
_PLAIN_FIELDS = ("request_id", "prompt_token_ids", "tenant", "group", "adapter")  # JSON types
Task = Literal["generate", "embed", "classify"]
_NOT_GENERATIVE: dict[Task, str] = {
    "embed": "This is an embedding model, which writes no text; ask /v1/embeddings for vectors.",
    "classify": "This is a classifier, which writes no text; ask /classify, /v1/rerank or /v1/score.",
}


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of a running engine, against which requests are checked."""

    max_model_len: int  # tokens of the prompt and the completion together
    num_blocks: int
    block_size: int  # tokens
    vocab_size: int
    has_tokenizer: bool = True
    task: Task = "generate"

    @property
    def generates(self) -> bool:
        """Whether the model generates text."""
        return self.task == "generate"

    def check_generates(self) -> None:
        """Raises RequestError if the model does not generate text."""
        if not self.generates:
            raise RequestError(_NOT_GENERATIVE[self.task])

    def check(self, request: Request) -> None:
        """Raises RequestError if `request` could never run, even on an idle engine."""
        self.check_generates()
        prompt, new = len(request.prompt_token_ids), request.params.max_new_tokens
        if prompt + new > self.max_model_len:
            raise RequestError(
                f"The prompt has {prompt} tokens and max_new_tokens is {new}, together {prompt + new}, but the context "
                f"holds {self.max_model_len}: shorten the prompt or ask for fewer new tokens."
            )
        # The last generated token is not fed back to the model, so its keys and values need no slot.
        if (blocks := -(-(prompt + new - 1) // self.block_size)) > self.num_blocks:
            raise RequestError(
                f"The request needs {blocks} cache blocks of {self.block_size} tokens and the engine has "
                f"{self.num_blocks}: shorten it or start the engine with more blocks."
            )
        if (largest := max(request.token_ids)) >= self.vocab_size:
            raise RequestError(f"Token id {largest} is outside the vocabulary of {self.vocab_size} tokens.")
        params = request.params
        if (params.stop or params.bad_words or params.has_grammar) and not self.has_tokenizer:
            raise RequestError("Stop strings, bad words and grammars need a tokenizer; the model directory has none.")
