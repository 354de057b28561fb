"""The cache of quantized weights for gradient accumulation: the caller decides when a weight is quantized again.

    for i, part in enumerate(microbatches):
        with autocast(recipe=recipe, is_first_microbatch=i == 0):     # or layer(x, is_first_microbatch=i == 0)
            loss = model(part)
        loss.backward()
    optimizer.step()

    None     quantizes the weight (the default)
    True     quantizes the weight and caches the result, one byte per element, until the next True
    False    uses the cached result, because the weight has not changed since the last True

Only the caller knows that a weight is unchanged. The version counter does not show it: fused optimizers, writes through
`.data` and writes through NumPy do not increase it. Evidence that a weight has changed still overrides False: a step of
any torch optimizer, a higher version counter, another storage or another recipe. Then False acts like True.
"""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8serve.errors import RecipeError

T = TypeVar("T")


class _OptimizerSteps:
    """Identifies the latest step of any optimizer of this process by a unique object."""

    latest = object()


def _on_optimizer_step(*_: Any) -> None:
    _OptimizerSteps.latest = object()


register_optimizer_step_post_hook(_on_optimizer_step)


def validate_is_first_microbatch(is_first_microbatch: bool | None) -> bool | None:
    """Returns the argument. Raises RecipeError unless it is None, True or False."""
    if is_first_microbatch is not None and not isinstance(is_first_microbatch, bool):
        raise RecipeError(f"is_first_microbatch must be None, True or False, found {is_first_microbatch!r}.")
    return is_first_microbatch


def _cache_key(weight: Tensor, dependencies: Hashable) -> tuple[Any, ...]:
    """Returns a key that changes if the weight is known to have changed. An equal key proves nothing."""
    version = None if weight.is_inference() else weight._version
    storage = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
    # A tensor that was created under inference_mode cannot be saved for a backward pass, so the mode is in the key.
    is_inference = torch.is_inference_mode_enabled()
    return _OptimizerSteps.latest, version, storage, weight.storage_offset(), is_inference, dependencies


class QuantizedWeightCache(Generic[T]):
    """The cached quantization of one weight. A copy of the layer that owns the cache starts with an empty cache."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._value: T | None = None

    def __deepcopy__(self, memo: Any) -> "QuantizedWeightCache[T]":
        return QuantizedWeightCache()

    def __reduce__(self) -> tuple[Any, ...]:
        return QuantizedWeightCache, ()

    def get(
        self,
        weight: Tensor,
        dependencies: Hashable,
        is_first_microbatch: bool | None,
        quantize: Callable[[], T],
        is_sufficient: Callable[[T], bool] = lambda _: True,
    ) -> T:
        """Returns the cached value if `is_first_microbatch` is False and the value is still valid, else a new one.

        Args:
            dependencies: What the value depends on apart from the weight, such as the recipe.
            quantize: Computes the value. It is cached unless `is_first_microbatch` is None.
            is_sufficient: Returns whether the cached value has all that this call needs.
        """
        if is_first_microbatch is None or torch.compiler.is_compiling():  # a graph cannot see changes between its runs
            return quantize()
        key = _cache_key(weight, dependencies)
        if is_first_microbatch or self._value is None or key != self._key or not is_sufficient(self._value):
            self._value, self._key = quantize(), key
        return self._value
