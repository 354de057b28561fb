"""DeepSeek: latent attention and its cache, group-limited routing, the official FP8 block format, and omitted
layers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8serve.engine.engine import Engine
from fp8serve.errors import ModelError
from fp8serve.fp8 import ops
from fp8serve.fp8.ops.attention import paged_attention
from fp8serve.model.checkpoint import load_servable, open_checkpoint
from fp8serve.model.config.decoder import parse_config
from fp8serve.model.storage.files import read_json
from tests.model.oracle import IDS, all_logits, make_model
from tests.model.published import CONFIGS

V3 = CONFIGS["deepseek-ai/DeepSeek-V3"]


def rewrite(directory: Path, more: dict[str, torch.Tensor], **keys: Any) -> None:
    """Changes tensors and config.json keys of the model in `directory`."""
    save_file(load_file(directory / "model.safetensors") | more, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(read_json(directory / "config.json") | keys))


def test_the_softmax_scale_includes_the_yarn_factor() -> None:
    mscale = 0.1 * 1.0 * torch.tensor(40.0).log().item() + 1
    assert parse_config(V3).softmax_scale == pytest.approx(192**-0.5 * mscale**2)
    assert parse_config(V3 | {"rope_scaling": None}).softmax_scale == 192**-0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63 where an even number"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0 where a positive whole number"),
        ({"n_group": 7}, "n_group is 7 where a divisor of the 256 experts"),
        ({"topk_group": 9}, "topk_group is 9 where at most n_group 8"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1 where a whole number from 0 on"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"head_dim": 128}, "head_dim is 128 where 64 was expected"),
    ],
)
def test_invalid_sizes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(V3 | change)


@pytest.mark.parametrize("kind", ["deepseek-v2", "deepseek-v3"])
def test_the_cache_holds_latent_vectors_and_answers_do_not_depend_on_the_batch(kind: str, tmp_path: Path) -> None:
    make_model(kind, tmp_path)
    prompts = [IDS, IDS[:5], [*IDS, *IDS], IDS[7:20]]
    how: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    together = Engine(tmp_path, recipe="bf16", max_num_seqs=4, num_blocks=64, max_batch_tokens=16)
    assert together.loaded.plan.block_bytes == 3 * 16 * (32 + 8) * 2  # layers, tokens, elements, bytes
    runner = together.loaded.runner
    assert runner.k_cache.data_ptr() == runner.v_cache.data_ptr()
    alone = Engine(tmp_path, recipe="bf16", max_num_seqs=1, max_batch_tokens=256)
    tokens = [completion.token_ids for completion in together.generate(prompts, **how)]
    assert tokens == [alone.generate([prompt], **how)[0].token_ids for prompt in prompts]


def test_official_fp8_blocks_are_read_and_kv_b_proj_is_dequantized(tmp_path: Path) -> None:
    make_model("deepseek-v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = [f"{n}.weight" for n in load_servable(tmp_path, "bf16").linear_names()]
    blocks: dict[str, torch.Tensor] = {}
    for name in [*names, *(n for n in tensors if "kv_b_proj" in n)]:
        amax = tensors[name].float().abs().max()
        shape = [-(-size // 128) for size in tensors[name].shape]
        quantized, inverse = ops.quantize(tensors[name], scale=448 / amax)
        blocks |= {name: quantized, f"{name}_scale_inv": torch.full(shape, float(inverse))}
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    rewrite(tmp_path, blocks, quantization_config=quantization)
    with torch.no_grad():
        actual = all_logits(load_servable(tmp_path), IDS)
        expected = all_logits(load_servable(tmp_path, "bf16"), IDS)
    assert (actual - expected).square().mean().sqrt() < 0.5 * expected.std()
    assert "model.layers.0.self_attn.kv_b_proj.weight" in open_checkpoint(tmp_path)


def test_multi_token_prediction_layers_are_omitted_and_named(tmp_path: Path) -> None:
    make_model("deepseek-v3", tmp_path)
    prediction_layer = {
        "model.layers.3.eh_proj.weight": torch.zeros(64, 128),
        "model.layers.3.enorm.weight": torch.zeros(64),
    }
    rewrite(tmp_path, prediction_layer, num_nextn_predict_layers=1)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.omitted_modules == ("model.layers.3",)
    assert not any(name.startswith("model.layers.3.") for name in checkpoint)
    rewrite(tmp_path, {"model.layers.4.enorm.weight": torch.zeros(64)})
    with pytest.raises(ModelError, match=r"model\.layers\.4\.enorm\.weight, which .* does not have"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_attention_takes_the_keys_of_v3(cache: torch.dtype) -> None:
    """128 heads share one key of 576 elements, which is also the value."""
    noise = torch.Generator().manual_seed(0)
    keys = (torch.randn(10, 16, 1, 576, generator=noise) * 0.3).to(cache)
    q = torch.randn(5, 128, 576, generator=noise).bfloat16()
    tables, lengths, starts = torch.arange(10).view(2, 5).int(), torch.tensor([70, 33]).int(), [0, 4, 5]
    scale = None if cache is torch.bfloat16 else torch.tensor(0.5)
    args = q, keys, keys, tables, lengths, torch.tensor(starts).int(), scale, scale, 192**-0.5
    torch.testing.assert_close(torch.ops.fp8serve.paged_attention(*args), paged_attention(*args), atol=4e-3, rtol=2e-2)
