"""What delayed scaling needs from torch.distributed: one MAX over everything that was staged.

There is one collective per update, whatever the number of layers: one when the outermost `autocast` ends and one when
the backward pass ends. It reduces a vector with a place for every module of the session (session.py), whose length the
ranks agree on (attendance.py). So the ranks cannot disagree about the vector: not when a module did not run on one of
them, not when one rank has already garbage-collected a discarded model and another has not, and not when only one makes
copies. They must have made the session's modules in the same order; copies have their own places. A module beyond the
agreed length keeps its staged amax until the next collective, which is long enough.

A rank on which *nothing* ran in FP8 takes part in the forward pass's collective through its `autocast`, but it has no
backward pass and so does not know that the others are in theirs. The forward collective therefore also says whether
there is such a rank. If so, from then on the gradients' amaxes are reduced when the next context ends: all ranks get
there, and the scales are not needed before. The next backward pass uses the same scales as if they had been found
earlier.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.errors import RecipeError
from fp8serve.fp8.attendance import HEADER, WIDTH, Attendance
from fp8serve.fp8.recipe import DelayedScaling, Recipe, delayed, one_per_tensor
from fp8serve.fp8.scaling import Direction, Line, Scaled
from fp8serve.fp8.torch_private import copy_each


def reduce_staged(
    living: Iterable[Scaled],
    direction: Direction,
    recipe: DelayedScaling,
    group: Any,
    said: list[list[float]],
    attendance: Attendance,
) -> list[Scaled]:
    """Raise every staging slot of the `living` modules to the maximum over the ranks of `group`, in one collective.

    `said`: this rank's header, [HEADER][WIDTH]; `attendance` receives those of all ranks. Returns the modules that have
    states and a place that was reduced. A module that ran only on other ranks gets its states here, so all ranks keep
    equal scales. An infinite amax on one rank is infinite on all, so all ranks drop that step alike.
    """
    modules = list(living)
    rows, heard = _reduced(modules, attendance.places, direction, group, said)
    if attendance.short(heard):
        rows, heard = _reduced(modules, attendance.places, direction, group, said)
    attendance.note(heard)
    modules = _placed(modules, attendance.places)
    _prepare_strangers(modules, rows, attendance.places, recipe)
    present = [m for m in modules if m.scaling]
    if present:
        copy_each(_slots(present, direction), rows[_cells(present, direction, attendance.places)].unbind())
    return present


def _prepare_strangers(modules: Sequence[Scaled], rows: Tensor, places: int, recipe: DelayedScaling) -> None:
    """Give states to the modules that have none but ran on another rank."""
    strangers = [m for m in modules if not m.scaling]
    if strangers:  # only for these the values are read, which synchronises with a GPU
        ran = rows[_rows(strangers, places)].any(1).tolist()
        for module in (m for m, yes in zip(strangers, ran, strict=True) if yes):
            module.prepare(recipe.amax_history_len)


def _reduced(
    modules: Sequence[Scaled], places: int, direction: Direction, group: Any, said: list[list[float]]
) -> tuple[Tensor, Tensor]:
    """The maxima over the ranks, FP32 [lines * places, WIDTH], and of the headers, [HEADER, WIDTH].

    A module's row is zero where it staged nothing.
    """
    staged = torch.zeros(len(Line) * places + HEADER, WIDTH, device=_device(modules, group))
    staged[-HEADER:] = torch.tensor(said)
    present = [m for m in _placed(modules, places) if m.scaling]
    if present:
        staged[_cells(present, direction, places)] = torch.stack(_slots(present, direction))
    dist.all_reduce(staged, op=dist.ReduceOp.MAX, group=group)
    return staged[:-HEADER], staged[-HEADER:]


def _placed(modules: Sequence[Scaled], places: int) -> list[Scaled]:
    """Those that have a row among so many places."""
    return [m for m in modules if m.place.number < places]


def _slots(modules: Sequence[Scaled], direction: Direction) -> list[Tensor]:
    return [m.scaling[name].amax_history[0] for m in modules for name in m.tensors[direction]]


def _rows(modules: Sequence[Scaled], places: int) -> list[int]:
    return [m.place.line * places + m.place.number for m in modules]


def _cells(modules: Sequence[Scaled], direction: Direction, places: int) -> tuple[list[int], list[int]]:
    """Row and column of every slot."""
    columns = [range(len(m.tensors[direction])) for m in modules]
    cells = [(row, c) for row, cs in zip(_rows(modules, places), columns, strict=True) for c in cs]
    return [row for row, _ in cells], [column for _, column in cells]


def _device(modules: Sequence[Scaled], group: Any) -> torch.device:
    """The device of the states; without any, the device that the group's collectives need."""
    found = {s.amax_history.device for m in modules for s in m.scaling.values()}
    return found.pop() if found else torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


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
