"""The state of a request in the engine. This module does not import torch."""

import secrets
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from fp8serve.engine.bad_words import Ban
from fp8serve.engine.output import FinishReason, RequestOutput, Timing, TokenLogprob
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher  # only as a type, because the tests on a GPU have no llguidance

    from fp8serve.engine.adapters import LoadedAdapter
    from fp8serve.engine.text import TextStream


class Status(Enum):
    """The status of a sequence. A PREEMPTED sequence has lost its blocks and waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Drafter(Protocol):
    """The interface of `drafting.Drafter` and `draft_model.ModelDrafter`, which draft tokens of one sequence."""

    def propose(self, token_ids: Items[int], max_tokens: int, rows: int) -> list[int]: ...

    def record(self, drafted: int, accepted: int) -> None: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """The prompt and the generated tokens of one request, with its state. Sequences are compared by identity. All times
    are on the monotonic clock."""

    request: Request
    token_ids: list[int]  # the prompt, then the generated tokens
    seed: int  # random if the request has none
    stop_ids: frozenset[int] = frozenset()  # tokens that end the text
    matcher: "LLMatcher | None" = None  # if the request has a grammar
    ban: Ban | None = None  # if the request has bad words
    drafter: Drafter | None = None  # if tokens are drafted
    adapter: "LoadedAdapter | None" = None  # if the request names an adapter
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of prompt tokens 1, 2, ...
    arrived: float = field(default_factory=time.monotonic)  # when the engine process received the request
    first_token: float | None = None  # when the first token was generated
    # the operations of SamplingPlan that this sequence needs, the hash of its seed, and its filters (temperature,
    # top_k, top_p, min_p); the sampler writes them once
    sampling: tuple[tuple[str, ...], blake2b, tuple[float, ...]] | None = None
    # the scheduler writes the following fields
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    num_computed: int = 0  # tokens whose keys and values are in the KV cache
    num_launched: int = 0  # tokens that are computed or that a step in flight computes (flights.py)
    sample_row: int = 0  # the row of the last launched step that samples a token of this sequence
    num_cached: int = 0  # tokens that were in the prefix cache when the sequence was first admitted
    admitted: float | None = None  # when the sequence was first admitted
    # the block pool writes the following fields
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks
    text: "TextStream" = field(init=False, repr=False)  # set by the engine; the scheduler does not read it
    # copied from the request, because every step reads them
    request_id: str = field(init=False)
    params: SamplingParams = field(init=False)
    num_prompt: int = field(init=False)
    max_tokens: int = field(init=False)  # of the prompt and the completion
    tenant: str = field(init=False)
    group: tuple[str, str] = field(init=False)  # the tenant and the group; a request without a group is its own group

    def __post_init__(self) -> None:
        request = self.request
        self.request_id = request.request_id
        self.params, self.tenant, self.num_prompt = request.params, request.tenant, len(request.prompt_token_ids)
        self.max_tokens = self.num_prompt + request.params.max_new_tokens
        self.group = request.tenant, request.group or request.request_id

    @classmethod
    def of(cls, request: Request) -> "Sequence":
        seed = request.params.seed
        return cls(request, list(request.prompt_token_ids), secrets.randbits(64) if seed is None else seed % 2**64)

    def timing(self) -> Timing:
        """Returns the durations of the request's phases until now."""
        now = time.monotonic()
        admitted = now if self.admitted is None else self.admitted
        first_token = now if self.first_token is None else self.first_token
        return Timing(
            time.time() - (now - self.arrived),
            admitted - self.arrived,
            None if self.admitted is None else first_token - admitted,
            None if self.first_token is None else now - first_token,
        )

    @property
    def cache_salt(self) -> bytes:
        """The salt of the block hashes: the adapter, on which keys and values depend. It has at most 64 bytes."""
        return b"" if self.adapter is None else self.adapter.digest

    @property
    def is_own(self) -> bool:
        """Whether the server itself sent the request, to verify weights. Those of clients have a group."""
        return not self.request.group

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_unscored(self) -> int:
        """The number of prompt tokens whose requested log-probabilities are not computed yet."""
        if self.params.prompt_logprobs is None:
            return 0
        return self.num_prompt - 1 - len(self.prompt_logprobs)

    @property
    def num_tokens(self) -> int:
        """The number of tokens, including those that a step in flight samples. A step that computes the last token
        samples the next one."""
        return max(len(self.token_ids), self.num_launched + 1)

    @property
    def num_pending(self) -> int:
        """The number of tokens whose computation is not launched yet: 1 while decoding."""
        return self.num_tokens - self.num_launched


PlainToken = tuple[Sequence, int, int, str]
"""An output that is nothing but one more token: the sequence, its number of tokens with this one, the token's id, and
the text that it released. Most outputs of a step are such tuples, because a RequestOutput takes ten times as long to
create."""
StepOutput = RequestOutput | PlainToken


def to_request_output(output: StepOutput) -> RequestOutput:
    if isinstance(output, RequestOutput):
        return output
    seq, num_tokens, token_id, text = output
    counts = seq.num_prompt, num_tokens - seq.num_prompt, seq.num_cached
    return RequestOutput(seq.request_id, text, (token_id,), None, None, *counts)
