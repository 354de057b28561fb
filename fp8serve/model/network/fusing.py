"""The pieces of a decoder layer, each run as one op where its modules allow it, else one module after the other.

A layer (decoder.py) is written once, in four pieces: a norm and the projections after it, twice, and a projection onto
the residual, twice. Serving's frozen layers (fp8/frozen.py) fuse the cast with the norm or activation before them and
add their product to the residual in the same pass: ten ops per layer instead of about forty, each of which takes more
time to call than to compute at batch 1. The ops round where the plain modules round, so the bits are the same. Modules
with hooks, with gradients or with other kinds of weights are called one by one.

Children and tensors are looked up in torch's own dictionaries: no copy of them can be out of date, and a module's
attribute takes twenty times as long. Joined tensors are such copies; fp8/replacing.py notifies them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8serve.fp8.elementwise import gelu_tanh_mul, silu_mul
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.joined import Joined, can_join
from fp8serve.fp8.replacing import note_replacements
from fp8serve.model.config.model_config import Activation
from fp8serve.model.network.norms import RMSNorm


def direct(module: nn.Module) -> Callable[..., Any]:
    """The forward of `module` if there is neither gradient nor hook; calling the module would spend time on checking
    that."""
    is_watched = module._forward_hooks or module._forward_pre_hooks or torch.is_grad_enabled()
    return module if is_watched else module.forward


class Projections:
    """The linears of `owner`, by name, that read one normed input; as one matrix once `join` has been called.

    widths: the rows of each projection where the file already joins them into one linear. This is not a module: the
    linears stay where they are, under their own names.
    """

    def __init__(self, owner: nn.Module, *names: str, widths: Sequence[int] | None = None) -> None:
        self._owner, self._names, self._widths = owner, names, widths
        self._joined: Joined | None = None
        self._changed: set[int] = set()  # not empty where something that is joined may have been replaced

    def __call__(self, x: Tensor, norm: nn.Module | None) -> Sequence[Tensor]:
        """norm(x [T, K]), or x itself where there is no norm, through every projection: [T, N] each, in their order."""
        parts = self._parts(x, norm)
        return parts if self._widths is None else parts[0].split_with_sizes(self._widths, -1)

    def _parts(self, x: Tensor, norm: nn.Module | None) -> Sequence[Tensor]:
        """Through every linear."""
        if self._joined is not None and not torch.is_grad_enabled() and (joined := self._current()) is not None:
            if any(layer.adapters is not None and layer.adapters.is_active for layer in joined.layers):
                x = x if norm is None else norm(x)
                return [_with_adapters(layer, y, x) for layer, y in zip(joined.layers, joined(x), strict=True)]
            weight = norm.fused_weight(x) if type(norm) is RMSNorm else None
            if weight is not None:
                return joined.of_normed(x, weight, norm.eps)  # type: ignore[union-attr, arg-type]
            return joined(x if norm is None else norm(x))
        x = x if norm is None else norm(x)
        modules = self._owner._modules
        return [modules[name](x) for name in self._names]  # type: ignore[misc]  # a linear is there

    def join(self) -> None:
        """Joins the linears if possible, and from then on also linears that replace them."""
        layers = [self._owner._modules[name] for name in self._names]
        if can_join(layers):
            listener = self._changed, 0
            note_replacements(self._owner, self._names, listener)
            self._joined = Joined(dict(zip(self._names, layers, strict=True)), listener)
            self._changed.clear()

    def matrices(self) -> Iterator["nn.Module | Projections"]:
        """The matrices that a step multiplies by and that could be packed: all as one, or each separately."""
        joined = self._current()
        if joined is None:
            yield from (module for name in self._names if (module := self._owner._modules[name]) is not None)
        elif joined.is_packable:
            yield self

    @property
    def weight(self) -> Tensor | None:
        """The joined linear; None where each linear runs separately."""
        joined = self._current()
        return None if joined is None else joined.weight

    def pack(self, out: Tensor) -> None:
        """See FrozenLinear.pack; only where there is a joined weight."""
        joined = self._current()
        if joined is not None:
            joined.pack(out)

    def _current(self) -> Joined | None:
        """The joined linear, joined again if something in it was replaced. None: it was never joined, or no longer can
        be."""
        joined = self._joined
        if joined is None or not self._changed:
            return joined
        if joined.is_current(self._owner._modules):
            self._changed.clear()
            return joined
        self.join()
        return None if self._joined is joined else self._joined


def _with_adapters(layer: FrozenLinear, y: Tensor, x: Tensor) -> Tensor:
    """y [T, N], the layer's output for x [T, K], plus its adapters."""
    return y if layer.adapters is None else layer.adapters.add(y.contiguous(), x)


class Ending(NamedTuple):
    """Prepares a block's output before it is added to the residual: normed by `norm`, times `scale`."""

    norm: nn.Module | None
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self.norm is None else direct(self.norm)(x)
        return x if self.scale == 1.0 else x * self.scale


PLAIN = Ending(None, 1.0)
"""Whether the output is added as it is, the only ending that ops fuse."""


def add_projection(residual: Tensor, linear: nn.Module, x: Tensor, ending: Ending) -> Tensor:
    """residual [T, hidden] + ending(linear(x [T, K])), in the residual's type: attention under fp8_mha gives FP32."""
    if ending is PLAIN and isinstance(linear, FrozenLinear) and linear.fuses(residual):
        return linear.onto(residual, x)
    return residual + ending(linear(x)).to(residual.dtype)


def add_gated(
    residual: Tensor, linear: nn.Module, gate: Tensor, up: Tensor, activation: Activation, ending: Ending
) -> Tensor:
    """residual [T, hidden] + ending(linear(activation(gate) * up)), both [T, K]."""
    if ending is PLAIN and activation == "silu" and isinstance(linear, FrozenLinear) and linear.fuses(residual):
        return linear.product_onto(residual, *linear.cast_silu_mul(gate, up))
    return residual + ending(linear(GATED[activation](gate, up)))


GATED: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}
