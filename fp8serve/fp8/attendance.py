"""What ranks tell each other along with their amaxes: which of them run a backward pass, how many places they need.

Two rows of WIDTH numbers travel with every collective, and their maxima come back:

    [this rank expects a backward pass, it expects none, this is the end of a context, of a backward pass]
    [one more than the highest place that ever staged an amax here, 0, 0, 0]

So no rank decides about a collective by what it knows alone. The maxima apply from the next collective on, on all ranks
alike; on a GPU they are read then, long after they have arrived. Only the first collective is waited for. It shows at
once whether a model has more than MIN_PLACES modules, so that no rank leaves any of them out of its first update."""

from typing import Any, Literal

import torch
from torch import Tensor

from fp8serve.errors import RecipeError

MIN_PLACES = 1024
WIDTH = 4  # numbers of a row; tensors that a module stages in one pass, at most
HEADER = 2  # rows


def header(direction: Literal["forward", "backward"], expecting: bool, reach: int) -> list[list[float]]:
    """The two rows of this rank."""
    passes = [float(expecting), float(not expecting), 1.0, 0.0] if direction == "forward" else [0.0, 0.0, 0.0, 1.0]
    return [passes, [float(reach), 0.0, 0.0, 0.0]]


class Attendance:
    """Whether all ranks of a group have the same passes, and how many places they reduce, according to their headers.

    From the first context for which only some ranks have a backward pass, the reduction of gradients is `deferred`, on
    all ranks alike. `places` grows to the next power of two, for the steps that follow.
    """

    def __init__(self) -> None:
        self.places = MIN_PLACES
        self._deferred = False
        self._reach = 0
        self._first = True
        self._told: list[tuple[Tensor, Any]] = []  # headers, each with the moment of its arrival if it is on a GPU

    def short(self, heard: Tensor) -> bool:
        """Whether the first collective must be repeated over more places; waits for its result, once."""
        if not self._first:
            return False
        self._first = False
        before = self.places
        self._reach = int(heard[1, 0])
        self._grow()
        return self.places > before

    def note(self, heard: Tensor) -> None:
        """Take in the maxima of the headers; on a GPU without waiting for them, so they are looked at later."""
        told, arrival = heard.to("cpu", non_blocking=True), None
        if heard.is_cuda:
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record()
        self._told.append((told, arrival))
        if arrival is None:
            self._listen()

    def deferred(self) -> bool:
        """Whether gradients wait for the next context; asked before the collectives of a step.

        RecipeError if the ranks were in different passes.
        """
        self._listen()
        self._grow()
        return self._deferred

    def _grow(self) -> None:
        while self.places < self._reach:
            self.places *= 2

    def _listen(self) -> None:
        told, self._told = self._told, []
        for header, arrival in told:
            if arrival is not None:
                arrival.synchronize()
            self._take_in(*header.tolist())

    def _take_in(self, passes: list[float], places: list[float]) -> None:
        back, none, ended_context, ended_pass = (value > 0 for value in passes)
        self._reach = max(self._reach, int(places[0]))
        if ended_context and ended_pass:
            raise RecipeError(
                "Some ranks were in a backward pass and others at the end of an autocast: a rank that ran FP8 "
                "layers with gradients must call backward when the others do, or run them under torch.no_grad()."
            )
        self._deferred |= back and none
