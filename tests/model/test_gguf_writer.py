"""Writing GGUF: a model written and read again is the same; a model that GGUF cannot express is refused without leaving
a file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from fp8serve.cli import main
from fp8serve.errors import ModelError
from fp8serve.model.checkpoint import load_trainable, open_checkpoint
from fp8serve.model.config.decoder import read_config
from fp8serve.model.export import write_calibrated
from fp8serve.model.gguf import convert
from fp8serve.model.gguf.reader import GgufFile
from fp8serve.model.gguf.writer import WeightType, write_gguf
from fp8serve.model.text.tokenizer import Tokenizer
from tests.model import gguf_files
from tests.model.oracle import IDS, all_logits, state_for

ModelDir = Callable[[str], Path]
KINDS = ["llama", "llama-tied", "llama-bias", "llama-wide-head", "llama-rope-llama3", "llama-rope-linear",
         "llama-rope-yarn", "mistral", "qwen2", "qwen3", "qwen3-moe"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_file_is_read_as_the_same_model(kind: str, model_dir: ModelDir, tmp_path: Path) -> None:
    write_gguf(model_dir(kind), tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    original, converted = load_trainable(model_dir(kind)), load_trainable(tmp_path / "out")
    for name, parameter in original.named_parameters():
        assert torch.equal(converted.get_parameter(name), parameter), name
    assert torch.equal(all_logits(converted, IDS), all_logits(original, IDS))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_tokenizer_and_template_are_included(model_dir: ModelDir, tmp_path: Path) -> None:
    write_gguf(model_dir("llama"), tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    ours, original = Tokenizer.from_dir(tmp_path / "out"), Tokenizer.from_dir(model_dir("llama"))
    for text in ("the inning", " a  b\n\n", "日本語 naïve 😀", "<s>x</s>", "1234", ""):
        assert ours.encode(text) == original.encode(text)
    messages = [{"role": "user", "content": "Hello"}]
    assert ours.chat(messages) == original.chat(messages)
    assert (ours.bos_id, ours.eos_ids) == (original.bos_id, original.eos_ids)


@pytest.mark.parametrize("weight_type", get_args(WeightType))
def test_tensors_equal_those_of_an_independent_writer(
    weight_type: WeightType, model_dir: ModelDir, tmp_path: Path
) -> None:
    write_gguf(model_dir("llama"), tmp_path / "ours.gguf", weight_type)
    gguf_files.write_gguf(tmp_path / "theirs.gguf", model_dir("llama"), Type[weight_type])
    ours, theirs = GgufFile(tmp_path / "ours.gguf").tensors, GgufFile(tmp_path / "theirs.gguf").tensors
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].tensor_type == tensor.tensor_type
        assert np.array_equal(
            gguf.dequantize(ours[name].data, tensor.tensor_type), gguf.dequantize(tensor.data, tensor.tensor_type)
        )


def test_transformers_reads_the_file(model_dir: ModelDir, tmp_path: Path) -> None:
    write_gguf(model_dir("llama"), tmp_path / "m.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    checkpoint, theirs = open_checkpoint(model_dir("llama")), model.state_dict()
    for name in checkpoint:
        assert torch.equal(checkpoint[name].float(), theirs[name]), name


def test_fp8_weights_are_dequantized(model_dir: ModelDir, tmp_path: Path) -> None:
    source = model_dir("llama")
    write_calibrated(tmp_path / "fp8", source, state_for(source, "rowwise"))
    write_gguf(tmp_path / "fp8", tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    before, after = open_checkpoint(tmp_path / "fp8"), open_checkpoint(tmp_path / "out")
    for name in before:
        assert torch.equal(before[name].bfloat16(), after[name])


def test_experts_are_stacked_and_routers_stay_in_fp32(model_dir: ModelDir, tmp_path: Path) -> None:
    write_gguf(model_dir("qwen3-moe"), tmp_path / "m.gguf", "Q8_0")
    tensors, weights = GgufFile(tmp_path / "m.gguf").tensors, open_checkpoint(model_dir("qwen3-moe"))
    router, stack = tensors["blk.0.ffn_gate_inp.weight"], tensors["blk.0.ffn_gate_exps.weight"]
    assert (router.tensor_type, stack.tensor_type) == (Type.F32, Type.Q8_0)
    experts = gguf.dequantize(stack.data, Type.Q8_0)
    assert len(experts) == 7
    for expert, values in enumerate(experts):
        weight = weights[f"model.layers.0.mlp.experts.{expert}.gate_proj.weight"].float().numpy()
        assert np.abs(values - weight).max() <= np.abs(weight).max() / 127
    assert np.array_equal(router.data, weights["model.layers.0.mlp.gate.weight"].float().numpy())


def refused(source: Path, tmp_path: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        write_gguf(source, tmp_path / "m.gguf")
    assert not list(tmp_path.glob("*gguf*"))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gemma2", "Gemma2ForCausalLM cannot be written"),
        ("mistral-window", "MistralForCausalLM with a window"),
        ("qwen3-moe-sparse", "GGUF cannot express that experts is"),
    ],
)
def test_other_models_are_refused(kind: str, message: str, model_dir: ModelDir, tmp_path: Path) -> None:
    refused(model_dir(kind), tmp_path, message)


def test_a_tokenizer_that_cuts_otherwise_is_refused(llama: Path, tmp_path: Path) -> None:
    raw = json.loads((llama / "tokenizer.json").read_text())
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "[aeiou]"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}  # fmt: skip
    (llama / "tokenizer.json").write_text(json.dumps(raw))
    refused(llama, tmp_path, "pre-tokenizer is none of those")


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [(1e6, "F16", "holds 999424, which is too large for F16; choose --type BF16"),
     (float("nan"), "Q8_0", "holds NaN or an infinity"), (float("inf"), "BF16", "holds NaN or an infinity")],
)  # fmt: skip
def test_numbers_that_the_file_cannot_hold_are_refused(
    value: float, kind: WeightType, message: str, llama: Path, tmp_path: Path
) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = value
    save_file(tensors, llama / "model.safetensors")
    with pytest.raises(ModelError, match=f"blk.0.ffn_up.weight {message}"):
        write_gguf(llama, tmp_path / "m.gguf", kind)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_an_existing_file_is_not_overwritten(model_dir: ModelDir, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("mine")
    with pytest.raises(ModelError, match="exists; choose another"):
        write_gguf(model_dir("llama"), tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_text() == "mine"


def test_the_command_writes_a_gguf_file(
    model_dir: ModelDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["convert", str(model_dir("llama")), "--out", str(tmp_path / "m.gguf"), "--format", "gguf"]
    assert main([*line, "--type", "Q8_0"]) == 0
    assert "in Q8_0 as GGUF, with the tokenizer" in capsys.readouterr().out
    assert main([*line[:-1], "fp8", "--type", "F16"]) == 1
    assert "--type needs --format gguf" in capsys.readouterr().err
    assert read_config(model_dir("llama")).vocab_size == len(
        GgufFile(tmp_path / "m.gguf").value("tokenizer.ggml.tokens")
    )
