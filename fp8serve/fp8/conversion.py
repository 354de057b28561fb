"""`convert`, which turns the nn.Linear layers of a module into FP8 `Linear` layers, and warns about other weights.

Layers that are not converted train in high precision. `convert` warns if they hold more weights than the caller may
expect. Weights outside of nn.Linear are named by their module's class, for example the Conv1D of GPT-2. In transformers
5 the weights of all experts of a mixture are two three-dimensional parameters, which are most of the model.
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

PEFT_WRAPPERS = ("base_layer", "original_module")  # the names that peft's layers give to the layer that they wrap
MAX_UNCONVERTED_SHARE = 0.05  # of all weights, without a warning; routers and learnt positions stay below
DEFAULT_SKIP = "lm_head"  # no warning if it matches no layer, because it is the default of `skip`


def convert(module: nn.Module, skip: tuple[str, ...] = ("lm_head",)) -> nn.Module:
    """Turns every nn.Linear inside `module` into a `Linear` in place and returns `module`.

    Parameters, hooks and names stay. Subclasses of nn.Linear are not converted, because `Linear` does not have their
    behavior. The adapters of peft are not converted either; they also stay in high precision if peft adds them
    afterwards. The kernels of a GPU are checked when a converted module is first on that GPU (selfcheck).

    Warns if no layer was converted, if an entry of `skip` other than "lm_head" matches no layer, and about weights that
    stay in high precision: nn.MultiheadAttention, nn.LazyLinear, and others if they are more than 5 % of all weights
    (`weights_left` lists them).

    Args:
        skip: Layers that are not converted: last components of names ("lm_head"), full names, or patterns
            ("model.layers.0.*").
    """
    patterns = (skip,) if isinstance(skip, str) else tuple(skip)
    adapters = _adapter_modules(module)
    linears = [
        cast(nn.Linear, child)
        for name, child in module.named_modules()
        if is_plain(child) and child not in adapters and not matches(name, patterns)
    ]
    for sentence in _warnings(module, patterns, len(linears)):
        warnings.warn(sentence, stacklevel=2)
    for linear in linears:
        Linear.convert(linear)
    for device in {p.device for linear in linears for p in linear.parameters() if p.device.type == "cuda"}:
        prepare_device(device)
    _disable_fast_paths(module, linears)
    return module


def _disable_fast_paths(module: nn.Module, converted: Iterable[nn.Module]) -> None:
    """Makes nn.TransformerEncoder layers inside `module` call their converted layers in evaluation.

    In evaluation nn.TransformerEncoderLayer passes its weights to one fused op in high precision instead of calling its
    layers, so converted layers would not run in FP8. `activation_relu_or_gelu` of the layer enables this op;
    `use_nested_tensor` of nn.TransformerEncoder packs the input for it.
    """
    converted = set(converted)
    for child in module.modules():
        if isinstance(child, nn.TransformerEncoderLayer) and converted & set(child.modules()):
            child.activation_relu_or_gelu = 0
        elif isinstance(child, nn.TransformerEncoder) and converted & set(child.modules()):
            child.use_nested_tensor = False


def matches(name: str, skip: tuple[str, ...]) -> bool:
    """Returns whether an entry of `skip` matches the full name of a module or its last component.

    The name is tried with and without the components that peft adds.
    """
    plain = ".".join(part for part in name.removeprefix("base_model.model.").split(".") if part not in PEFT_WRAPPERS)
    return any(fnmatch(n, pattern) or n.rpartition(".")[2] == pattern for n in (name, plain) for pattern in skip)


def _adapter_modules(module: nn.Module) -> set[nn.Module]:
    """Returns all modules of peft's adapters in `module`. peft's layers list the attributes that hold adapters."""
    adapters = (
        getattr(child, name, None) for child in module.modules() for name in getattr(child, "adapter_layer_names", ())
    )
    return {inner for adapter in adapters if isinstance(adapter, nn.Module) for inner in adapter.modules()}


def is_plain(module: nn.Module) -> bool:
    """Returns whether the module is an nn.Linear and no subclass, parametrized (weight_norm, spectral_norm) or not."""
    return type(module) is nn.Linear or (is_parametrized(module) and type(module).__bases__ == (nn.Linear,))


def weights_left(module: nn.Module, skip: tuple[str, ...] = ()) -> dict[str, int]:
    """Returns the number of elements of weights that `convert` leaves in high precision, largest first.

    The keys are class and parameter: {"Qwen3MoeExperts.gate_up_proj": 805306368}. Vectors, embeddings, modules that
    `skip` names, and nn.MultiheadAttention, about which `convert` warns separately, are not included.
    """
    sizes: Counter[str] = Counter()
    counted = {id(p) for child in module.modules() if _is_known(child) for p in child.parameters()}
    for name, child in module.named_modules():
        for leaf, parameter in () if matches(name, skip) else child.named_parameters(recurse=False):
            if not is_lazy(parameter) and parameter.dim() > 1 and id(parameter) not in counted:
                counted.add(id(parameter))
                sizes[f"{type(child).__name__}.{leaf}"] += parameter.numel()
    return dict(sizes.most_common())


def _is_known(module: nn.Module) -> bool:
    return isinstance(module, Stateful | nn.Embedding | nn.EmbeddingBag | nn.MultiheadAttention) or is_plain(module)


def _warn_about_other_weights(module: nn.Module, skip: tuple[str, ...]) -> Iterator[str]:
    """Yields a warning if a large share of the weights is outside of nn.Linear."""
    sizes = weights_left(module, skip)
    linears = {p for child in module.modules() if is_plain(child) or isinstance(child, Stateful)
               for p in child.parameters() if p.dim() > 1}  # fmt: skip
    count = sum(sizes.values())
    share = count / max(1, count + sum(p.numel() for p in linears))
    if share > MAX_UNCONVERTED_SHARE:
        names = ", ".join(list(sizes)[:3]) + (", ..." if len(sizes) > 3 else "")
        yield f"convert() has left {share:.0%} of the weights in high precision ({names}): it converts nn.Linear only."


def _warnings(module: nn.Module, skip: tuple[str, ...], num_converted: int) -> Iterator[str]:
    """Yields the warnings of `convert`, one sentence each."""
    linears = {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)}
    with_parameters = [
        name for name, child in module.named_modules() if any(True for _ in child.named_parameters(recurse=False))
    ]
    if not num_converted:
        yield f"convert() has converted nothing: {_why_nothing(module, linears, skip)}."
    else:
        yield from _warn_about_other_weights(module, skip)
    lazy = [name for name, child in module.named_modules() if isinstance(child, nn.LazyLinear)]
    if unconverted := [name for name in lazy if not matches(name, skip)]:
        first, count = unconverted[0] or "the module itself", len(unconverted)
        yield f"convert() has left {count} nn.LazyLinear in high precision ({first!r} first); run the model once."
    for pattern in skip:
        if pattern != DEFAULT_SKIP and not any(matches(name, (pattern,)) for name in with_parameters):
            yield f"convert() has skipped nothing for {pattern!r}, which matches the name of no module."
    attention = [name for name, child in module.named_modules() if isinstance(child, nn.MultiheadAttention)]
    if unconverted := [name for name in attention if not matches(name, skip)]:
        first, count = unconverted[0] or "the module itself", len(unconverted)
        yield (
            f"convert() has left {count} nn.MultiheadAttention ({first!r} first) in high "
            "precision: it does not call its projections as layers; name it in skip, or use nn.Linear projections."
        )


def _why_nothing(module: nn.Module, linears: dict[str, nn.Linear], skip: tuple[str, ...]) -> str:
    kind = type(module).__name__
    other_classes = sorted({type(child).__name__ for child in module.modules() if _has_matrix(child)})
    suffix = f"; other weights are in {', '.join(other_classes)}" if other_classes else ""
    if not linears:
        return f"{kind} has no nn.Linear{suffix}"
    layers = "1 linear layer" if len(linears) == 1 else f"{len(linears)} linear layers"
    reasons = ", ".join(_reasons(list(linears.values()), _adapter_modules(module), skip))
    return f"of {layers} in {kind}, {reasons}{suffix}"


def _reasons(linears: list[nn.Linear], adapters: set[nn.Module], skip: tuple[str, ...]) -> Iterator[str]:
    """Yields each reason why layers were not converted, with the number of layers."""
    unconverted = [child for child in linears if not isinstance(child, Stateful) and child not in adapters]
    subclasses = [type(child).__name__ for child in unconverted if not is_plain(child)]
    if num_converted := sum(isinstance(child, Stateful) for child in linears):
        yield f"{num_converted} converted already"
    if in_adapters := len(linears) - num_converted - len(unconverted):
        yield f"{in_adapters} in adapters of peft"
    if len(subclasses) < len(unconverted):
        yield f"{len(unconverted) - len(subclasses)} named by skip={skip!r}"
    if subclasses:
        yield f"{len(subclasses)} of subclasses of nn.Linear ({', '.join(sorted(set(subclasses)))})"


def _has_matrix(module: nn.Module) -> bool:
    """Returns whether the module is not an nn.Linear and has a weight that a matrix product might read."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.Linear):
        return False
    return is_lazy(weight) or weight.dim() > 1
