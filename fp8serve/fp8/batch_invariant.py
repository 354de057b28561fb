"""Batch-invariant BF16 products and `BatchInvariantLinear`: a row of the output does not depend on the other rows.

A matrix library chooses the order of its sums by the shape of the operands, so a token's result would depend on the
number of other tokens. The op `mm` (csrc/cpu/gemm.h) sums in the same order for every shape. So a token's projections
and logits have the same bits in a training batch, in a chunk of a prompt and during decoding. The products are
differentiable. The backward pass uses torch's products, because serving has no backward pass.

On a CPU all kernels are batch-invariant. On a GPU they are after `use_invariant_kernels`, for the whole process: FP8
and BF16 products of up to 64 rows run the skinny kernel, those of more rows the tall kernel, which sums in the same
order (csrc/cuda/gemm_tall.cu), and attention runs on warps only. cuBLASLt, CUTLASS and warpgroups, whose sums may
depend on the number of rows, are not used.

Without a kernel for the device or the dtype, all products are torch's.
"""

import math
from typing import TYPE_CHECKING, Any, Optional, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8serve.errors import MachineError
from fp8serve.fp8 import ops
from fp8serve.fp8.ops.libraries import INVARIANT_SWITCH
from fp8serve.fp8.ops.packing import pack_into, pack_state_dict_weight
from fp8serve.fp8.selfcheck.switches import disabled_kernels, set_disabled_kernels

if TYPE_CHECKING:
    from fp8serve.fp8.lora import ServedAdapters
    from fp8serve.fp8.sharded import Shard

_mm = torch.ops.fp8serve.mm.default
_packed_mm = torch.ops.fp8serve.packed_mm.default
_invariant_devices = {"cpu"} if "cpu kernel" in ops.backends("cpu")["mm"] else set[str]()  # types of devices
_GPU_OPS = ("scaled_mm", "stored_mm", "scaled_mm_add", "mm", "paged_attention", "rms_norm")
_GPU_KERNELS = ("skinny", "tall", "mma")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return cast(Tensor, _mm(x, weight, bias, out_dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dx = (dy @ weight.to(dy.dtype)).to(x.dtype) if needs_dx else None
        dw = (dy.t() @ x.to(dy.dtype)).to(weight.dtype) if needs_dw else None
        return dx, dw, dy.sum(0).to(ctx.bias_dtype) if needs_db else None, None


def is_batch_invariant(x: Tensor, weight: Tensor) -> bool:
    """Returns whether `product` of these tensors runs our batch-invariant kernel."""
    return x.device.type in _invariant_devices and x.dtype == weight.dtype == torch.bfloat16


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Returns x weight^T + bias, [M, N] of `out_dtype` (by default x's dtype), for x [M, K] and weight [N, K].

    It is differentiable, and batch-invariant if `is_batch_invariant(x, weight)`. Otherwise the product is torch's.
    """
    dtype = out_dtype or x.dtype
    if not is_batch_invariant(x, weight):
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return cast(Tensor, _Product.apply(x, weight, bias, dtype))  # type: ignore[no-untyped-call]
    return cast(Tensor, _mm(x, weight, bias, dtype))


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x weight^T + bias for x [..., K], batch-invariant if `is_batch_invariant(x, weight)`."""
    if not is_batch_invariant(x, weight):
        return F.linear(x, weight, bias)
    if x.dim() == 2:
        return product(x, weight, bias)
    return product(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))


class BatchInvariantLinear(nn.Linear):
    """An nn.Linear with batch-invariant products. Its weight may be packed for serving, and it may have adapters."""

    adapters: Optional["ServedAdapters"] = None
    input_shard: Optional["Shard"] = None  # if the layer has the columns of one rank (sharded.py)

    @classmethod
    def convert(cls, linear: nn.Linear) -> "BatchInvariantLinear":
        """Turns an nn.Linear into a BatchInvariantLinear in place. Its parameters, hooks and flags stay."""
        linear.__class__ = cls
        return cast(BatchInvariantLinear, linear)

    def pack(self, out: Tensor) -> None:
        """Packs the weight into `out`, a BF16 tensor with the same number of elements."""
        self.weight = nn.Parameter(pack_into(self.weight, out), requires_grad=False)

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
    """Returns whether all GEMMs on this device run batch-invariant kernels of ours."""
    kind = torch.device(device).type
    if kind != "cpu":
        return kind in _invariant_devices
    backends = ops.backends("cpu")
    return all(backends[op].startswith("cpu kernel") for op in ("scaled_mm", "scaled_mm_add", "mm"))


def use_invariant_kernels(device: str) -> None:
    """Makes products and attention on a GPU independent of the number of rows, for the rest of the process.

    On a CPU they always are. Raises MachineError if this machine lacks a kernel that this needs.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        if not has_batch_invariant_products(device):
            raise MachineError("invariant needs fp8serve's CPU kernels, which are not built here; leave invariant out.")
        return
    backends = ops.backends(kind)
    if missing := [op for op in _GPU_OPS if not backends.get(op, "").startswith("cuda kernel")]:
        raise MachineError(f"invariant needs fp8serve's CUDA kernel of {missing[0]}, which this GPU does not run here.")
    here = torch.empty(1, device=device)
    disabled = disabled_kernels(torch.ops.fp8serve, here)
    if wrong := [kernel for kernel in _GPU_KERNELS if kernel in disabled]:
        raise MachineError(
            f"invariant needs the kernel {wrong[0]}, which is switched off on this GPU; see `fp8serve doctor`."
        )
    set_disabled_kernels(torch.ops.fp8serve, here, disabled | {INVARIANT_SWITCH})
    _invariant_devices.add(kind)


def log_softmax(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns log softmax of each row of `logits`, FP32 [rows, vocab]. It may be written to `out`.

    On a GPU, torch adds up a row in an order that depends on whether the row begins at a multiple of 16 bytes. Where
    rows must be independent of each other, they are padded to a multiple, which adds zeros to the sum.
    """
    padding = -logits.shape[-1] % 4
    if padding == 0 or logits.device.type == "cpu" or logits.device.type not in _invariant_devices:
        return torch.log_softmax(logits, -1, out=out)
    return torch.log_softmax(F.pad(logits, (0, padding), value=-math.inf), -1)[..., :-padding]


def use_batch_invariant_products(model: nn.Module) -> None:
    """Turns every nn.Linear of `model` into a BatchInvariantLinear in place, unless its class overrides `forward`."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            BatchInvariantLinear.convert(module)
