"""Runs the parts of a decoder layer as fused ops if their modules allow it, and otherwise module by module.

A layer (decoder.py) has two parts that occur twice: a norm with the projections after it, and a projection whose output
is added to the residual. The frozen layers of serving (fp8/frozen.py) fuse the cast with the norm or activation before
it, and the addition with the matrix product. A layer then needs ten ops instead of about forty. At batch size 1 each op
takes longer to call than to compute. The fused ops round where the modules round, so the bits are the same. Modules
with hooks, with gradients or with other weights are called one by one.

This module looks up children and parameters in the dictionaries of nn.Module, which is twenty times as fast as
attribute access and never out of date. Joined tensors are copies; fp8/change_tracking.py reports when they are
outdated.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8serve.fp8.change_tracking import track_children
from fp8serve.fp8.elementwise import gelu_tanh_mul, silu_mul
from fp8serve.fp8.frozen import FrozenLinear, Operands
from fp8serve.fp8.fused import NormParameters, project_normed, run_gated_mlp
from fp8serve.fp8.joined import JoinedLinear, can_join
from fp8serve.fp8.shared_input import SharedInput
from fp8serve.model.config.model_config import Activation
from fp8serve.model.network.norms import RMSNorm

if TYPE_CHECKING:
    from fp8serve.fp8.sharded import Shard


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Returns `module.forward` if the module needs neither gradients nor hooks, otherwise `module` itself.

    Calling a module checks for many kinds of hooks, which takes time.
    """
    needs_call = module._forward_hooks or module._forward_pre_hooks or torch.is_grad_enabled()
    return module if needs_call else module.forward


class Projections:
    """The linears of `owner` with these names, which read the same normalized input. `join` makes them one matrix.

    If the checkpoint has one linear for all projections, `widths` are their numbers of rows. This is not a module: the
    linears stay children of `owner`.
    """

    def __init__(self, owner: nn.Module, *names: str, widths: Sequence[int] | None = None) -> None:
        self._owner, self._names, self._widths = owner, names, widths
        self._joined: JoinedLinear | None = None
        self._shared_input = SharedInput()
        self._changed: set[int] = set()  # not empty if a joined linear or tensor may have been replaced

    def __call__(self, x: Tensor, norm: nn.Module | None) -> Sequence[Tensor]:
        """Returns each projection of norm(x [T, K]), [T, N]. If `norm` is None, projects x itself."""
        outputs = self._linear_outputs(x, norm)
        return outputs if self._widths is None else outputs[0].split_with_sizes(self._widths, -1)

    def _linear_outputs(self, x: Tensor, norm: nn.Module | None) -> Sequence[Tensor]:
        if self._joined is not None and not torch.is_grad_enabled() and (joined := self._current_joined()) is not None:
            if any(layer.adapters is not None and layer.adapters.is_active for layer in joined.layers):
                x = x if norm is None else norm(x)
                pairs = zip(joined.layers, joined(x), strict=True)
                return [y if layer.adapters is None else layer.adapters.add(y.contiguous(), x) for layer, y in pairs]
            weight = norm.fused_weight(x) if type(norm) is RMSNorm else None
            if weight is not None:
                return joined.forward_norm(x, weight, norm.eps)  # type: ignore[union-attr, arg-type]
            return joined(x if norm is None else norm(x))
        modules = [self._owner._modules[name] for name in self._names]
        if (parameters := _norm_parameters(norm, x)) is not None:
            outputs = project_normed(self._shared_input, modules, x, parameters)
            if outputs is not None:
                return outputs
        return self._shared_input(modules, x if norm is None else norm(x))  # type: ignore[arg-type]  # none is None

    def shard(self, shard: "Shard") -> None:
        """Keeps this rank's rows of each projection. Must be called before `join`."""
        from fp8serve.fp8.sharded import keep_rows  # here, because it imports DTensor, which takes a second

        for name in self._names:
            layer: Any = self._owner._modules[name]
            keep_rows(layer, shard, self._widths)
        if self._widths is not None:
            self._widths = [width // shard.size for width in self._widths]

    def prepare_compiled(self) -> None:
        """Makes the linears share the state of their input, as the next call in a compiled graph shall find them."""
        self._shared_input.prepare(
            [module for name in self._names if (module := self._owner._modules[name]) is not None]
        )

    def run_gated_mlp(self, x: Tensor, norm: nn.Module | None, down: nn.Module | None) -> Tensor | None:
        """Returns down(silu(gate) * up) for the projections gate and up, or None if it cannot be fused."""
        modules = [self._owner._modules[name] for name in self._names]
        parameters = _norm_parameters(norm, x) if len(modules) == 2 else None
        if parameters is None:
            return None
        return run_gated_mlp(self._shared_input, [*modules, down], x, parameters)

    def cast_gated(self, x: Tensor, norm: nn.Module | None, linear: FrozenLinear) -> tuple[Tensor, Tensor] | None:
        """Returns silu(gate) * up, cast as the input of `linear`, for the projections gate and up of norm(x [T, K]).
        Returns None if no fused op can compute it."""
        if self._joined is None or torch.is_grad_enabled() or type(norm) is not RMSNorm:
            return None
        joined, weight = self._current_joined(), norm.fused_weight(x)
        if joined is None or weight is None:
            return None
        if any(layer.adapters is not None and layer.adapters.is_active for layer in joined.layers):
            return None
        return joined.cast_gated(x, weight, norm.eps, linear)

    def operands(self, x: Tensor, norm: nn.Module | None) -> tuple[Operands, Sequence[int]] | None:
        """Returns the operands of the joined product of norm(x [T, K]), and the widths of the projections in it.
        Returns None if no fused op can compute it."""
        joined = None if self._joined is None or torch.is_grad_enabled() else self._current_joined()
        if joined is None or not joined.can_fuse_product(x):  # never on a CPU
            return None
        if any(layer.adapters is not None and layer.adapters.is_active for layer in joined.layers):
            return None
        weight = norm.fused_weight(x) if type(norm) is RMSNorm else None
        if weight is None:
            operands = joined.operands(x if norm is None else norm(x))
        else:
            operands = joined.operands_of_norm(x, weight, norm.eps)  # type: ignore[union-attr, arg-type]
        return operands, self._widths or joined.widths

    def join(self) -> None:
        """Joins the linears if possible. Linears that replace them later are joined, too."""
        layers = [self._owner._modules[name] for name in self._names]
        if can_join(layers):
            listener = self._changed, 0
            track_children(self._owner, self._names, listener)
            self._joined = JoinedLinear(dict(zip(self._names, layers, strict=True)), listener)
            self._changed.clear()

    def matrices(self) -> Iterator["nn.Module | Projections"]:
        """Yields the modules whose matrices may be packed: this object if its linears are joined, or each linear."""
        joined = self._current_joined()
        if joined is None:
            yield from (module for name in self._names if (module := self._owner._modules[name]) is not None)
        elif joined.is_packable:
            yield self

    @property
    def weight(self) -> Tensor | None:
        """The joined weight, or None if the linears are not joined."""
        joined = self._current_joined()
        return None if joined is None else joined.weight

    def pack(self, out: Tensor) -> None:
        """Packs the joined weight into `out` as `FrozenLinear.pack`. Does nothing if the linears are not joined."""
        joined = self._current_joined()
        if joined is not None:
            joined.pack(out)

    def _current_joined(self) -> JoinedLinear | None:
        """Returns the joined linear, which is joined again if its parts were replaced, or None if it is not joined."""
        joined = self._joined
        if joined is None or not self._changed:
            return joined
        if joined.is_current(self._owner._modules):
            self._changed.clear()
            return joined
        self.join()
        return None if self._joined is joined else self._joined


def _norm_parameters(norm: nn.Module | None, x: Tensor) -> NormParameters | None:
    """Returns the parameters of a norm that training may fuse with the cast after it."""
    weight = norm.fused_weight(x) if type(norm) is RMSNorm and torch.is_grad_enabled() else None
    return None if weight is None else NormParameters(weight, norm.eps)  # type: ignore[union-attr, arg-type]


class OutputTransform(NamedTuple):
    """The transform of a module's output before it is added to the residual: norm(x) * scale."""

    norm: nn.Module | None
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self.norm is None else forward_of(self.norm)(x)
        return x if self.scale == 1.0 else x * self.scale


IDENTITY = OutputTransform(None, 1.0)
"""Leaves the output unchanged. Fused ops support no other transform."""


def add_projection(residual: Tensor, linear: nn.Module, x: Tensor, transform: OutputTransform) -> Tensor:
    """Returns residual [T, hidden] + transform(linear(x [T, K])) in the residual's dtype. With fp8_mha, x is FP32."""
    if transform is IDENTITY and isinstance(linear, FrozenLinear) and linear.can_fuse(residual):
        return linear.forward_add(residual, x)
    return residual + transform(linear(x)).to(residual.dtype)


def add_mlp(
    residual: Tensor,
    linear: nn.Module,
    gate_up: Projections,
    x: Tensor,
    norm: nn.Module | None,
    activation: Activation,
    transform: OutputTransform,
) -> Tensor:
    """Returns residual [T, hidden] + transform(linear(activation(gate) * up)) for the projections gate and up of
    norm(x [T, K])."""
    is_supported = transform is IDENTITY and activation == "silu"
    if is_supported and isinstance(linear, FrozenLinear) and linear.can_fuse(residual):
        can_cast_product = linear.can_cast_product(x)  # never on a CPU
        operands = gate_up.cast_gated(x, norm, linear) if can_cast_product else None
        return linear.product_add(residual, *(operands or linear.cast_silu_mul(*gate_up(x, norm))))
    gate, up = gate_up(x, norm)
    return residual + transform(linear(GATED_ACTIVATIONS[activation](gate, up)))


GATED_ACTIVATIONS: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}
