"""The matrix that makes logits, optionally in FP8.

It is the largest of a small model: 21 % of SmolLM2's parameters, read whole for every token. In FP8 a step reads half
of it. Each output channel has a scale from its own amax. On a CPU inputs stay in BF16, as in the recipe w8a16, which is
as fast there and more accurate. A GPU multiplies only operands of one type, so there each token's input is cast, as in
the recipe rowwise. A head that is tied to the embedding becomes a separate matrix, and the embedding stays as it is.
"""

from typing import cast

from torch import Tensor, nn

from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import Recipe, from_name
from fp8serve.model.building import Model
from fp8serve.model.storage.mapped import release_pages


def cast_head(model: Model) -> None:
    """Replaces the head of `model`, in place, for serving: a row of logits does not depend on other rows."""
    weight = cast(Tensor, model.head.weight)
    recipe = cast(Recipe, from_name("rowwise" if weight.is_cuda else "w8a16"))
    frozen = FrozenLinear.from_linear(cast(nn.Linear, model.head), recipe, out_dtype=weight.dtype)
    release_pages(weight)
    owner, _, leaf = model.head_name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, frozen)
