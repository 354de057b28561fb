"""A request to the engine: a prompt and how to continue it; plain data, no torch, to JSON and back.

`SamplingParams` and `Request` are frozen and refuse invalid values when they are made, so no later code checks again.
`EngineLimits` are the numbers of a running engine; `EngineLimits.check` is called before a request is queued (by the
client too, so a server can answer 4xx before it sends a header).

Not here: `n` completions of one prompt are `n` requests, made by the caller; they share their prompt's blocks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Annotated, Any, Literal

from annotated_types import Len

from fp8serve.engine.sampling_params import SamplingParams, TokenId
from fp8serve.errors import RequestError
from fp8serve.options import check, known_fields


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. `tenant` separates callers: no shared cached blocks, and a fair share each.

    Requests of one `group` belong together (several answers, several prompts) and get the share of one request; ""
    means that the request is alone. `adapter`: the name of one that the engine has loaded.
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
        """All that it names."""
        biased = (token_id for token_id, _ in self.params.logit_bias)
        return chain(self.prompt_token_ids, self.params.stop_token_ids, biased)

    def to_json(self) -> dict[str, Any]:
        """The prompt is not copied: `asdict` would, token by token."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        return plain | {"params": asdict(self.params)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Request":
        params = known_fields(SamplingParams, data.get("params", {}))
        return cls(**{**known_fields(cls, data), "params": SamplingParams(**params)})


_PLAIN = ("request_id", "prompt_token_ids", "tenant", "group", "adapter")
Task = Literal["generate", "embed", "classify"]
_NO_TEXT: dict[Task, str] = {
    "embed": "This is an embedding model, which writes no text; ask /v1/embeddings for vectors.",
    "classify": "This is a classifier, which writes no text; ask /classify, /v1/rerank or /v1/score.",
}


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of a running engine; every number in a refusal comes from here."""

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

    def check_generates(self) -> None:
        """Raises RequestError when the model writes no text."""
        if not self.generates:
            raise RequestError(_NO_TEXT[self.task])

    def check(self, request: Request) -> None:
        """Raises RequestError when `request` could never run, however long it waited."""
        self.check_generates()
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
        if (largest := max(request.token_ids)) >= self.vocab_size:
            raise RequestError(f"Token id {largest} is outside the vocabulary of {self.vocab_size} tokens.")
        params = request.params
        if (params.stop or params.bad_words or params.has_form) and not self.has_tokenizer:
            raise RequestError("Stop strings, bad words and grammars need a tokenizer; the model directory has none.")
