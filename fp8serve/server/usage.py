"""What one HTTP request has used so far: filled in as it is answered, read when it is over."""

from dataclasses import dataclass


@dataclass
class Usage:
    """Tokens. A prompt counts once, however many answers it has; what is generated counts as it comes."""

    prompt: int = 0
    generated: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.generated
