"""`finetune` and `calibrate` with `--recipe nvfp4`: the files, what a server computes with them, and layers in BF16."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from safetensors.torch import load_file

import fp8serve
from fp8serve.cli import main
from fp8serve.engine.engine import Engine
from fp8serve.fp8.batch_invariant import has_batch_invariant_products
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import from_name
from fp8serve.fp8.spec import NVFP4_INPUT, UNQUANTIZED, QuantSpec
from fp8serve.model.checkpoint import load_servable, load_trainable, open_checkpoint
from fp8serve.model.format_conversion import convert_format
from fp8serve.model.stored_checkpoint import dropped_inputs_notes
from fp8serve.train.data import Row
from fp8serve.train.forward import Forward, collate
from fp8serve.train.log_probs import log_probs
from fp8serve.train.setup import last_linears
from fp8serve.train.trainer import Trainer
from tests.model.oracle import make_model, write_tokenizer

from .conftest import TEXTS, Configure, write_lines

LINEAR = "model.layers.0.mlp.up_proj"
IDS = [[5, 250, 7, 7, 9, 100, 3], list(range(40))]


def layer_of(directory: Path, recipe: Any = "stored") -> FrozenLinear:
    layer = load_servable(directory, recipe).get_submodule(LINEAR)
    assert isinstance(layer, FrozenLinear)
    return layer


def input_spec(directory: Path, recipe: Any = "stored") -> QuantSpec:
    return layer_of(directory, recipe).input_spec


def group(directory: Path) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert config["format"] == "nvfp4-pack-quantized"
    return dict(config["config_groups"]["group_0"])


@pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")
def test_a_fine_tuned_model_is_served_as_it_was_trained(model_dir: Path, data: Path, tmp_path: Path) -> None:
    """From the command line to the log-probabilities of the written model, with 4 bits in weights and inputs."""
    command = ["finetune", str(model_dir), "--recipe", "nvfp4", "--data", str(data), "--out", str(tmp_path / "out")]
    assert main([*command, "--max-steps", "3", "--batch-size", "4", "--seq-len", "64", "--lr", "1e-3"]) == 0
    model = tmp_path / "out" / "model"
    tensors = load_file(model / "model.safetensors")
    assert tensors[f"{LINEAR}.weight_packed"].dtype is torch.uint8
    assert f"{LINEAR}.input_global_scale" not in tensors
    assert group(model)["input_activations"]["dynamic"] is True
    scales = tensors[f"{LINEAR}.weight_scale"].float()
    assert torch.equal(scales[:16], scales[:1].expand(16, -1))  # a block of 16 rows has one scale
    assert input_spec(model) == NVFP4_INPUT
    assert main(["verify", str(model)]) == 0  # the largest code of a block may be in any of its 16 rows
    assert not (model / "scales.safetensors").exists()
    engine = Engine(model, max_batch_tokens=16)
    served = engine.generate(IDS, max_new_tokens=1, prompt_logprobs=0)
    assert [[item.logprob for item in c.prompt_logprobs or ()] for c in served] == [
        x.tolist() for x in log_probs(model, IDS)
    ]


@pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")
def test_the_trainers_log_probs_are_the_servers(configure: Configure) -> None:
    """The master weights of a run, cast to blocks of 16x16 values in BF16, against the codes that it exports."""
    result = Trainer(configure(recipe="nvfp4", max_steps=2)).run()
    assert result.model is not None
    assert result.checkpoint is not None
    decoder = load_trainable(result.checkpoint)
    convert(decoder, skip=(decoder.head_name,))
    forward = Forward(decoder, from_name("nvfp4"))
    rows = [Row(np.array(ids, np.int32), np.ones(len(ids), bool)) for ids in IDS]
    trained = forward.log_probs(collate(rows, "cpu"))
    assert torch.equal(trained, torch.cat(log_probs(result.model, IDS)))
    assert not torch.equal(trained, torch.cat(log_probs(result.model, IDS, recipe="nvfp4-w4a16")))


def test_a_run_reports_no_difference_from_its_server(configure: Configure) -> None:
    events: list[dict[str, Any]] = []
    Trainer(configure(recipe="nvfp4", max_steps=1)).run(events.append)
    assert not [e for e in events if e.get("code") == "log_probs_differ"]


def test_the_last_layers_of_a_deep_model_stay_in_bf16(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "m", overrides={"num_hidden_layers": 7, "hidden_size": 64, "intermediate_size": 128})
    write_tokenizer(tmp_path / "m")
    recipe = from_name("nvfp4")
    names = last_linears(recipe, 7, tmp_path / "m")
    assert len(names) == 7
    assert all(name.startswith("model.layers.6.") for name in names)
    assert not last_linears(recipe, 6, tmp_path / "m")
    assert not last_linears(from_name("mxfp8"), 7, tmp_path / "m")
    rows = [{"prompt": text[:40], "completion": text[40:80]} for text in TEXTS[:8]]
    events: list[dict[str, Any]] = []
    options: dict[str, Any] = {"batch_size": 4, "seq_len": 64, "lr": 1e-3, "recipe": "nvfp4", "save_every": 1}
    arguments = {"data": rows, "out": tmp_path / "out", "on_event": events.append, **options}
    assert fp8serve.finetune(tmp_path / "m", max_steps=1, **arguments).status == "succeeded"
    text = "7 linear layers at the end of the model are trained in BF16, because the recipe is nvfp4"
    assert [e["message"] for e in events if e.get("code") == "kept"] == [text]
    checkpoint = open_checkpoint(tmp_path / "out" / "model")
    assert tuple(checkpoint.high_precision_linears) == names


FORMATS = {"compressed-tensors": "input_global_scale", "modelopt": "input_scale"}


@pytest.mark.parametrize("format_", FORMATS)
def test_calibration_measures_the_scales_of_inputs(model_dir: Path, format_: str, tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    out, other = tmp_path / "out", next(f for f in FORMATS if f != format_)
    command = ["calibrate", str(model_dir), "--recipe", "nvfp4", "--data", str(rows), "--out", str(out)]
    assert main([*command, "--format", format_, "--samples", "4", "--seq-len", "16"]) == 0
    tensors = load_file(out / "model.safetensors")
    report = json.loads((out / "calibration.json").read_text())
    amax = next(t["amax"] for t in report["tensors"] if t["name"] == f"{LINEAR}.input")
    scale = float(tensors[f"{LINEAR}.{FORMATS[format_]}"])
    assert (scale if format_ == "compressed-tensors" else 1 / scale) == pytest.approx(448 * 6 / amax, rel=1e-6)
    assert not (out / "scales.safetensors").exists()
    scales = tensors[f"{LINEAR}.weight_scale"].float()
    assert not torch.equal(scales[:16], scales[:1].expand(16, -1))  # blocks of one row
    if format_ == "compressed-tensors":
        scheme, preset = QuantizationScheme.model_validate(group(out)), preset_name_to_scheme("NVFP4", ["Linear"])
        for ours, theirs in ((scheme.weights, preset.weights), (scheme.input_activations, preset.input_activations)):
            assert ours is not None
            assert theirs is not None
            for field in ("num_bits", "type", "strategy", "group_size", "scale_dtype", "dynamic", "symmetric"):
                assert getattr(ours, field) == getattr(theirs, field)
    else:
        assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_algo"] == "NVFP4"
    assert input_spec(out) == UNQUANTIZED  # more accurate, and no slower on a CPU
    (note,) = dropped_inputs_notes(open_checkpoint(out))
    assert note.endswith("inputs stay in BF16 (--recipe nvfp4 casts them, too).")
    assert main(["verify", str(out)]) == 0
    stored, cast = layer_of(out, from_name("nvfp4")), layer_of(model_dir, from_name("nvfp4"))
    assert stored.input_spec == cast.input_spec == NVFP4_INPUT
    assert torch.equal(stored.weight_q, layer_of(out).weight_q)
    convert_format(out, tmp_path / "other", other)
    assert torch.equal(layer_of(tmp_path / "other").weight_q, stored.weight_q)
    assert len(Engine(out, recipe="nvfp4").generate([[5, 7, 9]], max_new_tokens=2)[0].token_ids) == 2


def test_shapes_without_whole_blocks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model("llama", tmp_path / "m", overrides={"hidden_size": 64, "intermediate_size": 136})
    write_tokenizer(tmp_path / "m")
    rows = write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    for command in ("calibrate", "finetune"):
        arguments = [
            command,
            str(tmp_path / "m"),
            "--recipe",
            "nvfp4",
            "--data",
            str(rows),
            "--out",
            str(tmp_path / "o"),
        ]
        assert main(arguments) == 1
        assert "down_proj in NVFP4 needs a multiple of 16 input features, found 136" in capsys.readouterr().err
        assert not (tmp_path / "o").exists()
