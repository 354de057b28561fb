"""The tokens that one HTTP request has used so far. The counts grow while the response is generated."""

from dataclasses import dataclass, field

from fp8serve.engine.output import FinishReason, RequestOutput, Timing
from fp8serve.engine.request import Request


@dataclass
class SequenceUsage:
    """The usage of one of the sequences that an HTTP request runs in the engine."""

    request: Request
    cached_tokens: int = 0  # of the prompt
    generated_tokens: int = 0
    finish_reason: FinishReason | None = None  # None if the sequence runs or was aborted
    timing: Timing | None = None  # None until the engine reports it

    def update(self, output: RequestOutput) -> None:
        self.generated_tokens, self.finish_reason = output.num_generated, output.finish_reason
        self.cached_tokens = output.num_cached_tokens
        self.timing = output.timing or self.timing


@dataclass
class Usage:
    """The tokens of one HTTP request. A prompt counts once, however many choices are generated for it.

    `request_id` is the id in the log and the response; a client may give several requests the same one. `tenant` is the
    tenant of the API key, and `model` the id of the weights that serve the request.
    """

    request_id: str = ""
    tenant: str = ""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    model: str | None = None
    sequences: list[SequenceUsage] = field(default_factory=list)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens
