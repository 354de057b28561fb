"""Texts that wait for an encoder's step, of all requests: requests take turns, text by text, until the step is full.

Small requests share a step instead of having one each, and none waits for a large one to end. The result of a text does
not depend on its step (text_encoder.py). No torch here.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Ids = Sequence[int]


@dataclass
class Call:
    """The texts of one request. segments: 0 or 1 for every token of each text. found: the answer for each text, None
    until it is computed."""

    number: int
    inputs: Sequence[Ids]
    segments: Sequence[Ids] | None = None
    dimensions: int | None = None
    found: list[Any] = field(init=False)
    taken: int = field(default=0, init=False)  # texts that have had their step

    def __post_init__(self) -> None:
        self.found = [None] * len(self.inputs)

    @property
    def is_finished(self) -> bool:
        return None not in self.found


@dataclass(frozen=True)
class Place:
    """One text of a call."""

    call: Call
    index: int

    @property
    def ids(self) -> Ids:
        return self.call.inputs[self.index]

    @property
    def segments(self) -> Ids:
        return [0] * len(self.ids) if self.call.segments is None else self.call.segments[self.index]


class EncodingQueue:
    """Calls in the order in which it is their turn."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: Call) -> None:
        """A call of one or more texts."""
        self._calls.append(call)

    def forget(self, number: int) -> None:
        """Drop this call, because its caller no longer waits."""
        self._calls = deque(call for call in self._calls if call.number != number)

    def take(self, tokens: int) -> list[Place]:
        """The texts of the next step: at most so many tokens together, but at least one text."""
        return list(self._next(tokens))

    def _next(self, room: int) -> Iterator[Place]:
        is_first = True
        while self._calls:
            call = self._calls[0]
            place = Place(call, call.taken)
            if not is_first and len(place.ids) > room:
                return
            self._calls.popleft()
            call.taken += 1
            if call.taken < len(call.inputs):
                self._calls.append(call)
            room, is_first = room - len(place.ids), False
            yield place
