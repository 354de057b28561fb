"""Warnings of `convert` where it converts less than its caller may expect. Layers that it leaves train in high
precision.

Weights outside of nn.Linear are named by their module's class, for instance the Conv1D of GPT-2. In transformers 5 the
weights of all experts of a mixture are two parameters of three dimensions; most of the model is in them.
"""

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from fp8serve.fp8.stateful import Stateful

SMALL = 0.05  # a share of the weights that is not announced, such as that of routers and of learnt positions
USUAL = "lm_head"  # in the default of `skip`, and absent from many models


def skipped(name: str, skip: tuple[str, ...]) -> bool:
    """Whether an entry of `skip` fits the full name of a module, or the last component of it."""
    return any(fnmatch(name, pattern) or name.rpartition(".")[2] == pattern for pattern in skip)


def is_plain(module: nn.Module) -> bool:
    """Whether `convert` knows the class: nn.Linear itself, parametrized or not (weight_norm, spectral_norm)."""
    return type(module) is nn.Linear or (is_parametrized(module) and type(module).__bases__ == (nn.Linear,))


def weights_left(module: nn.Module, skip: tuple[str, ...] = ()) -> dict[str, int]:
    """The elements of the weights that `convert` leaves in high precision, by class and parameter, the largest first:
    {"Qwen3MoeExperts.gate_up_proj": 805306368}.

    Vectors, embeddings, what `skip` names, and nn.MultiheadAttention, which has a sentence of its own, do not count.
    """
    left: Counter[str] = Counter()
    counted = {id(p) for child in module.modules() if _is_known(child) for p in child.parameters()}
    for name, child in module.named_modules():
        for leaf, parameter in () if skipped(name, skip) else child.named_parameters(recurse=False):
            if not is_lazy(parameter) and parameter.dim() > 1 and id(parameter) not in counted:
                counted.add(id(parameter))
                left[f"{type(child).__name__}.{leaf}"] += parameter.numel()
    return dict(left.most_common())


def _is_known(module: nn.Module) -> bool:
    return isinstance(module, Stateful | nn.Embedding | nn.EmbeddingBag | nn.MultiheadAttention) or is_plain(module)


def _of_weights(module: nn.Module, skip: tuple[str, ...]) -> Iterator[str]:
    """What is left beside the layers that are converted."""
    left = weights_left(module, skip)
    linears = {p for child in module.modules() if is_plain(child) or isinstance(child, Stateful)
               for p in child.parameters() if p.dim() > 1}  # fmt: skip
    count = sum(left.values())
    share = count / max(1, count + sum(p.numel() for p in linears))
    if share > SMALL:
        named = ", ".join(list(left)[:3]) + (", ..." if len(left) > 3 else "")
        yield f"convert() has left {share:.0%} of the weights in high precision ({named}): it converts nn.Linear only."


def announcements(module: nn.Module, skip: tuple[str, ...], converted: int) -> Iterator[str]:
    """One sentence for each thing that `convert` left undone; `converted` is the number of layers that it converted."""
    linears = {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)}
    named = [n for n, child in module.named_modules() if any(True for _ in child.named_parameters(recurse=False))]
    if not converted:
        yield f"convert() has converted nothing: {_why(module, linears, skip)}."
    else:
        yield from _of_weights(module, skip)
    lazy = [name for name, child in module.named_modules() if isinstance(child, nn.LazyLinear)]
    if left := [name for name in lazy if not skipped(name, skip)]:
        first = left[0] or "the module itself"
        yield f"convert() has left {len(left)} nn.LazyLinear in high precision ({first!r} first); run the model once."
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
    special = [type(child).__name__ for child in left if not is_plain(child)]
    if len(left) < len(linears):
        yield f"{len(linears) - len(left)} converted already"
    if len(special) < len(left):
        yield f"{len(left) - len(special)} named by skip={skip!r}"
    if special:
        yield f"{len(special)} of classes of their own ({', '.join(sorted(set(special)))})"


def _multiplies(module: nn.Module) -> bool:
    """Whether the module is not an nn.Linear and holds a weight that a matrix product might read."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.Linear):
        return False
    return is_lazy(weight) or weight.dim() > 1
