"""Stores the observations of every tensor as tensors of a file, and restores them into an observer, bit for bit."""

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from fp8serve.fp8.scaling import FIELDS, ScalingState

from .observe import Observer, Seen
from .result import HISTORY_SHOWN

TOKENS = ".tokens"


def recorded(observer: Observer) -> dict[str, Tensor]:
    """By the tensor's name and a field: the fields of its state, and `seen`, FP64 [running amax, newest amaxes]. By a
    mixture's name and `tokens`: the counts of its experts."""
    found = {f"{name}{TOKENS}": counts for name, counts in observer.tokens.items()}
    for name, state in observer.states().items():
        found |= {f"{name}.{field}": getattr(state, field) for field in FIELDS}
        seen = observer.seen[name]
        found[f"{name}.seen"] = torch.tensor([seen.amax, *seen.newest], dtype=torch.float64)
    return found


def restore(observer: Observer, found: Mapping[str, Tensor]) -> None:
    """Restore the recorded observations into an `observer` of the same tensors."""
    observer.tokens = {name.removesuffix(TOKENS): found[name].clone() for name in found if name.endswith(TOKENS)}
    for name, state in observer.states().items():
        _set(state, {field: found[f"{name}.{field}"] for field in FIELDS})
        amax, *newest = found[f"{name}.seen"].tolist()
        steps, nonfinite = int(state.steps), int(state.nonfinite)
        observer.seen[name] = Seen(amax, steps, nonfinite, deque(newest, maxlen=HISTORY_SHOWN))


def _set(state: ScalingState, fields: Mapping[str, Tensor]) -> None:
    for field, value in fields.items():
        setattr(state, field, value.clone().to(state.scale.device))
