"""Splits the experts that transformers' classes stack in two parameters into linear layers that FP8 may run.

    P.experts.gate_up_proj [E, 2 I, H]   ->  P.experts.0.gate_proj, P.experts.0.up_proj, ...
    P.experts.down_proj    [E, H, I]     ->  P.experts.0.down_proj, ...

The class's own router chooses the experts, and network/experts.py computes them. The linear layers have the names that
they have in files; transformers lists these names, because it stacks experts when it loads them.

Every class implements routing and the sum of the experts' outputs in its own way, so a mixture of experts is accepted
only if its model type is in `TESTED_MIXTURES`.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fp8serve.errors import ModelError
from fp8serve.model.network.experts import Expert, Experts

TESTED_MIXTURES = ("ernie4_5_moe", "olmoe")  # each has a row in tests/compatibility/cases.py
_EXPERTS = re.compile("expert", re.IGNORECASE)
STACKS = ("experts.gate_up_proj", "experts.down_proj")
ProjectionNames = tuple[str, str, str]  # of gate, up and down


class ClassExpert(Expert):
    """One expert with the activation function of transformers' class."""

    def __init__(self, names: ProjectionNames, hidden: int, size: int, activation: Callable[[Tensor], Tensor]) -> None:
        nn.Module.__init__(self)
        self.names = names
        self._activation = (activation,)  # a tuple, so that a shared activation module is not registered here
        for name, sizes in zip(names, ((hidden, size), (hidden, size), (size, hidden)), strict=True):
            self.register_module(name, nn.Linear(*sizes, bias=False, device="meta"))

    def apply_gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._activation[0](gate) * up

    @property
    def is_silu(self) -> bool:
        """Returns False, because the activation of transformers' class is unknown here."""
        return False


class ClassExperts(Experts):
    """The experts of one mixture, with the call signature of transformers' stacked experts."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if x.is_meta:  # without values, the number of rows for an expert is unknown
            return torch.empty_like(x)
        return super().forward(x, chosen, weights)


def check_mixture(model: nn.Module, model_type: str, name: str) -> None:
    """Raises ModelError if the model is a mixture of experts whose type is not in `TESTED_MIXTURES`."""
    if model_type not in TESTED_MIXTURES and any(_is_experts(path, module) for path, module in model.named_modules()):
        raise ModelError(
            f"{name} is a mixture of experts without a model family in fp8serve, and the transformers backend supports "
            f"mixtures only of the types {' and '.join(TESTED_MIXTURES)}."
        )


def _is_experts(path: str, module: nn.Module) -> bool:
    """Whether the module has stacked weights or several modules of experts; some dense classes only have the name."""
    if not _EXPERTS.search(path.rpartition(".")[2]) and not _EXPERTS.search(type(module).__name__):
        return False
    if isinstance(module, nn.ModuleList):
        return len(module) > 1
    return not isinstance(module, nn.Linear) and any(p.dim() > 1 for p in module.parameters(recurse=False))


def unstack_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces stacked experts of the standard layout: gate and up concatenated, no biases, not transposed."""
    names = _projection_names(model)
    modules = {name: module for name, module in model.named_modules() if names and _has_standard_layout(module)}
    for name, module in modules.items():
        stack: Any = module
        count, hidden, size = stack.down_proj.shape
        experts = ClassExperts(ClassExpert(names, hidden, size, stack.act_fn) for _ in range(count)).to(dtype)
        block = model.get_submodule(name.rpartition(".")[0])
        block.register_module(name.rpartition(".")[2], experts)
        for router in _routers(block):
            router.forward = _row_invariant(router.forward)


def router_modules(model: nn.Module) -> set[str]:
    """Returns the names of the routers: modules beside experts that have weights, but are no linear layers."""
    blocks = [name.rpartition(".")[0] for name, module in model.named_modules() if isinstance(module, ClassExperts)]
    routers = {id(module) for block in blocks for module in _routers(model.get_submodule(block))}
    return {name for name, module in model.named_modules() if id(module) in routers}


def _projection_names(model: Any) -> Any:
    """Returns the names of an expert's linear layers in files, or None if files store experts stacked."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    by_stack = {}
    for conversion in get_model_conversion_mapping(model):
        sources, targets = conversion.source_patterns, conversion.target_patterns
        if len(targets) == 1 and targets[0].endswith(STACKS) and all("experts.*." in source for source in sources):
            by_stack[targets[0].rpartition(".")[2]] = [source.split(".")[-2] for source in sources]
    names = [*by_stack.get("gate_up_proj", ()), *by_stack.get("down_proj", ())]
    return tuple(names) if len(names) == 3 else None


def _has_standard_layout(module: Any) -> bool:
    stacks = {name: parameter.dim() for name, parameter in module.named_parameters(recurse=False)}
    if stacks != {"gate_up_proj": 3, "down_proj": 3}:
        return False
    layout = (module.has_gate, module.is_concatenated, module.is_transposed, module.has_post_expert_norm)
    has_standard_gate = type(module)._apply_gate.__module__ == "transformers.integrations.moe"
    return has_standard_gate and layout == (True, True, False, False) and hasattr(module, "act_fn")


def _routers(block: nn.Module) -> Iterator[nn.Module]:
    for name, child in block.named_children():
        has_own_weight = "weight" in child._parameters and not isinstance(child, ClassExperts | nn.Linear)
        if has_own_weight or name == "router":
            yield child


def _row_invariant(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `forward` so that the bits of a row, and so the choice of experts, do not depend on other rows."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _RowByRow():
            return forward(*args, **kwargs)

    return wrapped


class _RowByRow(TorchFunctionMode):
    """Computes every `functional.linear` without gradients one row at a time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = func is functional.linear and not torch.is_grad_enabled() and not args[0].is_meta
        if not is_product:
            return func(*args, **(kwargs or {}))
        rows = args[0].flatten(0, -2).split(1)
        products = torch.cat([func(row, *args[1:], **(kwargs or {})) for row in rows])
        return products.view(*args[0].shape[:-1], -1)
