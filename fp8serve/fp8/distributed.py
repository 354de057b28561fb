"""Distributed amax reduction for delayed scaling: one MAX all-reduce over all staged amaxes.

There is one collective per update, whatever the number of layers: one when the outermost `autocast` ends and one when
the backward pass ends. The reduced vector has a row for every module of the session (session.py). The ranks agree on
the number of rows through `ReductionState`, so the vector has the same length on every rank. This holds even if a
module did not run on some rank, if one rank has already garbage-collected a discarded model, or if only one rank makes
copies. All ranks must create the session's modules in the same order; copies have positions of their own. A module
beyond the agreed number of rows keeps its staged amax until the next collective, which has more rows.

A rank on which no FP8 layer ran takes part in the forward pass's collective through its `autocast`. It has no backward
pass, so it cannot know that the other ranks reduce at the end of theirs. The forward collective therefore also reports
whether there is such a rank. If so, from then on the amaxes of gradients are reduced when the next context ends, which
every rank reaches. The scales are not needed earlier, so the next backward pass uses the same scales either way.

With every collective each rank sends a header of two rows of ROW_WIDTH numbers and gets the maxima over the ranks:

    flags, 0 or 1: [expects backward, expects no backward, is at the end of autocast, is at the end of backward]
    [one more than the highest position that ever staged an amax on this rank, 0, 0, 0]

No rank acts on its own header alone. All ranks apply the maxima at the next collective; on a GPU the maxima are copied
asynchronously and read then. Only the first collective is waited for. It shows whether a model has more than
MIN_POSITIONS modules, so that the first update already includes all of them.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.errors import RecipeError
from fp8serve.fp8.recipe import DelayedScaling, Recipe, as_delayed, has_tensor_scales
from fp8serve.fp8.scaling import Direction, Order
from fp8serve.fp8.torch_private import copy_each

if TYPE_CHECKING:
    from fp8serve.fp8.stateful import Stateful

MIN_POSITIONS = 1024
ROW_WIDTH = 4  # numbers in a row; a module stages at most this many tensors in one pass
HEADER_ROWS = 2


def make_header(
    direction: Literal["forward", "backward"], expects_backward: bool, num_positions: int
) -> list[list[float]]:
    """Returns this rank's header, [HEADER_ROWS][ROW_WIDTH]."""
    flags = [0.0, 0.0, 0.0, 1.0]
    if direction == "forward":
        flags = [float(expects_backward), float(not expects_backward), 1.0, 0.0]
    return [flags, [float(num_positions), 0.0, 0.0, 0.0]]


class ReductionState:
    """What the ranks of a group have agreed on through their headers.

    `num_positions` is the number of positions that the next collective reduces; it grows by powers of two. As soon as
    only some ranks have a backward pass in a context, all ranks defer the reduction of gradients' amaxes.
    """

    def __init__(self) -> None:
        self.num_positions = MIN_POSITIONS
        self._is_backward_deferred = False
        self._required_positions = 0
        self._is_first_collective = True
        self._pending_headers: list[tuple[Tensor, Any]] = []  # each with its CUDA event, or None on a CPU

    def must_repeat_first(self, headers: Tensor) -> bool:
        """Returns whether the first collective must be repeated over more positions. Waits for the device once."""
        if not self._is_first_collective:
            return False
        self._is_first_collective = False
        previous = self.num_positions
        self._required_positions = int(headers[1, 0])
        self._grow()
        return self.num_positions > previous

    def add_headers(self, headers: Tensor) -> None:
        """Adds the maxima of the headers. On a GPU they are copied without waiting and read at the next collective."""
        copy, event = headers.to("cpu", non_blocking=True), None
        if headers.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._pending_headers.append((copy, event))
        if event is None:
            self._read_pending_headers()

    def is_backward_deferred(self) -> bool:
        """Returns whether gradients' amaxes are reduced when the next context ends. Call it before a collective.

        Raises RecipeError if the ranks were in different passes at the last collective.
        """
        self._read_pending_headers()
        self._grow()
        return self._is_backward_deferred

    def _grow(self) -> None:
        while self.num_positions < self._required_positions:
            self.num_positions *= 2

    def _read_pending_headers(self) -> None:
        pending, self._pending_headers = self._pending_headers, []
        for headers, event in pending:
            if event is not None:
                event.synchronize()
            flags, (required_positions, *_) = headers.tolist()
            has_backward, has_no_backward, ended_context, ended_backward = (flag > 0 for flag in flags)
            self._required_positions = max(self._required_positions, int(required_positions))
            if ended_context and ended_backward:
                raise RecipeError(
                    "Some ranks were in a backward pass and others at the end of an autocast: a rank that ran FP8 "
                    "layers with gradients must call backward when the others do, or run them under torch.no_grad()."
                )
            self._is_backward_deferred |= has_backward and has_no_backward


def reduce_staged_amaxes(
    modules: Iterable["Stateful"],
    direction: Direction,
    recipe: DelayedScaling,
    group: Any,
    local_header: list[list[float]],
    state: ReductionState,
) -> list["Stateful"]:
    """Raises every staging slot of the modules to its maximum over the ranks of `group`, in one collective.

    Returns the modules that have scaling states and whose position was reduced. A module that ran only on other ranks
    gets its scaling states here, so all ranks hold equal scales. An amax that is infinite on one rank becomes infinite
    on all, so all ranks drop that step.

    Args:
        modules: All modules of the session that exist on this rank.
        local_header: The header of this rank, [HEADER_ROWS][ROW_WIDTH].
        state: The agreement of the ranks, which receives the maxima of their headers.
    """
    modules = list(modules)
    rows, headers = _all_reduce(modules, state.num_positions, direction, group, local_header)
    if state.must_repeat_first(headers):
        rows, headers = _all_reduce(modules, state.num_positions, direction, group, local_header)
    state.add_headers(headers)
    modules = _within(modules, state.num_positions)
    _create_missing_states(modules, rows, state.num_positions, recipe)
    present = [m for m in modules if m.scaling]
    if present:
        copy_each(_staging_slots(present, direction), rows[_cells(present, direction, state.num_positions)].unbind())
    return present


def _create_missing_states(
    modules: Sequence["Stateful"], rows: Tensor, num_positions: int, recipe: DelayedScaling
) -> None:
    """Creates the states of the modules that have none and ran on another rank."""
    without_states = [m for m in modules if not m.scaling]
    if without_states:  # reading values waits for the GPU, so they are read only in this case
        has_run = rows[_row_indices(without_states, num_positions)].any(1).tolist()
        for module in (m for m, ran in zip(without_states, has_run, strict=True) if ran):
            module.prepare(recipe.amax_history_len)


def _all_reduce(
    modules: Sequence["Stateful"],
    num_positions: int,
    direction: Direction,
    group: Any,
    local_header: list[list[float]],
) -> tuple[Tensor, Tensor]:
    """Returns the maxima over the ranks: of the amaxes, FP32 [orders * num_positions, ROW_WIDTH], and of the headers.

    A module's row is zero where the module staged nothing.
    """
    staged = torch.zeros(len(Order) * num_positions + HEADER_ROWS, ROW_WIDTH, device=_device(modules, group))
    staged[-HEADER_ROWS:] = torch.tensor(local_header)
    present = [m for m in _within(modules, num_positions) if m.scaling]
    if present:
        staged[_cells(present, direction, num_positions)] = torch.stack(_staging_slots(present, direction))
    dist.all_reduce(staged, op=dist.ReduceOp.MAX, group=group)
    return staged[:-HEADER_ROWS], staged[-HEADER_ROWS:]


def _within(modules: Sequence["Stateful"], num_positions: int) -> list["Stateful"]:
    return [m for m in modules if m.position.number < num_positions]


def _staging_slots(modules: Sequence["Stateful"], direction: Direction) -> list[Tensor]:
    return [m.scaling[name].amax_history[0] for m in modules for name in m.tensors[direction]]


def _row_indices(modules: Sequence["Stateful"], num_positions: int) -> list[int]:
    return [m.position.order * num_positions + m.position.number for m in modules]


def _cells(modules: Sequence["Stateful"], direction: Direction, num_positions: int) -> tuple[list[int], list[int]]:
    """Returns the row indices and the column indices of all staging slots."""
    columns = [range(len(m.tensors[direction])) for m in modules]
    cells = [(row, c) for row, cs in zip(_row_indices(modules, num_positions), columns, strict=True) for c in cs]
    return [row for row, _ in cells], [column for _, column in cells]


def _device(modules: Sequence["Stateful"], group: Any) -> torch.device:
    """Returns the device of the scaling states, or if there are none, the device that the group's backend needs."""
    devices = {s.amax_history.device for m in modules for s in m.scaling.values()}
    return devices.pop() if devices else torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def default_group() -> Any:
    """Returns the default process group, or None if none is initialized."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def has_other_ranks(group: Any) -> bool:
    """Returns whether the group exists and has more than one rank."""
    return group is not None and dist.get_world_size(group) > 1


def check_shared_scale(recipe: Recipe, amax_group: Any, shard_group: Any, user: str) -> None:
    """Raises RecipeError unless a tensor that is sharded over `shard_group` has one scale on all ranks.

    Delayed scales are equal on ranks that reduce their amaxes together, that is, if `amax_group` contains all ranks of
    `shard_group`. Ranks can compute a current scale together. A scale per row or block cannot be shared by both
    directions. `user` names the feature in the message.
    """
    if not has_tensor_scales(recipe):
        raise RecipeError(f"{user} needs one scale for a whole tensor; use a delayed recipe or current with 'tensor'.")
    if (delayed := as_delayed(recipe)) is not None and not (
        delayed.reduce_amax and _contains_ranks(amax_group, shard_group)
    ):
        raise RecipeError(
            f"{user} needs equal delayed scales on its ranks: give autocast an amax_reduction_group that spans "
            "them, and leave reduce_amax on."
        )


def _contains_ranks(group: Any, other: Any) -> bool:
    """Returns whether `group` contains every rank of `other`."""
    if group is None or group is other:
        return group is not None
    return set(dist.get_process_group_ranks(other)) <= set(dist.get_process_group_ranks(group))
