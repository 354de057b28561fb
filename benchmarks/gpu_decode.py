"""One decoding step of a 1.1-billion decoder with random FP8 weights, as the engine runs it, without its files.

The sizes are those of TinyLlama 1.1B; weights in E4M3 with one scale a tensor, inputs with a stored scale, embedding
and head in BF16 as they are served. It needs no checkpoint and no tokenizer, so that it runs on a machine that has
neither.
"""

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from fp8serve.engine.graphs import CudaCapture
from fp8serve.engine.runner import Runner
from fp8serve.engine.scheduler import StepWork, Work
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.config.rope import Rope
from fp8serve.model.network.decoder import Decoder

CONTEXT, BLOCK = 512, 16


def config(dry: bool) -> ModelConfig:
    layers, hidden, inner, vocab = (2, 128, 256, 512) if dry else (22, 2048, 5632, 32000)
    heads = hidden // 64
    return ModelConfig(
        architecture="LlamaForCausalLM", model_type="llama", vocab_size=vocab, hidden_size=hidden,
        intermediate_size=inner, num_layers=layers, num_heads=heads, num_kv_heads=max(1, heads // 8), head_dim=64,
        rms_norm_eps=1e-5, max_position_embeddings=2048,
        tie_word_embeddings=False, attention_bias=False, attention_out_bias=False, mlp_bias=False, qk_norm=False,
        layer_windows=(None,) * layers, layer_ropes=(Rope(10000.0),) * layers, softmax_scale=0.125,
        bos_token_id=1, eos_token_ids=(2,), dtype="bfloat16",
    )  # fmt: skip


def frozen(decoder: Decoder) -> Decoder:
    """Replaces every linear of the layers by one with FP8 weights, whose scale fits the initial values."""
    names = [name for name, module in decoder.model.named_modules() if isinstance(module, nn.Linear)]
    for name in names:
        linear = cast(nn.Linear, decoder.model.get_submodule(name))
        weight_scale = 448.0 / linear.weight.detach().abs().max().float()
        input_scale = torch.tensor(64.0, device=linear.weight.device)
        layer = FrozenLinear.from_linear(linear, DelayedScaling(), input_scale, weight_scale, torch.bfloat16)
        parent, _, last = name.rpartition(".")
        setattr(decoder.model.get_submodule(parent), last, layer)
    return decoder


class DecodeStep:
    """Call it to run the step. `bytes`: the size of the weights that a step reads; `how`: ", CUDA graphs" if the step
    replays a graph, for the name of the row."""

    @torch.inference_mode()
    def __init__(self, device: str, dry: bool) -> None:
        model = frozen(Decoder(config(dry), device))
        layers = [module for module in model.model.modules() if isinstance(module, FrozenLinear)]
        self.bytes = sum(layer.weight_q.nbytes for layer in layers) + model.lm_head.weight.nbytes
        model.join()
        self.runner = Runner(model, CONTEXT // BLOCK + 1, BLOCK, torch.bfloat16)
        tokens, blocks = [5] * (CONTEXT + 1), list(range(CONTEXT // BLOCK + 1))
        sequence = SimpleNamespace(token_ids=tokens, block_table=blocks, num_unscored=0, adapter=None)
        self.work = StepWork(others=[Work(cast(Any, sequence), CONTEXT, 1)])
        self.how = ""
        if device == "cuda":
            self.runner.use_graphs(CudaCapture(self.runner.device), 1, CONTEXT + BLOCK)
            self.how = ", CUDA graphs"

    def __call__(self, _: int) -> torch.Tensor:
        return self.runner.run(self.work)
