"""When a quantized weight may serve another forward pass: only when the caller says so.

    for i, part in enumerate(microbatches):
        with autocast(recipe=recipe, is_first_microbatch=i == 0):     # or layer(x, is_first_microbatch=i == 0)
            loss = model(part)
        loss.backward()
    optimizer.step()

    None     quantize the weight (the default)
    True     quantize it and keep the result: one byte an element, until the next True
    False    the weight is what it was at the last True: use what was kept

Only the caller knows that a weight is unchanged. A version counter does not show it: fused optimizers, writes through
`.data` and writes through NumPy leave it as it was. Evidence that a weight has changed still overrides the
announcement: a step of any torch optimizer, a counter that has risen, another storage, another recipe. Then False
quantizes and keeps, as True does.
"""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8serve.errors import RecipeError

T = TypeVar("T")


class _Steps:
    """The latest step of any optimizer of this process, as an object that equals only itself."""

    latest = object()


def _stepped(*call: Any) -> None:
    _Steps.latest = object()


register_optimizer_step_post_hook(_stepped)


def checked(is_first_microbatch: bool | None) -> bool | None:
    """The announcement itself; RecipeError for anything but None, True and False."""
    if is_first_microbatch is not None and not isinstance(is_first_microbatch, bool):
        raise RecipeError(f"is_first_microbatch must be None, True or False, found {is_first_microbatch!r}.")
    return is_first_microbatch


def _moment(weight: Tensor, about: Hashable) -> tuple[Any, ...]:
    """Differs between two moments if the weight is known to have changed; equality proves nothing."""
    version = None if weight.is_inference() else weight._version
    storage = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
    # Nothing that was made under inference_mode can be saved for a backward pass.
    return _Steps.latest, version, storage, weight.storage_offset(), torch.is_inference_mode_enabled(), about


def _any(value: object) -> bool:
    return True


class Retained(Generic[T]):
    """What was computed from one weight at the last True. A copy of its owner starts without it."""

    def __init__(self) -> None:
        self._moment: tuple[Any, ...] = ()
        self._value: T | None = None

    def __deepcopy__(self, memo: Any) -> "Retained[T]":
        return Retained()

    def __reduce__(self) -> tuple[Any, ...]:
        return Retained, ()

    def get(
        self,
        weight: Tensor,
        about: Hashable,
        first: bool | None,
        make: Callable[[], T],
        suits: Callable[[T], bool] = _any,
    ) -> T:
        """The kept value if `first` is False, no evidence speaks against it and it `suits`; else the result of `make`.

        about: what the value depends on apart from the weight, such as the recipe.
        """
        if first is None or torch.compiler.is_compiling():  # a graph cannot ask what happened between its runs
            return make()
        moment = _moment(weight, about)
        if first or self._value is None or moment != self._moment or not suits(self._value):
            self._value, self._moment = make(), moment
        return self._value
