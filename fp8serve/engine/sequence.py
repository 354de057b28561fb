"""The engine's own record of a request in flight. No torch."""

import secrets
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from fp8serve.engine.bad_words import Ban
from fp8serve.engine.output import FinishReason, Timing, TokenLogprob
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from fp8serve.engine.adapters import LoadedAdapter
    from fp8serve.engine.grammar import Matcher  # which needs a library that the GPU's tests do not


class Status(Enum):
    """Where a sequence is; PREEMPTED waits again after losing its blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Drafter(Protocol):
    """Drafts tokens of one sequence: `drafting.Drafter`, or `draft_model.ModelDrafter`."""

    def propose(self, token_ids: Items[int], room: int, rows: int) -> list[int]: ...

    def learn(self, drafted: int, accepted: int) -> None: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """The record of one request in flight, compared by identity. Comments name the part that writes a field."""

    request: Request
    token_ids: list[int]  # the prompt, then generated tokens; engine
    seed: int  # engine; random if the request has none
    status: Status = Status.WAITING  # scheduler
    num_computed: int = 0  # tokens whose keys and values are in the cache; scheduler
    num_cached: int = 0  # prompt tokens found in the prefix cache when first admitted; scheduler
    block_table: list[int] = field(default_factory=list)  # cache manager
    block_hashes: list[bytes] = field(default_factory=list)  # chained hashes of full blocks; cache manager
    finish_reason: FinishReason | None = None  # the part that ends the sequence
    constraint: "Matcher | None" = None  # if the answer has a form; engine
    ban: Ban | None = None  # if there are bad words; engine
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of tokens 1, 2, ...; engine
    drafter: Drafter | None = None  # if tokens are drafted; engine
    adapter: "LoadedAdapter | None" = None  # if the request names one; engine
    arrived: float = field(default_factory=time.monotonic)  # when the process received the request; engine
    admitted: float | None = None  # the first admission, on the monotonic clock as all times; scheduler
    first_token: float | None = None  # engine

    @classmethod
    def of(cls, request: Request) -> "Sequence":
        seed = request.params.seed
        return cls(request, list(request.prompt_token_ids), secrets.randbits(64) if seed is None else seed % 2**64)

    def timing(self) -> Timing:
        """Its phases until now."""
        now, since_epoch = time.monotonic(), time.time()
        admitted = now if self.admitted is None else self.admitted
        first = now if self.first_token is None else self.first_token
        return Timing(
            since_epoch - (now - self.arrived),
            admitted - self.arrived,
            None if self.admitted is None else first - admitted,
            None if self.first_token is None else now - first,
        )

    @property
    def salt(self) -> bytes:
        """What its keys and values depend on besides the tokens and the model; at most 64 bytes."""
        return b"" if self.adapter is None else self.adapter.digest

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def group(self) -> tuple[str, str]:
        """Identifies the request of which this is a part, among those of all tenants."""
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
