"""The named rules that reduce an amax history to the amax from which delayed scaling computes the scale.

A rule is a name in `RuleName` and an entry in `RULES`. Recipes, the command line, the update of states and the check of
stored scales read `RULES`. The op `delayed_update` implements the rules with `in_op=True`. Any other rule is computed
outside of the op, one state at a time, like a callable that a recipe gives. This module does not import torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

RuleName = Literal["max", "most_recent"]


@dataclass(frozen=True)
class AmaxRule:
    """A rule that reduces an amax history to one amax.

    Attributes:
        compute_amax: Reduces a history FP32 [N] to an amax FP32 []. Slot 0 holds the current step; slots 1 to N-1 hold
            earlier steps, oldest first.
        lower_bound: Reduces a stored history FP32 [N-1], oldest first, to an amax FP32 [] that is at most the amax from
            which the stored scale was computed. None if the history does not determine such an amax.
        in_op: Whether the op `delayed_update` implements the rule.
    """

    compute_amax: "Callable[[Tensor], Tensor]"
    lower_bound: "Callable[[Tensor], Tensor] | None" = None
    in_op: bool = False


RULES: dict[RuleName, AmaxRule] = {
    "max": AmaxRule(lambda history: history.amax(), lambda rows: rows.amax(), in_op=True),
    "most_recent": AmaxRule(lambda history: history[0].clone(), lambda rows: rows[-1], in_op=True),
}
