"""Mixtures of experts in 4 bits: every family is written, read, verified, converted and served."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8serve.engine.engine import Engine
from fp8serve.errors import ModelError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.inspection import inspect
from fp8serve.model.checkpoint import ScalingCheckpoint, load_servable, open_checkpoint
from fp8serve.model.device import estimate_weight_memory
from fp8serve.model.export import write_calibrated
from fp8serve.model.format_conversion import convert_format
from fp8serve.model.network.experts import mixtures
from fp8serve.model.stored_checkpoint import matrices_notes
from fp8serve.model.verify import verify
from tests.model.oracle import MODELS, make_model
from tests.model.test_experts import IDS, MOE
from tests.model.test_four_bit import FILES, edit, recipe_of

SIZES = {"hidden_size": 64, "intermediate_size": 96}
OF_EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
FORMATS = [("nvfp4-w4a16", "compressed-tensors"), ("nvfp4-w4a16", "modelopt"), ("mxfp4-w4a16", "compressed-tensors")]


def make(kind: str, out: Path) -> None:
    make_model(kind, out, overrides=SIZES | {key: size for key, size in OF_EXPERTS.items() if key in MODELS[kind][1]})


def answer(model: Path, recipe: str = "stored") -> list[int]:
    (completion,) = Engine(model, recipe=recipe).generate([IDS], temperature=0.0, max_new_tokens=8, ignore_eos=True)
    return completion.token_ids


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("kind", MOE)
@pytest.mark.parametrize(("name", "format_"), FORMATS)
def test_every_mixture_is_written_read_and_served(kind: str, name: str, format_: str, tmp_path: Path) -> None:
    make(kind, tmp_path / "m")
    source = open_checkpoint(tmp_path / "m")
    odd = [name for name in source.linears if source.shapes[f"{name}.weight"][1] % 32]  # of DeepSeek's small attention
    scales = ScalingCheckpoint(recipe_of(name), {})
    write_calibrated(tmp_path / "out", tmp_path / "m", scales, format=format_, high_precision=odd)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.quantized_linears == [name for name in checkpoint.linears if name not in odd]
    assert not [finding for finding in verify(tmp_path / "out") if finding.severity == "error"]
    report = inspect(tmp_path / "out")
    assert report["problem"] is None
    assert f"with {len(checkpoint.quantized_linears)} {name[:5].upper()} linear layers" in report["holds"]
    engine = Engine(tmp_path / "out")
    assert all(mixture.stacks() for mixture in mixtures(engine.loaded.runner.model).values())
    served = estimate_weight_memory(tmp_path / "out", "stored").served
    # in memory NVFP4 has an FP32 scale for each row of joined layers, much beside rows of 64 elements
    assert engine.info()["weight_bytes"] == pytest.approx(served, rel=0.12)
    assert odd or answer(tmp_path / "out") == answer(tmp_path / "m", name)  # cast while loading
    other = "modelopt" if (name, format_) == FORMATS[0] else "compressed-tensors"
    if other != format_:
        convert_format(tmp_path / "out", tmp_path / "other", other)
        assert answer(tmp_path / "other") == answer(tmp_path / "out")


@pytest.mark.parametrize("file", ["compressed-tensors NVFP4", "modelopt NVFP4", "compressed-tensors MXFP4A16"])
@pytest.mark.parametrize("kind", ["qwen3-moe", "deepseek-v3"])
def test_experts_of_other_projects_are_read(kind: str, file: str, tmp_path: Path) -> None:
    """Each expert is a layer of its own. DeepSeek's `kv_b_proj` and a head in 4 bits are computed in BF16."""
    config, pack = FILES[file]
    make(kind, tmp_path / "m")
    tensors, expected = load_file(tmp_path / "m" / "model.safetensors"), {}
    for key in [n for n in tensors if n.endswith("_proj.weight") and tensors[n].shape[1] % 32 == 0]:
        packed, owner = pack(tensors.pop(key).float()), key.removesuffix(".weight")
        tensors |= {f"{owner}.{suffix}": tensor for suffix, tensor in packed.tensors.items()}
        expected[key] = packed.weight
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    edit(tmp_path / "m", quantization_config=config)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert sum(".experts." in key for key in expected) > 20
    assert all(torch.equal(checkpoint[key], weight) for key, weight in expected.items())
    experts = [name for name in checkpoint.quantized_linears if ".experts." in name]
    model = load_servable(tmp_path / "m")
    assert all(model.get_submodule(name).is_4bit for name in experts)
    assert not [finding for finding in verify(tmp_path / "m") if finding.severity == "error"]
    matrices = checkpoint.quantized_matrices
    assert bool(matrices) is (kind == "deepseek-v3")
    assert (
        not matrices
        or f"stored in {checkpoint.weight_format(matrices[0])} and computed in BF16" in matrices_notes(checkpoint)[0]
    )
    assert answer(tmp_path / "m")
    convert_format(tmp_path / "m", tmp_path / "out", "compressed-tensors")
    assert open_checkpoint(tmp_path / "out").quantized_matrices == matrices
    assert answer(tmp_path / "out") == answer(tmp_path / "m")


def test_one_expert_in_bf16_is_served_beside_others_in_4_bits(tmp_path: Path) -> None:
    make("qwen3-moe", tmp_path / "m")
    names = [name for name in open_checkpoint(tmp_path / "m").linears if ".experts.2." in name]
    scales = ScalingCheckpoint(recipe_of("nvfp4-w4a16"), {})
    write_calibrated(tmp_path / "out", tmp_path / "m", scales, high_precision=names)
    engine = Engine(tmp_path / "out")
    assert not any(mixture.stacks() for mixture in mixtures(engine.loaded.runner.model).values())
    assert not isinstance(engine.loaded.runner.model.get_submodule(names[0]), FrozenLinear)
    assert answer(tmp_path / "out")


def test_an_expert_whose_columns_are_no_whole_blocks_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    make_model("qwen3-moe", tmp_path / "m", overrides=SIZES | {"moe_intermediate_size": 40})
    with pytest.raises(
        Exception, match=r"experts.0.down_proj in NVFP4 needs a multiple of 16 input features, found 40"
    ):
        write_calibrated(tmp_path / "out", tmp_path / "m", ScalingCheckpoint(recipe_of("nvfp4-w4a16"), {}))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale", "weight_global_scale"])
def test_an_incomplete_expert_is_named(suffix: str, tmp_path: Path) -> None:
    make("qwen3-moe", tmp_path / "m")
    write_calibrated(tmp_path / "out", tmp_path / "m", ScalingCheckpoint(recipe_of("nvfp4-w4a16"), {}))
    tensors, name = load_file(tmp_path / "out" / "model.safetensors"), "model.layers.1.mlp.experts.3.up_proj"
    del tensors[f"{name}.{suffix}"]
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    (tmp_path / "out" / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=name):
        load_servable(tmp_path / "out")
    assert [finding for finding in verify(tmp_path / "out") if finding.severity == "error"]
