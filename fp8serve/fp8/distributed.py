"""What delayed scaling needs from torch.distributed: one MAX over everything that was staged.

The vector holds one value per tensor of every living module, in order of creation, whether or not the module ran on
this rank or has a state here at all: the ranks cannot disagree about its length as long as they built the same modules.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.fp8.scaling import Scaled


def _staged(module: Scaled, name: str, device: torch.device) -> Tensor:
    state = module.scaling.get(name)
    return torch.zeros((), device=device) if state is None else state.amax_history[0].to(device)


def _device(modules: Sequence[Scaled]) -> torch.device:
    found = {s.amax_history.device for m in modules for s in m.scaling.values()}
    return found.pop() if found else torch.device("cuda" if torch.cuda.is_available() else "cpu")


def reduce_staged(modules: Sequence[Scaled], names: Sequence[str], recipe: DelayedScaling, group: Any) -> list[Scaled]:
    """Raise every staging slot to the maximum over the ranks of `group`, in one collective.

    Returns the modules that have states. A module that ran on another rank only gets its states here, so all ranks keep
    equal scales. An infinite amax on one rank is infinite on all, so all ranks drop that step alike.
    """
    if not modules:
        return []
    device = _device(modules)
    staged = torch.stack([_staged(m, name, device) for m in modules for name in names])
    dist.all_reduce(staged, op=dist.ReduceOp.MAX, group=group)
    rows = staged.view(len(modules), len(names))
    strangers = [i for i, m in enumerate(modules) if not m.scaling]
    if strangers:  # only these need a look at the values, which costs a synchronisation on a GPU
        ran = rows[strangers].any(1).tolist()
        for i in (i for i, yes in zip(strangers, ran, strict=True) if yes):
            modules[i].prepare(recipe.amax_history_len)
    present = [i for i, m in enumerate(modules) if m.scaling]
    for i in present:
        for name, value in zip(names, rows[i], strict=True):
            modules[i].scaling[name].amax_history[0].copy_(value)
    return [modules[i] for i in present]
