"""Writing model directories: the layouts that other projects read; files are streamed and aligned, and appear
completely or not at all."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from fp8serve.errors import MachineError, ModelError, ScalesError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import as_delayed
from fp8serve.model import export
from fp8serve.model.checkpoint import ScalingCheckpoint, TensorScale, load_servable, load_trainable, open_checkpoint
from fp8serve.model.export import write_calibrated, write_hf_directory
from fp8serve.model.storage.shards import read_header
from tests.model.oracle import IDS, LINEAR, all_logits, state_for

ModelDir = Callable[[str], Path]


def with_kv(state: ScalingCheckpoint) -> ScalingCheckpoint:
    for layer in range(2):
        for role in ("k", "v"):
            state.tensors[f"model.layers.{layer}.self_attn.{role}"] = TensorScale(torch.tensor(4.0))
    return state


def config_of(directory: Path) -> Any:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


# (format, recipe) -> (weight scale's name, its shape for a 96 x 64 weight, input scale's shape or None)
LAYOUTS: dict[tuple[str, str], tuple[str, tuple[int, ...], tuple[int, ...] | None]] = {
    ("compressed-tensors", "delayed"): ("weight_scale", (1,), (1,)),
    ("compressed-tensors", "delayed by row"): ("weight_scale", (96, 1), (1,)),
    ("compressed-tensors", "w8a16"): ("weight_scale", (96, 1), None),
    ("compressed-tensors", "current"): ("weight_scale", (1,), None),
    ("compressed-tensors", "rowwise"): ("weight_scale", (96, 1), None),
    ("compressed-tensors", "block"): ("weight_scale", (1, 1), None),
    ("fp8", "delayed"): ("weight_scale", (), ()),
    ("fp8", "current"): ("weight_scale", (), None),
    ("fp8", "block"): ("weight_scale_inv", (1, 1), None),
    ("modelopt", "delayed"): ("weight_scale", (), ()),
    ("modelopt", "rowwise"): ("weight_scale", (96,), None),
}


@pytest.mark.parametrize(("format_", "recipe"), LAYOUTS)
def test_tensors_have_the_formats_names_types_and_shapes(
    format_: str, recipe: str, model_dir: ModelDir, tmp_path: Path
) -> None:
    name, shape, input_shape = LAYOUTS[format_, recipe]
    write_calibrated(tmp_path / "out", model_dir("llama"), state_for(model_dir("llama"), recipe), format=format_)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors[f"{LINEAR}.weight"].dtype is torch.float8_e4m3fn
    assert (tensors[f"{LINEAR}.{name}"].dtype, tensors[f"{LINEAR}.{name}"].shape) == (torch.float32, shape)
    input_scale = tensors.get(f"{LINEAR}.input_scale")
    assert (None if input_scale is None else tuple(input_scale.shape)) == input_shape
    assert tensors["lm_head.weight"].dtype is torch.bfloat16
    assert tensors["model.norm.weight"].dtype is torch.bfloat16


# the format `fp8` with dynamic scales is read as one scale per token, not as the per-tensor `current`
@pytest.mark.parametrize(("format_", "recipe"), [pair for pair in LAYOUTS if pair != ("fp8", "current")])
def test_stored_directory_serves_what_the_recipe_gives_on_the_fly(
    format_: str, recipe: str, model_dir: ModelDir, tmp_path: Path
) -> None:
    source = model_dir("llama")
    write_calibrated(tmp_path / "out", source, state_for(source, recipe), format=format_)
    scaling = state_for(source, recipe).recipe
    scales = tmp_path / "out" / "scales.safetensors" if as_delayed(scaling) else None
    with torch.no_grad():
        actual = all_logits(load_servable(tmp_path / "out"), IDS)
        fly = all_logits(load_servable(source, scaling, scales=scales), IDS)
    torch.testing.assert_close(actual, fly, rtol=0, atol=0)


def test_the_format_stores_the_inverse_of_a_scale_and_the_scales_file_the_scale(
    model_dir: ModelDir, tmp_path: Path
) -> None:
    state = state_for(model_dir("llama"))
    write_calibrated(tmp_path / "out", model_dir("llama"), state)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    ours = load_file(tmp_path / "out" / "scales.safetensors")
    for role in ("input", "weight"):
        scale = state.tensors[f"{LINEAR}.{role}"].scale
        torch.testing.assert_close(tensors[f"{LINEAR}.{role}_scale"], scale.reciprocal().reshape(1), rtol=0, atol=0)
        torch.testing.assert_close(ours[f"{LINEAR}.{role}.scale"], scale, rtol=0, atol=0)


@pytest.mark.parametrize("format_", ["compressed-tensors", "fp8", "modelopt"])
def test_without_the_sidecar_the_same_scales_are_served(format_: str, model_dir: ModelDir, tmp_path: Path) -> None:
    state = state_for(model_dir("llama"))
    for i, entry in enumerate(
        state.tensors.values()
    ):  # a third of the scales are no exact reciprocal of an FP32 number
        entry.scale.fill_(1.4 + 0.037 * i)
    write_calibrated(tmp_path / "out", model_dir("llama"), state, format=format_)
    served = [m.input_scale for m in load_servable(tmp_path / "out").modules() if isinstance(m, FrozenLinear)]
    (tmp_path / "out" / "scales.safetensors").unlink()
    alone = [m.input_scale for m in load_servable(tmp_path / "out").modules() if isinstance(m, FrozenLinear)]
    assert len(served) == 14
    assert alone == served


def test_compressed_tensors_config_layout(model_dir: ModelDir, tmp_path: Path) -> None:
    write_calibrated(tmp_path / "out", model_dir("llama"), with_kv(state_for(model_dir("llama"))))
    args = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "strategy": "tensor",
            "block_structure": None, "dynamic": False, "actorder": None, "scale_dtype": None, "zp_dtype": None,
            "observer": "memoryless_minmax", "observer_kwargs": {}}  # fmt: skip
    group = {"targets": ["Linear"], "weights": args, "input_activations": args | {"observer": "static_minmax"},
             "output_activations": None, "format": "float-quantized"}  # fmt: skip
    assert config_of(tmp_path / "out") == {
        "config_groups": {"group_0": group}, "quant_method": "compressed-tensors", "kv_cache_scheme": args,
        "format": "float-quantized", "quantization_status": "compressed", "global_compression_ratio": None,
        "ignore": ["lm_head"],
    }  # fmt: skip
    assert load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.self_attn.k_scale"].tolist() == [0.25]


def test_fp8_config_layout(model_dir: ModelDir, tmp_path: Path) -> None:
    write_calibrated(tmp_path / "a", model_dir("llama"), state_for(model_dir("llama"), "delayed"), format="fp8")
    assert config_of(tmp_path / "a") == {
        "quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]
    }  # fmt: skip
    write_calibrated(tmp_path / "b", model_dir("llama"), state_for(model_dir("llama"), "block"), format="fp8")
    assert config_of(tmp_path / "b") == {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
        "ignored_layers": ["lm_head"],
    }  # fmt: skip


def test_modelopt_layout(model_dir: ModelDir, tmp_path: Path) -> None:
    source = model_dir("llama")
    write_calibrated(tmp_path / "out", source, with_kv(state_for(source)), format="modelopt")
    side_car = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert side_car["quantization"] == {
        "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]
    }  # fmt: skip
    config = config_of(tmp_path / "out")
    assert (config["quant_method"], config["quant_algo"]) == ("modelopt", "FP8")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.0.self_attn.v_proj.v_scale"].item() == 0.25


@pytest.mark.parametrize(
    ("format_", "recipe", "message"),
    [
        ("fp8", "rowwise", "no scale per output channel"),
        ("fp8", "delayed by row", "no scale per output channel"),
        ("fp8", "w8a16", "always quantizes inputs"),
        ("modelopt", "delayed by row", "cannot express the recipe 'delayed'"),
        ("modelopt", "w8a16", "cannot express the recipe 'w8a16'"),
        ("modelopt", "block", "cannot express the recipe 'block'"),
        ("gguf", "delayed", "format 'gguf' does not exist; choose one of compressed-tensors, fp8, modelopt"),
        ("compressed-tensors", "bf16", "needs an FP8 recipe"),
    ],
)
def test_what_a_format_cannot_express_is_refused_before_writing(
    format_: str, recipe: str, message: str, model_dir: ModelDir, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        write_calibrated(tmp_path / "out", model_dir("llama"), state_for(model_dir("llama"), recipe), format=format_)
    assert list(tmp_path.iterdir()) == []


def test_missing_scale_is_refused_before_writing(model_dir: ModelDir, tmp_path: Path) -> None:
    state = state_for(model_dir("llama"))
    del state.tensors[f"{LINEAR}.input"]
    with pytest.raises(ScalesError, match=r"up_proj\.input was never observed"):
        write_calibrated(tmp_path / "out", model_dir("llama"), state)
    assert list(tmp_path.iterdir()) == []


def test_shards_and_index(model_dir: ModelDir, tmp_path: Path) -> None:
    source = model_dir("llama")
    write_calibrated(tmp_path / "out", source, state_for(source), max_shard_bytes=40_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    assert files == sorted(p.name for p in (tmp_path / "out").glob("model-*.safetensors"))
    sizes = [sum(t.nbytes for t in load_file(tmp_path / "out" / f).values()) for f in files]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert max(sizes) <= 41_000  # the embedding alone has 40,960 bytes
    write_calibrated(tmp_path / "single", source, state_for(source))
    with torch.no_grad():
        expected = all_logits(load_servable(tmp_path / "single"), IDS)
        torch.testing.assert_close(all_logits(load_servable(tmp_path / "out"), IDS), expected, rtol=0, atol=0)


def test_weights_are_aligned_and_files_are_valid(model_dir: ModelDir, tmp_path: Path) -> None:
    write_calibrated(tmp_path / "out", model_dir("llama-bias"), state_for(model_dir("llama-bias")))
    path = tmp_path / "out" / "model.safetensors"
    start = int.from_bytes(path.read_bytes()[:8], "little") + 8
    header = json.loads(path.read_bytes()[8:start])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert {(start + entry["data_offsets"][0]) % 64 for n, entry in header.items() if n.endswith("proj.weight")} == {0}
    with safe_open(path, framework="pt") as file:  # the library checks that there are no gaps
        assert set(file.keys()) == set(read_header(path)[0])


def test_all_files_have_the_same_permissions(model_dir: ModelDir, tmp_path: Path) -> None:
    write_calibrated(tmp_path / "out", model_dir("llama"), state_for(model_dir("llama"), "delayed"))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert {"scales.safetensors", "model.safetensors", "config.json"} <= modes.keys()
    assert len(set(modes.values())) == 1, modes


def test_the_network_is_built_once_not_once_per_parameter(
    model_dir: ModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, build_any_on_meta = [], export.build_any_on_meta

    def counted(config: Any) -> Any:
        calls.append(config)
        return build_any_on_meta(config)

    monkeypatch.setattr(export, "build_any_on_meta", counted)
    write_calibrated(tmp_path / "out", model_dir("llama"), state_for(model_dir("llama"), "delayed"))
    assert len(calls) == 1


def test_tokenizer_and_other_files_are_copied(model_dir: ModelDir, tmp_path: Path) -> None:
    write_calibrated(
        tmp_path / "out", model_dir("llama"), state_for(model_dir("llama")), extra_files={"calibration.json": "{}"}
    )
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} <= names
    assert (tmp_path / "out" / "calibration.json").read_text() == "{}"


def test_extra_files_may_be_made_from_the_finished_model(model_dir: ModelDir, tmp_path: Path) -> None:
    def report(folder: Path) -> dict[str, str]:
        with torch.no_grad():
            return {"report.txt": str(all_logits(load_servable(folder), IDS).shape)}

    write_calibrated(tmp_path / "out", model_dir("llama"), state_for(model_dir("llama")), extra_files=report)
    assert (tmp_path / "out" / "report.txt").read_text() == "torch.Size([37, 320])"


@pytest.mark.parametrize("name", ["../x", "config.json", "a/b"])
def test_extra_files_cannot_leave_or_overwrite(name: str, model_dir: ModelDir, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="already exists, or its name is a path"):
        write_calibrated(tmp_path / "o", model_dir("llama"), state_for(model_dir("llama")), extra_files={name: ""})
    assert list(tmp_path.iterdir()) == []


def test_a_nonempty_output_directory_is_refused_and_left_unchanged(model_dir: ModelDir, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(ModelError, match="exists and is not empty; choose another output directory"):
        write_calibrated(out, model_dir("llama"), state_for(model_dir("llama")))
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "precious"]


def test_nothing_is_left_when_writing_fails(
    model_dir: ModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(1000))
    real = os.fsync

    def full(descriptor: int) -> None:
        if next(calls) == 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match="No space left on device; nothing was left there"):
        write_calibrated(tmp_path / "out", model_dir("llama"), state_for(model_dir("llama")))
    assert list(tmp_path.iterdir()) == []


def test_trained_weights_replace_those_of_the_source(model_dir: ModelDir, tmp_path: Path) -> None:
    source = model_dir("llama-tied")
    model = load_trainable(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    state = state_for(source)
    for key in [k for k in state.tensors if k.endswith(".weight")]:
        state.tensors[key] = TensorScale(state.tensors[key].scale / 1.25, state.tensors[key].amax_history)
    write_calibrated(tmp_path / "out", source, state, weights=dict(model.named_parameters()))
    checkpoint = open_checkpoint(tmp_path / "out")
    torch.testing.assert_close(checkpoint["model.norm.weight"], model.model.norm.weight.detach().bfloat16())
    torch.testing.assert_close(
        checkpoint[f"{LINEAR}.weight"], model.get_parameter(f"{LINEAR}.weight").detach(), rtol=2**-4, atol=1e-3
    )
    assert load_servable(tmp_path / "out").lm_head.weight is not None
    with pytest.raises(ScalesError, match="another model"):
        load_servable(source, scales=tmp_path / "out" / "scales.safetensors")


def test_high_precision_directory_is_read_by_transformers(model_dir: ModelDir, tmp_path: Path) -> None:
    source = model_dir("qwen3")
    config = json.loads((source / "config.json").read_text())
    model = load_trainable(source)
    write_hf_directory(tmp_path / "out", config, dict(model.named_parameters()), copy_files_from=source)
    auto: Any = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0].float()
        torch.testing.assert_close(all_logits(load_servable(tmp_path / "out", "bf16"), IDS), expected, rtol=0, atol=0)


def test_weights_that_do_not_fit_are_refused(model_dir: ModelDir, tmp_path: Path) -> None:
    config = json.loads((model_dir("llama") / "config.json").read_text())
    weights = dict(load_trainable(model_dir("llama")).named_parameters())
    with pytest.raises(ModelError, match=r"has the shape \[3\]"):
        write_hf_directory(tmp_path / "o", config, weights | {"model.norm.weight": torch.ones(3)})
    del weights["model.norm.weight"]
    with pytest.raises(ModelError, match=r"lack model\.norm\.weight"):
        write_hf_directory(tmp_path / "o", config, weights)
    assert list(tmp_path.iterdir()) == []
