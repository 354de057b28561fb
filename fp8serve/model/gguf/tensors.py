"""The weights of a GGUF file under their Hugging Face names, dequantized one by one when they are read.

llama.cpp rotates neighbouring pairs of a head's elements where the Hugging Face layout rotates the two halves, and so
stores the rows of q and k of the architecture llama in another order; Qwen's are stored as they are.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fp8serve.errors import ModelError, shown
from fp8serve.model.config.mixture import keeps_fp32
from fp8serve.model.gguf.families import Layout, dequantized
from fp8serve.model.gguf.reader import GgufFile

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
_ROW = ".shared_expert_gate.weight"
PERMUTED = re.compile(r".*\.([qk])_proj\.(?:weight|bias)")


def hf_name(name: str, names: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight; None for a tensor that no decoder here has.

    names: of parts of a layer with other names in this architecture (families.Layout).
    """
    match = _NAME.fullmatch(name)
    layer, part, kind = match.groups() if match else (None, "", "")
    if f"{part}.{kind}" in names:
        ours = names[f"{part}.{kind}"]
    elif (owner := ENDS.get(part) if layer is None else names.get(part, LAYER.get(part))) is not None:
        ours = f"{owner}.{kind}"
    else:
        return None
    return ours if layer is None else f"model.layers.{int(layer)}.{ours}"


class Weights(Mapping[str, Tensor]):
    """Tensors by Hugging Face name: BF16, or FP32 where a parameter stays so. config: what config.json holds.

    ModelError: the file holds a tensor that no decoder here computes with.
    """

    def __init__(self, file: GgufFile, layout: Layout, config: Mapping[str, Any], ignored: Collection[str]) -> None:
        self._makers: dict[str, Callable[[], Tensor]] = {}
        self._layout = layout
        self._heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        for name, tensor in file.tensors.items():
            if name in ignored:
                continue
            ours = hf_name(name, layout.names)
            if ours is None:
                raise ModelError(f"{file.path} holds the tensor {shown(name)}, which no decoder here computes with.")
            self._makers |= self._parts(ours, tensor)
        self._makers = with_kv_b(self._makers)

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def _parts(self, ours: str, tensor: Any) -> dict[str, Callable[[], Tensor]]:
        """`tensor` itself, or every expert's part of a stack."""
        if "{}" not in ours:
            return {ours: partial(self._one, ours, tensor)}
        experts = int(tensor.shape[-1])
        return {ours.format(e): partial(dequantized, tensor, expert=e) for e in range(experts)}

    def _one(self, name: str, tensor: Any) -> Tensor:
        if self._layout.one_added and name.endswith("norm.weight"):
            return (dequantized(tensor, torch.float32) - 1).to(torch.bfloat16)
        weight = dequantized(tensor, torch.float32 if keeps_fp32(name) else torch.bfloat16)
        match = PERMUTED.fullmatch(name) if self._layout.pairs else None
        if name.endswith(_ROW):  # the converter drops dimensions of size 1
            return weight.reshape(1, -1)
        return weight if match is None else halves(weight, self._heads[match[1]])


def with_kv_b(makers: dict[str, Callable[[], Tensor]]) -> dict[str, Callable[[], Tensor]]:
    """DeepSeek's `kv_b_proj` [heads * (nope + value), rank], which newer files have in two parts: `k_b` [heads, rank,
    still] and `v_b` [heads, value, rank]."""

    def joined(keys: Callable[[], Tensor], values: Callable[[], Tensor]) -> Tensor:
        return torch.cat((keys().transpose(1, 2), values()), 1).flatten(0, 1)

    result = dict(makers)
    for name in makers:
        owner, is_keys, _ = name.partition(".k_b_proj.weight")
        if is_keys and f"{owner}.v_b_proj.weight" in result:
            parts = result.pop(name), result.pop(f"{owner}.v_b_proj.weight")
            result[f"{owner}.kv_b_proj.weight"] = partial(joined, *parts)
    return result


def halves(weight: Tensor, heads: int) -> Tensor:
    """Rows [heads * head_dim, ...] of neighbouring pairs, reordered into two halves."""
    if weight.shape[0] % (2 * heads):
        raise ModelError(f"A projection of {weight.shape[0]} rows does not divide into {heads} heads of pairs.")
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
