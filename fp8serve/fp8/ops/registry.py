"""The registry of ops: `define` makes an op known to torch, and to everything here that lists ops: `backends()`,
doctor, the benchmark and the tests.

An op's family (casts.py, gemm.py, ...) defines all of it in one place: its schema, its reference in plain PyTorch, a
fake kernel that gives shapes, and the inputs that it is tried on. Dispatch, not an `if`, chooses the kernel: the
reference is registered as CompositeExplicitAutograd, which runs on every device without a kernel.

`torch.library` is imported by this module only.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.library

Kernel = Callable[..., Any]

_LIBRARY: Any = cast(Any, torch.library.Library)("fp8serve", "DEF")  # torch leaves the class untyped


@dataclass(frozen=True)
class Case:
    """One input of an op: `make()` gives fresh arguments, always the same values."""

    name: str
    make: Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Op:
    """What is known of an op.

    `kernels`: the devices whose library holds a kernel for it. `composed`: without a kernel it runs as a sequence of
    the other ops. `recipes`: those whose linear layers need it, forward or backward. `cases`: makes its list of inputs,
    for the tests of every kernel, for gradient checks and for benchmarks.
    """

    name: str
    kernels: tuple[str, ...]
    composed: bool
    recipes: tuple[str, ...]
    cases: Callable[[], list[Case]]


OPS: dict[str, Op] = {}  # every op that has a reference, by name, in the order of definition
reference = SimpleNamespace()  # the reference of every op, by name, with which torch.ops.fp8serve is compared
_WITHOUT_REFERENCE: dict[str, tuple[str, ...]] = {}  # name: devices
_DEFAULTS: dict[str, Kernel] = {}
_REPLACED: dict[tuple[str, str], Any] = {}  # (op, device): what holds the replacement in force


def define(
    schema: str,
    kernel: Kernel,
    *,
    fake: Kernel,
    cases: Callable[[], list[Case]],
    composition: Kernel | None = None,
    kernels: tuple[str, ...] = ("cpu", "cuda"),
    recipes: tuple[str, ...] = (),
) -> None:
    """Define an op by its schema and its reference `kernel`, which is also its default kernel unless there is a
    `composition` of other ops, which may have kernels."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    implement(name, composition or kernel)
    torch.library.register_fake(f"fp8serve::{name}", _on_one_device(name, fake), lib=_LIBRARY)
    setattr(reference, name, kernel)
    OPS[name] = Op(name, kernels, composition is not None, recipes, cases)


def _on_one_device(name: str, fake: Kernel) -> Kernel:
    """`fake`, which torch also calls when one argument of several is on meta: the result would be uninitialised."""

    @wraps(fake)
    def checked(*args: Any, **options: Any) -> Any:
        flat = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, torch.Tensor)]
        devices = sorted({t.device.type for t in flat})
        if "meta" in devices and len(devices) > 1:
            raise ValueError(
                f"fp8serve::{name}: its arguments are on {' and '.join(devices)}; move them to one device."
            )
        return fake(*args, **options)

    return checked


def declare(schema: str, fake: Kernel | None = None, kernels: tuple[str, ...] = ()) -> None:
    """Define an op that has no reference: its only kernel is in a library, or is given by `implement`."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    if fake is not None:
        torch.library.register_fake(f"fp8serve::{name}", fake, lib=_LIBRARY)
    _WITHOUT_REFERENCE[name] = kernels


def implement(name: str, kernel: Kernel) -> None:
    """Give an op its default kernel, which like the C++ kernels is not differentiable: gradients are the business of
    autograd functions."""
    _DEFAULTS[name] = torch.no_grad()(kernel)
    _LIBRARY.impl(name, _DEFAULTS[name], "CompositeExplicitAutograd")


def replace_by_default(name: str, device: str) -> None:
    """Let an op's default kernel answer on a device, "cpu" or "cuda", in the place of its library's kernel."""
    _REPLACED[name, device] = overridden(name, _DEFAULTS[name], device)


def overridden(name: str, kernel: Kernel, device: str) -> Any:
    """Has `kernel` answer on a device for as long as what is returned is not told to `_destroy()`."""
    holder: Any = cast(Any, torch.library.Library)("fp8serve", "IMPL")
    with warnings.catch_warnings():  # torch's, that there is a kernel already
        warnings.simplefilter("ignore", UserWarning)
        holder.impl(name, kernel, device.upper(), allow_override=True)
    return holder


def replaced(device: str) -> set[str]:
    """The ops for which `replace_by_default` holds."""
    return {name for name, where in _REPLACED if where == device}


def restore(device: str) -> None:
    """Let the library's kernels answer again."""
    for name in replaced(device):
        _REPLACED.pop((name, device))._destroy()


def compiled_for(device: str) -> set[str]:
    """The ops for which the library of a device, "cpu" or "cuda", holds a kernel."""
    every = {name: op.kernels for name, op in OPS.items()} | _WITHOUT_REFERENCE
    return {name for name, devices in every.items() if device in devices}


def recipe_ops() -> dict[str, tuple[str, ...]]:
    """The ops that a linear layer needs under each recipe, forward and backward."""
    recipes = dict.fromkeys(recipe for op in OPS.values() for recipe in op.recipes)
    return {recipe: tuple(name for name, op in OPS.items() if recipe in op.recipes) for recipe in recipes}


@cache
def cases(name: str) -> list[Case]:
    """The inputs that an op is tried on; they are made on first use."""
    return OPS[name].cases()
