"""Checkpoints of a tiny Llama in every layout that fp8serve reads, written without the libraries that define the
layouts.

A draft is a directory before it is written: tensors and config.json, to be changed at will.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.model.test_interop import quantization

HIDDEN, INNER, VOCABULARY, LAYERS, KV = 256, 384, 64, 3, 64
LINEARS = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV, HIDDEN), "self_attn.v_proj": (KV, HIDDEN),
           "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
           "mlp.down_proj": (HIDDEN, INNER)}  # fmt: skip
NAMES = [f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in LINEARS]
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY,
          "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
          "num_key_value_heads": 1, "max_position_embeddings": 256, "tie_word_embeddings": False,
          "torch_dtype": "bfloat16"}  # fmt: skip


@dataclass
class Draft:
    tensors: dict[str, Tensor]
    config: dict[str, Any] = field(default_factory=lambda: dict(CONFIG))
    num_shards: int = 1

    def write(self, out: Path) -> Path:
        out.mkdir(parents=True)
        (out / "config.json").write_text(json.dumps(self.config))
        names = [f"model-{i + 1:05}-of-{self.num_shards:05}.safetensors" for i in range(self.num_shards)]
        files = names if self.num_shards > 1 else ["model.safetensors"]
        for i, name in enumerate(files):
            keys = sorted(self.tensors)[i :: self.num_shards]
            save_file({key: self.tensors[key].contiguous() for key in keys}, out / name)
        if self.num_shards > 1:
            self._index(out, files)
        return out

    def _index(self, out: Path, files: list[str]) -> None:
        weight_map = {key: files[i % len(files)] for i, key in enumerate(sorted(self.tensors))}
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index))


def plain() -> Draft:
    """Returns a BF16 checkpoint in the usual layout."""
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    tensors |= {f"{name}.weight": LINEARS[name.split(".", 3)[3]] for name in NAMES}
    weights = {name: (torch.randn(shape) * 0.02).bfloat16() for name, shape in tensors.items()}
    norms = [
        "model.norm",
        *(f"model.layers.{i}.{n}_layernorm" for i in range(LAYERS) for n in ("input", "post_attention")),
    ]
    return Draft(weights | {f"{name}.weight": torch.ones(HIDDEN).bfloat16() for name in norms})


def amax_of(weight: Tensor, per: str) -> Tensor:
    """Returns the FP32 amax of the tensor, of each row, or of each block of 128 x 128."""
    if per == "tensor":
        return weight.abs().max()
    if per == "row":
        return weight.abs().amax(1, keepdim=True)
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight.abs()
    return padded.view(rows, 128, columns, 128).amax((1, 3))


def spread(scale: Tensor, weight: Tensor) -> Tensor:
    """Returns the scale of every element, in the shape of the weight."""
    if scale.numel() == 1 or scale.shape == (len(weight), 1):
        return scale.expand_as(weight)
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]


def fp8(
    config: str | dict[str, Any],
    per: str = "tensor",
    spelled: str = "weight_scale",
    convert_scale: Callable[[Tensor], Tensor] = lambda scale: scale,
    inputs: str | None = None,
    cache: str | None = None,
    power_of_2: bool = False,
) -> Draft:
    """Weights in FP8 with scales under the name `spelled`, in the form that `convert_scale` makes of them."""
    draft = plain()
    for i, name in enumerate(NAMES):
        weight = draft.tensors[f"{name}.weight"].float()
        scale = amax_of(weight, per) / 448
        scale = scale.log2().ceil().exp2() if power_of_2 else scale
        draft.tensors[f"{name}.weight"] = (weight / spread(scale, weight)).to(torch.float8_e4m3fn)
        draft.tensors[f"{name}.{spelled}"] = convert_scale(scale)
        if inputs:
            draft.tensors[f"{name}.{inputs}"] = torch.tensor([(2 + i) / 448])
    for layer in range(LAYERS) if cache else ():
        for role in ("k", "v"):
            draft.tensors[f"model.layers.{layer}.self_attn.{cache.format(role, role)}"] = torch.tensor(
                [0.02 + layer / 50]
            )
    draft.config["quantization_config"] = quantization(config) if isinstance(config, str) else config
    return draft


def static() -> Draft:
    """The layout of llm-compressor with static scales and an FP8 cache; most poisoned checkpoints are derived from
    it."""
    draft = fp8("ct-static", convert_scale=lambda s: s.reshape(1).bfloat16(), inputs="input_scale", cache="{}_scale")
    draft.config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    return draft


def blocks() -> Draft:
    return fp8("fp8-block", "block", "weight_scale_inv")


def rows() -> Draft:
    return fp8("ct-dynamic", "row", convert_scale=lambda scale: scale.bfloat16())


def mx(bits: int) -> Draft:
    from tests.model.test_microscaling import quantized

    draft = plain()
    for name in NAMES:
        codes, scales, _ = quantized(draft.tensors.pop(f"{name}.weight").float(), bits)
        draft.tensors[f"{name}.weight{'_packed' if bits == 4 else ''}"] = codes
        draft.tensors[f"{name}.weight_scale"] = scales
    draft.config["quantization_config"] = {"quant_method": f"mxfp{bits}"}
    return draft


def sharded() -> Draft:
    draft = static()
    draft.num_shards = 3
    return draft


def tied() -> Draft:
    draft = static()
    draft.config["tie_word_embeddings"] = True
    draft.tensors["lm_head.weight"] = draft.tensors["model.embed_tokens.weight"].clone()
    return draft


def wrapped() -> Draft:
    """A multimodal checkpoint: names of the language model have a prefix, and the vision tower is not quantized."""
    draft = static()
    draft.tensors = {f"language_model.{name}": tensor for name, tensor in draft.tensors.items()}
    draft.tensors["vision_tower.blocks.0.q_proj.weight"] = torch.randn(64, 64).bfloat16()
    draft.config["quantization_config"]["ignore"] = ["model.vision_tower", "lm_head"]
    own = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    draft.config = own | {"quantization_config": draft.config.pop("quantization_config"), "text_config": draft.config}
    return draft


def stacked() -> Draft:
    """Returns the experts of a layer stacked in one tensor, with block scales, as transformers 5 saves them."""
    draft, experts = blocks(), 4
    for name in [key for key in draft.tensors if ".mlp." in key]:
        del draft.tensors[name]
    for layer in range(LAYERS):
        weight = torch.randn(experts, 2 * INNER, HIDDEN) * 0.02
        scales = torch.stack([amax_of(expert, "block") for expert in weight]) / 448
        codes = torch.stack([w / spread(s, w) for w, s in zip(weight, scales, strict=True)]).to(torch.float8_e4m3fn)
        owner = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        draft.tensors |= {owner: codes, f"{owner}_scale_inv": scales}
    return draft
