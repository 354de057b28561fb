"""Attention of transformers' classes, handed to whoever runs the pass.

A class calls the function that is registered under the name in its configuration. Ours passes each call on to the one
that `answering` has named for this thread of execution, with the number of the call: in every pass the layers come in
the same order.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

from torch import Tensor, nn

SERVED = "fp8serve"  # no mask is made for it
TRIED = "fp8serve_trial"  # the mask is a number: see `masks`
# answer(number of the call, module, query, key, value, mask, options), [1, heads, T, head_dim] -> [T, heads, head_dim]
Answer = Callable[[int, nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor]
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


def register(mask: Callable[..., Tensor]) -> None:
    """Tell transformers both names; `mask` makes the masks of a trial."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(SERVED, attention)
    AttentionInterface.register(TRIED, attention)
    AttentionMaskInterface.register(TRIED, mask)
