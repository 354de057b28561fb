"""What delayed scaling needs from torch.distributed: one MAX over everything that was staged.

There is one collective per update, whatever the number of layers: one when the outermost `autocast` ends and one when
the backward pass ends. It reduces a vector with a position for every module of the session (session.py), whose length
the ranks agree on (`Attendance`). So the ranks cannot disagree about the vector: not when a module did not run on one
of them, not when one rank has already garbage-collected a discarded model and another has not, and not when only one
makes copies. They must have made the session's modules in the same order; copies have their own positions. A module
beyond the agreed length keeps its staged amax until the next collective, which is long enough.

A rank on which *nothing* ran in FP8 takes part in the forward pass's collective through its `autocast`, but it has no
backward pass and so does not know that the others are in theirs. The forward collective therefore also says whether
there is such a rank. If so, from then on the gradients' amaxes are reduced when the next context ends: all ranks get
there, and the scales are not needed before. The next backward pass uses the same scales as if they had been found
earlier.

Two rows of WIDTH numbers, the header of each rank, travel with every collective, and their maxima come back:

    flags, 0 or 1: [expects backward, expects no backward, is at the end of autocast, at the end of backward]
    [one more than the highest position that ever staged an amax here, 0, 0, 0]

So no rank decides about a collective by what it knows alone. All ranks apply the maxima at the next collective; on a
GPU they are copied asynchronously and read at that point. Only the first collective is waited for. It shows at
once whether a model has more than MIN_POSITIONS modules, so that no rank leaves any of them out of its first update.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.errors import RecipeError
from fp8serve.fp8.recipe import DelayedScaling, Recipe, delayed, one_per_tensor
from fp8serve.fp8.scaling import Direction, Order, Scaled
from fp8serve.fp8.torch_private import copy_each

MIN_POSITIONS = 1024
WIDTH = 4  # numbers of a row; tensors that a module stages in one pass, at most
HEADER = 2  # rows


def header(direction: Literal["forward", "backward"], expecting: bool, reach: int) -> list[list[float]]:
    """The two rows of this rank."""
    passes = [float(expecting), float(not expecting), 1.0, 0.0] if direction == "forward" else [0.0, 0.0, 0.0, 1.0]
    return [passes, [float(reach), 0.0, 0.0, 0.0]]


class Attendance:
    """Whether all ranks of a group have the same passes, and how many positions they reduce, according to their
    headers.

    From the first context for which only some ranks have a backward pass, the reduction of gradients is `deferred`, on
    all ranks alike. `positions` grows to the next power of two, for the steps that follow.
    """

    def __init__(self) -> None:
        self.positions = MIN_POSITIONS
        self._deferred = False
        self._reach = 0
        self._first = True
        self._pending: list[tuple[Tensor, Any]] = []  # headers, each with the moment of its arrival if it is on a GPU

    def short(self, headers: Tensor) -> bool:
        """Whether the first collective must be repeated over more positions; waits for its result, once."""
        if not self._first:
            return False
        self._first = False
        before = self.positions
        self._reach = int(headers[1, 0])
        self._grow()
        return self.positions > before

    def note(self, headers: Tensor) -> None:
        """Take in the maxima of the headers; on a GPU without waiting for them, so they are looked at later."""
        pending, arrival = headers.to("cpu", non_blocking=True), None
        if headers.is_cuda:
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record()
        self._pending.append((pending, arrival))
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
        while self.positions < self._reach:
            self.positions *= 2

    def _listen(self) -> None:
        pending, self._pending = self._pending, []
        for header, arrival in pending:
            if arrival is not None:
                arrival.synchronize()
            self._take_in(*header.tolist())

    def _take_in(self, passes: list[float], positions: list[float]) -> None:
        back, none, ended_context, ended_pass = (value > 0 for value in passes)
        self._reach = max(self._reach, int(positions[0]))
        if ended_context and ended_pass:
            raise RecipeError(
                "Some ranks were in a backward pass and others at the end of an autocast: a rank that ran FP8 "
                "layers with gradients must call backward when the others do, or run them under torch.no_grad()."
            )
        self._deferred |= back and none


def reduce_staged(
    living: Iterable[Scaled],
    direction: Direction,
    recipe: DelayedScaling,
    group: Any,
    own_header: list[list[float]],
    attendance: Attendance,
) -> list[Scaled]:
    """Raise every staging slot of the `living` modules to the maximum over the ranks of `group`, in one collective.

    own_header: this rank's, [HEADER][WIDTH]; `attendance` receives those of all ranks. Returns the modules that have
    states and a position that was reduced. A module that ran only on other ranks gets its states here, so all ranks
    keep equal scales. An infinite amax on one rank is infinite on all, so all ranks drop that step alike.
    """
    modules = list(living)
    rows, headers = _reduced(modules, attendance.positions, direction, group, own_header)
    if attendance.short(headers):
        rows, headers = _reduced(modules, attendance.positions, direction, group, own_header)
    attendance.note(headers)
    modules = _placed(modules, attendance.positions)
    _prepare_strangers(modules, rows, attendance.positions, recipe)
    present = [m for m in modules if m.scaling]
    if present:
        copy_each(_slots(present, direction), rows[_cells(present, direction, attendance.positions)].unbind())
    return present


def _prepare_strangers(modules: Sequence[Scaled], rows: Tensor, positions: int, recipe: DelayedScaling) -> None:
    """Give states to the modules that have none but ran on another rank."""
    strangers = [m for m in modules if not m.scaling]
    if strangers:  # only for these the values are read, which synchronises with a GPU
        ran = rows[_rows(strangers, positions)].any(1).tolist()
        for module in (m for m, yes in zip(strangers, ran, strict=True) if yes):
            module.prepare(recipe.amax_history_len)


def _reduced(
    modules: Sequence[Scaled], positions: int, direction: Direction, group: Any, own_header: list[list[float]]
) -> tuple[Tensor, Tensor]:
    """The maxima over the ranks, FP32 [orders * positions, WIDTH], and of the headers, [HEADER, WIDTH].

    A module's row is zero where it staged nothing.
    """
    staged = torch.zeros(len(Order) * positions + HEADER, WIDTH, device=_device(modules, group))
    staged[-HEADER:] = torch.tensor(own_header)
    present = [m for m in _placed(modules, positions) if m.scaling]
    if present:
        staged[_cells(present, direction, positions)] = torch.stack(_slots(present, direction))
    dist.all_reduce(staged, op=dist.ReduceOp.MAX, group=group)
    return staged[:-HEADER], staged[-HEADER:]


def _placed(modules: Sequence[Scaled], positions: int) -> list[Scaled]:
    """Those that have a row among so many positions."""
    return [m for m in modules if m.position.number < positions]


def _slots(modules: Sequence[Scaled], direction: Direction) -> list[Tensor]:
    return [m.scaling[name].amax_history[0] for m in modules for name in m.tensors[direction]]


def _rows(modules: Sequence[Scaled], positions: int) -> list[int]:
    return [m.position.order * positions + m.position.number for m in modules]


def _cells(modules: Sequence[Scaled], direction: Direction, positions: int) -> tuple[list[int], list[int]]:
    """Row and column of every slot."""
    columns = [range(len(m.tensors[direction])) for m in modules]
    cells = [(row, c) for row, cs in zip(_rows(modules, positions), columns, strict=True) for c in cs]
    return [row for row, _ in cells], [column for _, column in cells]


def _device(modules: Sequence[Scaled], group: Any) -> torch.device:
    """The device of the states; without any, the device that the group's collectives need."""
    devices = {s.amax_history.device for m in modules for s in m.scaling.values()}
    return devices.pop() if devices else torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def default_group() -> Any:
    """The default process group, or None while there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def several(group: Any) -> bool:
    """Whether the group has another rank besides this one."""
    return group is not None and dist.get_world_size(group) > 1


def one_scale(recipe: Recipe, group: Any, members: Any, user: str) -> None:
    """Raise RecipeError unless a tensor that is divided among the ranks of `members` has one scale under `recipe`.

    group: the group over which amaxes are reduced. Delayed scales are equal on ranks that reduce their amaxes together.
    Current scales can be computed together. A scale for each row or block cannot be shared by both directions.
    """
    if not one_per_tensor(recipe):
        raise RecipeError(f"{user} needs one scale for a whole tensor; use a delayed recipe or current with 'tensor'.")
    if (rules := delayed(recipe)) is not None and not (rules.reduce_amax and spans(group, members)):
        raise RecipeError(
            f"{user} needs equal delayed scales on its ranks: give autocast an amax_reduction_group that spans "
            "them, and leave reduce_amax on."
        )


def spans(group: Any, members: Any) -> bool:
    """Whether a group holds every rank of another one."""
    if group is None or group is members:
        return group is not None
    return set(dist.get_process_group_ranks(members)) <= set(dist.get_process_group_ranks(group))
