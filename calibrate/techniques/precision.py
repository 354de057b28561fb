"""Selects the linears that stay in high precision.

`skip` and `only` name linears by patterns. `target_kl` is met with as few bytes as possible: groups of linears
are sorted by the KL divergence that quantizing them adds (compare.py), divided by the bytes that quantizing them saves.
The first groups of this order stay in high precision, and bisection with measurements finds how many groups are
necessary. Linears that read the same input form a group. The experts of a layer form a group, too, because they are
served as one product.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from fp8serve.calibration.result import LinearGroup
from fp8serve.errors import RecipeError
from fp8serve.fp8.linear import Linear
from fp8serve.model.config.model_config import is_expert
from fp8serve.model.formats.targets import matches

Names = tuple[str, ...]
# Maps the last part of a linear's name to a name for its input, if other linears read the same input.
_INPUTS = {**dict.fromkeys(("query", "key", "value"), "qkv"),
           **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
           **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "qkv"),
           **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up")}  # fmt: skip


def excluded_linears(linears: Sequence[str], skip: Iterable[str], only: Iterable[str]) -> list[str]:
    """Returns the `linears` that stay in high precision.

    Raises RecipeError if a pattern matches no linear, or if all linears are excluded.
    """
    skip, only = tuple(skip), tuple(only)
    for pattern in (*skip, *only):
        if not any(matches(pattern, name) for name in linears):
            raise RecipeError(
                f"{pattern!r} matches no linear layer; linear layers have names such as {', '.join(linears[:3])}."
            )
    excluded = [
        n for n in linears if any(matches(p, n) for p in skip) or (only and not any(matches(p, n) for p in only))
    ]
    if len(excluded) == len(linears):
        raise RecipeError("`skip` and `only` exclude every linear layer, so there is nothing to calibrate.")
    return excluded


def input_groups(linears: Iterable[str]) -> list[Names]:
    """Groups linears that read the same input."""
    return _group_by(linears, lambda owner, leaf: f"{owner}.{_INPUTS.get(leaf, leaf)}")


def serving_groups(linears: Iterable[str]) -> list[Names]:
    """Groups linears that are served as one product: those that read the same input, and all experts of a layer."""
    return _group_by(linears, lambda owner, leaf: owner.partition(".experts.")[0] if is_expert(f"{owner}.{leaf}")
                     else f"{owner}.{_INPUTS.get(leaf, leaf)}")  # fmt: skip


def _group_by(linears: Iterable[str], key: Callable[[str, str], str]) -> list[Names]:
    """Groups linears by `key(parent, leaf)`, in the order of the first members of the groups."""
    groups: dict[str, list[str]] = {}
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        groups.setdefault(key(parent, leaf), []).append(name)
    return [tuple(names) for names in groups.values()]


def groups_by_cost(linears: Mapping[str, Linear], kl_by_linear: Mapping[str, float]) -> list[LinearGroup]:
    """Groups `linears` and sorts the groups by the KL divergence that quantizing them adds per byte saved,
    largest first."""
    groups = [
        LinearGroup(names, sum(bytes_saved(linears[n]) for n in names), sum(kl_by_linear.get(n, 0.0) for n in names))
        for names in serving_groups(linears)
    ]
    return sorted(groups, key=lambda group: -(group.kl or 0.0) / group.bytes)


def bytes_saved(linear: nn.Module) -> int:
    """Returns how many fewer bytes the weight has in FP8 than in BF16."""
    return int(linear.get_parameter("weight").numel())


def unmeasured_groups(decoder: nn.Module, names: Sequence[str]) -> tuple[LinearGroup, ...]:
    """Returns the groups of linears that the user excluded; their KL divergence is not measured."""
    groups = serving_groups(names)
    return tuple(LinearGroup(g, sum(bytes_saved(decoder.get_submodule(n)) for n in g), None) for g in groups)


def restore_linears(decoder: nn.Module, names: Iterable[str]) -> None:
    """Replaces converted linears by `nn.Linear` modules with the same weights."""
    for name in names:
        linear = decoder.get_submodule(name)
        original = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")  # type: ignore[arg-type]
        original.weight, original.bias = linear.weight, linear.bias  # type: ignore[assignment]
        decoder.set_submodule(name, original)


def min_groups_in_bf16(candidates: Sequence[LinearGroup], is_met: Callable[[Sequence[LinearGroup]], bool]) -> int:
    """Returns how many of the first `candidates` must stay in high precision, by bisection.

    `is_met` returns whether the target is met with these candidates in high precision. With all candidates in high
    precision every target is met.
    """
    if is_met([]):
        return 0
    low, high = 0, len(candidates)  # the target is met with `high` groups
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_met(candidates[:middle]) else (middle, high)
    return high
