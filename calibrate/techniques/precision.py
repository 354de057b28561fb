"""Chooses the linears that stay in high precision: those that the user names, and those that cost most per byte saved.

`skip` and `only` name linears by patterns. A target (`target_kl`, `max_ppl_increase`) is met at the smallest cost in
bytes: linears are ordered by the KL divergence that their FP8 adds (compare.py) per byte that it saves, and as many
of the first ones as needed return to high precision. Their number is found by bisection with measurements, not
predicted. Linears that read one input are one choice, and so are the experts of a layer, because they are served as one
product.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from fp8serve.calibration.options import CalibrationOptions
from fp8serve.calibration.result import LinearGroup, Quality
from fp8serve.errors import RecipeError
from fp8serve.fp8.linear import Linear
from fp8serve.model.formats.targets import matches

Names = tuple[str, ...]
EXPERTS = ".experts."
# The input of linears, by the last part of their name, where several read the same one.
_INPUTS = {**dict.fromkeys(("query", "key", "value"), "qkv"),
           **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
           **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up")}  # fmt: skip


def left_out(linears: Sequence[str], skip: Iterable[str], only: Iterable[str]) -> list[str]:
    """The `linears` that stay in high precision. RecipeError: a pattern fits none of them, or all are left out."""
    skip, only = tuple(skip), tuple(only)
    for pattern in (*skip, *only):
        if not any(matches(pattern, name) for name in linears):
            raise RecipeError(f"{pattern!r} fits no linear layer; they have names such as {', '.join(linears[:3])}.")
    out = [n for n in linears if any(matches(p, n) for p in skip) or (only and not any(matches(p, n) for p in only))]
    if len(out) == len(linears):
        raise RecipeError("Every linear layer is left out, so there is nothing to calibrate.")
    return out


def groups(linears: Iterable[str]) -> list[Names]:
    """Linears that read one input, together."""
    return _together(linears, lambda owner, leaf: f"{owner}.{_INPUTS.get(leaf, leaf)}")


def choices(linears: Iterable[str]) -> list[Names]:
    """Linears that are served as one product, together: those that read one input, and all experts of a layer."""
    return _together(linears, lambda owner, leaf: owner.partition(EXPERTS)[0] if EXPERTS in owner
                     else f"{owner}.{_INPUTS.get(leaf, leaf)}")  # fmt: skip


def _together(linears: Iterable[str], key: Callable[[str, str], str]) -> list[Names]:
    """Groups, in the order of their first members."""
    results: dict[str, list[str]] = {}
    for name in linears:
        owner, _, leaf = name.rpartition(".")
        results.setdefault(key(owner, leaf), []).append(name)
    return [tuple(names) for names in results.values()]


@dataclass(frozen=True)
class Target:
    """The permitted cost of FP8 on the held-out samples; None: no limit for that figure."""

    kl: float | None = None  # nats per token
    ppl_increase: float | None = None  # percent

    @classmethod
    def of(cls, settings: CalibrationOptions) -> "Target | None":
        """What the options ask for."""
        result = cls(settings.target_kl, settings.max_ppl_increase)
        return None if result == cls() else result

    def is_met(self, quality: Quality) -> bool:
        """Whether a measured quality is good enough."""
        if self.kl is not None and (quality.kl_divergence or 0.0) > self.kl:
            return False
        before = quality.reference_perplexity or quality.perplexity
        return self.ppl_increase is None or quality.perplexity <= before * (1 + self.ppl_increase / 100)


def ordered(linears: Mapping[str, Linear], shares: Mapping[str, float]) -> list[LinearGroup]:
    """The groups of `linears`, starting with those whose FP8 adds most KL divergence per byte saved."""
    results = [
        LinearGroup(names, sum(saved(linears[n]) for n in names), sum(shares.get(n, 0.0) for n in names))
        for names in choices(linears)
    ]
    return sorted(results, key=lambda group: -(group.kl or 0.0) / group.bytes)


def saved(linear: nn.Module) -> int:
    """Bytes that FP8 saves against BF16."""
    return int(linear.get_parameter("weight").numel())


def groups_of(decoder: nn.Module, names: Sequence[str]) -> tuple[LinearGroup, ...]:
    """The record of linears that the user named, whose cost is not measured."""
    result = ((group, sum(saved(decoder.get_submodule(n)) for n in group)) for group in choices(names))
    return tuple(LinearGroup(group, saved, None) for group, saved in result)


def restore(decoder: nn.Module, names: Iterable[str]) -> None:
    """Turn the converted linears of these names back into their original form, with the same weights."""
    for name in names:
        linear = decoder.get_submodule(name)
        plain = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")  # type: ignore[arg-type]
        plain.weight, plain.bias = linear.weight, linear.bias  # type: ignore[assignment]
        decoder.set_submodule(name, plain)


def fewest(candidates: Sequence[LinearGroup], enough: Callable[[Sequence[LinearGroup]], bool]) -> int:
    """How many of the first `candidates` have to stay in high precision.

    enough: whether the target is met with these candidates in high precision; with all of them every target is.
    """
    if enough([]):
        return 0
    low, high = 0, len(candidates)  # with `high` it is met
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(candidates[:middle]) else (middle, high)
    return high
