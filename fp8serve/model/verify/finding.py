"""A finding of a check."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """severity "error": answers would be wrong if it were served like this, or a reader refuses it. check: the kind of
    finding, one word. tensor: its name, or that of a file or a key of config.json."""

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
