"""`convert`, which turns the nn.Linear layers of any module into `Linear`, and its warnings where it converts less than
its caller may expect. Layers that it leaves train in high precision.

Weights outside of nn.Linear are named by their module's class, for instance the Conv1D of GPT-2. In transformers 5 the
weights of all experts of a mixture are two parameters of three dimensions; most of the model is in them.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from typing import cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from fp8serve.fp8.linear import Linear
from fp8serve.fp8.selfcheck import prepare_device
from fp8serve.fp8.stateful import Stateful

PEFT_WRAPPERS = ("base_layer", "original_module")  # the name of what a layer of peft wraps
SMALL_SHARE = 0.05  # of the weights; not warned about: such as routers and learnt positions
DEFAULT_SKIP = "lm_head"  # in the default of `skip`, and absent from many models


def convert(module: nn.Module, skip: tuple[str, ...] = ("lm_head",)) -> nn.Module:
    """Turn every nn.Linear inside `module` into a `Linear`, in place: parameters, hooks and names stay; returns module.

    `skip` holds last name components ("lm_head"), full names, or patterns ("model.layers.0.*"). Subclasses of nn.Linear
    are left alone, because they promise something of their own, and so are the adapters of peft, which stay in high
    precision as they do if peft adds them afterwards. Warns when nothing was converted, when an entry of
    `skip` (but the usual "lm_head") fits no layer, and of what stays in high precision: nn.MultiheadAttention,
    nn.LazyLinear, and other weights if they are more than 5 % of all (`weights_left` lists them).
    The kernels of a GPU that the module lies on, or is moved to later, are checked at their first use (selfcheck).
    """
    patterns = (skip,) if isinstance(skip, str) else tuple(skip)
    adapters = _adapters(module)
    linears = [
        cast(nn.Linear, child)
        for name, child in module.named_modules()
        if is_plain(child) and child not in adapters and not matches(name, patterns)
    ]
    for sentence in _shortfalls(module, patterns, len(linears)):
        warnings.warn(sentence, stacklevel=2)
    for linear in linears:
        Linear.adopt(linear)
    for device in {p.device for linear in linears for p in linear.parameters() if p.device.type == "cuda"}:
        prepare_device(device)
    _disable_fast_paths(module, linears)
    return module


def _disable_fast_paths(module: nn.Module, converted: Iterable[nn.Module]) -> None:
    """Let every layer of nn.Transformer inside `module` that holds one of the `converted` call its layers.

    In evaluation nn.TransformerEncoderLayer hands its weights to one fused operation in high precision and calls none
    of its layers: a converted one would silently run no FP8 product. A flag of the layer says whether the operation
    knows its activation; a flag of nn.TransformerEncoder says whether to pack the input for it.
    """
    chosen = set(converted)
    for child in module.modules():
        if isinstance(child, nn.TransformerEncoderLayer) and chosen & set(child.modules()):
            child.activation_relu_or_gelu = 0
        elif isinstance(child, nn.TransformerEncoder) and chosen & set(child.modules()):
            child.use_nested_tensor = False


def matches(name: str, skip: tuple[str, ...]) -> bool:
    """Whether an entry of `skip` fits the full name of a module, or the last component of it, with or without the parts
    that peft adds to names."""
    plain = ".".join(part for part in name.removeprefix("base_model.model.").split(".") if part not in PEFT_WRAPPERS)
    return any(fnmatch(n, pattern) or n.rpartition(".")[2] == pattern for n in (name, plain) for pattern in skip)


def _adapters(module: nn.Module) -> set[nn.Module]:
    """All modules of peft's adapters in `module`: a layer of peft names the attributes that hold them."""
    parts = (
        getattr(child, name, None) for child in module.modules() for name in getattr(child, "adapter_layer_names", ())
    )
    return {inner for part in parts if isinstance(part, nn.Module) for inner in part.modules()}


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
        for leaf, parameter in () if matches(name, skip) else child.named_parameters(recurse=False):
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
    if share > SMALL_SHARE:
        named = ", ".join(list(left)[:3]) + (", ..." if len(left) > 3 else "")
        yield f"convert() has left {share:.0%} of the weights in high precision ({named}): it converts nn.Linear only."


def _shortfalls(module: nn.Module, skip: tuple[str, ...], converted: int) -> Iterator[str]:
    """One sentence for each thing that `convert` left undone; `converted` is the number of layers that it converted."""
    linears = {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)}
    named = [n for n, child in module.named_modules() if any(True for _ in child.named_parameters(recurse=False))]
    if not converted:
        yield f"convert() has converted nothing: {_why(module, linears, skip)}."
    else:
        yield from _of_weights(module, skip)
    lazy = [name for name, child in module.named_modules() if isinstance(child, nn.LazyLinear)]
    if left := [name for name in lazy if not matches(name, skip)]:
        first = left[0] or "the module itself"
        yield f"convert() has left {len(left)} nn.LazyLinear in high precision ({first!r} first); run the model once."
    for pattern in skip:
        if pattern != DEFAULT_SKIP and not any(matches(name, (pattern,)) for name in named):
            yield f"convert() has skipped nothing for {pattern!r}, which fits the name of no nn.Linear."
    whole = [name for name, child in module.named_modules() if isinstance(child, nn.MultiheadAttention)]
    if left := [name for name in whole if not matches(name, skip)]:
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
    return f"of {layers} in {kind}, {', '.join(_reasons(list(linears.values()), _adapters(module), skip))}{rest}"


def _reasons(linears: list[nn.Linear], adapters: set[nn.Module], skip: tuple[str, ...]) -> Iterator[str]:
    """How many of the layers were left alone, for each reason."""
    left = [child for child in linears if not isinstance(child, Stateful) and child not in adapters]
    special = [type(child).__name__ for child in left if not is_plain(child)]
    if converted := sum(isinstance(child, Stateful) for child in linears):
        yield f"{converted} converted already"
    if in_adapters := len(linears) - converted - len(left):
        yield f"{in_adapters} in adapters of peft"
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
