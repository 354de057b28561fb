"""Splits the experts that transformers' classes stack in two parameters into linear layers that FP8 may run.

    P.experts.gate_up_proj [E, 2 I, H]   ->  P.experts.0.gate_proj, P.experts.0.up_proj, ...
    P.experts.down_proj    [E, H, I]     ->  P.experts.0.down_proj, ...

The class's router is called as it is; the chosen experts are computed as in our own mixtures (network/experts.py). The
linear layers have their names in files: transformers knows these, because it stacks experts when it loads them.

Every class has its own code for the choice of experts and the sum of their outputs, so a mixture is computed only if
its model type is one of `TESTED`; all others are refused.
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

TESTED = ("ernie4_5_moe", "olmoe")  # each has a row in tests/compatibility/cases.py
_EXPERTS = re.compile("expert", re.IGNORECASE)
STACKS = ("experts.gate_up_proj", "experts.down_proj")
Leaves = tuple[str, str, str]  # gate, up, down


class ClassExpert(Expert):
    """One expert of a class, with the class's activation."""

    def __init__(self, leaves: Leaves, hidden: int, size: int, activation: Callable[[Tensor], Tensor]) -> None:
        nn.Module.__init__(self)
        self.names = leaves
        self._activation = (activation,)  # in a tuple, because it may be a module, which all experts share
        for leaf, sizes in zip(leaves, ((hidden, size), (hidden, size), (size, hidden)), strict=True):
            self.register_module(leaf, nn.Linear(*sizes, bias=False, device="meta"))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._activation[0](gate) * up

    @property
    def is_silu(self) -> bool:
        """False: what the class's activation is, it alone knows."""
        return False


class ClassExperts(Experts):
    """Called as the class calls its own."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As `Experts`."""
        if x.is_meta:  # in the trial it is unknown how many rows an expert has
            return torch.empty_like(x)
        return super().forward(x, chosen, weights)


def check_mixture(model: nn.Module, model_type: str, name: str) -> None:
    """ModelError for a mixture that is not one of `TESTED`."""
    if model_type not in TESTED and any(_holds_experts(path, module) for path, module in model.named_modules()):
        raise ModelError(
            f"{name} is a mixture of experts without a family; of those, transformers' class is tested here, "
            f"and used, for {' and '.join(TESTED)} alone."
        )


def _holds_experts(path: str, module: nn.Module) -> bool:
    """Whether the module is a stack of experts, or a list of several. Some dense classes only have a word for it."""
    if not _EXPERTS.search(path.rpartition(".")[2]) and not _EXPERTS.search(type(module).__name__):
        return False
    if isinstance(module, nn.ModuleList):
        return len(module) > 1
    return not isinstance(module, nn.Linear) and any(p.dim() > 1 for p in module.parameters(recurse=False))


def take_apart(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace all experts of `model` that have the usual form: gate beside up, no biases, nothing transposed."""
    leaves = _leaves(model)
    modules = {name: module for name, module in model.named_modules() if leaves and _is_plain(module)}
    for name, module in modules.items():
        stack: Any = module
        count, hidden, size = stack.down_proj.shape
        experts = ClassExperts(ClassExpert(leaves, hidden, size, stack.act_fn) for _ in range(count)).to(dtype)
        block = model.get_submodule(name.rpartition(".")[0])
        block.register_module(name.rpartition(".")[2], experts)
        for router in _routers(block):
            router.forward = _by_rows(router.forward)


def in_mixtures(model: nn.Module) -> set[str]:
    """The names of modules that route: those in a block with experts that multiply by weights of their own."""
    blocks = [name.rpartition(".")[0] for name, module in model.named_modules() if isinstance(module, ClassExperts)]
    routers = {id(module) for block in blocks for module in _routers(model.get_submodule(block))}
    return {name for name, module in model.named_modules() if id(module) in routers}


def _leaves(model: Any) -> Any:
    """The names of an expert's linear layers in files; None where files hold no single experts."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    leaves = {}
    for conversion in get_model_conversion_mapping(model):
        sources, targets = conversion.source_patterns, conversion.target_patterns
        if len(targets) == 1 and targets[0].endswith(STACKS) and all("experts.*." in source for source in sources):
            leaves[targets[0].rpartition(".")[2]] = [source.split(".")[-2] for source in sources]
    both = [*leaves.get("gate_up_proj", ()), *leaves.get("down_proj", ())]
    return tuple(both) if len(both) == 3 else None


def _is_plain(module: Any) -> bool:
    stacks = {name: parameter.dim() for name, parameter in module.named_parameters(recurse=False)}
    if stacks != {"gate_up_proj": 3, "down_proj": 3}:
        return False
    layout = (module.has_gate, module.is_concatenated, module.is_transposed, module.has_post_expert_norm)
    gates = type(module)._apply_gate.__module__ == "transformers.integrations.moe"
    return gates and layout == (True, True, False, False) and hasattr(module, "act_fn")


def _routers(block: nn.Module) -> Iterator[nn.Module]:
    for name, child in block.named_children():
        multiplies = "weight" in child._parameters and not isinstance(child, ClassExperts | nn.Linear)
        if multiplies or name == "router":
            yield child


def _by_rows(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with products whose rows do not depend on each other, because the choice of experts must not."""

    def routed(*args: Any, **kwargs: Any) -> Any:
        with _RowByRow():
            return forward(*args, **kwargs)

    return routed


class _RowByRow(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = func is functional.linear and not torch.is_grad_enabled() and not args[0].is_meta
        if not is_product:
            return func(*args, **(kwargs or {}))
        rows = args[0].flatten(0, -2).split(1)
        products = torch.cat([func(row, *args[1:], **(kwargs or {})) for row in rows])
        return products.view(*args[0].shape[:-1], -1)
