"""Other projects read fp8serve's files: each format is loaded by their code, and the results are equal.

`READERS` is the table of docs/formats.md. transformers reads compressed-tensors through that project's own library.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors import safe_open
from torch import Tensor

from fp8serve.inspection import inspect
from fp8serve.model.checkpoint import TensorScale, load_servable, load_trainable, open_checkpoint
from fp8serve.model.compatibility import EXPERTS_NOTE, MODELOPT_NOTE, SCALE_NAMES_NOTE, compatibility_notes
from fp8serve.model.export import write_calibrated, write_hf_directory
from fp8serve.model.storage.shards import open_shards
from tests.model.oracle import IDS, LINEAR, all_logits, make_model, state_for
from tests.model.readers import tensors_taken

ModelDir = Callable[[str], Path]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "formats.md"
ALIGNED = {"hidden_size": 256, "intermediate_size": 384}  # all dimensions are multiples of 128

# (format, recipe) -> whether transformers reads it; the library compressed-tensors reads its own format
READERS = {
    ("compressed-tensors", "delayed"): "yes",
    ("compressed-tensors", "delayed by row"): "yes",
    ("compressed-tensors", "w8a16"): "yes",
    ("compressed-tensors", "current"): "yes",
    ("compressed-tensors", "rowwise"): "yes",
    ("compressed-tensors", "block"): "yes",
    ("fp8", "delayed"): "no",
    ("fp8", "current"): "no",
    ("fp8", "block"): "yes",
    ("modelopt", "delayed"): "no",
    ("modelopt", "rowwise"): "no",
}
READ = [pair for pair, reads in READERS.items() if reads == "yes"]
UNREAD = [pair for pair, reads in READERS.items() if reads == "no"]
COMPRESSED = [recipe for format_, recipe in READERS if format_ == "compressed-tensors"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases, so that a reader that drops a bias fails the test."""
    out = tmp_path_factory.mktemp("source") / "model"
    make_model("llama-bias", out, overrides=ALIGNED)
    return out


def write_quantized(source: Path, out: Path, format_: str, recipe: str) -> Path:
    write_calibrated(out, source, state_for(source, recipe), format=format_)
    return out


def read_by_transformers(folder: Path, dtype: torch.dtype, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Returns transformers' model, and the tensors that it missed or did not expect."""
    auto: Any = transformers.AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    with torch.no_grad():
        model(torch.tensor([IDS]))  # some weights are decompressed on the first call
    return model.eval(), {what: names for what, names in report.items() if names}


def exact_dtype(format_: str) -> torch.dtype:
    """Returns the dtype in which transformers computes the stored values exactly: it rounds the scales of
    compressed-tensors to the model's dtype, and always dequantizes `fp8` to BF16."""
    return torch.float32 if format_ == "compressed-tensors" else torch.bfloat16


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(torch.tensor([IDS])).logits[0].float()
        return output


def assert_same_parameters(theirs: Any, folder: Path, dtype: torch.dtype, relative: float = 0.0) -> None:
    ours = open_checkpoint(folder)
    for name in ours:
        torch.testing.assert_close(theirs.get_parameter(name), ours[name].to(dtype), rtol=relative, atol=0)


@pytest.mark.parametrize(("format_", "recipe"), READ)
def test_transformers_reads_the_same_weights(format_: str, recipe: str, source: Path, tmp_path: Path) -> None:
    out, dtype = write_quantized(source, tmp_path / "out", format_, recipe), exact_dtype(format_)
    theirs, problems = read_by_transformers(out, dtype)
    assert problems == {}
    assert_same_parameters(theirs, out, dtype)
    assert compatibility_notes(open_checkpoint(out)) == ()


@pytest.mark.parametrize("recipe", COMPRESSED)
def test_in_bf16_transformers_rounds_the_scales_of_compressed_tensors(
    recipe: str, source: Path, tmp_path: Path
) -> None:
    out = write_quantized(source, tmp_path / "out", "compressed-tensors", recipe)
    theirs, problems = read_by_transformers(out, torch.bfloat16)
    assert problems == {}
    assert_same_parameters(theirs, out, torch.bfloat16, relative=2**-7)


@pytest.mark.parametrize("recipe", COMPRESSED)
def test_compressed_tensors_dequantized_gives_the_same_logits(recipe: str, source: Path, tmp_path: Path) -> None:
    out = write_quantized(source, tmp_path / "out", "compressed-tensors", recipe)
    config = transformers.CompressedTensorsConfig(dequantize=True)
    with pytest.warns(UserWarning, match="loading attributes .* will be overwritten"):
        theirs, problems = read_by_transformers(out, torch.float32, quantization_config=config)
    assert {name.rpartition(".")[2] for names in problems.values() for name in names} <= {"input_scale"}
    with torch.no_grad():
        ours = all_logits(load_servable(out, "bf16", dtype=torch.float32), IDS)
        torch.testing.assert_close(ours, logits(theirs), rtol=0, atol=5e-5)  # FP32 sums are added in another order


def test_fp8_blocks_dequantized_give_the_same_logits(source: Path, tmp_path: Path) -> None:
    """Without a GPU, transformers dequantizes the weights. Processors sum BF16 products in different orders."""
    out = write_quantized(source, tmp_path / "out", "fp8", "block")
    theirs, _ = read_by_transformers(out, torch.bfloat16)
    assert_same_parameters(theirs, out, torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(all_logits(load_servable(out, "bf16"), IDS), logits(theirs), rtol=0, atol=0.05)


@pytest.mark.parametrize("recipe", COMPRESSED)
def test_compressed_tensors_quantizes_inputs_like_fp8serve(recipe: str, source: Path, tmp_path: Path) -> None:
    """The difference is smaller than the FP8 error: activation scales are equal, and products are summed in another
    order."""
    out = write_quantized(source, tmp_path / "out", "compressed-tensors", recipe)
    theirs, _ = read_by_transformers(out, torch.bfloat16)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        expected = theirs.get_submodule(LINEAR)(x[None])[0].float()
        actual = load_servable(out).get_submodule(LINEAR)(x).float()
    error = (expected - actual).square().sum() / expected.square().sum()
    assert -10 * torch.log10(error) > 32


@pytest.mark.parametrize("recipe", COMPRESSED)
def test_the_library_itself_decompresses_to_our_weight(recipe: str, source: Path, tmp_path: Path) -> None:
    out = write_quantized(source, tmp_path / "out", "compressed-tensors", recipe)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    scheme: QuantizationScheme = parsed.config_groups["group_0"]
    names = [name for name in open_shards(out) if name.startswith(f"{LINEAR}.weight")]
    tensors = {name.removeprefix(f"{LINEAR}."): open_shards(out)[name].clone() for name in names}
    weight = BaseCompressor.get_value_from_registry(parsed.format).decompress(tensors, scheme)["weight"]
    torch.testing.assert_close(weight.float(), open_checkpoint(out)[f"{LINEAR}.weight"].to(weight.dtype).float())


def test_transformers_gets_the_scales_of_a_cache(source: Path, tmp_path: Path) -> None:
    state = state_for(source)
    for layer in range(2):
        for role in ("k", "v"):
            state.tensors[f"model.layers.{layer}.self_attn.{role}"] = TensorScale(torch.tensor(4.0 + layer))
    write_calibrated(tmp_path / "out", source, state)
    theirs, problems = read_by_transformers(tmp_path / "out", torch.float32)
    assert problems == {}
    assert theirs.get_parameter("model.layers.0.self_attn.k_scale").item() == 0.25
    assert theirs.get_parameter("model.layers.1.self_attn.v_scale").item() == pytest.approx(0.2)


@pytest.mark.parametrize(("format_", "recipe"), UNREAD)
def test_files_that_transformers_misreads_have_a_note(format_: str, recipe: str, source: Path, tmp_path: Path) -> None:
    """transformers uses the FP8 codes as weights. If a later version reads them, this test fails and docs/formats.md
    must be changed."""
    out = write_quantized(source, tmp_path / "out", format_, recipe)
    auto: Any = transformers.AutoModelForCausalLM
    theirs, report = auto.from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
    assert f"{LINEAR}.weight_scale" in report["unexpected_keys"]
    ours = open_checkpoint(out)[f"{LINEAR}.weight"]
    assert (theirs.get_parameter(f"{LINEAR}.weight").float() - ours).norm() > 100 * ours.norm()
    assert inspect(out)["notes"] == [MODELOPT_NOTE if format_ == "modelopt" else SCALE_NAMES_NOTE]


def test_transformers_misreads_blocks_of_a_dimension_that_is_no_multiple_of_128(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "hp", overrides={"hidden_size": 256, "intermediate_size": 448})
    out = write_quantized(tmp_path / "hp", tmp_path / "out", "fp8", "block")
    theirs, problems = read_by_transformers(out, torch.bfloat16)
    assert problems == {}  # transformers divides 448 by the four blocks and uses blocks of 112
    ours = open_checkpoint(out)
    wrong = {name for name in ours if not torch.equal(theirs.get_parameter(name), ours[name].bfloat16())}
    assert wrong == {f"model.layers.{i}.mlp.{p}_proj.weight" for i in (0, 1) for p in ("gate", "up", "down")}
    (note,) = inspect(out)["notes"]
    assert note.startswith("6 layers, such as model.layers.0.mlp.gate_proj with 448 x 256 elements, have a dimension")


def test_transformers_fails_if_its_block_count_does_not_divide_a_dimension(tmp_path: Path) -> None:
    sizes = {"hidden_size": 576, "intermediate_size": 384, "num_attention_heads": 9, "num_key_value_heads": 3}
    make_model("llama", tmp_path / "hp", overrides=sizes)
    out = write_quantized(tmp_path / "hp", tmp_path / "out", "fp8", "block")
    with pytest.raises(RuntimeError, match="issues during automatic conversion"):
        read_by_transformers(out, torch.bfloat16)
    assert "14 layers" in inspect(out)["notes"][0]


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
def test_only_block_scales_need_multiples_of_128(recipe: str, model_dir: ModelDir, tmp_path: Path) -> None:
    out = write_quantized(model_dir("llama"), tmp_path / "out", "compressed-tensors", recipe)
    assert inspect(out)["notes"] == []
    theirs, problems = read_by_transformers(out, torch.float32)
    assert problems == {}
    assert_same_parameters(theirs, out, torch.float32)


# Combinations that vLLM's own code (benchmarks/peer_programs/vllm_loads.py) refused for Mixtral and Qwen3-MoE.
EXPERTS_REFUSED = {("compressed-tensors", "delayed by row"), ("compressed-tensors", "w8a16"), ("modelopt", "rowwise")}


@pytest.mark.parametrize(("format_", "recipe"), READERS)
def test_experts_that_vllm_refuses_have_a_note(format_: str, recipe: str, model_dir: ModelDir, tmp_path: Path) -> None:
    out = write_quantized(model_dir("mixtral"), tmp_path / "out", format_, recipe)
    assert (EXPERTS_NOTE in inspect(out)["notes"]) == ((format_, recipe) in EXPERTS_REFUSED)
    without = write_quantized(model_dir("llama"), tmp_path / "without", format_, recipe)
    assert EXPERTS_NOTE not in inspect(without)["notes"]


@pytest.mark.parametrize("format_", ["compressed-tensors", "fp8", "modelopt"])
def test_routers_are_named_among_the_layers_in_high_precision(
    format_: str, model_dir: ModelDir, tmp_path: Path
) -> None:
    """vLLM quantizes Qwen3-MoE's router unless the list of ignored layers has its whole name."""
    out = write_quantized(model_dir("qwen3-moe"), tmp_path / "out", format_, "delayed")
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    routers = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert quantization["ignored_layers" if format_ == "fp8" else "ignore"] == ["lm_head", *routers]
    if format_ == "modelopt":
        hf_quant = json.loads((out / "hf_quant_config.json").read_text())
        assert hf_quant["quantization"]["exclude_modules"] == ["lm_head", *routers]
    assert load_servable(out)


def test_the_table_of_the_documentation_equals_the_tested_one() -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| ([a-z0-9 ]+) \| (yes|no)\b", PAGE.read_text(), flags=re.M)
    assert {(format_, recipe): reads for format_, recipe, reads in rows} == READERS


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 40_000])
@pytest.mark.parametrize(("format_", "recipe"), READERS)
def test_a_reader_of_every_safetensors_takes_the_weights_only(
    format_: str, recipe: str, max_shard_bytes: int, model_dir: ModelDir, tmp_path: Path
) -> None:
    source, out = model_dir("llama"), tmp_path / "out"
    write_calibrated(out, source, state_for(source, recipe), format=format_, max_shard_bytes=max_shard_bytes)
    assert tensors_taken(out) == sorted(open_shards(out))


def test_the_high_precision_directory_has_an_index_too(model_dir: ModelDir, tmp_path: Path) -> None:
    source, out = model_dir("llama"), tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    write_hf_directory(out, config, dict(load_trainable(source).named_parameters()))
    (out / "adapter.safetensors").write_bytes((out / "model.safetensors").read_bytes())
    assert tensors_taken(out) == sorted(open_shards(out))
    with safe_open(out / "model.safetensors", framework="pt") as file:
        size = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == size
