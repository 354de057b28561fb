"""The weights of a GGUF file under their Hugging Face names, dequantized one by one when they are asked for.

llama.cpp rotates neighbouring pairs of a head's elements where the Hugging Face layout rotates the two halves, and so
stores the rows of q and k of the architecture llama in another order; Qwen's are stored as they are.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8serve.errors import ModelError, shown
from fp8serve.model.gguf.reader import GgufFile

_ELEMENTS_AT_ONCE = 2**20  # FP32 exists of so much of a tensor only
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d{1,5})\.)?([a-z_]+)\.(weight|bias)")
PERMUTED = re.compile(r".*\.([qk])_proj\.(?:weight|bias)")


def hf_name(name: str) -> str | None:
    """blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight; None for a tensor that no decoder here has."""
    found = _NAME.fullmatch(name)
    layer, part, kind = found.groups() if found else (None, "", "")
    ours = (ENDS if layer is None else LAYER).get(part)
    if ours is None:
        return None
    return f"{ours}.{kind}" if layer is None else f"model.layers.{int(layer)}.{ours}.{kind}"


class Weights(Mapping[str, Tensor]):
    """BF16 tensors by Hugging Face name. heads: of (q, k) whose rows are to be put in order, None where they are.

    ModelError: the file holds a tensor that no decoder here computes with.
    """

    def __init__(self, file: GgufFile, heads: tuple[int, int] | None, ignored: frozenset[str]) -> None:
        self._heads = dict(zip("qk", heads, strict=True)) if heads else {}
        self._tensors: dict[str, Any] = {}
        for name, tensor in file.tensors.items():
            ours = hf_name(name)
            if ours is None and name not in ignored:
                raise ModelError(f"{file.path} holds the tensor {shown(name)}, which no decoder here computes with.")
            if ours is not None:
                self._tensors[ours] = tensor

    def __getitem__(self, name: str) -> Tensor:
        weight = dequantized(self._tensors[name])
        found = PERMUTED.fullmatch(name)
        return halves(weight, self._heads[found[1]]) if found and self._heads else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def dequantized(tensor: Any, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A `gguf.ReaderTensor` as `dtype`, in the shape that PyTorch gives it; FP32 of a few rows at a time."""
    import gguf

    shape = tuple(int(size) for size in reversed(tensor.shape))
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    out = torch.empty(len(rows), shape[-1], dtype=dtype)
    step = max(1, _ELEMENTS_AT_ONCE // shape[-1])
    for at in range(0, len(rows), step):
        with np.errstate(all="ignore"):  # NaN and infinities are found, and refused, when the tensor is written
            part = gguf.dequantize(rows[at : at + step], tensor.tensor_type)
        out[at : at + step] = torch.from_numpy(np.array(part, dtype=np.float32))
    return out.reshape(shape)


def halves(weight: Tensor, heads: int) -> Tensor:
    """Rows [heads * head_dim, ...] of neighbouring pairs, brought into the order of two halves."""
    if weight.shape[0] % (2 * heads):
        raise ModelError(f"A projection of {weight.shape[0]} rows does not divide into {heads} heads of pairs.")
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
