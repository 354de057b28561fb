"""`BatchInvariantLinear`: torch's linear layer with a product whose rows do not depend on each other, and the
conversion of a model to it."""

from typing import TYPE_CHECKING, Any, Optional, cast

import torch
from torch import Tensor, nn

from fp8serve.fp8 import ops
from fp8serve.fp8.batch_invariant_product import apply_linear
from fp8serve.fp8.frozen import pack_loaded, packed

if TYPE_CHECKING:
    from fp8serve.fp8.served_adapters import ServedAdapters

_packed_mm = torch.ops.fp8serve.packed_mm.default


class BatchInvariantLinear(nn.Linear):
    """nn.Linear with that product; for serving its weight may be packed. adapters: those that are served with it."""

    adapters: Optional["ServedAdapters"] = None

    @classmethod
    def adopt(cls, linear: nn.Linear) -> "BatchInvariantLinear":
        """Turn an nn.Linear into one in place: same object, parameters, hooks and flags."""
        linear.__class__ = cls
        return cast(BatchInvariantLinear, linear)

    def pack(self, out: Tensor) -> None:
        """Move the weight, packed, into `out`, BF16 of as many elements."""
        self.weight = nn.Parameter(packed(self.weight, out), requires_grad=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accepts a weight in rows where this layer's is packed."""
        if self.weight.dim() == 3:
            pack_loaded(state_dict, f"{prefix}weight")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in] -> [..., out]."""
        y = self._run(input)
        return y if self.adapters is None else self.adapters.add(y, input)

    def _run(self, x: Tensor) -> Tensor:
        tensors = self._parameters
        weight, bias = cast(Tensor, tensors["weight"]), tensors["bias"]
        if weight.dim() == 2:
            return apply_linear(x, weight, bias)
        y: Tensor = _packed_mm(x.flatten(0, -2), weight, None, None, bias, None, x.dtype)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


def has_batch_invariant_products(device: str) -> bool:
    """Whether all products on this device run our CPU kernels."""
    return all("cpu kernel" in ops.backends(device)[op] for op in ("scaled_mm", "scaled_mm_add", "mm"))


def is_plain(module: nn.Module) -> bool:
    """Whether the module is a plain linear layer of torch; a subclass that also routes is called as its class
    defines."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def use_batch_invariant_products(model: nn.Module) -> None:
    """Turns every plain nn.Linear of `model` into a BatchInvariantLinear, in place."""
    for module in [m for m in model.modules() if is_plain(m)]:
        BatchInvariantLinear.adopt(cast(nn.Linear, module))
