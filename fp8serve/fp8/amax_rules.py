"""The rules that reduce a history of amaxes to the amax that sets the scale; a delayed recipe names one.

A rule is a name in `RuleName` and an entry in `RULES`; recipes, the command line, the update of states and the check of
stored scales read them here. The kernels of `delayed_update` know the rules that are `in_op`. Any other rule is
computed outside of the op, state by state, like a rule that a recipe brings as a callable. Nothing here imports torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

RuleName = Literal["max", "most_recent"]


@dataclass(frozen=True)
class AmaxRule:
    """choose: history FP32 [N], slot 0 the present step and 1 the oldest -> amax FP32 [].

    witness: the rows of a stored history FP32 [N-1], oldest first -> an amax FP32 [] that is at most the chosen one;
    None where the rows do not determine one. in_op: the op `delayed_update` knows the rule by its name.
    """

    choose: "Callable[[Tensor], Tensor]"
    witness: "Callable[[Tensor], Tensor] | None" = None
    in_op: bool = False


RULES: dict[RuleName, AmaxRule] = {
    "max": AmaxRule(lambda history: history.amax(), lambda rows: rows.amax(), in_op=True),
    "most_recent": AmaxRule(lambda history: history[0].clone(), lambda rows: rows[-1], in_op=True),
}
