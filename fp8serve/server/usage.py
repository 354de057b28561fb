"""What one HTTP request has used so far: filled in while it is answered, and read at the end."""

from dataclasses import dataclass, field

from fp8serve.engine.output import FinishReason, RequestOutput, Timing
from fp8serve.engine.request import Request


@dataclass
class Answer:
    """One of the sequences that an HTTP request asked the engine for."""

    request: Request
    cached: int = 0  # tokens of its prompt
    generated: int = 0
    finish_reason: FinishReason | None = None  # None: it did not end, or not by itself
    timing: Timing | None = None  # None: the engine said nothing

    def saw(self, output: RequestOutput) -> None:
        self.generated, self.finish_reason = output.num_generated, output.finish_reason
        self.cached = output.num_cached_tokens
        self.timing = output.timing or self.timing


@dataclass
class Usage:
    """Tokens. A prompt counts once, however many answers it has; generated tokens count as they come.

    `request_id`: the request's id in the log and for the client, who may give two requests the same. `tenant`: that of
    the key.
    """

    request_id: str = ""
    tenant: str = ""
    prompt: int = 0
    generated: int = 0
    model: str | None = None  # that answers
    answers: list[Answer] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.prompt + self.generated
