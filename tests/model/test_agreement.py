"""Scales that contradict each other or are meaningless are refused with a sentence, and `inspect` marks them."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import fp8serve
from fp8serve.calibration.pipeline import calibrate
from fp8serve.cli import main
from fp8serve.errors import Fp8ServeError
from tests.tiny import write_tiny_model

LINEAR = "model.layers.0.mlp.up_proj"
ATTENTION = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("scales") / "model")


@pytest.fixture(scope="module")
def calibrated(plain: Path) -> Path:
    calibrate(plain, out=plain.parent / "fp8", samples=4, seq_len=16, kv_cache=True)
    return plain.parent / "fp8"


@pytest.fixture
def model(calibrated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(calibrated, tmp_path / "model"))


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata)


def configure(model: Path, **values: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | values))


def serve(model: Path) -> None:
    fp8serve.Engine(model, kv_cache_dtype="fp8").generate(["Once"], max_new_tokens=2)


@pytest.mark.parametrize("factor", [4, 1 / 4])
@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        (f"{LINEAR}.input", f"{LINEAR}.input_scale"),
        (f"{LINEAR}.weight", f"{LINEAR}.weight_scale"),
        (f"{ATTENTION}.k", f"{ATTENTION}.k_scale"),
    ],
)
def test_scales_that_contradict_the_weights_file_are_refused(key: str, tensor: str, factor: float, model: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{key}.scale"].mul_(factor)
        tensors.pop(f"{key}.amax_history", None)  # a history would contradict the larger scale on its own

    serve(model)
    edit(model / "scales.safetensors", change)
    with pytest.raises(Fp8ServeError) as refused:
        serve(model)
    assert f"{key} has a scale that is {factor:.4g} times the scale of {tensor} in the weight files" in str(
        refused.value
    )


def test_a_weights_file_changed_after_calibration_is_refused(model: Path) -> None:
    edit(model / "model.safetensors", lambda t: t[f"{LINEAR}.weight_scale"].mul_(4))
    with pytest.raises(Fp8ServeError, match="belongs to another model"):
        serve(model)


def test_inspect_detects_scales_of_another_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(model / "model.safetensors", lambda t: t[f"{LINEAR}.weight"].view(torch.uint8)[:2].zero_())
    assert main(["inspect", str(model)]) == 1
    assert "scales.safetensors belongs to another model than " in capsys.readouterr().err


@pytest.mark.parametrize("role", ["input", "weight"])
def test_a_history_beyond_its_scale_is_refused(role: str, model: Path) -> None:
    edit(model / "scales.safetensors", lambda t: t[f"{LINEAR}.{role}.amax_history"].mul_(16))
    with pytest.raises(Fp8ServeError, match=rf"{LINEAR}\.{role} has an amax in its history that is 16 times what"):
        serve(model)


def test_subnormal_scales_are_refused(model: Path) -> None:
    edit(model / "scales.safetensors", lambda t: t[f"{LINEAR}.input.scale"].fill_(1e-40))
    with pytest.raises(Fp8ServeError, match=r"up_proj\.input has the scale 1e-40|up_proj\.input has the scale 9\.99"):
        serve(model)


@pytest.mark.parametrize("value", [1e-40, 3e38])
def test_cache_scales_without_a_finite_reciprocal_are_refused(value: float, model: Path) -> None:
    (model / "scales.safetensors").unlink()
    edit(model / "model.safetensors", lambda t: t[f"{ATTENTION}.k_scale"].fill_(value))
    with pytest.raises(Fp8ServeError, match=r"k_scale holds .* which is too (small|large) for a scale"):
        serve(model)


def test_cache_scales_of_one_are_announced(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Scales of 1 are another project's default without calibration. The model can be served, but loses quality."""
    (model / "scales.safetensors").unlink()
    with caplog.at_level(logging.WARNING, "fp8serve.engine"):
        serve(model)
        assert caplog.text == ""
        edit(model / "model.safetensors", lambda t: [t[k].fill_(1) for k in t if k.endswith(("k_scale", "v_scale"))])
        serve(model)
    assert "All KV-cache scales" in caplog.text
    assert "calibrate with --kv-cache" in caplog.text


def test_configurations_that_quantize_the_cache_only(plain: Path, calibrated: Path, tmp_path: Path) -> None:
    from fp8serve.model.storage.files import read_json

    scheme = read_json(calibrated / "config.json")["quantization_config"]["kv_cache_scheme"]
    scales = {
        k: v for k, v in load_file(calibrated / "model.safetensors").items() if k.endswith(("k_scale", "v_scale"))
    }
    configs = {
        "ct": {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme, "format": "dense"},
        "modelopt": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": scheme},
    }
    for name, config in configs.items():
        model = Path(shutil.copytree(plain, tmp_path / name))
        edit(model / "model.safetensors", lambda t: t.update(scales))
        configure(model, quantization_config=config)
        serve(model)
        config["kv_cache_scheme"] = scheme | {"type": "int"}
        configure(model, quantization_config=config)
        with pytest.raises(Fp8ServeError, match="kv_cache_scheme '8-bit int'"):
            serve(model)


def test_a_checkpoint_that_says_it_is_dense_is_served(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())["quantization_config"]
    dense = {"format": "dense", "global_sparsity": 0.0, "sparsity_structure": "0:0", "targets": [], "ignore": []}
    configure(model, quantization_config=config | {"sparsity_config": dense, "transform_config": {}})
    serve(model)


def test_modelopts_names_in_lower_case() -> None:
    from fp8serve.model.formats.interop import STATIC, UNQUANTIZED, read_quantization

    for name, spec in {"fp8": STATIC, "fp8_pb_wo": UNQUANTIZED, "FP8_PB_WO": UNQUANTIZED}.items():
        quantization = read_quantization(
            Path(), {"quantization_config": {"quant_method": "modelopt", "quant_algo": name}}
        )
        assert quantization is not None
        assert quantization.require_scheme(LINEAR).input_spec == spec


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("file", ["model.safetensors", "scales.safetensors"])
def test_inspect_marks_what_cannot_be_served(
    value: float, file: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = f"{LINEAR}.input_scale" if file.startswith("model") else f"{LINEAR}.input.scale"
    assert main(["inspect", str(model)]) == 0
    capsys.readouterr()
    edit(model / file, lambda t: t[key].fill_(value))
    assert main(["inspect", str(model)]) == 1
    captured = capsys.readouterr()
    marked = [line for line in captured.out.splitlines() if line.startswith("!")]
    assert len(marked) == 1
    assert f"{LINEAR}.input" in marked[0]
    assert f"{value}, which cannot be served" in marked[0]
    assert re.search(rf"cannot be served: .*{re.escape(LINEAR)}\.input", captured.err)
    assert main(["inspect", str(model), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["scales"]
    assert [r["tensor"] for r in rows if r["problem"]] == [f"{LINEAR}.input"]


def test_inspect_marks_contradictions(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(model / "model.safetensors", lambda t: t[f"{LINEAR}.weight_scale"].mul_(4))
    edit(model / "scales.safetensors", lambda t: t[f"{LINEAR}.input.amax_history"].mul_(16))
    assert main(["inspect", str(model)]) == 1
    marked = [line for line in capsys.readouterr().out.splitlines() if line.startswith("!")]
    assert len(marked) == 2
    assert torch.tensor([" 4 times" in line or " 16 times" in line for line in marked]).all()


def test_weights_that_are_nan_are_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loading does not read the weights; the NaN logits are refused."""
    (model / "scales.safetensors").unlink()
    edit(model / "model.safetensors", lambda t: t[f"{LINEAR}.weight"].view(torch.uint8).fill_(0x7F))
    for command in (["generate", str(model), "Once"], ["eval", str(model), "--samples", "2", "--seq-len", "16"]):
        assert main(command) == 1
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        assert "internal error" not in message
        assert "check its weights and scales" in message
