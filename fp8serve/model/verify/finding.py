"""What a check has to say."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """severity "error": served like this, answers would be wrong, or a reader refuses it. check: what kind it is, one
    word. tensor: its name, or that of a file or a key of config.json."""

    severity: Severity
    check: str
    tensor: str
    what: str  # follows the tensor's name: "holds the scale nan"
    do: str  # an imperative: "quantize the model again"

    @property
    def sentence(self) -> str:
        return f"{self.tensor} {self.what}; {self.do}."


def error(check: str, tensor: str, what: str, do: str) -> Finding:
    return Finding("error", check, tensor, what, do)


def warning(check: str, tensor: str, what: str, do: str) -> Finding:
    return Finding("warning", check, tensor, what, do)
