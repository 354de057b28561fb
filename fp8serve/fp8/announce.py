"""What `convert` says when it does less than its caller may think: a model left as it was trains, in high precision.

Weights that lie elsewhere than in nn.Linear are named by their module's class, for instance the Conv1D of GPT-2.
"""

from collections.abc import Iterator
from fnmatch import fnmatch

from torch import Tensor, nn

from fp8serve.fp8.stateful import Stateful

USUAL = "lm_head"  # in the default of `skip`, and missing from many a model


def skipped(name: str, skip: tuple[str, ...]) -> bool:
    """Whether an entry of `skip` fits the full name of a module, or the last component of it."""
    return any(fnmatch(name, pattern) or name.rpartition(".")[2] == pattern for pattern in skip)


def announcements(module: nn.Module, skip: tuple[str, ...], converted: int) -> Iterator[str]:
    """One sentence for each thing that `convert` has not done; `converted` counts the layers that it has."""
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
    if not linears:
        others = sorted({type(child).__name__ for child in module.modules() if _multiplies(child)})
        return f"{kind} has no nn.Linear" + (f"; its weights are in {', '.join(others)}" if others else "")
    done = sum(isinstance(child, Stateful) for child in linears.values())
    left = {name: child for name, child in linears.items() if not isinstance(child, Stateful)}
    by_skip = sum(type(child) is nn.Linear for child in left.values())
    own = sorted({type(child).__name__ for child in left.values() if type(child) is not nn.Linear})
    reasons = [
        f"{done} converted already" if done else "",
        f"{by_skip} named by skip={skip!r}" if by_skip else "",
        f"{len(left) - by_skip} of classes of their own ({', '.join(own)})" if own else "",
    ]
    layers = "1 linear layer" if len(linears) == 1 else f"{len(linears)} linear layers"
    return f"of {layers} in {kind}, {', '.join(r for r in reasons if r)}"


def _multiplies(module: nn.Module) -> bool:
    """Whether the module holds a weight that a matrix product might read."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() > 1 and not isinstance(module, nn.Embedding)
