"""GGUF files of families other than Llama and Qwen are converted back to the models that they were made from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from fp8serve.errors import ModelError
from fp8serve.model.checkpoint import load_trainable
from fp8serve.model.config.decoder import read_config
from fp8serve.model.config.mixture import CORRECTION
from fp8serve.model.gguf import convert
from fp8serve.model.gguf.families import LAYOUTS, layout_of
from fp8serve.model.gguf.reader import GgufFile
from fp8serve.model.stored_checkpoint import open_checkpoint
from tests.model.gguf_families import ARCHITECTURES, write_family
from tests.model.oracle import IDS, MODELS, STRETCHED, YARN, all_logits, make_model, write_tokenizer

DEFAULT = {"rope_type": "default"}
HEADS = {"query_pre_attn_scalar": 32}  # GGUF has no key for it
# Features that llama.cpp assumes without a key, so that models with these values can be written.
AS_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "gemma2": HEADS, "gemma3": HEADS, "gemma3-stretched": HEADS, "smollm3": {"no_rope_layer_interval": 4},
    "gpt-oss": {"swiglu_limit": 7.0, "rope_parameters": YARN | {"truncate": False}},
    "olmo3-stretched": {"rope_parameters": STRETCHED | {"sliding_attention": DEFAULT | {"rope_theta": 1e6}}},
    "deepseek-v2-greedy": {"n_group": 1, "topk_group": 1},
    "deepseek-v3": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}, "num_nextn_predict_layers": 0},
}  # fmt: skip
FAMILIES = ["mixtral", "qwen2-moe", "qwen3-moe", "granite", "smollm3", "olmo2", "olmo3", "olmo3-stretched", "gemma2",
            "gemma3", "gemma3-stretched", "phi3", "phi3-window", "phi3-long", "glm4", "stablelm", "stablelm-parallel",
            "cohere", "cohere-qk-norm", "cohere2", "gpt-oss", "deepseek-v2", "deepseek-v2-greedy",
            "deepseek-v3"]  # fmt: skip
Family = Callable[[str], Path]


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Returns a function that gives a directory of a kind, with features that llama.cpp can express. Read only."""
    folders: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            make_model(kind, folders[kind], overrides=AS_LLAMA_CPP.get(kind))
            write_tokenizer(folders[kind])
        return folders[kind]

    return get


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_converted_model_has_the_logits_of_the_original(kind: str, family: Family, tmp_path: Path) -> None:
    convert(write_family(tmp_path / "tiny.gguf", family(kind)), tmp_path / "out")
    original, converted = load_trainable(family(kind)), load_trainable(tmp_path / "out")
    expected = dict(original.named_parameters())
    assert {name for name, _ in converted.named_parameters()} == set(expected)
    for name, parameter in converted.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert read_config(tmp_path / "out") == read_config(family(kind))
    assert torch.equal(all_logits(converted, IDS), all_logits(original, IDS))


def test_every_architecture_of_the_table_is_written_by_a_test() -> None:
    architectures = {MODELS[kind][0].lower() for kind in FAMILIES}
    assert {layout.model_type.replace("_text", "").replace("_", "") for layout in LAYOUTS.values()} <= (
        architectures | {"llama", "qwen2", "qwen3"}
    )
    assert set(ARCHITECTURES.values()) <= set(LAYOUTS)


QUANTIZED = [("qwen3-moe", Type.Q8_0), ("mixtral", Type.Q4_0), ("gpt-oss", Type.MXFP4)]


@pytest.mark.parametrize(("kind", "weight_type"), QUANTIZED)
def test_an_expert_is_a_slice_of_a_quantized_stack(
    kind: str, weight_type: Type, family: Family, tmp_path: Path
) -> None:
    path = write_family(tmp_path / "tiny.gguf", family(kind), weight_type)
    convert(path, tmp_path / "out")
    weights, layout = open_checkpoint(tmp_path / "out"), layout_of(GgufFile(path))
    stack = GgufFile(path).tensors["blk.1.ffn_up_exps.weight"]
    assert stack.tensor_type == weight_type
    expected = torch.from_numpy(gguf.dequantize(stack.data, weight_type)).bfloat16()
    for expert, weight in enumerate(expected):
        assert torch.equal(weights[f"model.layers.1.{layout.names['ffn_up_exps'].format(expert)}.weight"], weight)


def test_old_deepseek_files_with_joined_keys_and_values_are_read(family: Family, tmp_path: Path) -> None:
    older = {"key_length_mla": None, "value_length_mla": None, "key_length": 24, "value_length": 12}
    names = {f"deepseek2.attention.{key}": value for key, value in older.items()}
    convert(write_family(tmp_path / "tiny.gguf", family("deepseek-v2"), **names), tmp_path / "out")
    assert read_config(tmp_path / "out") == read_config(family("deepseek-v2"))


@pytest.mark.parametrize(
    ("kind", "metadata", "says"),
    [
        ("granite", {"granite.logit_scale": None}, "has no granite.logit_scale; convert the model to GGUF again"),
        ("mixtral", {"llama.expert_used_count": None}, "has no llama.expert_used_count"),
        ("mixtral", {"llama.expert_count": 4}, "has the shape|lack|holds"),
        ("phi3", {"phi3.attention.sliding_window": None}, "has no phi3.attention.sliding_window"),
        ("phi3-long", {"phi3.rope.scaling.original_context_length": None}, "original_context_length"),
        ("glm4", {"glm4.rope.dimension_count": 0}, "rope.dimension_count is 0"),
        ("olmo3", {"olmo2.attention.sliding_window_pattern": [True]}, "layer_types is not 4"),
        ("olmo3", {"olmo2.attention.sliding_window_pattern": 4}, "which is not a list"),
        ("gpt-oss", {"gpt-oss.rope.scaling.yarn_attn_factor": 3.0}, "yarn_attn_factor is 3.0, which is not supported"),
        ("deepseek-v2", {"deepseek2.expert_gating_func": 3}, "expert_gating_func is 3, which is not supported"),
        ("deepseek-v2", {"deepseek2.expert_weights_norm": True}, "norm_topk_prob"),
        ("gemma2", {"gemma2.attention.sliding_window": None}, "has no gemma2.attention.sliding_window"),
        ("cohere2", {"cohere2.attention.layer_norm_epsilon": None}, "has no cohere2.attention.layer_norm_epsilon"),
        ("qwen3-moe", {"qwen3moe.expert_weights_scale": 2.5}, "does not implement"),
    ],
)
def test_missing_or_unknown_metadata_is_refused(
    kind: str, metadata: dict[str, Any], says: str, family: Family, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=says):
        convert(write_family(tmp_path / "tiny.gguf", family(kind), **metadata), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_correction_bias_of_a_router_stays_in_fp32(family: Family, tmp_path: Path) -> None:
    convert(write_family(tmp_path / "tiny.gguf", family("deepseek-v3")), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors[f"model.layers.1.mlp.gate.{CORRECTION}"].dtype == torch.float32
