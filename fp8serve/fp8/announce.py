"""Warnings of `convert` where it converts less than its caller may expect. Layers that it leaves train in high
precision.

Weights outside of nn.Linear are named by their module's class, for instance the Conv1D of GPT-2.
"""

from collections.abc import Iterator
from fnmatch import fnmatch

from torch import Tensor, nn

from fp8serve.fp8.stateful import Stateful

USUAL = "lm_head"  # in the default of `skip`, and absent from many models


def skipped(name: str, skip: tuple[str, ...]) -> bool:
    """Whether an entry of `skip` fits the full name of a module, or the last component of it."""
    return any(fnmatch(name, pattern) or name.rpartition(".")[2] == pattern for pattern in skip)


def announcements(module: nn.Module, skip: tuple[str, ...], converted: int) -> Iterator[str]:
    """One sentence for each thing that `convert` left undone; `converted` is the number of layers that it converted."""
    linears = {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)}
    named = [n for n, child in module.named_modules() if isinstance(child, nn.Linear | nn.MultiheadAttention)]
    if not converted:
        yield f"convert() has converted nothing: {_why(module, linears, skip)}."
    for pattern in skip:
        if pattern != USUAL and not any(skipped(name, (pattern,)) for name in named):
            yield f"convert() has skipped nothing for {pattern!r}, which fits the name of no nn.Linear."
    whole = [name for name, child in module.named_modules() if isinstance(child, nn.MultiheadAttention)]
    if left := [name for name in whole if not skipped(name, skip)]:
        yield (
            f"convert() has left {len(left)} nn.MultiheadAttention ({left[0] or 'the module itself'!r} first) in high "
            "precision: it multiplies by its weights itself; name it in skip, or use projections of nn.Linear."
        )


def _why(module: nn.Module, linears: dict[str, nn.Linear], skip: tuple[str, ...]) -> str:
    kind = type(module).__name__
    others = sorted({type(child).__name__ for child in module.modules() if _multiplies(child)})
    rest = f"; other weights are in {', '.join(others)}" if others else ""
    if not linears:
        return f"{kind} has no nn.Linear{rest}"
    layers = "1 linear layer" if len(linears) == 1 else f"{len(linears)} linear layers"
    return f"of {layers} in {kind}, {', '.join(_reasons(list(linears.values()), skip))}{rest}"


def _reasons(linears: list[nn.Linear], skip: tuple[str, ...]) -> Iterator[str]:
    """How many of the layers were left alone, for each reason."""
    left = [child for child in linears if not isinstance(child, Stateful)]
    special = [type(child).__name__ for child in left if type(child) is not nn.Linear]
    if len(left) < len(linears):
        yield f"{len(linears) - len(left)} converted already"
    if len(special) < len(left):
        yield f"{len(left) - len(special)} named by skip={skip!r}"
    if special:
        yield f"{len(special)} of classes of their own ({', '.join(sorted(set(special)))})"


def _multiplies(module: nn.Module) -> bool:
    """Whether the module is not an nn.Linear and holds a weight that a matrix product might read."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() > 1 and not isinstance(module, nn.Embedding | nn.Linear)
