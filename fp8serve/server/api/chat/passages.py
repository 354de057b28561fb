"""An answer as a series of passages, each of them reasoning, content or one call, for protocols with blocks or items.

`take` returns the changes by an output, in the order of a stream: a passage begins, grows, is complete.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fp8serve.engine.output import RequestOutput
from fp8serve.server.answers.choice import AnswerReader
from fp8serve.server.answers.feed import Arguments, Call, Content, Part, Reasoning

Kind = Literal["reasoning", "content", "call"]


@dataclass
class Passage:
    """`text`: for a call, the JSON text of its arguments. `name`: of the tool that is called."""

    kind: Kind
    name: str = ""
    text: str = ""


class Change(NamedTuple):
    """`text`: what is added to the passage."""

    what: Literal["begins", "grows", "ends"]
    place: int
    passage: Passage
    text: str = ""


class Passages:
    """The passages of one choice so far. `reasoning_tokens`: those that came while the model was still thinking."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self.found: list[Passage] = []
        self.tokens = self.cached_tokens = self.reasoning_tokens = 0
        self.finish: str | None = None
        self.stop: str | int | None = None

    @property
    def calls(self) -> bool:
        return any(passage.kind == "call" for passage in self.found)

    def take(self, output: RequestOutput) -> list[Change]:
        self.tokens, self.cached_tokens = output.num_generated, max(self.cached_tokens, output.num_cached_tokens)
        self.finish, self.stop = output.finish_reason, output.stop_reason
        ends = output.finish_reason is not None
        parts = self._reader.take(output.text_delta, ends, output.is_cut_off)
        changes = [change for part in parts for change in self._add(part)]
        if self.found and self.found[-1].kind == "reasoning":
            self.reasoning_tokens = output.num_generated
        return changes + (self._end() if ends else [])

    def _add(self, part: Part) -> list[Change]:
        if isinstance(part, Call):
            return self._begin(Passage("call", part.name))
        begun = self._begin(Passage(_kind(part))) if not self.found or self.found[-1].kind != _kind(part) else []
        passage = self.found[-1]
        passage.text += part.text
        return [*begun, Change("grows", len(self.found) - 1, passage, part.text)]

    def _begin(self, passage: Passage) -> list[Change]:
        ended = self._end()
        self.found.append(passage)
        return [*ended, Change("begins", len(self.found) - 1, passage)]

    def _end(self) -> list[Change]:
        return [Change("ends", len(self.found) - 1, self.found[-1])] if self.found else []


def _kind(part: Content | Reasoning | Arguments) -> Kind:
    if isinstance(part, Arguments):
        return "call"
    return "reasoning" if isinstance(part, Reasoning) else "content"
