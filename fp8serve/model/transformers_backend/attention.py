"""Passes the attention of transformers' classes to the caller of a pass.

A class calls the function that is registered under the name in its configuration. Ours passes each call, with its
number, on to the function that `answering` has set for this thread of execution: in every pass the layers come in the
same order.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

SERVED = "fp8serve"  # no mask is made for it
TRIED = "fp8serve_trial"  # the mask is a `Mask`
# answer(number of the call, module, query, key, value, mask, options), [1, heads, T, head_dim] -> [T, heads, head_dim]
Answer = Callable[[int, nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor]
Seen = Callable[[Tensor, Tensor], Tensor]  # (query positions, key positions) -> bool
_pass: ContextVar[tuple[Iterator[int], Answer]] = ContextVar("pass")


@contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Inside, `answer` is called for every attention layer of a pass through a class."""
    token = _pass.set((count(), answer))
    try:
        yield
    finally:
        _pass.reset(token)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """As transformers calls it: [1, heads, T, head_dim] -> [1, T, heads, head_dim], and no weights."""
    numbers, answer = _pass.get()
    return answer(next(numbers), module, query, key, value, attention_mask, options)[None], None


class Mask(Tensor):
    """What a class's mask code passes to attention: `sees`, the mask as a function of two positions."""

    sees: Seen


def mask(*args: Any, mask_function: Callable[..., Tensor], **options: Any) -> Tensor:
    """As transformers calls it to make the mask of some layers."""
    made = torch.zeros(1, 1, 1, 1).as_subclass(Mask)
    made.sees = lambda q, k: mask_function(torch.zeros_like(q), torch.zeros_like(q), q, k)
    return made


@cache
def register() -> None:
    """Tell transformers both names, before a class is built with one of them."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(SERVED, attention)
    AttentionInterface.register(TRIED, attention)
    AttentionMaskInterface.register(TRIED, mask)
