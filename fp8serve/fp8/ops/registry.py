"""The registry of ops. `define` registers an op with torch and adds it to OPS, which `backends()`, doctor, the
benchmark and the tests read.

The module of a family (casts.py, gemm.py, ...) defines for every op a schema, a reference in plain PyTorch, a fake
kernel that returns shapes, and test inputs. torch's dispatcher chooses the kernel: the reference is registered as
CompositeExplicitAutograd, which runs on every device that has no kernel.

Only this module imports `torch.library`.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, wraps
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.library

Kernel = Callable[..., Any]

_LIBRARY: Any = cast(Any, torch.library.Library)("fp8serve", "DEF")  # torch leaves the class untyped


@dataclass(frozen=True)
class Case:
    """A test input of an op: `make()` returns new arguments, always with the same values."""

    name: str
    make: Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Op:
    """A registered op.

    `kernel_devices` are the devices whose library has a kernel for the op. An op with `is_composed` runs as a sequence
    of other ops where it has no kernel. `recipes` are the recipes whose linear layers need the op, forward or backward.
    `cases` returns its inputs for the tests of kernels, for gradient checks and for benchmarks.
    """

    name: str
    kernel_devices: tuple[str, ...]
    is_composed: bool
    recipes: tuple[str, ...]
    cases: Callable[[], list[Case]]


OPS: dict[str, Op] = {}  # the ops with a reference, by name, in the order of definition
reference = SimpleNamespace()  # the reference of every op by name; tests compare kernels with it
_DECLARED_DEVICES: dict[str, tuple[str, ...]] = {}  # the ops without a reference, and the devices of their kernels
_DEFAULT_KERNELS: dict[str, Kernel] = {}
_REPLACEMENTS: dict[tuple[str, str], Any] = {}  # (op, device) -> torch library that holds the replacing kernel


def define(
    schema: str,
    reference_kernel: Kernel,
    *,
    fake: Kernel,
    cases: Callable[[], list[Case]],
    default_kernel: Kernel | None = None,
    kernel_devices: tuple[str, ...] = ("cpu", "cuda"),
    recipes: tuple[str, ...] = (),
) -> None:
    """Defines an op by its schema and its reference, which is also the default kernel unless another one is given."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    implement(name, default_kernel or reference_kernel)
    torch.library.register_fake(f"fp8serve::{name}", _check_one_device(name, fake), lib=_LIBRARY)
    setattr(reference, name, reference_kernel)
    OPS[name] = Op(name, kernel_devices, default_kernel is not None, recipes, cases)


def define_composed(schema: str, composition: Kernel, **options: Any) -> None:
    """Defines an op that is a sequence of other ops, with the options of `define`.

    The first argument of `composition` is the namespace of the ops that it calls, followed by the arguments of the op.
    The reference calls references. The default kernel calls ops, which may have compiled kernels.
    """
    default_kernel = partial(composition, torch.ops.fp8serve)
    define(schema, partial(composition, reference), default_kernel=default_kernel, **options)


def _check_one_device(name: str, fake: Kernel) -> Kernel:
    """Returns `fake` with a check for arguments of which only some are on "meta": the result would be uninitialized."""

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


def declare(schema: str, fake: Kernel | None = None, kernel_devices: tuple[str, ...] = ()) -> None:
    """Defines an op without a reference, whose only kernel is in a library or is registered by `implement`."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    if fake is not None:
        torch.library.register_fake(f"fp8serve::{name}", fake, lib=_LIBRARY)
    _DECLARED_DEVICES[name] = kernel_devices


def implement(name: str, kernel: Kernel) -> None:
    """Registers the default kernel of an op. Like the C++ kernels it has no gradient; autograd functions provide it."""
    _DEFAULT_KERNELS[name] = torch.no_grad()(kernel)
    _LIBRARY.impl(name, _DEFAULT_KERNELS[name], "CompositeExplicitAutograd")


def use_default_kernel(name: str, device: str) -> None:
    """Makes an op run its default kernel on a device, "cpu" or "cuda", instead of the library's kernel."""
    _REPLACEMENTS[name, device] = override_kernel(name, _DEFAULT_KERNELS[name], device)


def override_kernel(name: str, kernel: Kernel, device: str) -> Any:
    """Makes an op run `kernel` on a device until `_destroy()` is called on the returned torch library."""
    library: Any = cast(Any, torch.library.Library)("fp8serve", "IMPL")
    with warnings.catch_warnings():  # torch warns that there is a kernel already
        warnings.simplefilter("ignore", UserWarning)
        library.impl(name, kernel, device.upper(), allow_override=True)
    return library


def replaced_ops(device: str) -> set[str]:
    """Returns the ops that run their default kernel on a device because of `use_default_kernel`."""
    return {name for name, replaced_on in _REPLACEMENTS if replaced_on == device}


def restore_library_kernels(device: str) -> None:
    """Undoes `use_default_kernel` for all ops on a device."""
    for name in replaced_ops(device):
        _REPLACEMENTS.pop((name, device))._destroy()


def compiled_for(device: str) -> set[str]:
    """Returns the ops for which the library of a device, "cpu" or "cuda", has a kernel."""
    devices = {name: op.kernel_devices for name, op in OPS.items()} | _DECLARED_DEVICES
    return {name for name, kernel_devices in devices.items() if device in kernel_devices}


def recipe_ops() -> dict[str, tuple[str, ...]]:
    """Returns the ops that a linear layer needs under each recipe, forward and backward."""
    recipes = dict.fromkeys(recipe for op in OPS.values() for recipe in op.recipes)
    return {recipe: tuple(name for name, op in OPS.items() if recipe in op.recipes) for recipe in recipes}


@cache
def cases(name: str) -> list[Case]:
    """Returns the test inputs of an op, which are created at the first call."""
    return OPS[name].cases()
