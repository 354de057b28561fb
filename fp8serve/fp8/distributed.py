"""What delayed scaling needs from torch.distributed: one MAX over everything that was staged.

There is one collective an update, whatever the number of layers: one when the outermost `autocast` ends and one when
the backward pass ends. It goes over a vector with a place for every module that was ever made, in order of creation. So
the ranks cannot disagree about its length: not when a module did not run on one of them, and not when one has already
collected a discarded model as garbage and another has not. They must have made the same modules in the same order; the
length is rounded up to a power of two (at least 1024 places), so that a copy made later by one rank alone (for
evaluation, for export) does no harm.

A rank on which *nothing* ran in FP8 takes part in the forward pass's collective by its `autocast`, but no backward
pass of its own tells it that the others are in theirs. So the forward collective also says whether there is such a
rank. If so, the gradients' amaxes are reduced when the next context ends, from then on: before they are needed, and at
a place that all ranks pass. A scale that is found later is no other scale: the next backward pass uses the same one.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.errors import RecipeError
from fp8serve.fp8.recipe import DelayedScaling, Recipe, delayed
from fp8serve.fp8.scaling import Direction, Scaled
from fp8serve.fp8.torch_private import copy_each

MIN_PLACES = 1024
WIDTH = 4  # tensors that a module stages in one pass, at most; and places of a header


class Attendance:
    """Whether all ranks of a group have the same passes, as far as the collectives under one rule have told.

    A header travels with each: [this rank expects a backward pass, it expects none, this is the end of a context, of a
    backward pass]. From the first context on that some ranks have a backward pass for and others not, the reduction of
    gradients is `deferred`, on all ranks alike.
    """

    def __init__(self) -> None:
        self._deferred = False
        self._told: Tensor | None = None
        self._here: Any = None  # on a GPU: the moment when `_told` has arrived

    def note(self, header: Tensor) -> None:
        """Take in the maximum of the headers; on a GPU without waiting for it, so it is looked at later."""
        self._told = header.to("cpu", non_blocking=True)
        if header.is_cuda:
            self._here = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._here.record()
        else:
            self.deferred()

    def deferred(self) -> bool:
        """Whether gradients wait for the next context. RecipeError if the ranks were in different passes."""
        if self._told is not None:
            if self._here is not None:
                self._here.synchronize()
            back, none, ended_context, ended_pass = (value > 0 for value in self._told.tolist())
            self._told = None
            if ended_context and ended_pass:
                raise RecipeError(
                    "Some ranks were in a backward pass and others at the end of an autocast: a rank that ran FP8 "
                    "layers with gradients must call backward when the others do, or run them under torch.no_grad()."
                )
            self._deferred |= back and none
        return self._deferred


def header(direction: Direction, expecting: bool) -> list[float]:
    """What a rank says beside its amaxes, see `Attendance`."""
    if direction == "backward":
        return [0.0, 0.0, 0.0, 1.0]
    return [float(expecting), float(not expecting), 1.0, 0.0]


def reduce_staged(
    living: Iterable[Scaled],
    made: int,
    direction: Direction,
    recipe: DelayedScaling,
    group: Any,
    said: Sequence[float],
) -> tuple[list[Scaled], Tensor]:
    """Raise every staging slot of the `living` modules to the maximum over the ranks of `group`, in one collective.

    `made`: how many modules were ever made; a module's `key` is its number among them. `said`: this rank's header.
    Returns the modules that have states, and the maximum of the headers, FP32 [WIDTH]. A module that ran on another
    rank only gets its states here, so all ranks keep equal scales. An infinite amax on one rank is infinite on all, so
    all ranks drop that step alike.
    """
    modules = list(living)
    rows, heard = _reduced(modules, made, direction, group, said)
    strangers = [m for m in modules if not m.scaling]
    if strangers:  # only these need a look at the values, which costs a synchronisation on a GPU
        ran = rows[[m.key for m in strangers]].any(1).tolist()
        for module in (m for m, yes in zip(strangers, ran, strict=True) if yes):
            module.prepare(recipe.amax_history_len)
    present = [m for m in modules if m.scaling]
    if present:
        copy_each(_slots(present, direction), rows[_places(present, direction)].unbind())
    return present, heard


def _reduced(
    modules: Sequence[Scaled], made: int, direction: Direction, group: Any, said: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """The maxima over the ranks, FP32 [places, WIDTH], and of the headers.

    Row `key` is that module's, zero where it staged nothing.
    """
    places = max(MIN_PLACES, 1 << (made - 1).bit_length())
    staged = torch.zeros(places + 1, WIDTH, device=_device(modules, group))
    staged[-1] = torch.tensor(said)
    present = [m for m in modules if m.scaling]
    if present:
        staged[_places(present, direction)] = torch.stack(_slots(present, direction))
    dist.all_reduce(staged, op=dist.ReduceOp.MAX, group=group)
    return staged[:-1], staged[-1]


def _slots(modules: Sequence[Scaled], direction: Direction) -> list[Tensor]:
    return [m.scaling[name].amax_history[0] for m in modules for name in m.tensors[direction]]


def _places(modules: Sequence[Scaled], direction: Direction) -> tuple[list[int], list[int]]:
    """Row and column of every slot."""
    places = [(m.key, column) for m in modules for column in range(len(m.tensors[direction]))]
    return [row for row, _ in places], [column for _, column in places]


def _device(modules: Sequence[Scaled], group: Any) -> torch.device:
    """Where the states are; without any, where the group's collectives want their tensors."""
    found = {s.amax_history.device for m in modules for s in m.scaling.values()}
    return found.pop() if found else torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def default_group() -> Any:
    """The default process group, or None while there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def several(group: Any) -> bool:
    """Whether the group has another rank besides this one."""
    return group is not None and dist.get_world_size(group) > 1


def one_scale(recipe: Recipe, group: Any, members: Any, user: str) -> None:
    """Raise RecipeError unless a tensor that lies in parts on the ranks of `members` has one scale under `recipe`.

    group: the one over which amaxes are reduced. Delayed scales are equal on ranks that reduce their amaxes together;
    current ones can be found together; a scale for each row or block cannot be shared by both directions.
    """
    if (rules := delayed(recipe)) is not None:
        if not (rules.reduce_amax and spans(group, members)):
            raise RecipeError(
                f"{user} needs equal delayed scales on its ranks: give autocast an amax_reduction_group that spans "
                "them, and leave reduce_amax on."
            )
    elif not one_per_tensor(recipe):
        raise RecipeError(f"{user} needs one scale for a whole tensor; use a delayed recipe or current with 'tensor'.")


def one_per_tensor(recipe: Recipe) -> bool:
    """Whether the recipe has one scale for a whole tensor."""
    return all(spec.granularity == "tensor" for spec in recipe.specs.linear.values())


def spans(group: Any, members: Any) -> bool:
    """Whether a group holds every rank of another one."""
    if group is None or group is members:
        return group is not None
    return set(dist.get_process_group_ranks(members)) <= set(dist.get_process_group_ranks(group))
