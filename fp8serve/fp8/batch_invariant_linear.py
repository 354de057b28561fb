"""`BatchInvariantLinear`, a linear layer in which a row's output does not depend on the other rows of the batch."""

from typing import TYPE_CHECKING, Any, Optional, cast

import torch
from torch import Tensor, nn

from fp8serve.fp8 import ops
from fp8serve.fp8.batch_invariant_product import apply_linear
from fp8serve.fp8.frozen import pack_state_dict_weight, pack_weight

if TYPE_CHECKING:
    from fp8serve.fp8.lora import ServedAdapters

_packed_mm = torch.ops.fp8serve.packed_mm.default


class BatchInvariantLinear(nn.Linear):
    """An nn.Linear with batch-invariant products. Its weight may be packed for serving, and it may have adapters."""

    adapters: Optional["ServedAdapters"] = None

    @classmethod
    def convert(cls, linear: nn.Linear) -> "BatchInvariantLinear":
        """Turns an nn.Linear into a BatchInvariantLinear in place. Its parameters, hooks and flags stay."""
        linear.__class__ = cls
        return cast(BatchInvariantLinear, linear)

    def pack(self, out: Tensor) -> None:
        """Packs the weight into `out`, a BF16 tensor with the same number of elements."""
        self.weight = nn.Parameter(pack_weight(self.weight, out), requires_grad=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Loads a state dict with an unpacked weight; packs that weight first if this layer's is packed."""
        if self.weight.dim() == 3:
            pack_state_dict_weight(state_dict, f"{prefix}weight")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, input: Tensor) -> Tensor:
        """Returns the output [..., out] for an input [..., in]."""
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
    """Returns whether all GEMMs on this device run our CPU kernels, which are batch-invariant."""
    return all("cpu kernel" in ops.backends(device)[op] for op in ("scaled_mm", "scaled_mm_add", "mm"))


def is_plain(module: nn.Module) -> bool:
    """Returns whether the module is an nn.Linear or a subclass of it that does not override `forward`."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def use_batch_invariant_products(model: nn.Module) -> None:
    """Turns every plain nn.Linear of `model` into a BatchInvariantLinear, in place."""
    for module in [m for m in model.modules() if is_plain(m)]:
        BatchInvariantLinear.convert(cast(nn.Linear, module))
